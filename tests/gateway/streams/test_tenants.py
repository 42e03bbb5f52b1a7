"""A stream that another replica served belongs to the tenant that asked for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from relume.controlplane.stream import event_ids
from relume.controlplane.stream.arrival import Arrival

CLAIM = "t" * 43


async def test_a_resume_token_gives_no_stream_to_a_client_of_another_tenant(rig):
    arrival = Arrival(
        request="q", model="m", route="/v1/completions", stream=True, prompt_tokens=1,
        max_tokens=9, verdict="exact", tenant="a", resumable=event_ids.digest(CLAIM),
    )  # fmt: skip
    returns = SimpleNamespace(
        known=lambda request: (arrival, arrival.resumable), is_moving=lambda request: True
    )
    context: Any = SimpleNamespace(scheduler=SimpleNamespace(returns=returns))
    shown: Any = SimpleNamespace(request="q", resume_token=CLAIM, position=(0, 0))
    async with rig() as r:
        nobody: Any = None
        reply = r.gateway._streams.returned(context, nobody, shown, "/p", "id", "b")
        assert reply.status == 410 and not r.gateway._streams.open
