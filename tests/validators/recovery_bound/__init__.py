"""I10, the recovery bound of streams."""
