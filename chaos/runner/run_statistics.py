"""Figures of a run (`relume.chaos.scenario.catalogue.FIGURES`), from its clients and its log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relume.chaos.outcome import History, Outcome
from relume.chaos.scenario.schedule import Request
from relume.chaos.validators.promises.requests.recoveries import recoveries
from relume.chaos.validators.records import Log, courses, events_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    HealthState,
    RequestOutcome,
    RolloutStage,
    ShedReason,
    TransportKind,
)

MS = 1e6
"""Nanoseconds in a millisecond."""
REFUSED = (429, 503)
LOST = frozenset(
    (TransportKind.RESET, TransportKind.EOF, TransportKind.REFUSED, TransportKind.UNREACHABLE,
     TransportKind.STALE, TransportKind.ENGINE_DEAD, TransportKind.STALL)
)  # fmt: skip
"""How attempts of a lost worker end."""


def figures_of(run: Outcome, log: Log) -> dict[str, float | None]:
    """Every figure by name; None: the run gives no value for it (nothing was lost, no token came).
    A stream without a whole answer counts as broken, regardless of which side ended it.
    Undisturbed requests do not count."""
    histories = real(run)
    requests = {request.name: request for request in run.schedule.requests}
    refused = sum(h.record.status in REFUSED and not h.record.token_count for h in histories)
    broken = sum(h.record.outcome != RequestOutcome.COMPLETED for h in histories)
    ttft = [(h.first_ns - h.sent_ns) / MS for h in histories if h.first_ns is not None]
    gaps = [max(h.record.gaps_ms) for h in histories if h.record.gaps_ms]
    back = [float(one.back_ms - one.begun_ms) for one in recoveries(log) if one.resumed_on]
    sent = [h.sent_ns for h in histories]
    last = [h.last_ns for h in histories if h.last_ns is not None]
    return {
        "requests": len(histories),
        "faults_fired": len({fired.name for fired in run.fired}),
        "broken_streams": broken,
        "refused_streams": refused,
        "lost_streams": broken - refused,
        "moved_streams": _moved(log),
        "failed_attempts": _count(log, _is_failed_attempt),
        "lost_attempts": _count(log, _is_lost_attempt),
        "engines_rolled": _engines_rolled(log),
        "breakers_opened": _count(log, _is_opening),
        "levels_decided": _count(log, lambda event: type(event) is v.DegradationDecided),
        "highest_level": _highest_level(log),
        "degraded_refusals": _count(log, _is_degraded),
        **_promotions(log),
        "workers_quarantined": _count(log, _is_quarantine),
        "ttft_ms_mean": mean(ttft),
        "ttft_ms_p99": quantile(ttft, 0.99),
        "ttft_ms_p99_interactive": quantile(_ttft_of(histories, requests, "interactive"), 0.99),
        "ttft_ms_p99_batch": quantile(_ttft_of(histories, requests, "batch"), 0.99),
        "tenant_fairness": _fairness(histories, requests),
        "tpot_ms_mean": mean([p for h in histories if (p := tpot_ms(h)) is not None]),
        "gap_ms_p99": quantile(gaps, 0.99),
        "recovery_ms_p99": quantile(back, 0.99),
        "makespan_s": (max(last) - min(sent)) / 1e9 if last else None,
    }


def _ttft_of(
    histories: Sequence[History], requests: Mapping[str, Request], tier: str
) -> list[float]:
    return [
        (h.first_ns - h.sent_ns) / MS
        for h in histories
        if h.first_ns is not None and h.request in requests and requests[h.request].tier == tier
    ]


def _fairness(histories: Sequence[History], requests: Mapping[str, Request]) -> float | None:
    """Minimum over tenants of the tokens served, as a share of an equal part or of all that the
    tenant requested, if that is less; None: fewer than two tenants."""
    served: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for history in histories:
        request = requests.get(history.request)
        if request is not None and request.tenant:
            tokens = request.prompt_tokens + request.output_tokens
            wanted[request.tenant] = wanted.get(request.tenant, 0) + tokens
            if history.record.outcome == RequestOutcome.COMPLETED:
                served[request.tenant] = served.get(request.tenant, 0) + tokens
    if len(wanted) < 2:
        return None
    part = sum(served.values()) / len(wanted)
    return min(served.get(name, 0) / max(min(part, all_), 1) for name, all_ in wanted.items())


def real(run: Outcome) -> list[History]:
    """Its requests without the undisturbed ones."""
    return [history for history in run.histories if not history.record.undisturbed]


def tpot_ms(history: History) -> float | None:
    """Time per output token after the first; None: there is none."""
    count = history.record.token_count
    if history.first_ns is None or history.last_ns is None or count < 2:
        return None
    return (history.last_ns - history.first_ns) / MS / (count - 1)


def _moved(log: Log) -> int:
    return sum(
        len({decision.worker for decision in course.decisions}) > 1
        for course in courses(log).values()
    )


def _count(log: Log, wanted: Callable[[Any], bool]) -> int:
    return sum(wanted(at.event) for at in events_of(log))


def _is_failed_attempt(event: Any) -> bool:
    return type(event) is v.TransportObserved and event.kind == TransportKind.ENGINE_ERROR


def _is_lost_attempt(event: Any) -> bool:
    return type(event) is v.TransportObserved and event.kind in LOST


def _engines_rolled(log: Log) -> int:
    """Of the steps that were not given up before their restart."""
    rolled, restarts = 0, False
    for event in (at.event for at in events_of(log, "fleet")):
        if type(event) is not v.RolloutDecided:
            continue
        if event.stage in (RolloutStage.DRAINING, RolloutStage.RESTARTING):
            restarts = event.stage == RolloutStage.RESTARTING
        elif event.stage == RolloutStage.RETURNED and restarts:
            rolled += len(event.workers)
    return rolled


def _is_opening(event: Any) -> bool:
    return type(event) is v.HealthDecided and event.state == HealthState.UNHEALTHY


def _highest_level(log: Log) -> int:
    events = (at.event for at in events_of(log, "fleet"))
    return max((e.level for e in events if type(e) is v.DegradationDecided), default=0)


def _promotions(log: Log) -> dict[str, float | None]:
    """Spares that were promoted, and the longest time from the death of another worker's engine."""
    promoted, dead, spares = 0, set[str](), set[str]()
    died_ms: int | None = None
    longest: float | None = None
    for at in events_of(log):
        event, kind = at.event, type(at.event)
        if kind is v.EngineDied:
            if died_ms is None and spares and event.worker not in {*spares, *dead}:
                died_ms = at.at_ms
            dead.add(event.worker)
        elif kind is v.EngineReady:
            dead.discard(at.stream[2:])
        elif kind is v.SparesDecided:
            promoted += len({*event.was} - {*event.spares} - dead)
            spares = {*event.spares}
            if died_ms is not None:
                longest = max(longest or 0.0, float(at.at_ms - died_ms))
                died_ms = None
    return {"spares_promoted": promoted, "promotion_ms_most": longest}


def _is_degraded(event: Any) -> bool:
    return type(event) is v.RequestShed and event.reason == ShedReason.DEGRADED


def _is_quarantine(event: Any) -> bool:
    return type(event) is v.HealthDecided and event.state == HealthState.QUARANTINED


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None: no values."""
    return sum(values) / len(values) if values else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed; None: no values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else None
