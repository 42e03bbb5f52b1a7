"""How much a fleet can serve, how much clients send, and what it does when it is short."""
