"""What the log means: the fold, and what it keeps of workers, requests, prefixes and checkpoints."""
