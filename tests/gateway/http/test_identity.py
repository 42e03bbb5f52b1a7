"""What names a request on its way: trace context, the first worker's counts, fired timers."""

from __future__ import annotations

import json

from structlog.testing import capture_logs

from tests.gateway.peers import Behaviour

TEXT = "/v1/completions"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def body(**extra) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", "temperature": 0, **extra}).encode()


async def test_the_clients_trace_reaches_the_worker_the_log_and_the_log_lines(rig):
    async with rig() as r:
        arrived = []
        tell = r.scheduler.arrived
        r.scheduler.arrived = lambda arrival: (arrived.append(arrival), tell(arrival))[1]
        r.engines[0].script.append(Behaviour(cut_at=900))
        with capture_logs() as lines:
            answer = await r.ask(TEXT, body(stream=True), headers=f"traceparent: {TRACE}\r\n")
        assert answer.complete
        assert [e.seen[0].headers["traceparent"] for e in r.engines] == [TRACE, TRACE]
        assert arrived[0].trace == TRACE
        (moved,) = [line for line in lines if line["event"] == "failover"]
        assert (moved["request"], moved["trace"]) == (arrived[0].request, TRACE)
        await r.ask("/tokenize", b"{}", headers=f"traceparent: {TRACE}\r\n")
        assert r.engines[0].seen[-1].headers["traceparent"] == TRACE
        await r.ask(TEXT, body(), headers="traceparent: 00-zz\r\n")
        assert "traceparent" not in r.engines[0].seen[-1].headers


async def test_a_resumption_carries_the_first_workers_count_of_cached_tokens(rig):
    async with rig(engines=3) as r:
        r.engines[0].cached, r.engines[1].cached = 17, 99
        r.engines[0].script.append(Behaviour(cut_after=5))
        r.engines[1].script.append(Behaviour(cut_after=3))
        assert (await r.ask(TEXT, body(stream=True))).complete
        sent = [e.seen[0].headers.get("x-relume-cached", "") for e in r.engines]
        assert sent == ["", "17", "17"]


async def test_a_wait_that_ran_out_is_a_fired_timer(rig):
    async with rig(wait_timeout_s=0.2) as r:
        r.scheduler.serving = False
        assert (await r.ask(TEXT, body())).status == 503
        assert r.scheduler.log[-2:] == [("timer", "wait"), ("ended", "failed", 503, 0, "-")]


async def test_going_again_to_where_it_failed_is_a_fired_timer(rig):
    async with rig(engines=1) as r:
        r.engines[0].script.append(Behaviour(cut_at=0))
        r.scheduler.observed = lambda *a, **k: r.scheduler.log.append(("observed", a[2]))
        assert (await r.ask(TEXT, body())).status == 200
        kinds = [entry[0] for entry in r.scheduler.log]
        assert kinds == ["assign", "observed", "assign", "timer", "ended"]
