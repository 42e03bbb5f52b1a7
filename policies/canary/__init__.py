"""Whether what a worker computes is right: canary answers compared with those of its class."""
