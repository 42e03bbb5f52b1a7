"""Logs and traces of a replica. Neither stands on the token path."""
