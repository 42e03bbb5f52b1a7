"""Why the daemon does not start or does not take a block."""

from __future__ import annotations

from relume.events.log.errors import RelumeError


class StateDaemonError(RelumeError):
    """Root of the daemon's errors."""


class CannotHold(StateDaemonError):
    """The host has not the memory the configuration promises; the daemon does not start.

    Remedy: a smaller `budget_bytes`, or more memory for this process.
    """


class BadConfig(StateDaemonError):
    """The configuration file is unreadable, or its settings are unsafe."""
