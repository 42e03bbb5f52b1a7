"""Metrics, logs and traces of a replica. None of them stands on the token path."""
