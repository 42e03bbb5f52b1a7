"""Benches of Relume's parts inside engines: reports, checkpoints, restores."""
