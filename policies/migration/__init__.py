"""Which running requests leave their worker, and where they continue."""
