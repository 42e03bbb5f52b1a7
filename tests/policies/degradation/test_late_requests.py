"""Where late requests are refused, level 3 lets their tier's first token take twice as long."""

from __future__ import annotations

import pytest

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Tier
from relume.policies.degradation.degradation_settings import DegradationConfig, settings_of
from relume.policies.routing.choose_worker import Choice, decide
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.overlay.view import View
from tests.policies.story import MODEL, Story, engine_step, queued, replica_started

QUERY = RouteQuery(request="q", model=MODEL, prompt_tokens=100, tier=Tier.STANDARD)


@pytest.fixture
def story() -> Story:
    """Two workers with prompts to compute."""
    story = Story()
    settings = (*settings_of(DegradationConfig(mode="on")), ("version.degradation", "1"))
    story.tell("r.r0", replica_started("r0", settings=settings))
    story.leader("r0")
    for number, prompt in enumerate((2000, 3000)):
        story.worker(f"w{number}")
        story.tell(f"w.w{number}", engine_step(queued(f"a{number}", prompt=prompt)))
    return story


def choice(story: Story) -> Choice:
    view = View("r.r0", story.fleet)
    view.landed()
    return decide(view, QUERY, "predicted_ttft")


@pytest.mark.parametrize(("level", "part", "worker"), [
    (2, 0.7, ""), (3, 0.7, "w0"), (4, 0.7, "w0"), (3, 0.4, ""), (2, 1.1, "w0"),
])  # fmt: skip
def test_routing_refuses_as_late_what_takes_longer_than_the_goal_or_twice_the_goal(
    story: Story, level: int, part: float, worker: str
) -> None:
    """`part`: the goal, in terms of the time to first token that is predicted."""
    ttft_ms = choice(story).ttft_us / 1000
    assert ttft_ms > 10
    story.tell(
        "fleet",
        v.ConfigChanged("routing.shed", "on"),
        v.ConfigChanged("routing.slo_standard_ms", str(round(part * ttft_ms))),
        v.DegradationDecided(model=MODEL, level=level, was=0, since=0, due_ticks=3),
    )
    found = choice(story)
    assert (found.worker, bool(found.refused)) == (worker, not worker)
