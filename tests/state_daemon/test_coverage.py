"""What the holder's agent writes: positions of the worst rank, and ends, once each."""

from __future__ import annotations

from pathlib import Path

from relume.engine_shim.checkpoints.daemon.coverage_changes import CoverageReports, together
from relume.engine_shim.checkpoints.link.block_stream import BlockOut, scatter
from relume.events.vocabulary import (
    CheckpointAcknowledged,
    CheckpointDropped,
    CheckpointEvicted,
    CheckpointsAcknowledged,
    HeldPrefix,
)
from relume.events.wire.kv import kv_messages as m
from tests.state_daemon.daemon import Cache, daemon_in, hello, local, peer_of, tokens_of


def change(
    rank: int = 0, blocks: int = 1, reason: str = "", attempt: int = 1, ranks: int = 1
) -> m.Change:
    return m.Change(
        request="q",
        child=0,
        rank=rank,
        attempt=attempt,
        blocks=blocks,
        tokens=blocks * 4,
        bytes=blocks * 100,
        worker="w0",
        reason=reason,
        ranks=ranks,
    )


def changed(cursor: int, *changes: m.Change, boot: str = "b") -> m.ChangesAnswer:
    return m.ChangesAnswer(seq=0, cursor=cursor, boot=boot, changes=changes)


def test_the_worst_rank_counts_and_a_missing_one_covers_nothing() -> None:
    reports = CoverageReports("w1")
    assert reports.take(changed(1, change(0, 3, ranks=2))) == []
    (event,) = reports.take(changed(2, change(1, 2, ranks=2)))
    assert event == CheckpointAcknowledged(
        holder="w1", boot="b", request="q", child=0, attempt=1, blocks=2, tokens=8, bytes=500
    )
    assert reports.take(changed(3, change(0, 4, ranks=2))) == [], "nothing new for the request"


def test_less_than_before_is_an_eviction_and_the_end_is_reported_once() -> None:
    reports = CoverageReports("w1")
    reports.take(changed(1, change(0, 3)))
    assert reports.take(changed(2, change(0, 1))) == [
        CheckpointEvicted(holder="w1", boot="b", request="q", child=0, tokens=4, bytes=100)
    ]
    end = changed(3, change(0, 0, "dropped"))
    assert reports.take(end) == [
        CheckpointDropped(holder="w1", boot="b", request="q", child=0, reason="finished")
    ]
    assert reports.take(changed(4, change(0, 0, "expired"))) == []


def test_another_boot_is_asked_from_its_beginning() -> None:
    reports = CoverageReports("w1")
    reports.take(changed(7, change(0, 3)))
    assert reports.take(changed(9, change(0, 5), boot="c")) == []
    assert reports.cursor == 0
    (event,) = reports.take(changed(1, change(0, 2), boot="c"))
    assert isinstance(event, CheckpointAcknowledged) and event.boot == "c"


def test_the_acknowledgements_of_one_answer_are_one_record() -> None:
    ack = [
        CheckpointAcknowledged(
            holder="w1",
            boot="b",
            request=f"q{n}",
            child=0,
            attempt=1,
            blocks=2,
            tokens=8,
            bytes=500,
        )
        for n in range(2)
    ]
    dropped = CheckpointDropped(holder="w1", boot="b", request="q", child=0, reason="finished")
    assert together([ack[0], dropped]) == [dropped, ack[0]], "what made room comes first"
    held = tuple(
        HeldPrefix(request=f"q{n}", child=0, attempt=1, blocks=2, tokens=8, bytes=500)
        for n in range(2)
    )
    both = CheckpointsAcknowledged("w1", "b", held)
    assert together([ack[0], dropped, ack[1]]) == [dropped, both]


def test_with_a_real_daemon(tmp_path: Path) -> None:
    with (
        daemon_in(tmp_path) as daemon,
        peer_of(local(daemon.socket)) as writer,
        peer_of(local(daemon.socket), hello=hello("control")) as agent,
    ):
        reports = CoverageReports("w1")
        blocks = [
            BlockOut(
                request="q", child=0, rank=0, index=i, attempt=1, block_id=i, tokens=tokens_of(i)
            )
            for i in range(5)
        ]
        scatter(Cache(5), blocks, writer)
        assert writer.drained(5)
        answer, _ = agent.ask(m.Changes(0, reports.cursor), 5.0)
        (event,) = reports.take(answer)
        assert (event.blocks, event.tokens, event.boot) == (5, 20, daemon.boot)
        agent.ask(m.Drop(0, ("q",), 1), 5.0)
        answer, _ = agent.ask(m.Changes(0, reports.cursor), 5.0)
        assert reports.take(answer) == [
            CheckpointDropped(
                holder="w1", boot=daemon.boot, request="q", child=0, reason="finished"
            )
        ]
