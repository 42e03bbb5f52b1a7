"""A judgement of one stream's silence is taken again with all its fields, and told."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.policies.decision_versions import DECISION_VERSIONS, RETAKEN
from tests.policies.story import (
    Story,
    arrived,
    decided,
    ended,
    engine_step,
    finished,
    observed,
    queued,
    replica_started,
)


def judged(over: bool = False, version: int = 1, **other: Any) -> Story:
    """Stream q1 got stuck after step 1; the engine made 40 steps, or is done with it. A replica with
    that version of the decision says so."""
    story = Story()
    story.worker()
    settings = (("overdue.floor_us", "900000"), ("version.overdue", str(version)))
    story.tell("r.r0", replica_started(settings=settings), arrived(), decided())
    story.tell("w.w0", engine_step(queued(), v.FirstToken("q1", 1), us=100_000))
    for step in range(2, 42):
        story.tell("w.w0", replace(engine_step(us=100_000), step=step))
    if over:
        story.tell("w.w0", engine_step(finished(), us=0))
    found = v.StreamJudged(
        decision="r0.b1.stream1",
        basis=v.Basis(story.revision, 3),
        request="q1",
        attempt=1,
        worker="w0",
        incarnation=1,
        silent_us=1_000_000,
        from_step=1,
        probe="answered",
        steps=40,
        decodes=not over,
        finished=over,
        bound_us=900_000,
        stuck=True,
    )
    story.tell("r.r0", replace(found, **other), observed(kind="stuck"), ended())
    return story


@pytest.mark.parametrize("over", [False, True])
def test_a_judgement_is_repeated(over: bool) -> None:
    verdict = verify(judged(over).groups)
    assert not [d for d in verdict.divergences if "stuck" in str(d)], verdict.divergences
    assert not verdict.untaken


@pytest.mark.parametrize(
    "other",
    [
        {"stuck": False},
        {"steps": 41},
        {"from_step": 2},
        {"bound_us": 1_500_000},
        {"decodes": False},
        {"finished": True},
        {"probe": "silent"},
        {"silent_us": 899_999},
        {"attempt": 2},
        {"incarnation": 2},
    ],
)
def test_every_field_of_it_is_compared(other: dict[str, Any]) -> None:
    found = verify(judged(**other).groups).divergences
    assert [d for d in found if "stuck" in str(d)], found


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_versions_from_4_go_by_what_the_engine_says_of_itself(version: int) -> None:
    idle = judged(version=version, from_step=40, steps=1, held=0)
    found = [str(d) for d in verify(idle.groups).divergences if "stuck" in str(d)]
    assert (found == []) == (version >= 4), found
    busy = judged(version=version, from_step=40, steps=1, held=1)
    assert [d for d in verify(busy.groups).divergences if "stuck" in str(d)]


@pytest.mark.parametrize("version", [4, 5])
def test_only_version_5_leaves_an_engine_that_answers_no_probe(version: int) -> None:
    away = judged(version=version, probe="silent", silent_us=4_100_000, bound_us=4_000_000)
    found = [str(d) for d in verify(away.groups).divergences if "stuck" in str(d)]
    assert (found == []) == (version == 5), found


def test_why_tells_that_the_engine_was_out_of_reach() -> None:
    away = judged(version=5, probe="silent", silent_us=4_100_000, bound_us=4_000_000)
    course = why(away.groups, "q1")
    assert course is not None
    text = "\n".join(lines_of(course))
    assert "no token came from w0:1 for 4100 ms (bound 4000 ms), in which it made 40 steps" in text
    assert "by its reports the engine decodes attempt 1; its probe silent" in text


def test_why_tells_what_the_engine_said() -> None:
    course = why(judged(version=4, held=0).groups, "q1")
    assert course is not None
    text = "\n".join(lines_of(course))
    assert "its probe answered: it has no requests, so it is done with attempt 1" in text
    assert "by its reports" not in text


def test_another_version_of_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECISION_VERSIONS, "overdue", 5)
    monkeypatch.setitem(RETAKEN, "overdue", {})
    (untaken,) = verify(judged().groups).untaken
    assert untaken.startswith("overdue version ")


@pytest.mark.parametrize(("over", "says"), [(False, "decodes"), (True, "has finished")])
def test_why_tells_it(over: bool, says: str) -> None:
    course = why(judged(over).groups, "q1")
    assert course is not None
    text = "\n".join(lines_of(course))
    assert "no token came from w0:1 for 1000 ms (bound 900 ms), in which it made 40 steps" in text
    assert f"by its reports the engine {says} attempt 1; its probe answered" in text
    assert "the gateway saw stuck on w0:1" in text
