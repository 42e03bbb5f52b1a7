"""The number of the next event of an answer whose events have numbers."""

from __future__ import annotations

from array import array

from relume.controlplane.stream.answer import Answer, NumberedAnswer, created_in
from relume.events.wire.frames import encode_tokens


def event(number: int, text: str = "a") -> bytes:
    return (
        b'event: response.output_text.delta\ndata: {"delta":"%b","sequence_number":%d,'
        b'"type":"response.output_text.delta"}\n\n' % (text.encode(), number)
    )


def chunk(start: int, payload: bytes) -> bytes:
    frame = encode_tokens(start, [7], payload)
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def test_it_follows_the_events_of_the_last_token() -> None:
    answer = NumberedAnswer()
    assert answer.next_event == answer.next_after_all == -1
    answer.follow(event(0) + event(1), True)
    assert answer.next_event == 2
    assert answer.take(chunk(0, event(2)), 1.0) is not None
    assert answer.next_event == answer.next_after_all == 3
    assert answer.take(chunk(5, event(9)), 1.0) is None, "not the next token"
    assert answer.next_event == 3


def test_events_after_the_last_token_are_repeated_by_who_goes_on() -> None:
    answer = NumberedAnswer()
    answer.follow(event(4), True)
    answer.follow(event(5), False)
    assert (answer.next_event, answer.next_after_all) == (5, 6)


def test_a_client_that_returns_may_have_fewer() -> None:
    answer = NumberedAnswer()
    answer.follow(event(4), True)
    answer.restart(array("I", [1, 2]))
    assert answer.next_event == -1


def test_it_is_done_with_its_last_event() -> None:
    last = b'event: response.completed\ndata: {"sequence_number":3}\n\n'
    answer = NumberedAnswer()
    assert answer.take(chunk(0, event(2) + last), 1.0) is None, "the parser sees the end"
    answer.follow(event(2), True)
    assert not answer.done
    answer.follow(event(2, "event: response.completed") + event(3), True)
    assert not answer.done
    answer.follow(event(2) + last, True)
    assert answer.done and answer.is_complete


def test_text_is_no_number() -> None:
    answer = NumberedAnswer()
    answer.follow(event(4, r"\"sequence_number\":99"), True)
    assert answer.next_event == 5
    answer.follow(b'data: {"sequence_number":null}\n\n', True)
    assert answer.next_event == -1


def test_other_answers_have_no_numbers() -> None:
    answer = Answer()
    answer.follow(event(4), True)
    assert answer.next_event == -1


def test_the_time_of_creation_has_two_names() -> None:
    assert created_in(b'data: {"id":"x","created":17,"choices":[]}') == b"17"
    assert created_in(b'data: {"response":{"created_at":18,"tools":[{"created":{}}]}}') == b"18"
    assert created_in(b'data: {"tools":[{"created":{}}]}') == b""
