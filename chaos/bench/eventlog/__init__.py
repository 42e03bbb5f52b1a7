"""Benches of the log: appends, reads, replay, validators."""
