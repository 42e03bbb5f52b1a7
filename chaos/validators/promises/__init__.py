"""One module per promise."""
