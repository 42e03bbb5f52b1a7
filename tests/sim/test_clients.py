"""Simulated clients: what they record of the bytes that come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from relume.chaos.scenario.schedule import Request
from relume.chaos.sim.gateway.answer_bytes import LARGE, SMALL, style_of, tokens_of
from relume.chaos.sim.gateway.client_connection import SimClientConnection
from relume.chaos.sim.message_ports import Ask, Stretch
from relume.chaos.sim.sim_clients import Call, Clients
from relume.chaos.validators.promises.requests import i3_indices


class AdmissionQueue:
    """A run's clients, as a call uses them."""

    loop = SimpleNamespace(now_ns=7)

    def ended(self, call: Call) -> None:
        pass


def call_of(style: object) -> Call:
    """A call whose answer has that style."""
    names = (f"q{n}" for n in range(100))
    name = next(name for name in names if style_of(name, "streaming") is style)
    clients: Clients = AdmissionQueue()  # type: ignore[assignment]
    return Call(clients, Request(name=name, at_ns=0, prompt_tokens=8, output_tokens=4))


def stretch(start: int, count: int, data: bytes, at_ns: int) -> Stretch:
    return Stretch(start=start, count=count, first_ns=at_ns, last_ns=at_ns, data=data)


def test_a_note_whose_token_was_lost_begins_no_chunk() -> None:
    call = call_of(SMALL)
    name = call.request.name
    call.tokens(stretch(0, 1, SMALL.note, 5))
    assert (call.record.starts, call.record.status, call.first_ns) == ([], 200, 0)
    call.tokens(stretch(0, 1, SMALL.shown(tokens_of(name, 0, 1)), 9))
    assert (call.record.starts, call.record.token_count, call.first_ns) == ([0], 1, 9)
    assert i3_indices.check([], [call.record]) == []


@pytest.mark.parametrize(("second", "fine"), [(1, True), (2, False), (0, False)])
def test_a_gap_and_a_repetition_are_recorded(second: int, fine: bool) -> None:
    call = call_of(LARGE)
    for start in (0, second):
        call.tokens(stretch(start, 1, LARGE.shown(tokens_of(call.request.name, start, 1)), 5))
    assert (call.record.starts == [0]) is fine


@pytest.mark.parametrize(("status", "refusal"), [(302, 0), (400, 400)])
def test_a_relayed_answer_has_the_status_of_its_worker(status: int, refusal: int) -> None:
    """I25 of composed 9028 compared 200 with the log's 302."""
    call = call_of(SMALL)
    ask = Ask(client_id="q0", content_id="q0", prompt_tokens=8, output_tokens=4, kind="relayed")
    connection = SimClientConnection(call, ask, {})
    answer = SimpleNamespace(finish="")
    connection.session = SimpleNamespace(stream=SimpleNamespace(answer=answer))  # type: ignore[assignment]
    connection.begin(b"HTTP/1.1 %d \r\n" % status, b"", last=True)
    assert (call.record.status, call.refusal, call.message) == (status, refusal, "")
    assert call.record.finish == ("" if refusal else "length"), (
        "it reads its worker's last event (50473)"
    )
