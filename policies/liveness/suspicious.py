"""Which failures of a connection make a replica suspect the worker, and what they may be."""

from __future__ import annotations

from relume.events.vocabulary.enums import FailureClass, TransportKind

SUSPICIOUS: dict[TransportKind, FailureClass] = {
    TransportKind.RESET: FailureClass.CRASH,
    TransportKind.EOF: FailureClass.CRASH,
    TransportKind.REFUSED: FailureClass.CRASH,
    TransportKind.ENGINE_DEAD: FailureClass.CRASH,
    TransportKind.UNREACHABLE: FailureClass.UNREACHABLE,
    TransportKind.STALL: FailureClass.HANG,
}
"""After these a replica sends the incarnation nothing new until it proved itself. STALE is our own
error. ENGINE_ERROR (it answered, but wrongly) and STUCK (it serves the others) count by requests
(`relume.policies.health`): one client's request must not exclude a worker. DECLINED and TIMEOUT may
be the request's. MOVED and DETACHED are no failures. CORRUPT follows from the leader's
decision."""

WRONG = frozenset((TransportKind.ENGINE_ERROR, TransportKind.STUCK))
"""The engine works, but not for this request: such failures count by requests."""

OVERLOADED = frozenset((429, 503))
"""Statuses by which an engine says that it is full: no failure either."""
