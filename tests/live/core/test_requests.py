"""One representative of each kind of request, cut at the same token: exact where its guarantee
says so."""

from __future__ import annotations

import os
import signal

from relume.events.failpoints.points import Failpoint
from tests.live.cases import other_cases, plain_cases, stateful_cases
from tests.live.core.core_fleet import CORE, CoreFleet
from tests.live.streams.test_exactness import Round, judged

pytestmark = CORE
CUT = 24
"""Tokens of the first request to be there; no request of these kinds is so short."""
KINDS = (
    "text-stream text-whole chat-stream seeded-stream penalties repetition logprobs-chat json "
    "regex-seeded bias echo choices-stream prompts-whole tools-stream called-whole "
    "echoed-logprobs sampled-stream"
).split()


async def test_each_kind_of_request_survives_a_kill_as_promised(fleet: CoreFleet) -> None:
    known = {case.name: case for case in (*plain_cases(), *stateful_cases(), *other_cases())}
    cases = [known[name] for name in KINDS]
    calm, struck = (Round(fleet, cases, fleet.named(tag)) for tag in ("calm", "kinds"))
    await calm.run()

    async def kill(round_: Round) -> None:
        await fleet.until_routed(round_.cases)
        hit = await point.reached()
        await fleet.open_all()
        os.kill(hit.pid, signal.SIGKILL)

    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=CUT) as point:
        await struck.run(kill)
    assert not (wrong := judged(calm, struck)), "\n".join(wrong)
    routes = await fleet.routes(struck.cases)
    assert [name for name, made in routes.items() if len(made) != 2] == [], "ended before the kill"
