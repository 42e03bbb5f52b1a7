"""Which arrivals wait, in which order they are served, and which are refused."""
