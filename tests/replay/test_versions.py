"""Versions in the log: what this build has the version of is taken again, the rest is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relume.controlplane.cli.relume_command import main
from relume.controlplane.history import snapshots
from relume.controlplane.replay import verify as verification
from relume.controlplane.replay.recorded_log import History, from_file
from relume.controlplane.replay.store import BadStoredLog, save
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.what_if import what_if
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.interface import RevisionGroup
from relume.policies import decision_versions
from relume.policies.admission import admission_queue
from relume.policies.decision_versions import DECISION_VERSIONS
from relume.policies.liveness import stall
from relume.policies.routing import choose_worker
from relume.policies.state.fleet import Fleet, dump, load
from relume.policies.state.fold import apply_group
from tests.policies.story import Story, arrived, decided, replica_started
from tests.replay import frozen
from tests.replay.scene import Scene

OF_KINDS = {
    "route.least_load": ("engine-killed", v.RouteDecided),
    "route.predicted_ttft": ("routing", v.RouteDecided),
    "route.round_robin": ("settings", v.RouteDecided),
    "route.planned": ("migration", v.RouteDecided),
    "admission": ("admission-steady", (v.RequestHeld, v.RequestShed)),
    "placement": ("restores", v.HolderChosen),
    "recovery": ("recoveries", v.RecoveryPlanned),
    "migration": ("migration", v.MigrationPlanned),
    "stall": ("stall-spared", v.StallJudged),
    "detail": ("pressure", v.DetailDecided),
}
"""By kind of decision, a log that has some, and their type."""


def of_kind(history: History, kind: str) -> int:
    """How many decisions of a kind the log has."""
    types = OF_KINDS[kind][1]
    events = [e for e in frozen.events_of(history) if isinstance(e, types)]
    if kind.startswith("route."):
        return sum(f"route.{e.policy}" == kind for e in events)
    turns = 0
    if kind == "admission":
        routes = (e for e in frozen.events_of(history) if type(e) is v.RouteDecided)
        turns = sum(e.cause == "wait_over" for e in routes)
    return len(events) + turns


def raised(patch: pytest.MonkeyPatch, kind: str) -> None:
    """The rule of this build is a new one, and it has no older one left."""
    patch.setitem(DECISION_VERSIONS, kind, DECISION_VERSIONS[kind] + 1)
    patch.setitem(decision_versions.RETAKEN, kind, {})


@pytest.mark.parametrize("kind", OF_KINDS)
def test_raised_version_is_named_and_all_else_is_taken_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = frozen.read(OF_KINDS[kind][0])
    before = frozen.verdict_of(history)
    count = of_kind(history, kind)
    assert count > 0 and before.complete
    raised(monkeypatch, kind)
    verdict = frozen.verdict_of(history)
    assert verdict.divergences == []
    assert verdict.untaken == {f"{kind} version 1": count} and not verdict.complete
    assert verdict.decisions + verdict.waits < before.decisions + before.waits
    assert verdict.answers == before.answers
    assert verdict.hashes == before.hashes and verdict.unanchored == 0


def test_raised_versions_of_predictions_and_of_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    history = frozen.read("leader")
    before = frozen.verdict_of(history)
    monkeypatch.setitem(DECISION_VERSIONS, "first_token", 3)
    monkeypatch.setitem(decision_versions.RETAKEN, "first_token", {2: "for the test"})
    raised(monkeypatch, "leader")
    verdict = frozen.verdict_of(history)
    routes = [e for e in frozen.events_of(history) if type(e) is v.RouteDecided]
    assert verdict.divergences == [] and verdict.decisions == before.decisions
    assert verdict.untaken == {
        "first_token version 1": sum(e.at_us >= 0 for e in routes),
        "leader version 1": before.answers,
    }
    assert verdict.answers == 0 < before.answers


def doubled(old: Callable[..., int]) -> Callable[..., int]:
    return lambda worker, config: 2 * old(worker, config)


@pytest.mark.parametrize(
    ("kinds", "owner", "name", "value"),
    [
        (("stall",), stall, "bound_us", doubled),
        (("admission",), admission_queue, "AGED_PART", 7),
        (("route.least_load", "route.planned"), choose_worker, "REQUEST_TOKENS", 31),
    ],
)
def test_changed_decision_needs_its_version_raised(
    kinds: tuple[str, ...], owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = frozen.read(OF_KINDS[kinds[0]][0])
    old = getattr(owner, name)
    monkeypatch.setattr(owner, name, value(old) if callable(value) else value)
    for kind in kinds:
        assert frozen.verdict_of(history).divergences
        raised(monkeypatch, kind)
    verdict = frozen.verdict_of(history)
    assert verdict.divergences == [] and len(verdict.untaken) == len(kinds)


def test_the_command_says_what_it_cannot_retake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised(monkeypatch, "stall")
    path = str(frozen.path_of("stall-spared"))
    assert main(["replay", "--verify", "--log", path]) == 5
    out = capsys.readouterr().out
    assert "cannot retake 17 decisions: stall version 1; the version of this build: 4" in out
    assert "no divergence in the decisions that this build can retake" in out
    assert "every decision came out the same" not in out
    assert main(["replay", "--verify", "--json", "--log", path]) == 5
    told = json.loads(capsys.readouterr().out)
    assert told["complete"] is False and told["untaken"] == {"stall version 1": 17}
    assert told["ok"] is True and told["divergences"] == []
    monkeypatch.setattr(stall, "bound_us", doubled(stall.bound_us))
    monkeypatch.setitem(DECISION_VERSIONS, "stall", 1)
    assert main(["replay", "--verify", "--log", path]) == 1, "a divergence is worse"


def test_what_if_leaves_out_what_it_cannot_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    history = frozen.read("stall-spared")
    asked = what_if(history, {"stall.cap_us": "1"})
    raised(monkeypatch, "stall")
    outcome = what_if(history, {"stall.cap_us": "1"})
    assert outcome.untaken == {"stall version 1": 17} and not asked.untaken
    assert outcome.decisions == asked.decisions - 17


# --- who wrote what ----------------------------------------------------------------------

NOW = DECISION_VERSIONS["route.least_load"]


def routed(groups: list[RevisionGroup], stream: str) -> int:
    events = [
        event
        for group in groups
        for segment in group.segments
        if segment.stream == stream
        for event in codec.decode_all(segment.records)
    ]
    return sum(type(event) is v.RouteDecided for event in events)


async def upgraded(raise_version: Callable[[], None]) -> tuple[list[RevisionGroup], int]:
    """Two replicas, of which r1 comes back with another version; the log, and how many
    decisions r1 took before."""
    async with Scene(7, policy="least_load") as scene:
        await scene.traffic(30)
        await scene.settled()
        await scene.kill_replica("r1")
        await scene.settled()
        before = routed(scene.log.groups, "r.r1")
        raise_version()
        await scene.start_replica("r1")
        await scene.traffic(30, "later")
        await scene.settled()
    return scene.log.groups, before


def test_versions_hold_for_their_writer_and_from_its_start_on() -> None:
    with pytest.MonkeyPatch.context() as patch:
        groups, before = asyncio.run(upgraded(lambda: raised(patch, "route.least_load")))
        late = routed(groups, "r.r1") - before
        early = before + routed(groups, "r.r0")
        assert before > 5 and late > 5
        of_new = verify(groups)
        assert of_new.divergences == []
        assert of_new.untaken == {f"route.least_load version {NOW}": early}
    of_old = verify(groups)
    assert of_old.divergences == [] and of_old.ok
    assert of_old.untaken == {f"route.least_load version {NOW + 1}": late}


def test_versions_are_in_a_snapshot() -> None:
    """Replay that goes on from the middle knows what was written before."""
    with pytest.MonkeyPatch.context() as patch:
        groups, before = asyncio.run(upgraded(lambda: raised(patch, "route.least_load")))
    base, rest = Fleet(), list(groups)
    while "r1" not in base.replicas or base.replicas["r1"].decisions < before + 3:
        apply_group(base, rest.pop(0))
    verdict = verify(rest, load(dump(base)))
    assert verdict.divergences == []
    assert 0 < verdict.untaken[f"route.least_load version {NOW + 1}"] <= routed(rest, "r.r1")
    assert len(verdict.untaken) == 1


def test_kind_that_this_build_never_had_is_named() -> None:
    """A policy of a later build, which announced it."""
    story = Story()
    story.worker()
    story.tell("r.r0", replica_started(settings=(("version.route.oracle", "3"),)))
    dispatch = decided(basis=v.Basis(story.revision, 2))
    dispatch = msgspec.structs.replace(dispatch, policy="oracle")
    story.tell("r.r0", arrived(), dispatch)
    verdict = verify(story.groups)
    assert (verdict.divergences, verdict.untaken) == ([], {"route.oracle version 3": 1})


def test_replicas_write_the_version_of_every_kind() -> None:
    groups, _ = asyncio.run(upgraded(lambda: None))
    started = [
        event
        for group in groups
        for segment in group.segments
        for event in codec.decode_all(segment.records)
        if type(event) is v.ReplicaStarted
    ]
    assert len(started) == 3
    for event in started:
        told = {k: n for k, n in event.settings if k.startswith("version.")}
        assert told == {f"version.{kind}": str(n) for kind, n in DECISION_VERSIONS.items()}
    kinds = {*DECISION_VERSIONS} - {"first_token", "leader"}
    assert {*OF_KINDS} <= kinds


# --- the state ---------------------------------------------------------------------------


def grown(fleet: Fleet) -> bytes:
    """The hash that the state would have with one more field."""
    return blake2b(msgspec.msgpack.encode([fleet, 0]), digest_size=16).digest()


@pytest.mark.parametrize("name", ["routing", "restores", "leader"])
def test_changed_state_needs_its_shape_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    history = frozen.read(name)
    before = frozen.verdict_of(history)
    assert not before.foreign and not before.shapes
    monkeypatch.setattr(verification, "state_hash", grown)
    assert {d.what for d in frozen.verdict_of(history).divergences} == {"state"}
    monkeypatch.setattr(decision_versions, "STATE_SHAPE", 2)
    verdict = frozen.verdict_of(history)
    assert verdict.divergences == [] and verdict.decisions == before.decisions
    assert verdict.shapes == {"1": before.hashes} and verdict.foreign == before.hashes
    groups = [g for n, g in enumerate(history.groups) if n != len(history.groups) // 2]
    assert verify(groups, limit=1).divergences, "the order is still compared"


def test_shape_is_written_and_named_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups, _ = asyncio.run(upgraded(lambda: None))
    path = tmp_path / "run.rlog"
    footer = save(path, groups)
    assert footer.shape == "1" and verify(groups).foreign == 0
    monkeypatch.setattr(decision_versions, "STATE_SHAPE", 2)
    assert main(["replay", "--verify", "--log", str(path)]) == 0
    assert "of them of state shape 1, order compared alone" in capsys.readouterr().out


def test_snapshot_of_another_shape_is_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, _ = asyncio.run(upgraded(lambda: None))
    base = Fleet()
    for group in groups[:40]:
        apply_group(base, group)
    path = tmp_path / "window.rlog"
    save(path, groups[40:], base)
    assert verify((history := from_file(path)).groups, history.base).divergences == []
    shape = snapshots.shape()
    snapshots.shape.cache_clear()
    monkeypatch.setattr(decision_versions, "STATE_SHAPE", 2)
    with pytest.raises(BadStoredLog, match=r"state shape 1; this build has shape 2"):
        from_file(path)
    try:
        assert snapshots.shape() != shape
    finally:
        snapshots.shape.cache_clear()
