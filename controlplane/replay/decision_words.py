"""What the control plane decided, in plain words: each decision with what it rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import CheckCause, MigrationCause, RecoveryKind
from relume.policies.weights import comparison


def counted(number: int, what: str) -> str:
    """A number of things: 1 worker, 2 workers."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


COST_UNITS = {
    "least_load": " tokens",
    "predicted_ttft": " us",
    "prefix_first": " us",
    "power_of_two": " us",
    "jsq": " requests",
}
"""In what each routing policy counts the cost of a worker; the others rank only."""


def _decided(event: v.RouteDecided) -> list[str]:
    return [*route_basis(event), *_candidates(event), *route_result(event)]


def route_basis(event: v.RouteDecided) -> list[str]:
    """Where the request was sent and why, by which policy, on which basis."""
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    if event.worker:
        has = f", the client has {event.delivered} tokens" if event.delivered else ""
        first = (
            f"attempt {event.attempt} sent to {event.worker}:{event.incarnation} "
            f"because of {event.cause.replace('_', ' ')} (mode {event.mode}{has})"
        )
    else:
        first = f"no worker was available (cause {event.cause.replace('_', ' ')})"
    return [first, f"{event.decision} by {event.policy} on {basis}"]


def is_chosen(event: v.RouteDecided, candidate: v.Candidate) -> bool:
    """Whether the request was sent to this candidate."""
    return (candidate.worker, candidate.incarnation) == (event.worker, event.incarnation)


def others_line(why: str, count: int) -> str:
    """Workers that a decision counts and does not name."""
    reason = f"not eligible: {why}" if why else "eligible at no lower cost"
    return f"and {counted(count, 'other')}, {reason}"


def _candidates(event: v.RouteDecided) -> list[str]:
    unit = COST_UNITS.get(event.policy, "")
    lines = []
    for candidate in event.candidates:
        lines.append(
            f"{'->' if is_chosen(event, candidate) else '  '} "
            f"{candidate.worker}:{candidate.incarnation} costs {candidate.cost}{unit} "
            f"({candidate.prefill_tokens} prompt tokens to compute, "
            f"{counted(candidate.requests, 'request')}{_expected(candidate)})"
            + (f", not eligible: {candidate.excluded}" if candidate.excluded else "")
        )
    return lines + [f"   {others_line(why, count)}" for why, count in event.others]


def route_result(event: v.RouteDecided) -> list[str]:
    """What was expected of the dispatch, and what limited the choice."""
    lines = []
    if event.ttft_us >= 0:
        lines.append(f"predicted TTFT: {event.ttft_us / 1000:.1f} ms")
    if event.refused:
        lines.append(f"refused: {event.refused}")
    if event.avoid:
        lines.append(f"it failed before on {', '.join(event.avoid)}")
    if event.doubted:
        lines.append("a worker that computes wrong results served it: its tokens are in doubt")
    return lines


def _expected(candidate: v.Candidate) -> str:
    """What predicting policies add about a worker."""
    if candidate.ttft_us < 0:
        return ""
    held = f", {candidate.hit_tokens} prompt tokens cached" if candidate.hit_tokens else ""
    return (
        f", {candidate.batch} of them decode {candidate.context_tokens} tokens{held}, "
        f"{candidate.kv_free} blocks free; predicted TTFT "
        f"{candidate.ttft_us / 1000:.1f} ms, TPOT {candidate.tpot_us / 1000:.1f} ms"
    )


_HELD = {
    "saturated": "all workers are at their queue limit",
    "no worker": "no worker accepts requests",
    "behind": "other requests wait already",
}


def _held(event: v.RequestHeld) -> list[str]:
    lines = [f"queued: {_HELD.get(event.cause, event.cause)}", *_in_queue(event)]
    if event.deadline_us:
        lines.append(f"TTFT goal: {(event.deadline_us - event.at_us) / 1000:.0f} ms from then")
    if event.evicted:
        lines.append(f"displaced: {', '.join(event.evicted)}")
    return lines


