"""I19: an attempt that outlives its client is named."""

from __future__ import annotations

from typing import Any

from relume.chaos.validators.ground_truth import ClientCall, GroundTruth
from relume.chaos.validators.promises.workers.i19_engine_stops import check
from relume.chaos.validators.records import ClientRecord
from relume.chaos.validators.strikes import Strike

NS = 1_000_000_000
CLIENTS = [ClientRecord(request="q1", outcome="cancelled")]
CUT = Strike(what="cut", targets=frozenset(("w0",)), since_ms=900, until_ms=5000)


def found(ended_s: float | None, kind: str = "streaming", **more: Any) -> str:
    """What is said of a client that leaves after 1 s, if the engine ends its attempt then."""
    truth = GroundTruth(
        calls={"q1": ClientCall(kind=kind, ended_ns=NS)},
        attempts={"q1": [("a/1", "w0", 0)]},
        ended={} if ended_s is None else {"a/1": round(ended_s * NS)},
        serving={"w0": [(0, True), (60 * NS, False)]},
    )
    return "; ".join(map(str, check([], more.pop("clients", CLIENTS), truth, **more)))


def test_an_attempt_that_outlives_its_client_is_named() -> None:
    assert "w0 computed a/1" in found(4)
    assert "w0 computed a/1" in found(None)


def test_one_that_ends_in_time_is_not() -> None:
    assert found(1.5) == ""


def test_neither_is_one_of_a_client_that_may_return_or_got_all() -> None:
    assert found(4, kind="resumable") == ""
    assert found(4, clients=[ClientRecord(request="q1")]) == ""


def test_a_fault_may_delay_the_news() -> None:
    assert found(4, strikes=[CUT]) == ""
