"""Incidents: one record for each failure, folded from the log."""
