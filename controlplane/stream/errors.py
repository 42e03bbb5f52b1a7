"""Errors of the stream machine."""

from __future__ import annotations

from relume.events.log.errors import RelumeError


class IllegalEvent(RelumeError):
    """A shell fed an event that cannot happen in this state: a bug of ours."""

    def __init__(self, state: object, event: object) -> None:
        super().__init__(f"{type(event).__name__} cannot happen in {type(state).__name__}")
        self.state = state
        self.event = event
