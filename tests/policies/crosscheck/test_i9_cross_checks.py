"""I9: cross-checks go to idle engines that count, and only a majority quarantines by them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.health import i9_breakers
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState
from relume.policies.crosscheck import choice, disputes
from tests.policies.crosscheck.driven_fleet import DrivenFleet
from tests.policies.story import decided, engine_step, finished, observed


def violations(fleet: DrivenFleet, unkept: Collection[str] = ()) -> str:
    return "\n".join(map(str, i9_breakers.check(fleet.groups, [], unkept)))


def quarantined(fleet: DrivenFleet, worker: str, evidence: str) -> None:
    fleet.tell(
        "fleet",
        v.HealthDecided(
            worker=worker, incarnation=1, state=HealthState.QUARANTINED,
            failure=FailureClass.CORRUPTION, evidence=evidence, since=1,
        ),
    )  # fmt: skip


@pytest.fixture
def fleet() -> DrivenFleet:
    return DrivenFleet(4)


def test_a_worker_that_is_outvoted_twice_breaks_nothing(fleet: DrivenFleet) -> None:
    fleet.drive("a", "w0")
    fleet.drive("b", "w0")
    assert fleet.state("w0") == HealthState.QUARANTINED
    fleet.drive("c", "w2")
    assert violations(fleet) == ""


def test_a_check_of_an_engine_with_requests_is_found(fleet: DrivenFleet) -> None:
    fleet.serve("a", "w1")
    fleet.begin("busy", "w2")
    fleet.ask("a", "w1", by="w2")
    assert "a: w2 answers it again, although its engine has 1 requests" in violations(fleet)


def test_a_request_that_the_replica_has_just_sent_counts(fleet: DrivenFleet) -> None:
    fleet.serve("a", "w1")
    before = fleet.fleet.revision
    fleet.tell("r.r0", decided("new", worker="w2"))
    fleet.ask("a", "w1", by="w2", late=fleet.fleet.revision - before)
    assert "although r0 has just sent new there" in violations(fleet)
    again = DrivenFleet(4)
    again.serve("a", "w1")
    again.tell("r.r0", decided("new", worker="w2"), replace(observed("new"), worker="w2"))
    again.ask("a", "w1", by="w2", late=1)
    assert violations(again) == ""


def test_a_request_that_its_engine_had_finished_counts_no_more(fleet: DrivenFleet) -> None:
    """The replica's dispatch came into the log after the end that its check knew."""
    fleet.serve("a", "w1")
    changes = (v.RequestQueued("new", 1, 9, b""), v.EngineFinished("new", 1, "stop", 3))
    fleet.tell("w.w2", engine_step(*changes))
    before = fleet.fleet.revision
    fleet.tell("r.r0", decided("new", worker="w2"))
    fleet.ask("a", "w1", by="w2", late=fleet.fleet.revision - before)
    assert violations(fleet) == ""


def test_checks_of_engines_that_do_not_count_are_found(fleet: DrivenFleet) -> None:
    fleet.serve("a", "w1")
    quarantined(fleet, "w2", "wrong answers to canaries")
    fleet.ask("a", "w1", by="w2")
    assert "although it is quarantined" in violations(fleet)
    fleet.tell("w.w3", v.EngineDied("w3", 1, "killed", ""))
    fleet.ask("a", "w1", by="w3")
    assert "w3 answers it again, although its engine is not ready" in violations(fleet)


def test_the_engine_that_served_it_may_answer_in_quarantine(fleet: DrivenFleet) -> None:
    fleet.serve("a", "w0")
    fleet.check("a", "w0", "w1")
    quarantined(fleet, "w0", "wrong answers to canaries")
    fleet.check("a", "w0", "w0")
    assert violations(fleet) == ""


def test_requests_that_may_not_be_checked_are_found(fleet: DrivenFleet) -> None:
    fleet.serve("sampled", "w1", verdict="sampled")
    fleet.ask("sampled", "w1", by="w2")
    assert "although its guarantee is sampled" in violations(fleet)
    fleet.serve("moved", "w1", attempts=2)
    fleet.ask("moved", "w1", by="w2")
    assert "although it had 2 attempts" in violations(fleet)
    fleet.begin("open", "w1")
    fleet.ask("open", "w1", by="w2")
    assert "although it is not complete" in violations(fleet)
    fleet.tell("w.w1", engine_step(finished("open")))


def test_a_prompt_that_may_not_be_kept_is_found(fleet: DrivenFleet) -> None:
    fleet.serve("a", "w1")
    fleet.ask("a", "w1", by="w2")
    named = next(e for e in fleet.seen if type(e) is v.RequestArrived).client_id
    assert violations(fleet) == ""
    assert "although its prompt may not be kept" in violations(fleet, {named})


def test_a_quarantine_by_one_majority_or_none_is_found(fleet: DrivenFleet) -> None:
    evidence = "its answers to 2 requests (a, b) differ from what most engines answer"
    fleet.drive("a", "w0")
    quarantined(fleet, "w0", evidence)
    text = "contradicted 1 of its answers, of at least 2"
    assert f"w0: quarantined by a majority, which {text}" in violations(fleet)


def _two_are_enough(fleet: Any, known: Any, request: str, dispute: Any) -> list[Any]:
    """Of two engines that differ, the one that served the client is outvoted."""
    worker = fleet.workers[dispute.worker]
    worker.checks.outvoted[request] = fleet.tick
    del known[request]
    return [worker]


def _for_ever(fleet: Any) -> None:
    pass


SEEDED: dict[str, tuple[Any, str, Any, str]] = {
    "engines with requests": (choice, "_is_idle", lambda view, worker: True, "requests"),
    "quarantined engines": (choice, "_is_trusted", lambda worker: True, "it is quarantined"),
    "two engines decide": (disputes, "_decide", _two_are_enough, "contradicted 0 of its"),
    "once is enough": (
        disputes, "is_outvoted", lambda record, config: record is not None and bool(record.outvoted),
        "contradicted 1 of its answers",
    ),
    "disputes never end": (disputes, "expire", _for_ever, "is in doubt for"),
}  # fmt: skip


@pytest.mark.parametrize("bug", SEEDED)
def test_a_seeded_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, planted, said = SEEDED[bug]

    def story() -> str:
        fleet = DrivenFleet(4)
        fleet.drive("a", "w0")
        fleet.drive("b", "w0")
        for name in ("w1", "w2"):
            fleet.begin(f"long-{name}", name)
        fleet.drive("c", "w3")
        pair = DrivenFleet(2)
        pair.drive("d", "w0")
        pair.drive("e", "w1")
        pair.ticks(disputes.DOUBT_TICKS + 20)
        return f"{violations(fleet)}\n{violations(pair)}"

    assert story().strip() == ""
    with monkeypatch.context() as patch:
        patch.setattr(module, name, planted)
        if bug == "quarantined engines":
            patch.setattr(choice, "excluded_at", lambda view, worker: "")
        assert said in story()
