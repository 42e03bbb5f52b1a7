"""Whether a silent engine hangs."""
