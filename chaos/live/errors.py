"""What keeps a live run from being one."""

from __future__ import annotations

from relume.events.log.errors import RelumeError


class LiveError(RelumeError):
    """A part did not come up, or not back, within its bound. The message says which."""


class CannotStrike(RelumeError):
    """A fault found nothing to strike: its target is gone, or holds nothing."""
