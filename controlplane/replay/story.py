"""A request's chain of causes (`why`) for the page: each step with its candidates as a table."""

from __future__ import annotations

from msgspec import Struct

from relume.controlplane.replay import decision_words, rendering
from relume.controlplane.replay.why import Step, Why
from relume.events import vocabulary as v
from relume.events.log.entries import KINDS


class StoryCandidate(Struct, frozen=True, kw_only=True):
    """A worker that a routing decision compared. `excluded`: why it was not eligible. `cost` in
    `unit`, empty if the policy ranks only. The predictions are -1 if the policy makes none."""

    worker: str
    incarnation: int
    chosen: bool
    excluded: str
    cost: int
    unit: str
    requests: int
    prefill_tokens: int
    hit_tokens: int
    kv_free: int
    ttft_us: int
    tpot_us: int


class StoryStep(Struct, frozen=True, kw_only=True):
    """One link of the chain, as `relume why` prints it: `text` is its first line, `details` are the
    others without those of `candidates`. `id` is its place in the log."""

    id: str
    stream: str
    position: int
    at_ms: int
    type: str
    text: str
    details: list[str]
    candidates: list[StoryCandidate]


class Story(Struct, frozen=True, kw_only=True):
    """Why a request went where it went. `since`: the first revision that was read for it; what
    happened to workers before is not part of it. `complete`: everything from there on was read."""

    request: str
    headline: str
    outcome: str
    since: int
    complete: bool
    steps: list[StoryStep]


def story_of(found: Why, since: int, complete: bool = True) -> Story:
    """The chain as a story."""
    return Story(
        request=found.request,
        headline=rendering.headline(found),
        outcome=found.ended.outcome if found.ended else "",
        since=since,
        complete=complete,
        steps=[_step(found, step) for step in found.steps],
    )


def _step(found: Why, step: Step) -> StoryStep:
    entry, event = step.entry, step.event
    candidates: list[StoryCandidate] = []
    if type(event) is v.RouteDecided:
        first, *details = decision_words.route_basis(event)
        details += [decision_words.others_line(why, count) for why, count in event.others]
        details += decision_words.route_result(event)
        if step.journalled:
            details.append(rendering.JOURNALLED)
        candidates = [_candidate(event, candidate) for candidate in event.candidates]
    else:
        first, *details = rendering.words(step)
    return StoryStep(
        id=f"{entry.revision}.{entry.index}",
        stream=entry.stream,
        position=entry.position,
        at_ms=entry.at_ms,
        type=KINDS[type(event)],
        text=first,
        details=[*details, *rendering.measured(found, step)],
        candidates=candidates,
    )


def _candidate(event: v.RouteDecided, candidate: v.Candidate) -> StoryCandidate:
    return StoryCandidate(
        worker=candidate.worker,
        incarnation=candidate.incarnation,
        chosen=decision_words.is_chosen(event, candidate),
        excluded=candidate.excluded,
        cost=candidate.cost,
        unit=decision_words.COST_UNITS.get(event.policy, "").strip(),
        requests=candidate.requests,
        prefill_tokens=candidate.prefill_tokens,
        hit_tokens=candidate.hit_tokens,
        kv_free=candidate.kv_free,
        ttft_us=candidate.ttft_us,
        tpot_us=candidate.tpot_us,
    )
