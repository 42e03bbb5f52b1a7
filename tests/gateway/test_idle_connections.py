"""Idle connections to an engine that is dead are not used again."""

from __future__ import annotations

from relume.events.vocabulary.enums import TransportKind
from tests.gateway.client_requests import CHAT, chat_body


async def test_idle_connections_to_a_dead_engine_are_closed(rig):
    """Its host may not reset them, and the next request would wait there."""
    async with rig(engines=1) as r:
        await r.ask(CHAT, chat_body())
        idle = r.gateway._pool._idle
        assert [len(found) for found in idle.values()] == [1]
        r.gateway.break_streams("w0", 3, TransportKind.ENGINE_DEAD, "its agent saw it die")
        assert not any(idle.values())
