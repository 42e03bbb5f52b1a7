"""Which failures of a connection make a replica suspect the worker."""

from __future__ import annotations

from relume.events.vocabulary.enums import TransportKind

SUSPICIOUS = frozenset(
    {
        TransportKind.RESET,
        TransportKind.EOF,
        TransportKind.REFUSED,
        TransportKind.UNREACHABLE,
        TransportKind.STALL,
        TransportKind.ENGINE_DEAD,
    }
)
"""After these a replica sends the incarnation nothing new until it proved itself. STALE is our own
error. ENGINE_ERROR (it answered, but wrongly), DECLINED and TIMEOUT may be the request's: one
client's request must not exclude a worker. MOVED and DETACHED are no failures."""
