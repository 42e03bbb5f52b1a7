"""I22: an early 503 and a wrong 410 are named; late and explained ones are not."""

from __future__ import annotations

from msgspec.structs import replace

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.promises.requests.i22_needless_failure import check
from relume.chaos.validators.records import ClientRecord
from relume.events import vocabulary as v
from tests.policies.story import Story, arrived, ended
from tests.validators.builders import about

NS = 1_000_000_000
CLIENTS = [ClientRecord(request="q1")]


def story(wait_s: float, status: int = 503) -> Story:
    """q1 fails after that time."""
    told = Story()
    told.worker()
    told.replica()
    told.tell("r.r0", arrived())
    told.at_ms = round(1000 * wait_s)
    end = v.RequestEnded(
        **{f: getattr(ended(), f) for f in v.RequestEnded.__struct_fields__}
    )  # fmt: skip
    detail = "no worker can take the request now; try again"
    told.tell("r.r0", replace(end, outcome="failed", status=status, detail=detail))
    return told


def truth(until_ns: int = 60 * NS, **more: object) -> GroundTruth:
    """The engine of w0 serves until then."""
    serving = {"w0": [(0, True), (until_ns, False)]}
    return GroundTruth(serving=serving, **more)  # type: ignore[arg-type]


def test_an_early_503_is_named() -> None:
    assert "waited 100 ms" in about(check(story(0.1).groups, CLIENTS, truth()))


def test_one_after_the_whole_wait_is_not() -> None:
    assert check(story(30).groups, CLIENTS, truth()) == []


def test_one_without_a_worker_is_not() -> None:
    assert check(story(0.1).groups, CLIENTS, truth(until_ns=NS)) == []
    assert check(story(0.1).groups, CLIENTS, truth(), away=["w0"]) == []
    assert check(story(0.1).groups, CLIENTS) == []


def test_a_410_while_the_log_has_the_request_is_named() -> None:
    found = check(story(9, 499).groups, CLIENTS, truth(refused={"q1": (410, 5 * NS)}))
    assert "410 after 5000 ms" in about(found)


def test_one_after_its_end_is_not() -> None:
    assert check(story(9, 499).groups, CLIENTS, truth(refused={"q1": (410, 10 * NS)})) == []
