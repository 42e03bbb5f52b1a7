"""Promises about single decisions, by rules that share no code with the policies."""
