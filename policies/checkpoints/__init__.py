"""Which hosts hold a request's checkpoint."""
