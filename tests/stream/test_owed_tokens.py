"""When a stream is owed a token that could be overdue, and when its silence means nothing."""

from __future__ import annotations

from typing import Any

import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import event_ids
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.arrival import Arrival, Assignment
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import RelayedRequest, Stream
from relume.events.vocabulary.enums import TransportKind
from relume.events.wire.frames import CONTENT_TYPE, encode_tokens

HEAD = e.Head(200, {b"content-type": CONTENT_TYPE})
TOKEN = e.Data(encode_tokens(0, [5], b"data: a\n\n"))
SECOND = e.Data(encode_tokens(1, [6], b"data: b\n\n"))
CLAIM = "t" * 43


def machine(
    stream: bool = True, verdict: str = "exact", resumable: bool = False, relayed: bool = False
) -> StreamMachine:
    arrival = Arrival(
        request="r", model="m", route="/v1/completions", stream=stream, prompt_tokens=1,
        max_tokens=9, verdict=verdict, resumable=event_ids.digest(CLAIM) if resumable else "",
    )  # fmt: skip
    return StreamMachine(
        Stream(
            arrival=arrival, path="/p", response_id="q", body=b"{}", limits=GatewayConfig(),
            now=0.0, resume_token=CLAIM if resumable else "", created="17" if resumable else "",
            relayed=RelayedRequest("POST", ()) if relayed else None,
        )
    )  # fmt: skip


def fed(made: StreamMachine, *events: Any) -> list[bool]:
    """Whether a token is owed after each event."""
    found = []
    for event in events:
        made.handle(event, 0.0)
        found.append(made.owes_token)
    return found


def begun(made: StreamMachine) -> tuple[Any, ...]:
    return e.Accepted(made.stream.arrival), e.Admitted(30.0)


def to(attempt: int, mode: str) -> e.Assigned:
    return e.Assigned(
        Assignment(
            request="r", attempt=attempt, worker=f"w{attempt}", incarnation=1, host="h", port=1,
            mode=mode, dispatch=b"d",
        )
    )  # fmt: skip


def test_a_stream_is_owed_tokens_from_its_dispatch_on() -> None:
    """Its engine's reports say from when one is due."""
    made = machine()
    assert fed(made, *begun(made), to(1, "new")) == [False] * 3
    assert fed(made, e.Connected(()), HEAD, TOKEN, SECOND) == [True] * 4
    assert fed(made, e.Data(b":e stop\n")) == [False]


def test_a_new_answer_in_one_piece_is_owed_tokens_once_some_came() -> None:
    made = machine(stream=False)
    assert fed(made, *begun(made), to(1, "new"), e.Connected(()), HEAD) == [False] * 5
    assert fed(made, e.Data(encode_tokens(0, [5], b""))) == [True]


@pytest.mark.parametrize(("mode", "first"), [("continue", True), ("replay", False)])
def test_a_replay_is_silent_until_it_has_caught_up(mode: str, first: bool) -> None:
    made = machine()
    lost = e.ConnectionLost(TransportKind.RESET, "", False)
    fed(made, *begun(made), to(1, "new"), e.Connected(()), HEAD, TOKEN)
    assert fed(made, lost, to(2, mode)) == [False, False], "while it moves"
    assert fed(made, e.Connected(())) == [first]
    assert fed(made, HEAD) == [first]
    assert fed(made, SECOND) == [True]


def test_a_replay_and_an_answer_in_one_piece_may_send_nothing_before_their_engine_is_done() -> None:
    lost = e.ConnectionLost(TransportKind.RESET, "", False)
    made = machine()
    fed(made, *begun(made), to(1, "new"), e.Connected(()))
    assert not made.withholds
    fed(made, HEAD, TOKEN, lost, to(2, "replay"))
    assert not made.withholds, "while it moves"
    for event, withholds in ((e.Connected(()), True), (HEAD, True), (SECOND, False)):
        fed(made, event)
        assert made.withholds == withholds
    made = machine(stream=False)
    fed(made, *begun(made), to(1, "new"), e.Connected(()), HEAD)
    assert made.withholds
    made = machine(stream=False, relayed=True)
    fed(made, *begun(made), to(1, "new"), e.Connected(()))
    assert not made.withholds


def test_what_no_other_worker_can_continue_stays_where_it_is() -> None:
    made = machine(verdict="restart")
    assert fed(made, *begun(made), to(1, "new"), e.Connected(()), HEAD, TOKEN)[-2:] == [True, False]
    made = machine(relayed=True)
    assert fed(made, *begun(made), to(1, "new"), e.Connected(()))[-1] is False


def test_an_absent_client_is_owed_nothing() -> None:
    made = machine(resumable=True)
    fed(made, *begun(made), to(1, "new"), e.Connected(()), HEAD, TOKEN)
    assert made.owes_token
    assert fed(made, e.ClientGone()) == [False]


def test_an_attempt_that_is_attached_repeats_what_the_client_has_first() -> None:
    made = machine(resumable=True)
    fed(made, *begun(made), to(1, "new"), e.Connected(()), HEAD, TOKEN, e.ClientGone())
    assert fed(made, e.ClientReturned((1, 0))) == [False]
