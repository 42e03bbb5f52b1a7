"""A quarantined worker is not released by canaries while its model files differ from those of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AdminCommand, HealthState, WeightsOutcome
from relume.policies.leader.duties import step
from relume.policies.state.fleet import dump, load, state_hash
from relume.policies.weights import comparison
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.health.test_canaries import RIGHT, all_report, reports, restarted
from tests.policies.story import died, ready, started

BOUND = 1800
"""Ticks, by default."""
RIGHT_FILES, DAMAGED = "right", "damaged"
SAME, DIFFERENT, UNKNOWN = WeightsOutcome


def fleet_of(workers: int = 3, level: int = 2, **more: Any) -> LedFleet:
    fleet = LedFleet(workers=workers, **more)
    if level > 1:
        fleet.tell("fleet", v.FeatureLevelRaised(level=level, was=1, replicas=("r0",)))
    return fleet


def reads(fleet: LedFleet, worker: str, weights: str = "w") -> None:
    """Its agent begins to read the files."""
    fleet.tell(
        f"w.{worker}",
        v.WeightsReadStarted(
            worker=worker,
            incarnation=fleet.fleet.workers[worker].incarnation,
            weights=weights,
            size_bytes=9,
        ),
    )


def digests(fleet: LedFleet, worker: str, digest: str = RIGHT_FILES, **more: Any) -> None:
    """And has their digest."""
    event = v.WeightsDigested(
        worker=worker,
        incarnation=fleet.fleet.workers[worker].incarnation,
        weights=more.pop("weights", "w"),
        digest=digest,
        files=(("one", RIGHT_FILES), ("two", digest)),
        **more,
    )
    fleet.tell(f"w.{worker}", event)


def quarantined(fleet: LedFleet, restart: Callable[[LedFleet, str, int], None] = restarted) -> None:
    """w1 is quarantined, and its next engine is ready."""
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert fleet.state("w1") == HealthState.QUARANTINED
    restart(fleet, "w1", 2)
    fleet.ticks(1)


def right(fleet: LedFleet, worker: str = "w1") -> None:
    """As many right answers as end a quarantine."""
    for _ in range(2):
        all_report(fleet, worker)


def ends_as(fleet: LedFleet, *outcomes: WeightsOutcome) -> None:
    """The comparisons so far, and another fold of the log."""
    assert [e.outcome for e in fleet.compared] == list(outcomes)
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)
    assert state_hash(load(dump(fleet.fleet))) == state_hash(fleet.fleet)


def released(fleet: LedFleet, worker: str = "w1") -> bool:
    return fleet.state(worker) == HealthState.PROBING


def test_files_that_differ_from_those_of_most_hold_a_worker() -> None:
    fleet = fleet_of()
    quarantined(fleet)
    for worker in ("w0", "w2"):
        digests(fleet, worker, reread=False)
    digests(fleet, "w1", DAMAGED)
    assert fleet.compared == [], "canaries first"
    right(fleet)
    (compared,) = fleet.compared
    assert compared == v.WeightsCompared(
        worker="w1",
        incarnation=2,
        outcome=DIFFERENT,
        digest=DAMAGED,
        expected=RIGHT_FILES,
        witnesses=("w0", "w2"),
        files=("two",),
    )
    for _ in range(5):
        right(fleet)
        fleet.ticks(BOUND // 5)
    assert fleet.excluded("w1") == "quarantined"
    ends_as(fleet, DIFFERENT)
    text = comparison.state_in_words(fleet.fleet, fleet.fleet.workers["w1"])
    assert "its model files differ from those of w0, w2 (two)" in text
    assert "relume restart w1" in text and "relume trust w1" in text


def test_the_names_of_equal_files_are_stored_once() -> None:
    """A model has many, and a fleet many workers. They are found wherever they are."""
    fleet = fleet_of(workers=5)
    quarantined(fleet)
    for worker in ("w0", "w2", "w3"):
        digests(fleet, worker)
    records = [fleet.fleet.workers[worker].weights for worker in ("w0", "w2", "w3")]
    assert [bool(record.files) for record in records] == [True, False, False]
    restarted(fleet, "w0", 2)
    reads(fleet, "w0")
    assert fleet.fleet.workers["w2"].weights.files, "the next one has them"
    digests(fleet, "w0", DAMAGED)
    digests(fleet, "w4")
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    (compared,) = fleet.compared
    assert compared.witnesses == ("w2", "w3", "w4") and compared.files == ("two",)
    ends_as(fleet, DIFFERENT)


def test_the_same_files_hold_nobody_and_the_release_says_so() -> None:
    fleet = fleet_of()
    quarantined(fleet)
    for worker in ("w0", "w1", "w2"):
        digests(fleet, worker)
    right(fleet)
    assert released(fleet)
    text = "4 right answers to canaries in a row; its model files are those of w0, w2"
    assert fleet.health("w1").evidence == text
    all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.HEALTHY
    assert fleet.health("w1").weights is UNSET is fleet.health("w1").weights_owed
    ends_as(fleet, SAME)


def test_replaced_files_end_it_with_the_next_engine() -> None:
    fleet = fleet_of()
    quarantined(fleet)
    for worker in ("w0", "w2"):
        digests(fleet, worker)
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    restarted(fleet, "w1", 3)
    reads(fleet, "w1")
    right(fleet)
    assert not released(fleet), "they are being read"
    digests(fleet, "w1")
    assert released(fleet)
    ends_as(fleet, DIFFERENT, SAME)


def test_an_operator_ends_it() -> None:
    fleet = fleet_of()
    quarantined(fleet)
    for worker in ("w0", "w2"):
        digests(fleet, worker)
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    command = v.AdminCommanded(
        command_id="c", principal="ann", command=AdminCommand.TRUST, target="w1"
    )
    fleet.tell("r.r0", command)
    assert released(fleet) and fleet.health("w1").evidence.startswith("ann")
    fleet.ticks(2)
    ends_as(fleet, DIFFERENT)


@pytest.mark.parametrize("which", ["its own", "again", "a peer's"])
def test_digests_are_waited_for_up_to_the_bound(which: str) -> None:
    fleet = fleet_of()
    quarantined(fleet)
    reads(fleet, "w0")
    digests(fleet, "w2", DAMAGED)
    if which == "its own":
        reads(fleet, "w1")
    else:
        digests(fleet, "w1", reread=which != "again")
    right(fleet)
    name = "the model files of w0" if which == "a peer's" else "its model files"
    text = comparison.state_in_words(fleet.fleet, fleet.fleet.workers["w1"])
    assert text == f"{name} are being read"
    fleet.ticks(BOUND - 1)
    assert not released(fleet) and fleet.compared == []
    fleet.ticks(1)
    if which != "a peer's":
        assert released(fleet)
        again = " again" if which == "again" else ""
        reason = f"its agent did not read them{again} within {BOUND} ticks"
        assert fleet.compared[0].reason == reason
        assert "not compared" in fleet.health("w1").evidence
        ends_as(fleet, UNKNOWN)
    else:
        assert fleet.compared[0].witnesses == ("w2",), "of those that are read"
        assert not released(fleet)
        ends_as(fleet, DIFFERENT)


def test_a_majority_of_all_is_enough_whatever_the_others_have() -> None:
    fleet = fleet_of(workers=4)
    quarantined(fleet)
    reads(fleet, "w3")
    for worker in ("w0", "w1", "w2"):
        digests(fleet, worker)
    right(fleet)
    assert released(fleet)
    ends_as(fleet, SAME)


def test_the_bound_is_a_setting() -> None:
    fleet = fleet_of()
    fleet.tell("fleet", v.ConfigChanged("canary.digest_ticks", "0"))
    quarantined(fleet)
    reads(fleet, "w1")
    right(fleet)
    assert released(fleet)
    ends_as(fleet, UNKNOWN)


@pytest.mark.parametrize(
    ("own", "peers", "reason"),
    [
        ({"digest": "", "error": "gone"}, {}, "its agent cannot read them: gone"),
        (None, {}, "its agent reports no digest of them"),
        ({}, {"w0": None, "w2": None}, "no majority of healthy workers has the same"),
        ({}, {"w0": {"digest": "a"}, "w2": {"digest": "b"}}, "no majority"),
        ({}, {"w0": {"weights": "v"}, "w2": {"digest": "", "error": "gone"}}, "no majority"),
    ],
)  # fmt: skip
def test_where_nothing_can_be_compared_canaries_decide_and_the_log_says_why(
    own: dict[str, Any] | None, peers: dict[str, dict[str, Any] | None], reason: str
) -> None:
    fleet = fleet_of()
    quarantined(fleet)
    for name, more in {"w0": {}, "w2": {}, **peers, "w1": own}.items():
        if more is not None:
            digests(fleet, name, **more)  # type: ignore[arg-type]
    right(fleet)
    assert released(fleet)
    assert reason in fleet.compared[0].reason and reason in fleet.health("w1").evidence
    ends_as(fleet, UNKNOWN)


def test_only_healthy_workers_of_the_same_model_count() -> None:
    """w0 is lost, the engine of w2 is dead, w3 has another model: none of them says what is right."""
    fleet = fleet_of(workers=4)
    quarantined(fleet)
    fleet.tell("w.w3", died("w3"), started("w3", 2), ready("w3", 2, model="other"))
    for worker in ("w0", "w2", "w3"):
        digests(fleet, worker)
    epoch = fleet.fleet.workers["w0"].epoch
    fleet.tell("fleet", v.WorkerLost("w0", epoch, "lease lapsed"))
    fleet.tell("w.w2", died("w2"))
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    assert released(fleet)
    ends_as(fleet, UNKNOWN)


def test_nor_does_another_worker_in_quarantine() -> None:
    fleet = fleet_of(workers=5)
    quarantined(fleet)
    for canary in RIGHT:
        reports(fleet, "w2", canary, tokens=(1, 2, 3))
    assert fleet.state("w2") == HealthState.QUARANTINED
    for worker, digest in {"w0": RIGHT_FILES, "w2": RIGHT_FILES, "w3": "other"}.items():
        digests(fleet, worker, digest)
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    ends_as(fleet, UNKNOWN)


def test_what_is_known_to_differ_stays_so_when_its_peers_are_gone() -> None:
    """And over a restart, until the files are known to be right."""
    fleet = fleet_of()
    quarantined(fleet)
    for worker in ("w0", "w2"):
        digests(fleet, worker)
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    for worker in ("w0", "w2"):
        fleet.tell(f"w.{worker}", died(worker))
    fleet.ticks(2)
    assert not released(fleet) and len(fleet.compared) == 1
    restarted(fleet, "w1", 3)
    digests(fleet, "w1", "", error="gone")
    right(fleet)
    assert not released(fleet)
    assert fleet.compared[1].expected == RIGHT_FILES and fleet.compared[1].incarnation == 3
    restarted(fleet, "w0", 2)
    digests(fleet, "w0")
    restarted(fleet, "w1", 4)
    digests(fleet, "w1")
    right(fleet)
    assert released(fleet)
    ends_as(fleet, DIFFERENT, DIFFERENT, SAME)


def test_a_majority_that_has_changed_releases_it() -> None:
    """All files were replaced in place, its own first."""
    fleet = fleet_of()
    quarantined(fleet)
    for worker in ("w0", "w2"):
        digests(fleet, worker)
    digests(fleet, "w1", "new")
    right(fleet)
    for worker in ("w0", "w2"):
        restarted(fleet, worker, 2)
        digests(fleet, worker, "new")
    assert released(fleet)
    ends_as(fleet, DIFFERENT, SAME)


def test_a_digest_of_the_engine_before_does_not_count() -> None:
    late = v.WeightsDigested(worker="w1", incarnation=1, weights="w", digest=RIGHT_FILES)
    fleet = fleet_of()
    for worker in ("w0", "w1", "w2"):
        digests(fleet, worker)
    quarantined(fleet)
    fleet.tell("w.w1", late)
    right(fleet)
    assert fleet.compared[0].reason == "its agent reports no digest of them"
    ends_as(fleet, UNKNOWN)


def test_a_new_leader_writes_what_its_predecessor_did_not() -> None:
    fleet = fleet_of()
    quarantined(fleet)
    for worker in ("w0", "w2"):
        digests(fleet, worker)
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    (compared,) = fleet.compared
    owed = step(fleet.fleet, v.LeaderElected("r0", "b1"))
    assert not [e for e in owed if type(e) is v.WeightsCompared], "it is in the log"
    fleet.fleet.workers["w1"].health.weights = UNSET
    fleet.leader("r0")
    assert fleet.compared == [compared, compared]


@pytest.mark.parametrize(("version", "level"), [(12, 2), (13, 1)])
def test_no_file_is_compared_before_every_replica_does_so_and_reads_it(
    version: int, level: int
) -> None:
    fleet = fleet_of(level=level, version=version)
    quarantined(fleet)
    for worker in ("w0", "w2"):
        digests(fleet, worker)
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    assert released(fleet) and fleet.health("w1").evidence.endswith("in a row")
    ends_as(fleet)
