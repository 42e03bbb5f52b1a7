"""Promises about what clients get."""
