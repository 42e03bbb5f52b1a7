"""Streams of a former log, in whose place this one began."""
