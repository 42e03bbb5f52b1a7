"""How many machines compute prompts and how many generate tokens."""
