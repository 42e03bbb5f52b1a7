"""Six lives of a request, event by event: what happens, the state after it, what the shell must do.

Random runs (`test_machine`) look for what nobody thought of; these are to be read.
"""

from __future__ import annotations

from typing import Any

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import event_ids
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from relume.controlplane.stream.arrival import Arrival, Assignment
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import Stream
from relume.events.wire.frames import CONTENT_TYPE, encode_end, encode_envelope, encode_tokens
from tests.stream.worker_side import BODY, DONE, PATH, TOKEN

FRAMES = e.Head(200, {b"content-type": CONTENT_TYPE})
ATTACHED = e.Head(200, {b"content-type": CONTENT_TYPE, b"x-relume-from": b"0"})
FIRST, SECOND = (
    encode_tokens(0, [100], b"data: a\n\n"),
    encode_tokens(1, [101], b"data: b\n\n"),
)
LAST = encode_tokens(2, [], DONE) + encode_end("stop")


class Story:
    """A request on a machine. `resumable`: its client has a resume token; `body` is empty where
    another replica took the request."""

    def __init__(self, resumable: bool = False, body: bytes = BODY) -> None:
        arrival = Arrival(
            request="r-1",
            model="m",
            route=PATH,
            stream=True,
            prompt_tokens=3,
            max_tokens=9,
            verdict="exact",
            resumable=event_ids.digest(TOKEN) if resumable else "",
        )
        self.stream = Stream(
            arrival=arrival,
            path=PATH,
            response_id="q",
            body=body,
            limits=GatewayConfig(),
            now=0.0,
            resume_token=TOKEN if resumable else "",
            created="17" if resumable and body else "",
        )
        self.machine = StreamMachine(self.stream)
        self.client = b""
        self.effects: list[do.Effect] = []

    def after(self, event: object, state: type[s.State], *effects: type[do.Effect]) -> Story:
        """`event` happens: it leads to `state`, and the shell must do `effects`, in this order."""
        self.effects = self.machine.handle(event, 1.0)
        assert type(self.machine.state) is state
        assert [type(effect) for effect in self.effects] == list(effects)
        for effect in self.effects:
            if isinstance(effect, do.Begin | do.ToClient | do.Finish):
                self.client += effect.data
        return self

    def effect(self, kind: type[do.Effect]) -> Any:
        """The effect of that kind that the last event had."""
        (found,) = [effect for effect in self.effects if type(effect) is kind]
        return found

    def arrives(self) -> Story:
        """Accepted by the log, admitted by the queue."""
        self.after(e.Accepted(self.stream.arrival), s.Queued, do.Admit)
        return self.after(e.Admitted(5.0), s.Routing, do.Assign)

    def goes_to(self, worker: str, attempt: int, mode: str = "new") -> Story:
        """The scheduler chooses a worker, and it is reached."""
        to = assignment(worker, attempt, mode)
        self.after(e.Assigned(to), s.Connecting, do.Open)
        return self.after(e.Connected(), s.AwaitingFirst, do.Send)

    def begins(self) -> Story:
        """Its first token goes to the client."""
        self.after(FRAMES, s.AwaitingFirst)
        return self.after(e.Data(FIRST), s.Streaming, do.Begin)

    def ends(self) -> Story:
        """The last bytes, and the terminal event (I1)."""
        ending = (do.StopWaiting, do.Close, do.RecordEnd, do.Finish)
        return self.after(e.Data(LAST), s.Ended, *ending)

    def is_delivered(self) -> Story:
        """Where a client may resume, the end waits until its connection has acknowledged all."""
        ending = (do.StopWaiting, do.Close, do.Finish, do.AwaitDelivery)
        self.after(e.Data(LAST), s.Delivering, *ending)
        return self.after(e.Delivered(), s.Ended, do.StopWaiting, do.RecordEnd, do.Release)

    def events(self) -> list[bytes]:
        """What the client has, without the ids of events."""
        lines = [line for line in self.client.split(b"\n") if not line.startswith(b"id: ")]
        return [line for line in lines if line]


def assignment(worker: str, attempt: int, mode: str = "new") -> Assignment:
    return Assignment(
        request="r-1",
        attempt=attempt,
        worker=worker,
        incarnation=1,
        host="h",
        port=1,
        mode=mode,
        dispatch=b"d",
    )


WHOLE = [b"data: a", b"data: b", b"data: [DONE]"]


def test_plain() -> None:
    story = Story().arrives().goes_to("w0", 1).begins()
    story.after(e.Data(SECOND), s.Streaming, do.ToClient)
    story.ends()
    assert story.events() == WHOLE
    end = story.effect(do.RecordEnd)
    assert (end.outcome, end.status, end.tokens, end.finish) == ("completed", 200, 2, "stop")


