"""How a cut request goes on."""

from __future__ import annotations

import pytest

from relume.events import vocabulary as v
from relume.policies.recovery.resume_mode import grounded, mode_of
from relume.policies.state.overlay.view import View
from tests.policies.story import MODEL, Story, started


@pytest.mark.parametrize("verdict", ["exact", "sampled", "replay", "restart"])
@pytest.mark.parametrize("streaming", [True, False])
def test_client_with_nothing_starts_over(verdict: str, streaming: bool) -> None:
    assert mode_of(verdict, streaming, 0) == "new"


@pytest.mark.parametrize(
    ("verdict", "mode"),
    [("exact", "continue"), ("sampled", "continue"), ("replay", "replay"), ("restart", "hopeless")],
)
def test_streaming_client_with_tokens(verdict: str, mode: str) -> None:
    assert mode_of(verdict, True, 17) == mode


@pytest.mark.parametrize(
    ("verdict", "mode"),
    [("exact", "continue"), ("sampled", "continue"), ("replay", "new"), ("restart", "new")],
)
def test_client_that_waits_for_the_whole_has_no_bytes_yet(verdict: str, mode: str) -> None:
    assert mode_of(verdict, False, 17) == mode


@pytest.mark.parametrize(
    ("verdict", "mode"),
    [
        ("exact", "replay"), ("best_effort", "replay"), ("replay", "replay"),
        ("sampled", "hopeless"), ("restart", "hopeless"),
    ],
)  # fmt: skip
def test_tokens_of_a_corrupt_worker_are_compared_and_never_continued(
    verdict: str, mode: str
) -> None:
    assert mode_of(verdict, True, 17, doubted=True) == mode
    assert mode_of(verdict, False, 17, doubted=True) == "new", "its client has nothing yet"
    assert mode_of(verdict, True, 0, doubted=True) == "new"


def test_unknown_verdict_is_a_broken_invariant() -> None:
    with pytest.raises(KeyError):
        mode_of("maybe", True, 1)


def fleet_of(**exact: str) -> View:
    """Workers with what their engines' self-tests found exact."""
    story = Story()
    for name, features in exact.items():
        ready = v.EngineReady(
            worker=name,
            incarnation=1,
            host="h",
            port=1,
            model=MODEL,
            max_model_len=100,
            block_size=16,
            kv_blocks=10,
            exact=tuple(features.split()),
        )
        registered = v.WorkerRegistered(worker=name, domain="host", agent_pid=7)
        story.tell(f"w.{name}", registered, started(name, 1), ready)
    return View("r.r0", story.fleet)


@pytest.mark.parametrize(
    ("exact", "verdict"),
    [
        ({"w0": "greedy seeded"}, "exact"),
        ({"w0": "greedy seeded", "w1": "greedy seeded more"}, "exact"),
        ({"w0": "greedy seeded", "w1": "greedy"}, "replay"),
        ({"w0": "greedy", "w1": ""}, "replay"),
        ({"w0": "greedy seeded", "w1": ""}, "best_effort"),
        ({}, "exact"),
    ],
)
def test_weakest_engine_decides_what_the_fleet_keeps(exact: dict[str, str], verdict: str) -> None:
    found, reason = grounded(fleet_of(**exact), MODEL, "exact", ("seeded",), "replay")
    assert found == verdict
    assert ("self-test" in reason) == (found != "exact")


def test_sampling_falls_back_only_for_what_it_needs() -> None:
    view = fleet_of(w0="greedy penalties", w1="greedy")
    assert grounded(view, MODEL, "sampled")[0] == "sampled"
    assert grounded(view, MODEL, "sampled", ("penalties",), "restart")[0] == "restart"
    assert grounded(fleet_of(w0=""), MODEL, "sampled", ("penalties",), "restart")[0] == "sampled"