def _shed(event: v.RequestShed) -> list[str]:
    waited = f" after {event.waited_us / 1000:.1f} ms" if event.waited_us >= 0 else " on arrival"
    lines = [f"refused{waited}: {event.reason}", *_in_queue(event)]
    if event.deadline_us:
        due_ms = (event.deadline_us - event.at_us) / 1000
        lines.append(f"TTFT goal: {due_ms:.0f} ms from then")
    if event.behalf:
        lines.append(f"displaced by {event.behalf}")
    lines.append(f"its client may retry after {event.retry_after_s} s")
    return lines


def _in_queue(event: v.RequestHeld | v.RequestShed) -> list[str]:
    """The request and what was before it, at its arrival."""
    owner = f" of tenant {event.tenant}" if event.tenant else ""
    expected = ""
    if event.predicted_us >= 0:
        expected = f", predicted wait {event.predicted_us / 1000:.1f} ms"
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    return [
        f"{event.tier}{owner}, charged {event.tokens} tokens, {event.size} bytes",
        f"{counted(event.ahead_requests, 'request')} of {event.ahead_tokens} tokens ahead"
        f"{expected}; {event.depth} in the admission queue",
        f"{event.decision} on {basis}",
    ]


def _judged(event: v.StallJudged) -> list[str]:
    answer = "hung" if event.hung else "not hung"
    return [
        f"{event.worker}:{event.incarnation} was silent for {event.silent_us / 1000:.0f} ms "
        f"(stall timeout {event.bound_us / 1000:.0f} ms), its probe {event.probe}: judged {answer}"
    ]


def _stream_judged(event: v.StreamJudged) -> list[str]:
    answer = "stuck" if event.stuck else "not stuck"
    decodes = (
        "has finished" if event.finished else "decodes" if event.decodes else "does not decode"
    )
    by = f"by its reports the engine {decodes} attempt {event.attempt}; its probe {event.probe}"
    if event.held == 0:
        by = f"its probe {event.probe}: it has no requests, so it is done with attempt {event.attempt}"
    return [
        f"no token came from {event.worker}:{event.incarnation} for {event.silent_us / 1000:.0f} ms "
        f"(bound {event.bound_us / 1000:.0f} ms), in which it made {event.steps} steps: "
        f"judged {answer}",
        by,
        f"{event.decision} on basis ({event.basis.revision}, {event.basis.position})",
    ]


def _holders(event: v.HolderChosen) -> list[str]:
    cause = event.cause.replace("_", " ")
    size = f"{event.expected_blocks} blocks, {event.expected_bytes} bytes expected"
    if event.holders:
        first = f"its checkpoint goes to {', '.join(event.holders)} because of {cause} ({size})"
    else:
        first = f"no worker holds its checkpoint: {event.reason} (cause {cause}, {size})"
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    lines = [first, f"{event.decision} by {event.policy} on {basis}"]
    for candidate in event.candidates:
        lines.append(
            f"{'->' if candidate.worker in event.holders else '  '} {candidate.worker} "
            f"has a recovery load of {candidate.load}, {candidate.free_bytes} bytes free"
            + (f", not eligible: {candidate.excluded}" if candidate.excluded else "")
        )
    return lines


def _plan(event: v.RecoveryPlanned) -> list[str]:
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    lines = [f"planned with all running requests of {event.worker}:{event.incarnation}"]
    for choice in event.choices:
        if choice.chosen < 0:
            lines[0] += ": no worker could take it"
        else:
            option = choice.options[choice.chosen]
            how = f"recomputed on {option.worker}"
            if option.kind == RecoveryKind.RESTORE:
                how = f"restored on {option.worker} from {option.holder}"
            lines[0] += f": {choice.tokens} tokens {how} in {option.done_us / 1000:.1f} ms"
        tier = f", tier {choice.tier}" if choice.tier else ""
        lines.append(f"{event.decision} by {event.policy} on {basis}{tier}")
        for at, option in enumerate(choice.options):
            is_chosen = at == choice.chosen
            lines.append(f"{'->' if is_chosen else '  '} {_option(option, is_chosen)}")
    return lines