def test_the_engine_dies_after_the_first_token() -> None:
    story = Story().arrives().goes_to("w0", 1).begins()
    dead = e.EngineGivenUp("engine_dead", "signal 9")
    story.after(dead, s.Routing, do.Close, do.RecordFailure, do.Assign)
    failure, asked = story.effect(do.RecordFailure), story.effect(do.Assign)
    assert (failure.attempt, failure.kind, failure.delivered) == (1, "engine_dead", 1)
    assert (asked.cause, asked.delivered) == ("engine_dead", 1)
    story.goes_to("w1", 2, "continue")
    assert b"x-relume-resume: continue 1" in story.effect(do.Send).head
    story.after(FRAMES, s.AwaitingFirst)
    story.after(e.Data(SECOND), s.Streaming, do.ReportFailover, do.ToClient)
    story.ends()
    assert story.events() == WHOLE


def test_one_worker_fails_and_all_others_decline() -> None:
    """Another worker took the same body, so a 400 of the second one is not yet the answer."""
    story = Story().arrives().goes_to("w0", 1)
    story.after(e.Head(500, {}), s.Routing, do.Close, do.RecordFailure, do.Assign)
    story.goes_to("w1", 2)
    story.after(e.Head(400, {}), s.Declining)
    story.after(e.Data(b'{"detail":"too long"}'), s.Declining)
    story.after(e.ResponseEnded(), s.Routing, do.Close, do.RecordFailure, do.Assign)
    assert story.effect(do.Assign).cause == "declined"
    story.after(e.NoWorker(5.0), s.Ended, do.StopWaiting, do.RecordEnd, do.Reply)
    assert (story.effect(do.RecordEnd).outcome, story.effect(do.Reply).status) == ("rejected", 400)
    assert story.effect(do.Reply).body == b'{"detail":"too long"}'


def test_a_client_leaves_and_returns() -> None:
    story = Story(resumable=True).arrives().goes_to("w0", 1).begins()
    story.after(e.ClientGone(), s.Detached, do.StopWaiting, do.Close, do.Detach)
    story.after(e.ClientReturned((1, 0)), s.Connecting, do.StopWaiting, do.Open)
    story.after(e.Connected(), s.Attaching, do.Send)
    assert story.effect(do.Send).head.startswith(b"POST /relume/attach ")
    assert b'"tokens":1' in story.effect(do.Send).body
    story.after(ATTACHED, s.Attaching, do.Begin)
    story.after(e.Data(FIRST + SECOND), s.Streaming, do.ToClient)
    story.is_delivered()
    assert story.events() == WHOLE


def test_a_stream_of_another_replica_is_adopted() -> None:
    """The worker gives the request's body, which only the first replica had."""
    story = Story(resumable=True, body=b"")
    story.after(e.Adopted((1, 0)), s.Adopting, do.AwaitOwnership)
    story.after(e.Owned(True, assignment("w0", 1, "attach")), s.Connecting, do.Open)
    story.after(e.Connected(), s.Attaching, do.Send)
    story.after(ATTACHED, s.Attaching, do.Begin)
    envelope = encode_envelope(b'{"path":"/v1/completions","id":"q","created":"17"}\n' + BODY)
    story.after(e.Data(envelope + FIRST + SECOND), s.Streaming, do.ToClient)
    story.is_delivered()
    assert story.events() == WHOLE[1:], "it had the first token from the other replica"


def test_a_stream_moves_while_its_client_is_away() -> None:
    story = Story(resumable=True).arrives().goes_to("w0", 1).begins()
    story.after(e.ClientGone(), s.Detached, do.StopWaiting, do.Close, do.Detach)
    story.after(e.HandoverNoticed(), s.Routing, do.Release, do.RecordFailure, do.Assign)
    assert story.effect(do.RecordFailure).kind == "moved", "no worker is blamed"
    story.after(e.Assigned(assignment("w1", 2, "continue")), s.Connecting, do.Open)
    story.after(e.Connected(), s.HandingOver, do.Send)
    story.after(FRAMES, s.Detached, do.Close)
    story.after(e.ClientReturned((1, 0)), s.Connecting, do.StopWaiting, do.Open)
    assert story.effect(do.Open).to.worker == "w1"
    story.after(e.Connected(), s.Attaching, do.Send)
    story.after(ATTACHED, s.Attaching, do.Begin)
    story.after(e.Data(FIRST + SECOND), s.Streaming, do.ToClient)
    story.is_delivered()
    assert story.events() == WHOLE
