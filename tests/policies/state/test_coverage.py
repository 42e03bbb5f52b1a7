"""The fold of checkpoints: coverage is what a living holder acknowledged, nothing else."""

from __future__ import annotations

from typing import Any

from relume.events import vocabulary as v
from relume.events.log import codec
from relume.policies.checkpoints import placement
from relume.policies.checkpoints.decisions import displaced, sites
from relume.policies.state import coverage
from relume.policies.state.coverage import (
    bandwidth,
    covered_tokens,
    endpoint,
)
from relume.policies.state.fleet import dump, load, state_hash
from relume.policies.state.overlay.view import View
from tests.policies.story import (
    Story,
    arrived,
    decided,
    ended,
    engine_step,
    queued,
)

BASIS = v.Basis(1, 0)


def scene() -> Story:
    story = Story()
    for name in ("w0", "w1", "w2"):
        story.worker(name)
        story.tell(f"w.{name}", daemon(name))
    story.replica()
    story.tell("r.r0", arrived("q"))
    return story


def daemon(name: str, boot: str = "b1", epoch: int = 1, budget: int = 10_000) -> Any:
    return v.StateDaemonStarted(
        worker=name,
        boot=boot,
        epoch=epoch,
        address=f"tcp://{name}",
        budget_bytes=budget,
        family="f",
    )


def acknowledged(holder: str, tokens: int, boot: str = "b1", child: int = 0) -> Any:
    return v.CheckpointAcknowledged(
        holder=holder,
        boot=boot,
        request="q",
        child=child,
        attempt=1,
        blocks=tokens // 16,
        tokens=tokens,
        bytes=tokens * 10,
    )


def chosen(holder: str, attempt: int = 1, primary: str = "w0") -> Any:
    return v.HolderChosen(
        decision="d1",
        basis=BASIS,
        request="q",
        attempt=attempt,
        cause="arrival",
        primary=primary,
        holders=(holder,),
        policy="load_aware",
        wanted=1,
        expected_blocks=8,
        expected_bytes=1280,
    )


def test_coverage_follows_acknowledgements_evictions_and_drops() -> None:
    story = scene()
    story.tell("w.w1", acknowledged("w1", 32), acknowledged("w1", 64))
    assert covered_tokens(story.fleet, "w1", "q") == 64
    assert story.fleet.holders["w1"].held_bytes == 640
    story.tell("w.w1", acknowledged("w1", 16, child=1))
    assert covered_tokens(story.fleet, "w1", "q") == 16, "the worst child"
    both = tuple(
        v.HeldPrefix(request="q", child=n, attempt=1, blocks=2, tokens=32 + n, bytes=320)
        for n in (0, 1)
    )
    story.tell("w.w1", v.CheckpointsAcknowledged("w1", "b1", both))
    assert covered_tokens(story.fleet, "w1", "q") == 32
    assert story.fleet.holders["w1"].held_bytes == 640
    story.tell("w.w1", acknowledged("w1", 16, child=1))
    story.tell(
        "w.w1",
        v.CheckpointEvicted(holder="w1", boot="b1", request="q", child=0, tokens=8, bytes=80),
    )
    assert covered_tokens(story.fleet, "w1", "q") == 8
    assert story.fleet.holders["w1"].held_bytes == 80 + 160
    for child in (0, 1):
        story.tell(
            "w.w1",
            v.CheckpointDropped(
                holder="w1", boot="b1", request="q", child=child, reason="finished"
            ),
        )
    assert story.fleet.holders["w1"].covered == {}
    assert story.fleet.holders["w1"].held_bytes == 0


def test_an_older_life_of_the_daemon_covers_nothing() -> None:
    story = scene()
    story.tell("w.w1", acknowledged("w1", 64))
    story.tell("w.w1", daemon("w1", "b2", 2))
    assert covered_tokens(story.fleet, "w1", "q") == 0, "a new life holds nothing"
    story.tell("w.w1", acknowledged("w1", 64, "b1"))
    story.tell("w.w1", v.StateDaemonLost("w1", "b1", "late news"))
    assert covered_tokens(story.fleet, "w1", "q") == 0
    assert story.fleet.holders["w1"].alive
    story.tell("w.w1", daemon("w1", "b1", 1))
    assert story.fleet.holders["w1"].boot == "b2", "an older epoch changes nothing"


