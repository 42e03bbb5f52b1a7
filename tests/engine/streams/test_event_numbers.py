"""The Responses API beside frames: the response's name, and numbers of a continued stream."""

from __future__ import annotations

import json

import pytest

from relume.engine_shim.engine.streams.responses import EventNumbers, named


@pytest.mark.parametrize("given", ('{"input": "hi"}', '{"input": "hi", "request_id": null}'))
def test_a_response_is_named_after_its_request(given: str) -> None:
    found = json.loads(named(given.encode(), "q.1"))
    assert found == {"input": "hi", "request_id": "resp_q.1"}


@pytest.mark.parametrize(
    "body", (b'{"request_id":"mine"}', b'{"a":', b"[1]", b"", b"\xff", b"[" * 100_000)
)
def test_a_named_response_and_what_is_no_request_are_left_alone(body: bytes) -> None:
    assert named(body, "q") is body


def events(*numbers: int, text: str = "") -> bytes:
    made = [{"delta": text, "sequence_number": n, "type": "x"} for n in numbers]
    return b"".join(b"event: x\ndata: %b\n\n" % json.dumps(one).encode() for one in made).replace(
        b'"sequence_number": ', b'"sequence_number":'
    )


def test_numbers_go_on_where_the_client_is() -> None:
    numbers = EventNumbers(12)
    assert numbers.renumber(events(40, 41)) == events(12, 13)
    assert numbers.renumber(events(42)) == events(14)


def test_equal_numbers_pass_untouched() -> None:
    payload = events(12, 13)
    assert EventNumbers(12).renumber(payload) is payload


def test_numbers_in_text_are_left_alone() -> None:
    text = 'say "sequence_number":7'
    assert EventNumbers(2).renumber(events(1, text=text)) == events(2, text=text)


def test_an_event_without_a_number_passes() -> None:
    numbers = EventNumbers(2)
    assert numbers.renumber(b"event: error\ndata: {}\n\n") == b"event: error\ndata: {}\n\n"
    assert numbers.renumber(events(5)) == events(2)
