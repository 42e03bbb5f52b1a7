"""Promises about workers, their effects, and the checkpoints that they hold."""