def test_one_worker_does_not_speak_for_anothers_daemon() -> None:
    story = scene()
    story.tell("w.w2", acknowledged("w1", 64))
    assert covered_tokens(story.fleet, "w1", "q") == 0


def test_a_lost_host_takes_its_checkpoints_with_it() -> None:
    story = scene()
    story.leader()
    view = View("r.r0", story.fleet)
    story.tell("w.w1", acknowledged("w1", 64))
    story.tell("r.r0", chosen("w1"))
    assert displaced(view, "q", "w0") is None
    story.tell("fleet", v.WorkerLost("w1", story.epochs["w.w1"], "lease"))
    assert covered_tokens(story.fleet, "w1", "q") == 0
    assert displaced(view, "q", "w0") == "holder_lost"


def test_a_recovered_request_needs_a_new_holder() -> None:
    story = scene()
    view = View("r.r0", story.fleet)
    assert displaced(view, "q", "w0") == "holder_joined", "it has none yet"
    story.tell("r.r0", chosen("w1"))
    story.tell("r.r0", chosen("w1", attempt=2, primary="w1"))
    assert displaced(view, "q", "w1") == "recovered"
    story.tell("r.r0", chosen("w2", attempt=1))
    assert story.fleet.placed["q"].attempt == 2, "an older decision changes nothing"


def test_eq4_and_eq5_from_the_fold() -> None:
    """A placement counts at once with what it is expected to hold, and then with what it
    holds; the bytes of both are never counted twice."""
    story = scene()
    view = View("r.r0", story.fleet)
    story.tell("r.r0", chosen("w1"))

    def site() -> placement.Site:
        (found,) = [s for s in sites(view) if s.worker == "w1"]
        return found

    assert (site().blocks, site().used_bytes) == (8, 1280)
    story.tell("w.w1", acknowledged("w1", 64))
    assert (site().blocks, site().used_bytes) == (8, 1280)
    story.tell("w.w1", acknowledged("w1", 160))
    assert (site().blocks, site().used_bytes) == (10, 1600)
    story.tell("r.r0", ended("q"))
    assert (site().blocks, site().used_bytes) == (0, 1600), "held until the holder let go"


def test_what_has_no_holder_is_not_covered_and_no_lag() -> None:
    story = scene()
    ready = v.EngineReady(
        worker="w0",
        incarnation=1,
        host="h",
        port=1,
        model="m",
        max_model_len=4096,
        block_size=16,
        kv_blocks=10,
        family="f",
        block_bytes=4096,
    )
    story.tell("r.r0", arrived("r"), decided("q"), decided("r"), chosen("w1"))
    filled = (v.KvBlocksFilled("q", 1, 6), v.KvBlocksFilled("r", 1, 4))
    story.tell("w.w0", ready, engine_step(queued("q"), queued("r"), *filled))
    story.tell("w.w1", acknowledged("w1", 64))
    assert coverage.progress(story.fleet) == (160, 64, 32, 2, 1)
    story.tell("w.w1", acknowledged("w1", 112))
    assert coverage.progress(story.fleet) == (160, 96, 0, 2, 1), "the holder heard first"
    story.tell("r.r0", ended("q"), ended("r"))
    assert coverage.progress(story.fleet) == (0, 0, 0, 0, 0)


def test_restores_are_counted_and_snapshots_hold_everything() -> None:
    story = scene()
    story.tell("r.r0", chosen("w1"))
    story.tell(
        "w.w2",
        v.RestoreStarted(incarnation=1, request="q", child=0, attempt=2, holder="w1", tokens=64),
        v.RestoreFailed(
            incarnation=1, request="q", child=0, attempt=2, holder="w1", tokens=32, reason="corrupt"
        ),
        v.RestoreDone(
            incarnation=1,
            request="q",
            child=0,
            attempt=2,
            holder="w1",
            tokens=64,
            bytes=640,
            duration_us=900,
        ),
    )
    assert story.fleet.restores == {"started": 1, "failed": 1, "done": 1, "tokens": 96}
    again = load(dump(story.fleet))
    assert state_hash(again) == state_hash(story.fleet)


