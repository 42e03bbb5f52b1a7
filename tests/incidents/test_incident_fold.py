"""The fold is pure, the same live and offline, and bounded."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from relume.controlplane.incidents import touched_streams
from relume.controlplane.incidents.case_book import MOST_INCIDENTS
from relume.controlplane.incidents.incident import MOST_EVENTS, MOST_STREAMS
from relume.controlplane.incidents.incident_fold import IncidentFold, IncidentObserver, incidents_of
from relume.controlplane.replay.recorded_log import from_file
from relume.events import vocabulary as v
from relume.events.log.entries import Entry, entries
from relume.events.vocabulary.enums import DeathReason
from relume.policies.state.fleet import Fleet, state_hash
from relume.policies.state.fold import apply_group
from tests.incidents.failure_log import FailureLog, live
from tests.policies.story import decided
from tests.replay.decisions.test_scheduler_replay import eventful_log

LOGS = sorted((Path(__file__).parents[1] / "replay" / "logs").glob("*.rlog"))
KILLED = {
    "cross-checks": ["w1:1", "w2:1"],
    "churn": ["p09:1"], "engine-killed": ["w0:1"], "leader": ["w1:1", "r0"],
    "one-estimate": ["w1:1"], "outage": ["w0:1"], "plain": ["w0:1"], "pressure": ["w0:1"],
    "recoveries": ["w0:1", "w1:1", "w2:1", "w3:1"],
    "regenerated": ["w1:1", "w0:1", "w1:2", "r0"],
    "restores": ["w0:1", "daemon:w1", "w0:2", "w2:1"],
    "resumable": ["r0"], "settings": ["w0:1"], "stall-spared": ["w0:1"],
    "stall": ["w0:1", "w1:1", "w0:1"],
    "breaker": ["w1:1", "w2:1"], "rare-failures": ["w1:1"],
    "hangs": ["w1:1", "w2:1", "w0:1", "w1:1"],
    "wrong-beside-errors": ["w0:1", "w1:1"],
    "out-of-reach": ["w0:1"],
    "unreadable-reports": ["w0:1"], "unhealthy-drained": ["w0:1", "w1:1", "w2:1"],
    "who-probes": ["w1:1"], "damaged-weights": ["w1:1", "w1:2"], "slow-canaries": ["w1:1"], "slow-steps": ["w1:1"],
    "only-worker": ["stream:w1", "w0:1"], "gateway-restarted": ["r0"],
    "damaged-files": ["w1:1", "w1:3"], "quarantined-as-it-left": ["w2:1", "w0:1"],
    "rollout-host-lost": ["w1:1"], "rollout-step-given-up": ["w1:1"], "log-begun": ["w0:1", "w1:1"],
}  # fmt: skip
"""What failed in each stored log; in the others nothing did."""


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_live_and_offline_give_the_same_records(path: Path) -> None:
    groups = from_file(path).groups
    offline = incidents_of(groups)
    assert [r.subject for r in offline] == KILLED.get(path.stem, [])
    assert msgspec.to_builtins(live(groups)) == msgspec.to_builtins(offline)


def test_every_engine_that_was_not_ended_on_purpose_has_one_incident() -> None:
    groups = asyncio.run(eventful_log(31))
    died, fleet = set(), Fleet()

    def seen(stream: str, position: int, event: object) -> None:
        if type(event) is v.EngineDied and event.reason not in ("stopped", "replaced"):
            died.add(f"{event.worker}:{event.incarnation}")

    for group in groups:
        apply_group(fleet, group, seen)
    named = [r.subject for r in incidents_of(groups)]
    assert died and all(named.count(name) == 1 for name in died)


def test_the_fold_of_the_fleet_is_the_same_beside_it() -> None:
    (path,) = (path for path in LOGS if path.stem == "engine-killed")
    groups = from_file(path).groups
    alone, beside, observer = Fleet(), Fleet(), IncidentObserver()
    for group in groups:
        apply_group(alone, group)
        apply_group(beside, group, observer.seen)
        observer.folded(group)
    assert observer.incidents and state_hash(alone) == state_hash(beside)


def test_a_record_ends_where_its_lists_are_full() -> None:
    log = FailureLog()
    names = [f"q{n}" for n in range(3 * MOST_STREAMS)]
    for name in names:
        log.stream(name)
    log.dies()
    for name in names:
        log.breaks(name, "engine_dead")
        log.tell("r.r0", decided(name, 2, "w1"))
        log.first_token(name, "w1", 2)
    for name in names:
        log.ended(name)
    log.restarts()
    incident = log.one()
    assert incident.streams == incident.continued == len(names)
    assert len(incident.touched) == MOST_STREAMS
    assert len(incident.events) <= MOST_EVENTS and incident.events_left_out > 100
    assert "engine_ready" in [e.type for e in incident.events], "the worker's own find room"


def entry(number: int, stream: str, event: object) -> Entry:
    return Entry(
        revision=number, index=0, stream=stream, epoch=1, position=number, at_ms=number, event=event
    )


def test_memory_is_bounded_however_long_the_log() -> None:
    """Engines die for ever, names of workers do not repeat, and no touched stream ends."""
    fold, number = IncidentFold(), 0

    def tell(stream: str, *events: object) -> None:
        nonlocal number
        for event in events:
            number += 1
            fold.take(entry(number, stream, event))

    def rounds(first: int, last: int) -> int:
        for n in range(first, last):
            tell(
                f"w.w{n}",
                v.WorkerRegistered(worker=f"w{n}", domain="d", agent_pid=1),
                v.EngineStarted(f"w{n}", 1, 1, 1),
            )
            tell(
                "r.r0",
                *(
                    v.TransportObserved(
                        request=f"q{n}.{i}", attempt=1, worker=f"w{n}", incarnation=1,
                        kind="engine_dead", delivered=1,
                    )
                    for i in range(3)
                ),
            )  # fmt: skip
            tell(f"w.w{n}", v.EngineDied(f"w{n}", 1, DeathReason.KILLED))
            tell("fleet", v.WorkerForgotten(f"w{n}", 1))
        return size(fold)

    full = rounds(0, 2 * MOST_INCIDENTS)
    assert len(fold.incidents) == MOST_INCIDENTS
    assert fold.incidents[-1].name == f"w{2 * MOST_INCIDENTS - 1}"
    assert rounds(2 * MOST_INCIDENTS, 6 * MOST_INCIDENTS) < 1.05 * full


def size(root: object) -> int:
    """Bytes of all that is reachable from `root` of our own."""
    found: dict[int, int] = {}
    left = [root]
    while left:
        at = left.pop()
        if id(at) in found or isinstance(at, type) or callable(at):
            continue
        found[id(at)] = sys.getsizeof(at)
        if isinstance(at, dict):
            left += [*at, *at.values()]
        elif isinstance(at, list | tuple | set):
            left += at
        elif isinstance(at, msgspec.Struct):
            left += [getattr(at, name) for name in at.__struct_fields__]
        elif hasattr(at, "__dict__"):
            left += vars(at).values()
    return sum(found.values())


def test_streams_that_never_end_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_streams, "MOST_LIVE", 10)
    log = FailureLog()
    for n in range(30):
        log.stream(f"q{n}")
        log.breaks(f"q{n}")
    fold = IncidentFold()
    for told in entries(log.groups):
        fold.take(told)
    (incident,) = fold.incidents
    assert incident.streams == 30
    assert len(fold._streams.waiting) <= 10


def test_after_a_snapshot_it_begins_anew() -> None:
    observer, log = IncidentObserver(), FailureLog()
    log.dies()
    for group in log.groups:
        apply_group(Fleet(), group, observer.seen)
        observer.folded(group)
    assert len(observer.incidents) == 1 and observer.since == 1
    observer.restart(log.revision)
    assert observer.incidents == [] and observer.since == log.revision + 1


def test_a_word_of_a_newer_build_is_no_obstacle() -> None:
    log = FailureLog()
    log.dies("melted")
    log.tell(
        "fleet",
        v.HealthDecided(
            worker="w1", incarnation=1, state="unhealthy", failure="haunted", evidence="", since=1
        ),
    )
    assert [r.name for r in log.incidents()] == ["w0", "w1"]
    assert [r.name for r in live(log.groups)] == ["w0", "w1"]
