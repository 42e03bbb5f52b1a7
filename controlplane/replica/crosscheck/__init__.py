"""Cross-checks of one replica: which requests wait for one, and the checks themselves."""
