"""Fenced appends to one stream, its ownership, and the spool that outlives an outage."""