_LEFT_BECAUSE = {
    MigrationCause.DRAIN: "drains",
    MigrationCause.IMBALANCE: "has been overloaded for several ticks",
    MigrationCause.PROMOTION: "was a spare and is promoted",
}


def _migration(event: v.MigrationPlanned) -> list[str]:
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    why = _LEFT_BECAUSE.get(event.cause, event.cause)
    lines = [f"{event.worker}:{event.incarnation} {why}"]
    for choice in event.choices:
        if choice.chosen < 0:
            lines[0] += f": the request stays there ({choice.reason})"
        else:
            option = choice.options[choice.chosen]
            how = f"restored from {option.holder}" if option.holder else "recomputed"
            lines[0] += f": {choice.tokens} tokens to migrate to {option.worker}, {how}"
        lines.append(f"{event.decision} by {event.cause} on {basis}")
        ends = f"{choice.stay_us / 1000:.1f} ms here, {choice.go_us / 1000:.1f} ms there"
        lines.append(f"about {choice.left} more tokens: {ends}")
        for at, option in enumerate(choice.options):
            lines.append(f"{'->' if at == choice.chosen else '  '} {_option(option)}")
    return lines


def _option(option: v.RecoveryOption, is_chosen: bool = False) -> str:
    what = f"recompute all on {option.worker}"
    if option.kind == RecoveryKind.RESTORE:
        what = f"restore {option.restored} tokens from {option.holder} on {option.worker}"
    parts = (("move", option.move_us), ("wait", option.wait_us), ("compute", option.compute_us))
    took = ", ".join(f"{name} {us / 1000:.1f}" for name, us in parts if us)
    against = "despite" if is_chosen else "not possible:"
    refused = f", {against} {option.excluded}" if option.excluded else ""
    return f"{what}: {option.done_us / 1000:.1f} ms ({took}){refused}"


def _health(event: v.HealthDecided) -> list[str]:
    failure = f" ({event.failure})" if event.failure else ""
    lines = [f"{event.worker}:{event.incarnation} is {event.state}{failure}: {event.evidence}"]
    if event.until >= 0:
        lines.append(f"its breaker stays open until tick {event.until}, now {event.since}")
    if event.prober:
        lines.append(f"{event.prober} probes it, with {event.probes} request(s) at once")
    return lines


_LEVELS = (
    "normal",
    "answers have a maximum length",
    "requests of tier batch are refused",
    "TTFT goals count twice",
    "all new requests are refused",
)


def rollout_line(event: v.RolloutDecided) -> str:
    """A decision about a rolling restart."""
    names = ", ".join(event.workers) or "no worker"
    stage = f"{event.stage}: {event.reason}" if event.reason else str(event.stage)
    return f"rolling restart of {event.model}: {names}: {stage}; {event.left} to come"


def level_lines(event: v.DegradationDecided) -> list[str]:
    """A change of level, and the figures that it rests on."""
    meaning = _LEVELS[event.level] if 0 <= event.level < len(_LEVELS) else "unknown"
    lines = [f"{event.model}: degradation level {event.level} ({meaning}), was {event.was}"]
    if event.share < 0:
        unknown = "levels are no longer decided"
        if event.due_ticks >= 0:
            unknown = f"capacity or demand is not known, for {counted(event.due_ticks, 'tick')}"
        return [*lines, unknown]
    rate = event.requests_per_ks / 1000
    lines.append(
        f"{counted(event.workers, 'worker')} can compute {rate:.2f} requests/s "
        f"({event.tokens_per_s} tokens/s, {event.sequences} requests at once), of which "
        f"{event.usable_per_ks / 1000:.2f} requests/s count"
    )
    served = f"{event.share / 10:.0f} % are served" if event.demand_per_ks else "all are served"
    lines.append(
        f"{event.demand_per_ks / 1000:.2f} requests/s arrive, each of {event.prompt_tokens} prompt "
        f"tokens to compute and {event.output_tokens} output tokens: {served}"
    )
    direction = "higher" if event.level > event.was else "lower"
    lines.append(f"a {direction} level was due for {counted(event.due_ticks, 'tick')}")
    lines.append(f"{counted(event.wanted, 'worker')} would serve the demand")
    return lines


