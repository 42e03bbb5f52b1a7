"""Stories of a stored log have what `relume why` prints."""

from __future__ import annotations

from typing import Any

from relume.controlplane.replay import rendering
from relume.controlplane.replay.recorded_log import from_file
from relume.controlplane.replay.story import story_of
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.log import codec
from tests.replay.frozen import FOLDER


def test_stories_of_a_stored_log_have_every_line_of_the_command():
    """Candidates are data; every other line of `relume why` is in the story, in its order."""
    history = from_file(FOLDER / "engine-killed.rlog")
    entered = [
        event.request
        for group in history.groups
        for segment in group.segments
        for event in _arrivals(segment)
    ]
    tables = 0
    for request in entered[:12]:
        found = why(history.groups, request)
        assert found is not None
        story = story_of(found, since=1)
        for step, link in zip(story.steps, found.steps, strict=True):
            lines = [*rendering.words(link), *rendering.measured(found, link)]
            if step.candidates:
                tables += 1
                names = [f"{c.worker}:{c.incarnation} costs {c.cost}" for c in step.candidates]
                shown = [line for line in lines if any(name in line for name in names)]
                assert len(shown) == len(step.candidates)
                lines = [line for line in lines if line not in shown]
            stripped = [line.strip() for line in (step.text, *step.details)]
            assert sorted(line.strip() for line in lines) == sorted(stripped)
        assert story.headline == rendering.headline(found)
    assert tables >= 12


def _arrivals(segment: Any) -> list[Any]:
    return [e for e in codec.decode_all(segment.records) if type(e) is v.RequestArrived]
