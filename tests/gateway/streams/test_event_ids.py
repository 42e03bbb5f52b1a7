"""Ids of events: where a client stands, and what it gets when it comes back."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from relume.controlplane.stream import event_ids
from relume.controlplane.stream.event_ids import Stamp

CLAIM = event_ids.resume_token(os.urandom(event_ids.TOKEN_ENTROPY_BYTES))

FRAMES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda frame: frame != (0, 0)),
    min_size=1,
    max_size=12,
)
"""(tokens, events) of each frame; tokens that nothing shows are possible, and so are events
that show none."""


def frames_of(shape: list[tuple[int, int]]) -> list[tuple[int, bytes]]:
    number = 0
    found = []
    for tokens, events in shape:
        parts = []
        for _ in range(events):
            parts.append(b'data: {"n":%d}\n\n' % number)
            number += 1
        found.append((tokens, b"".join(parts)))
    return found


def sent(frames: list[tuple[int, bytes]], stamp: Stamp, first: int = 0) -> list[bytes]:
    """The events a client gets of the frames behind token `first`, as a worker sends them."""
    out = b""
    at = 0
    for tokens, payload in frames:
        before = at + tokens <= first if tokens else at < first
        at += tokens
        if before:
            stamp.skipped(tokens)
        elif payload:
            out += stamp.frame(payload, tokens)
        else:
            stamp.skipped(tokens)
    return out.split(b"\n\n")[:-1]


@given(FRAMES, st.data())
def test_any_cut_resumes_to_the_identical_list(
    shape: list[tuple[int, int]], data: st.DataObject
) -> None:
    frames = frames_of(shape)
    whole = sent(frames, Stamp("q-1", CLAIM))
    assert len(set(whole)) == len(whole) == sum(events for _, events in shape)
    if not whole:
        return
    cut = data.draw(st.integers(1, len(whole)))
    last = event_ids.parse(whole[cut - 1].split(b"\n")[0].decode().removeprefix("id: "))
    assert last is not None and last.request == "q-1"
    again = Stamp("q-1", CLAIM)
    again.restart((0, 0), last.position)
    assert whole[:cut] + sent(frames, again, last.position[0]) == whole


@given(
    st.lists(st.sampled_from(("one", "two", "half", "line")), min_size=1, max_size=9),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_a_run_is_as_its_frames_one_by_one(kinds: list[str], tokens: int, events: int) -> None:
    """Frames of one token each; `have` may lie in front of them, among them or behind."""
    shown = {"one": "data: {0}\n\n", "two": "data: {0}\n\ndata: [DONE]\n\n", "half": "da{0}"}
    line = "event: a\ndata: {0}\n\n"
    frames = [shown.get(kind, line).format(n).encode() for n, kind in enumerate(kinds)]
    single, run = Stamp("q", CLAIM), Stamp("q", CLAIM)
    for stamp in (single, run):
        stamp.restart((3, events), (tokens, 0))
    assert run.run(frames) == b"".join(single.frame(payload, 1) for payload in frames)
    assert run.at == single.at == (3 + len(frames), 0)


def test_claim_is_known_by_its_digest_alone() -> None:
    known = event_ids.digest(CLAIM)
    assert CLAIM not in known
    assert event_ids.proves(CLAIM, known)
    assert not event_ids.proves(
        event_ids.resume_token(os.urandom(event_ids.TOKEN_ENTROPY_BYTES)), known
    )
    assert not event_ids.proves(CLAIM, "")


def test_what_is_no_id_of_ours() -> None:
    shown = f"a-1:{CLAIM}:12:3"
    assert event_ids.parse(shown) == event_ids.EventId("a-1", CLAIM, (12, 3))
    for text in ("", "17", "a-1:short:1", f"a-1:{CLAIM}", f"a-1:{CLAIM}:x", shown + ":1"):
        assert event_ids.parse(text) is None


def test_a_frame_that_straddles_is_found() -> None:
    stamp = Stamp("q", CLAIM)
    stamp.restart((4, 0), (6, 0))
    assert stamp.straddles(3, b"") and not stamp.straddles(2, b"")


def events(*tokens: int) -> bytes:
    return b"".join([b"data: %d\n\n" % token for token in tokens])


def shown(stamped: bytes) -> list[bytes]:
    return [line for line in stamped.splitlines() if line.startswith(b"data: ")]


def test_events_behind_a_token_are_known_however_the_next_worker_groups_them() -> None:
    """A frame showed tokens 4 to 6 by three events; its client has two of them."""
    for groups in ([(4, 5, 6)], [(4,), (5,), (6,)], [(4,), (5, 6)], [(4, 5), (6,)]):
        stamp = Stamp("q", CLAIM)
        stamp.restart((4, 0), (4, 2))
        got = []
        for group in groups:
            assert not stamp.straddles(len(group), events(*group))
            got += shown(stamp.frame(events(*group), len(group)))
        assert got == [b"data: 6"] and not stamp.is_behind and stamp.at == (7, 0)
    stamp.restart((4, 0), (4, 2))
    assert shown(stamp.run([events(4), events(5), events(6)])) == [b"data: 6"]


def test_one_event_of_several_tokens_cannot_be_cut() -> None:
    stamp = Stamp("q", CLAIM)
    stamp.restart((4, 0), (4, 1))
    assert stamp.straddles(3, b"data: 4 to 6\n\n")
    assert not stamp.straddles(1, b"data: 4\n\n")