def spares_lines(event: v.SparesDecided) -> list[str]:
    """A change of the spares of a model, and why."""
    promoted = [name for name in event.was if name not in event.spares]
    chosen = [name for name in event.spares if name not in event.was]
    lines = [f"{event.model}: spares are {', '.join(event.spares) or 'no workers'}"]
    if promoted:
        lines.append(f"{', '.join(promoted)} ceased to be a spare")
    if chosen:
        short = counted(event.short_ticks, "tick")
        lines.append(f"{', '.join(chosen)} became a spare: one was missing for {short}")
    lines.append(
        f"{event.failed} of {counted(event.workers, 'worker')} are not open to requests: "
        f"{counted(event.due, 'spare')} due"
    )
    return lines


def _canary_values(event: v.CanaryValuesDecided) -> list[str]:
    names = ", ".join(event.witnesses)
    only = ": the class has no other worker" if event.workers == 1 else ""
    return [
        f"right answer to canary {event.canary} for {event.kind}, version {event.version}",
        f"{len(event.witnesses)} of {event.workers} workers agree ({names}){only}",
    ]


def _weights_compared(event: v.WeightsCompared) -> list[str]:
    lines = [f"{event.worker}:{event.incarnation}: {comparison.in_words(event)}"]
    if event.digest:
        expected = f", expected {event.expected}" if event.expected else ""
        lines.append(f"digest of its model files: {event.digest}{expected}")
    return lines


def _cross_check(event: v.CrossCheckDecided) -> list[str]:
    engine = f"{event.by}:{event.by_incarnation}"
    if event.by == event.worker:
        return [
            f"its engine {engine} answers it once more, because another one answers differently"
        ]
    why = {
        CheckCause.SHARE: "as one of the share that is compared",
        CheckCause.DOUBT: f"because answers of {event.worker} differed before",
        CheckCause.DISPUTE: "to settle which answer is right",
    }.get(event.cause, event.cause)
    return [f"the idle engine {engine} answers it again, {why}"]


WORDS: dict[type, Callable[[Any], list[str]]] = {
    v.RouteDecided: _decided,
    v.RequestHeld: _held,
    v.RequestShed: _shed,
    v.StallJudged: _judged,
    v.StreamJudged: _stream_judged,
    v.CrossCheckDecided: _cross_check,
    v.CanaryValuesDecided: _canary_values,
    v.WeightsCompared: _weights_compared,
    v.CheckpointsVoided: lambda e: [
        f"blocks of {counted(len(e.attempts), 'attempt')} are not used: "
        f"{e.worker}:{e.incarnation} computes wrong results"
    ],
    v.HolderChosen: _holders,
    v.RecoveryPlanned: _plan,
    v.MigrationPlanned: _migration,
    v.MigrationAbandoned: lambda e: [f"not migrated from {e.worker}: {e.reason}"],
    v.HealthDecided: _health,
    v.VerdictsWithheld: lambda e: [
        f"{len(e.workers)} of {e.serving} workers of {e.model} fail at once: no breaker opens"
        if e.workers
        else f"verdicts on workers of {e.model} are no longer withheld"
    ],
    v.DegradationDecided: level_lines,
    v.RolloutDecided: lambda e: [rollout_line(e)],
    v.FeatureLevelRaised: lambda e: [
        f"feature level {e.level}, was {e.was}: {', '.join(e.replicas)} read it"
        if e.level != e.was
        else f"feature level {e.level}, stated again"
    ],
    v.SparesDecided: spares_lines,
}
"""By decision: a line, then details line by line."""
