"""What errors of predicted times to first token are made of, from one recorded run.

Of each request the steps that its engine took from the dispatch to the first token are known
from the log. What they took, what the step times known at the dispatch say that exactly they
would take, and what there was besides (the way there and back, waiting between steps) tell how
much is owed to the length of steps, to which steps were foreseen, and to the way. The best that
a predictor could do which knows all these steps beforehand, but of the way only what it takes
usually, is a bound for all predictors.
"""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_right
from typing import Any

from msgspec import Struct

from relume.chaos.bench.figures import figure
from relume.chaos.bench.load_accuracy import Views, own_events
from relume.chaos.bench.load_run import Run
from relume.events import vocabulary as v
from relume.events.codec import decode_all
from relume.policies.steptime import Costs


class Parts(Struct, frozen=True):
    """Microseconds: the first token's time as it was and as predicted; steps from the dispatch on
    as they were, and as step times known then have them."""

    actual: int
    predicted: int
    steps: int
    modelled: int

    @property
    def besides(self) -> int:
        """What was no step."""
        return self.actual - self.steps


class _Steps(Struct):
    """Of one worker: when each step was told, and in which one a request's first token came."""

    told_us: list[int]
    steps: list[v.EngineStep]
    first: dict[str, int]


def parts_of(run: Run) -> list[Parts]:
    """Requests of the load that were sent once and answered, each with its steps."""
    steps = _steps_of(run)
    own = list(own_events(run))
    ended = {
        e.request: e.ttft_us
        for _, _, e in own
        if type(e) is v.RequestEnded and e.attempts == 1 and e.ttft_us > 0
    }
    views, found = Views(), []
    timeline = heapq.merge(
        ((at, 0, group) for at, group in run.groups),
        ((at, 1, (position, event)) for at, position, event in own),
        key=lambda entry: entry[:2],
    )
    for at, kind, what in timeline:
        if kind == 0:
            views.receive(at, what)
            continue
        position, event = what
        if (
            type(event) is v.RouteDecided
            and event.ttft_us >= 0
            and event.attempt == 1
            and at >= run.began_us
            and event.request in ended
            and event.request in steps[event.worker].first
        ):
            fleet = views.whole
            costs = Costs(fleet, fleet.workers[event.worker])
            of = steps[event.worker]
            taken, modelled = _through(of, at, of.first[event.request], costs)
            found.append(Parts(ended[event.request], event.ttft_us, taken, modelled))
        views.own(position, event)
    return found


def _steps_of(run: Run) -> dict[str, _Steps]:
    found: dict[str, _Steps] = {}
    for at, group in run.groups:
        for segment in group.segments:
            if segment.stream[0] != "w":
                continue
            of = found.setdefault(segment.stream[2:], _Steps([], [], {}))
            for event in decode_all(segment.records):
                if type(event) is v.EngineStep and event.duration_us:
                    for change in event.changes:
                        if type(change) is v.FirstToken:
                            of.first[change.request] = len(of.steps)
                    of.told_us.append(at)
                    of.steps.append(event)
    return found


def _through(of: _Steps, at: int, last: int, costs: Costs) -> tuple[int, int]:
    """What the steps told after `at`, up to number `last`, took from `at` on, and what they would
    have taken by `costs`."""
    first = min(bisect_right(of.told_us, at), last)
    taken = modelled = 0.0
    for number in range(first, last + 1):
        step = of.steps[number]
        known = costs.base + step.batch * costs.request + step.sum_context * costs.context
        if step.prefill_tokens:
            known += costs.mixed + step.prefill_tokens * costs.prompt + _work(step) * costs.work
        share = 1.0
        if number == first:
            share = min(max(of.told_us[first] - at, 0) / step.duration_us, 1.0)
        taken += share * step.duration_us
        modelled += share * known
    return int(taken), int(modelled)


def _work(step: v.EngineStep) -> int:
    chunks = [c for c in step.changes if type(c) is v.PrefillChunkDone]
    return sum(c.tokens * max(c.computed - c.tokens, 0) + c.tokens * c.tokens // 2 for c in chunks)


def figures_of(run: Run) -> dict[str, Any]:
    """Medians of what errors are made of, in shares of the true time."""
    parts = parts_of(run)
    way = statistics.median(p.besides for p in parts)
    shares = {
        "oracle_error_p50": [abs(p.besides - way) / p.actual for p in parts],
        "step_times_error_p50": [abs(p.modelled - p.steps) / p.actual for p in parts],
        "foreseen_error_p50": [abs(p.predicted - p.modelled - way) / p.actual for p in parts],
    }
    figures = {name: figure(statistics.median(s), "ratio") for name, s in shares.items()}
    figures["besides_steps_p50"] = figure(way / 1000, "ms", digits=2)
    busy = _busy(run)
    figures["engines_busy"] = figure(busy, "share")
    return figures


def _busy(run: Run) -> float:
    steps = _steps_of(run).values()
    took = sum(
        step.duration_us
        for of in steps
        for at, step in zip(of.told_us, of.steps, strict=True)
        if run.began_us <= at <= run.ended_us
    )
    return took / max(run.ended_us - run.began_us, 1) / max(len(steps), 1)
