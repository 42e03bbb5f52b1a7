"""The `relume` command."""
