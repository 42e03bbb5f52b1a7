"""Canaries: known prompts that the agent sends to its engine, to see whether it computes rightly."""
