"""Responses as frames, and streams buffered for clients that may return."""
