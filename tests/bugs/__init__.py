"""Seeded bugs: a table, and a command that says what notices each."""