def test_the_new_records_survive_the_wire() -> None:
    option = v.RecoveryOption(
        worker="w1",
        kind="restore",
        holder="w2",
        restored=64,
        wait_us=0,
        move_us=900,
        compute_us=100,
        done_us=1000,
    )
    for event in (
        daemon("w1"),
        acknowledged("w1", 64),
        chosen("w1"),
        v.RecoveryPlanned(
            decision="d",
            basis=BASIS,
            worker="w0",
            incarnation=3,
            policy="completion",
            choices=(
                v.RecoveryChoice(request="q", attempt=2, tokens=99, chosen=0, options=(option,)),
            ),
        ),
    ):
        assert codec.decode(codec.encode(event)) == event


def test_a_daemon_found_running_acknowledges_what_it_has_again() -> None:
    """What it dropped while nobody asked it is not told; what is not told again is gone."""
    story = scene()
    story.tell("w.w1", acknowledged("w1", 64))
    story.tell("w.w1", daemon("w1", "b1"))
    assert covered_tokens(story.fleet, "w1", "q") == 0
    story.tell("w.w1", daemon("w1", "b1"), acknowledged("w1", 48))
    assert covered_tokens(story.fleet, "w1", "q") == 48
    assert story.fleet.holders["w1"].held_bytes == 480


def test_an_engine_reaches_a_holder_on_its_own_machine_by_the_socket() -> None:
    story = scene()
    for name, machine, tcp in (("w0", "m1", ""), ("w1", "m1", ""), ("w2", "m2", "tcp://h2:7")):
        story.tell(
            f"w.{name}",
            v.StateDaemonStarted(
                worker=name,
                boot="b2",
                epoch=2,
                address=tcp,
                budget_bytes=1,
                family="f",
                local=f"unix:/run/{name}",
                machine=machine,
            ),
        )
    assert endpoint(story.fleet, "w1", "w0") == "unix:/run/w1"
    assert endpoint(story.fleet, "w2", "w0") == "tcp://h2:7"
    assert endpoint(story.fleet, "w0", "w2") == "", "it listens to no other host"
    story.tell("w.w1", v.StateDaemonLost("w1", "b2", "killed"))
    assert endpoint(story.fleet, "w1", "w0") == "", "dead"


def test_restores_measure_their_link() -> None:
    story = scene()
    assert bandwidth(story.fleet, "w1", "w2") == 0
    story.tell(
        "w.w2",
        v.RestoreDone(
            incarnation=1,
            request="q",
            child=0,
            attempt=2,
            holder="tcp://w1",
            tokens=64,
            bytes=3_000_000,
            duration_us=2_000,
        ),
        v.RestoreDone(
            incarnation=1,
            request="p",
            child=0,
            attempt=2,
            holder="tcp://w1",
            tokens=64,
            bytes=1_000_000,
            duration_us=2_000,
        ),
        v.RestoreDone(
            incarnation=1,
            request="p",
            child=0,
            attempt=2,
            holder="tcp://elsewhere",
            tokens=64,
            bytes=1_000_000,
            duration_us=2_000,
        ),
    )
    assert bandwidth(story.fleet, "w1", "w2") == 1_000_000_000
    assert bandwidth(story.fleet, "w1", "w0") == 0
    for _ in range(3):
        story.tell(
            "w.w2",
            v.RestoreDone(
                incarnation=1,
                request="q",
                child=0,
                attempt=2,
                holder="tcp://w1",
                tokens=64,
                bytes=1 << 30,
                duration_us=10_000_000,
            ),
        )
    assert 90_000_000 < bandwidth(story.fleet, "w1", "w2") < 120_000_000, "old ones fade"


def test_an_engine_tells_what_blocks_it_writes() -> None:
    story = scene()
    story.tell("w.w1", v.EngineStarted("w1", 2, 9, 9))
    ready = v.EngineReady(
        worker="w1",
        incarnation=2,
        host="h",
        port=1,
        model="m",
        max_model_len=100,
        block_size=16,
        kv_blocks=10,
        family="f2",
        block_bytes=4096,
    )
    story.tell("w.w1", ready)
    assert story.fleet.workers["w1"].block_bytes == 4096
    assert story.fleet.workers["w1"].family == story.fleet.holders["w1"].family == "f2"
