"""Promises about the log and what replay makes of it."""
