"""Prompts count as the engine counted them, whichever of the two streams is folded first."""

from __future__ import annotations

from typing import Any

import msgspec

from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.policies.checkpoints import decisions
from relume.policies.state.overlay.view import View
from relume.policies.state.prompt_tokens import SEVERAL, prompt_tokens
from tests.policies.story import Story, arrived, decided, died, engine_step, queued


def story_of() -> Story:
    story = Story()
    story.worker()
    story.worker("w1")
    story.replica()
    return story


def counted(story: Story) -> int:
    return story.fleet.requests["q1"].engine_prompt_tokens


def resumed(worker: str = "w1", delivered: int = 40) -> v.RouteDecided:
    event = decided(attempt=2, worker=worker, delivered=delivered)
    return msgspec.structs.replace(event, mode="continue")


def test_engine_counts_the_prompt_its_gateway_estimated() -> None:
    for worker_first in (False, True):
        story = story_of()
        tellings: list[tuple[str, Any]] = [
            ("r.r0", (arrived(prompt=100), decided(prompt=100))),
            ("w.w0", (engine_step(queued(prompt=137)),)),
        ]
        for stream, events in reversed(tellings) if worker_first else tellings:
            story.tell(stream, *events)
        assert counted(story) == 137, worker_first
        story.tell("w.w0", died())
        assert prompt_tokens(story.fleet, "q1", 100) == 137, "it outlives the engine"


def test_delivered_tokens_are_no_part_of_the_prompt() -> None:
    for worker_first in (False, True):
        story = story_of()
        story.tell("r.r0", arrived(prompt=100), decided(prompt=100))
        story.tell("w.w0", died())
        again = engine_step(queued(attempt=2, prompt=177, dispatch=encode(resumed())))
        tellings = [("r.r0", resumed()), ("w.w1", again)]
        for stream, event in reversed(tellings) if worker_first else tellings:
            story.tell(stream, event)
        assert counted(story) == 137, worker_first


def test_a_later_attempt_whose_dispatch_cannot_be_read_counts_nothing() -> None:
    story = story_of()
    story.tell("r.r0", arrived(prompt=100), resumed())
    story.tell("w.w1", engine_step(queued(attempt=2, prompt=177, dispatch=b"\xc1")))
    assert prompt_tokens(story.fleet, "q1", 100) == 100


def test_several_choices_keep_the_estimate() -> None:
    children = engine_step(queued("q1", prompt=9), queued("q1#1", prompt=9))
    for worker_first in (False, True):
        story = story_of()
        tellings = [("r.r0", (arrived(prompt=18), decided(prompt=18))), ("w.w0", (children,))]
        for stream, events in reversed(tellings) if worker_first else tellings:
            story.tell(stream, *events)
        assert counted(story) == SEVERAL, worker_first
        assert prompt_tokens(story.fleet, "q1", 18) == 18


def test_what_is_lost_is_figured_with_the_engines_count() -> None:
    story = story_of()
    story.tell("r.r0", arrived(prompt=100), decided(prompt=100))
    view = View("r.r0", story.fleet)
    assert decisions.tokens_lost(view, "q1", 100, 7) == 107
    story.tell("w.w0", engine_step(queued(prompt=137)))
    assert decisions.tokens_lost(view, "q1", 100, 7) == 144
