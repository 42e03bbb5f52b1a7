"""Decisions of a replica, each repeated on the view at its basis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.controlplane.replay.answers import judged, routed, stream_judged
from relume.controlplane.replay.checks.verify_checkpoints import (
    check_holders,
    check_migration,
    check_plan,
)
from relume.controlplane.replay.divergence import Verdict
from relume.events import vocabulary as v
from relume.policies.crosscheck.choice import CheckChoice, FinishedRequest, choose
from relume.policies.decision_versions import (
    kind_of,
    missing,
    version_of,
)
from relume.policies.liveness import overdue, stall
from relume.policies.routing import choose_worker
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.overlay.view import View

Check = Callable[[View, str, int, Any, Verdict], None]
"""Repeats a recorded decision, on the view at its basis: (view, stream,
position, event, verdict)."""


def check_route(
    view: View, stream: str, position: int, event: v.RouteDecided, verdict: Verdict,
    policy: str = "",
) -> None:  # fmt: skip
    """The question is the request and what failed it; the recorded policy, or `policy`, answers
    with a worker."""
    verdict.decisions += 1
    policy = policy or event.policy
    if policy not in choose_worker.RECORDED:
        revision, unknown = event.basis.revision, "unknown policy"
        verdict.differ(revision, stream, position, "decision", event.policy, unknown)
        return
    query = query_of(event)
    view.now_us = event.at_us
    version = version_of(view, kind_of(event)) if policy == event.policy else 0
    if event.others:
        choice = choose_worker.decide(view, query, policy, version)
    else:
        choice = choose_worker.rule_of(policy, version)(view, query)
    if len([c for c in choice.candidates if not c.excluded]) > 1:
        verdict.contested += 1
    expected = event.worker, event.incarnation, event.candidates, event.others
    actual = choice.worker, choice.incarnation, choice.candidates, choice.others
    place = event, stream, position
    found = event.cached_tokens, event.refused
    if policy == event.policy and found != (choice.cached_tokens, choice.refused):
        verdict.differ(
            event.basis.revision,
            stream,
            position,
            "decision",
            "{} cached tokens, refused: {}".format(*found),
            f"{choice.cached_tokens} cached tokens, refused: {choice.refused}",
        )
    if actual != expected:
        verdict.changed("route", event.request, *place, routed(*expected), routed(*actual))
    elif event.at_us < 0:
        return
    elif lacking := missing(view, "first_token"):
        verdict.cannot_take(lacking)
    else:
        first_token_us = choose_worker.FIRST_TOKEN[version_of(view, "first_token")]
        ttft_us = first_token_us(view, query, policy, choice)
        if ttft_us != event.ttft_us:
            recorded, other = (
                (routed(*actual)[0], (f"predicted TTFT {us} us",))
                for us in (event.ttft_us, ttft_us)
            )
            verdict.changed("route", event.request, *place, recorded, other, "prediction")


def query_of(event: v.RouteDecided) -> RouteQuery:
    """The question to the policy."""
    return RouteQuery(
        request=event.request,
        model=event.model,
        prompt_tokens=event.prompt_tokens,
        delivered=event.delivered,
        avoid=event.avoid,
        lost=event.attempt - 1 if event.worker else event.attempt,
        prefix=event.prefix,
        session=event.session,
        tier=event.tier,
    )


def _check_stall(
    view: View, stream: str, position: int, event: v.StallJudged, verdict: Verdict
) -> None:
    verdict.decisions += 1
    verdict.stalls += 1
    config = stall.config_of(view)
    worker = view.fleet.workers.get(event.worker)
    bound = stall.bound_us(worker, config) if worker is not None else -1
    look = stall.ProbeEvidence(
        probe=event.probe,
        steps=event.probe_steps,
        step_age_us=event.step_age_us,
        cpu_us=event.cpu_us,
        held=event.held,
        expected_us=event.expected_us,
        wait_us=event.wait_us,
        turns=event.turns,
    )
    hung = stall.HUNG[version_of(view, "stall")](event.silent_us, look, bound, config)
    if (hung, bound) != (event.hung, event.bound_us):
        engine = f"{event.worker}:{event.incarnation}"
        recorded = judged(event.hung, event.silent_us, event.bound_us)
        other = judged(hung, event.silent_us, bound)
        verdict.changed("stall", engine, event, stream, position, recorded, other)


def _check_stream(
    view: View, stream: str, position: int, event: v.StreamJudged, verdict: Verdict
) -> None:
    verdict.decisions += 1
    seen = overdue.Silence(
        silent_us=event.silent_us, from_step=event.from_step, probe=event.probe, held=event.held
    )
    of = event.request, event.attempt
    place, config = (event.worker, event.incarnation), overdue.config_of(view)
    rule = overdue.RULES[version_of(view, "overdue")]
    found = overdue.judge(view.fleet, place, of, seen, config, rule)
    recorded = overdue.Judgement(
        steps=event.steps,
        decodes=event.decodes,
        finished=event.finished,
        bound_us=event.bound_us,
        stuck=event.stuck,
    )
    if found != recorded:
        answers = stream_judged(seen, recorded), stream_judged(seen, found)
        verdict.changed("overdue", event.request, event, stream, position, *answers)


def _check_cross_check(
    view: View, stream: str, position: int, event: v.CrossCheckDecided, verdict: Verdict
) -> None:
    verdict.decisions += 1
    finished = FinishedRequest(
        request=event.request,
        worker=event.worker,
        incarnation=event.incarnation,
        tokens=event.tokens,
        answer=event.answer,
    )
    recorded = CheckChoice(event.by, event.by_incarnation, event.cause)
    by_savings = version_of(view, "cross_check") > 1
    if (found := choose(view, finished, by_savings)) != recorded:
        place = event.basis.revision, stream, position
        verdict.differ(*place, "decision", recorded, found)


def _counted(view: View, stream: str, position: int, event: Any, verdict: Verdict) -> None:
    """What `AdmissionReplay` looks at."""
    verdict.decisions += 1


CHECKS: dict[type, Check] = {
    v.RouteDecided: check_route,
    v.StallJudged: _check_stall,
    v.StreamJudged: _check_stream,
    v.CrossCheckDecided: _check_cross_check,
    v.HolderChosen: check_holders,
    v.RecoveryPlanned: check_plan,
    v.MigrationPlanned: check_migration,
    v.RequestHeld: _counted,
    v.RequestShed: _counted,
}
