"""Errors of live runs."""

from __future__ import annotations

from relume.events.log.errors import RelumeError


class LiveError(RelumeError):
    """A part did not come up, or not come back, within its bound. The message names it."""


class CannotStrike(RelumeError):
    """A fault found nothing to strike: its target is gone, or empty."""
