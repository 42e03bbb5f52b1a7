"""Records that cannot be read, and records whose figures cannot be."""
