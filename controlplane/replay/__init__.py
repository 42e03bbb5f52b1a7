"""Replay: fold a log again, call every policy again, and compare."""
