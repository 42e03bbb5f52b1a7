"""What a client is told that comes back when worker and gateway of its stream are gone, and
the stream cannot be made again: OpenAI's clients raise it at once, with what to do."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from relume.controlplane.client import _ResumedStream, astream
from relume.controlplane.stream import event_ids
from relume.controlplane.stream.arrival import Arrival, Assignment
from relume.controlplane.stream.stream_events import Owned
from tests.gateway.client_requests import TEXT
from tests.gateway.peers import Behaviour

CLAIM = event_ids.resume_token(os.urandom(event_ids.TOKEN_ENTROPY_BYTES))
LAST_ID = f"lost-1:{CLAIM}:5"


@dataclass
class Returns:
    """The log of a stream of another replica; `runs`: where, None when its engine is gone."""

    scheduler: Any
    verdict: str
    runs: Assignment | None = None
    doubted: bool = False
    moves: bool = False

    def known(self, request: str) -> tuple[Arrival, str] | None:
        digest = event_ids.digest(CLAIM)
        arrival = Arrival(
            request=request,
            model="m",
            route=TEXT,
            stream=True,
            prompt_tokens=5,
            max_tokens=50,
            verdict=self.verdict,
            resumable=digest,
            grace_ticks=30,
        )
        return (arrival, digest) if request not in self.scheduler.arrivals else None

    def is_moving(self, request: str) -> bool:
        return self.moves

    def came_back(self, request: str, tokens: int, events: int) -> None: ...

    def adopt(self, arrival: Arrival, tokens: int, events: int) -> None:
        self.scheduler.arrivals[arrival.request] = arrival
        self.scheduler.avoid[arrival.request] = set()
        self.scheduler.attempts[arrival.request] = 1

    def holders(self, request: str, worker: str = "") -> tuple[str, ...]:
        return ()

    async def owned(self, request: str, timeout_s: float) -> Owned:
        return Owned(True, self.runs, self.doubted)

    async def later_attempt(self, request: str, timeout_s: float) -> Owned:
        return Owned(True)


def client_of(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-")


def asking() -> dict[str, Any]:
    headers = {"last-event-id": LAST_ID}
    return {"model": "m", "prompt": "x", "extra_headers": headers}


@pytest.mark.parametrize(
    "verdict, says", [("sampled", "without a seed"), ("exact", "no holder has")]
)
async def test_openai_client_raises_it_once_and_knows_what_to_do(rig, verdict, says):
    async with rig() as r:
        r.scheduler.returns = Returns(r.scheduler, verdict)
        client = client_of(r.gateway.port)
        with pytest.raises(openai.InternalServerError) as raised:
            await client.completions.create(**asking(), stream=True)
        error = raised.value
        assert error.status_code == 502 and error.code == "stream_lost"
        assert error.response.headers["content-type"] == "application/json"
        assert set(error.response.json()["error"]) == {"message", "type", "param", "code"}
        assert says in error.message and "any more" in error.message
        assert "again" in error.message
        told = [e[:2] for e in r.scheduler.endings()]
        assert told == [("failed", 502)], "it was asked again"


async def test_a_stream_that_another_replica_continues_is_left_to_it(rig):
    """It alone has what was sampled; the client returns until its stream has an engine again."""
    async with rig() as r:
        returns = r.scheduler.returns = Returns(r.scheduler, "sampled", moves=True)
        client = client_of(r.gateway.port).with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError) as raised:
            await client.completions.create(**asking(), stream=True)
        assert (raised.value.status_code, raised.value.code) == (503, "stream_moving")
        assert raised.value.response.headers["retry-after"]
        assert not r.scheduler.arrivals and not r.scheduler.endings(), "it was taken from its owner"
        returns.moves = False
        with pytest.raises(openai.InternalServerError) as raised:
            await client.completions.create(**asking(), stream=True)
        assert raised.value.code == "stream_lost"


async def test_a_client_hears_once_that_its_tokens_are_in_doubt(rig):
    """A retry would only hear that the stream is gone."""
    async with rig() as r:
        r.scheduler.returns = Returns(r.scheduler, "sampled", doubted=True)
        with pytest.raises(openai.InternalServerError) as raised:
            await client_of(r.gateway.port).completions.create(**asking(), stream=True)
        assert raised.value.code == "corrupt_answer"
        assert "do not use" in raised.value.message


async def test_our_client_helper_raises_it_too(rig):
    async with rig() as r:
        r.scheduler.returns = Returns(r.scheduler, "sampled")
        asked = asking()
        with pytest.raises(openai.InternalServerError) as raised:
            async for _ in astream(client_of(r.gateway.port), **asked):
                pass
        assert raised.value.code == "stream_lost"


@pytest.mark.parametrize(("grace", "ends_s"), [("0", 5.15), ("30", 31.15)])
def test_our_client_helper_returns_until_the_grace_time_is_over(
    monkeypatch: pytest.MonkeyPatch, grace: str, ends_s: float
) -> None:
    """Eight attempts are over in 5 s. A replica that starts again, and reads a new log, takes longer."""
    now = 0.0
    monkeypatch.setattr("relume.controlplane.client.time.monotonic", lambda: now)
    course = _ResumedStream(SimpleNamespace(base_url="http://a/v1"), (), {"prompt": "x"})
    answer = SimpleNamespace(headers={"x-relume-resumable": grace}, http_request=None)
    course.take("id: q:token:1", answer)
    assert course.take('data: {"choices": []}', answer) is not None
    error = ConnectionError("refused")
    with pytest.raises(ConnectionError, match="refused"):
        while True:
            now += course.lost(error)
    assert now == pytest.approx(ends_s)


async def test_a_stream_that_had_begun_ends_with_an_error_event(rig):
    """The worker dies while the client is attached to its stream again."""
    async with rig() as r:
        w0 = r.engines[0]
        runs = Assignment(
            request="lost-1",
            attempt=1,
            worker="w0",
            incarnation=3,
            host="127.0.0.1",
            port=w0.port,
            mode="attach",
            dispatch=b"",
        )
        r.scheduler.returns = Returns(r.scheduler, "sampled", runs)
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/x-relume-frames\r\n"
            b"x-relume-from: 0\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        w0.script.append(Behaviour(raw=head, cut_after=1))
        got: list[Any] = []
        with pytest.raises(openai.APIError) as raised:
            async with asyncio.timeout(20):
                async for chunk in await client_of(r.gateway.port).completions.create(
                    **asking(), stream=True
                ):
                    got.append(chunk)
        assert not isinstance(raised.value, openai.APIStatusError), "its 200 was out"
        assert raised.value.code == "stream_lost" and "again" in raised.value.message
        assert not got
        assert len(r.scheduler.endings()) == 1
