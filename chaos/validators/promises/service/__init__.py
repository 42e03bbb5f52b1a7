"""Promises about what clients feel beyond right answers: mechanisms that save time are used."""
