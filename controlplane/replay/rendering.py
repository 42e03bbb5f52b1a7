"""A request's chain of causes (`why`) in plain words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from relume.controlplane.replay.why import Step, Why
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.vocabulary.enums import (
    CheckCause,
    MigrationCause,
    RecoveryKind,
    RouteCause,
    TransportKind,
)
from relume.events.wire.prefix import HASH_BYTES


def lines_of(found: Why) -> Iterator[str]:
    """The lines of the chain, for a terminal."""
    yield headline(found)
    yield ""
    begun_ms = found.steps[0].entry.at_ms if found.steps else 0
    for step in found.steps:
        first, *rest = words(step)
        place = f"{step.entry.stream}:{step.entry.position}"
        yield f"{_clock(step.entry.at_ms, begun_ms):>10}  {place:<12} {first}"
        for line in (*rest, *_came(found, step), *_waited(found, step)):
            yield f"{'':10}  {'':12}   {line}"


def _came(found: Why, step: Step) -> Iterator[str]:
    """When the first token of a dispatch existed."""
    event = step.event
    if type(event) is v.RouteDecided and event.worker and event.attempt in found.first_tokens_us:
        yield f"measured TTFT: {found.first_tokens_us[event.attempt] / 1000:.1f} ms"


def _waited(found: Why, step: Step) -> Iterator[str]:
    """How long the wait was that a dispatch ended."""
    event = step.event
    if type(event) is v.RouteDecided and event.cause == RouteCause.WAIT_OVER and event.worker:
        if found.waited_us >= 0:
            yield f"time in the admission queue: {found.waited_us / 1000:.1f} ms"


def headline(found: Why) -> str:
    """The result of the request, in one line."""
    name = found.request
    if found.arrived is not None and found.arrived.client_id:
        name += f" (client's id {found.arrived.client_id})"
    ended = found.ended
    if ended is None:
        tried = len([d for d in found.decisions if d.worker])
        return f"{name}: no end in this log, {_count(tried, 'attempt')} so far"
    gap = f", longest gap {ended.longest_gap_us / 1000:.0f} ms" if ended.longest_gap_us >= 0 else ""
    tokens = f", {ended.tokens} tokens" if ended.tokens >= 0 else ""
    status = f" (HTTP {ended.status})" if ended.status not in (0, 200) else ""
    return f"{name}: {ended.outcome}{status}{tokens}, {_count(ended.attempts, 'attempt')}{gap}"


def words(step: Step) -> list[str]:
    """One link: what happened, then details line by line."""
    render = _WORDS.get(type(step.event))
    lines = render(step.event) if render is not None else [codec.tag_of(step.event)]
    if step.journalled:
        lines.append(
            "known only from the worker's journal: the gateway died before it recorded this"
        )
    return lines


def brief(event: Any) -> str:
    """Any event of the log, or change in an engine step, in one line."""
    if type(event) is v.RecoveryPlanned and len(event.choices) > 1:
        ways = [c.options[c.chosen].kind if c.chosen >= 0 else "no worker" for c in event.choices]
        counts = (f"{ways.count(kind)} to {kind}" for kind in ("restore", "recompute"))
        left = f", {ways.count('no worker')} that no worker can take" if "no worker" in ways else ""
        return (
            f"{_count(len(ways), 'request')} of {event.worker}:{event.incarnation} planned "
            f"together by {event.policy}: {', '.join(counts)}{left}"
        )
    if type(event) is v.MigrationPlanned and len(event.choices) > 1:
        moved = sum(choice.chosen >= 0 for choice in event.choices)
        return (
            f"{moved} of {_count(len(event.choices), 'request')} on {event.worker}:"
            f"{event.incarnation} to migrate because of {event.cause}"
        )
    if type(event) is v.PrefixBlocksChanged:
        gained, lost = (len(data) // HASH_BYTES for data in (event.stored, event.removed))
        emptied = "emptied, " if event.reset else ""
        return f"prefix cache: {emptied}{gained} prefixes added, {lost} removed"
    if type(event) in _WORDS:
        return _WORDS[type(event)](event)[0]
    if type(event) is v.EngineStep:
        changed = f", {_count(len(event.changes), 'change')}" if event.changes else ""
        gap = f" after a gap of {event.gap_us / 1000:.1f} ms" if event.gap_us >= 100 else ""
        return (
            f"step {event.step} of {event.duration_us / 1000:.1f} ms{gap}: {event.batch} decoded, "
            f"{event.prefill_tokens} prompt tokens, {event.waiting} waiting{changed}"
        )
    fields = ((name, getattr(event, name)) for name in event.__struct_fields__)
    return " ".join(f"{name}={_short(value)}" for name, value in fields if value not in ("", ()))


def _short(value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def to_json(found: Why) -> dict[str, Any]:
    """The chain for programs."""
    return {
        "request": found.request,
        "outcome": found.ended.outcome if found.ended else "",
        "waited_us": found.waited_us,
        "first_tokens_us": {str(n): us for n, us in found.first_tokens_us.items()},
        "steps": [
            {
                "revision": s.entry.revision,
                "stream": s.entry.stream,
                "position": s.entry.position,
                "at_ms": s.entry.at_ms,
                "journalled": s.journalled,
                "event": codec.to_json(s.event),
                "text": words(s),
            }
            for s in found.steps
        ],
    }


def _clock(at_ms: int, begun_ms: int) -> str:
    if not at_ms:
        return "-"
    if at_ms == begun_ms:
        return time.strftime("%H:%M:%S", time.localtime(at_ms / 1000))
    return f"{at_ms - begun_ms:+} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _arrived(event: v.RequestArrived) -> list[str]:
    kind = "streaming" if event.stream else "whole"
    about = "about " if event.estimated else ""
    lines = [
        f"arrived: {event.route} {kind}, model {event.model}, "
        f"{about}{event.prompt_tokens} prompt tokens, at most {event.max_tokens} output tokens"
    ]
    reason = f": {event.reason}" if event.reason else ""
    lines.append(f"resume guarantee: {event.verdict}{reason}")
    if event.output_limit:
        lines.append(f"capacity was short: limited to {event.output_limit} output tokens")
    return lines


COST_UNITS = {
    "least_load": " tokens",
    "predicted_ttft": " us",
    "prefix_first": " us",
    "power_of_two": " us",
    "jsq": " requests",
}
"""In what each routing policy counts the cost of a worker; the others rank only."""


def _decided(event: v.RouteDecided) -> list[str]:
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    if event.worker:
        has = f", the client has {event.delivered} tokens" if event.delivered else ""
        lines = [
            f"attempt {event.attempt} sent to {event.worker}:{event.incarnation} "
            f"because of {event.cause.replace('_', ' ')} (mode {event.mode}{has})"
        ]
    else:
        lines = [f"no worker was available (cause {event.cause.replace('_', ' ')})"]
    lines.append(f"{event.decision} by {event.policy} on {basis}")
    unit = COST_UNITS.get(event.policy, "")
    for candidate in event.candidates:
        chosen = (candidate.worker, candidate.incarnation) == (event.worker, event.incarnation)
        lines.append(
            f"{'->' if chosen else '  '} {candidate.worker}:{candidate.incarnation} "
            f"costs {candidate.cost}{unit} "
            f"({candidate.prefill_tokens} prompt tokens to compute, "
            f"{_count(candidate.requests, 'request')}{_expected(candidate)})"
            + (f", not eligible: {candidate.excluded}" if candidate.excluded else "")
        )
    for why, count in event.others:
        reason = f"not eligible: {why}" if why else "eligible at no lower cost"
        lines.append(f"   and {_count(count, 'other')}, {reason}")
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
        f"{_count(event.ahead_requests, 'request')} of {event.ahead_tokens} tokens ahead"
        f"{expected}; {event.depth} in the admission queue",
        f"{event.decision} on {basis}",
    ]


def _observed(event: v.TransportObserved) -> list[str]:
    if event.kind == TransportKind.MOVED:
        place = f"{event.worker}:{event.incarnation}"
        return [f"{place} handed it over after {event.delivered} tokens"]
    detail = f": {event.detail}" if event.detail else ""
    return [
        f"the gateway saw {event.kind.replace('_', ' ')} on {event.worker}:{event.incarnation} "
        f"after {event.delivered} tokens{detail}"
    ]


def _returned(event: v.ClientReturned) -> list[str]:
    beyond = f" and {_count(event.events, 'event')} after them" if event.events else ""
    return [
        f"its client returned with {_count(event.tokens, 'token')}{beyond}: "
        f"this gateway serves it from now on (resume token {event.claim})"
    ]


def _ended(event: v.RequestEnded) -> list[str]:
    first = f", first token after {event.ttft_us / 1000:.0f} ms" if event.ttft_us >= 0 else ""
    lines = [f"ended: {event.outcome}, HTTP {event.status}, finish {event.finish or '-'}{first}"]
    return [*lines, event.detail] if event.detail else lines


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


def _replica_stopped(event: v.ReplicaStopped) -> list[str]:
    line = f"its gateway {event.replica} stopped: {event.reason}"
    if event.ended or event.moved or event.cut:  # an earlier build counts none
        line += f"; its requests: {event.ended} ended, {event.moved} moved, {event.cut} cut"
    return [line]


def _commanded(event: v.AdminCommanded) -> list[str]:
    value = f" {event.value}" if event.value else ""
    lines = [f"{event.principal}: {event.command} {event.target}{value}"]
    if event.reason:
        lines[0] += f" ({event.reason})"
    if event.deadline_ticks:
        lines[0] += f", deadline {_count(event.deadline_ticks, 'tick')}"
    if event.force:
        lines[0] += ", forced"
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
            unknown = f"capacity or demand is not known, for {_count(event.due_ticks, 'tick')}"
        return [*lines, unknown]
    rate = event.requests_per_ks / 1000
    lines.append(
        f"{_count(event.workers, 'worker')} can compute {rate:.2f} requests/s "
        f"({event.tokens_per_s} tokens/s, {event.sequences} requests at once), of which "
        f"{event.usable_per_ks / 1000:.2f} requests/s count"
    )
    served = f"{event.share / 10:.0f} % are served" if event.demand_per_ks else "all are served"
    lines.append(
        f"{event.demand_per_ks / 1000:.2f} requests/s arrive, each of {event.prompt_tokens} prompt "
        f"tokens to compute and {event.output_tokens} output tokens: {served}"
    )
    direction = "higher" if event.level > event.was else "lower"
    lines.append(f"a {direction} level was due for {_count(event.due_ticks, 'tick')}")
    lines.append(f"{_count(event.wanted, 'worker')} would serve the demand")
    return lines


def spares_lines(event: v.SparesDecided) -> list[str]:
    """A change of the spares of a model, and why."""
    promoted = [name for name in event.was if name not in event.spares]
    chosen = [name for name in event.spares if name not in event.was]
    lines = [f"{event.model}: spares are {', '.join(event.spares) or 'no workers'}"]
    if promoted:
        lines.append(f"{', '.join(promoted)} ceased to be a spare")
    if chosen:
        short = _count(event.short_ticks, "tick")
        lines.append(f"{', '.join(chosen)} became a spare: one was missing for {short}")
    lines.append(
        f"{event.failed} of {_count(event.workers, 'worker')} are not open to requests: "
        f"{_count(event.due, 'spare')} due"
    )
    return lines


def _ready(event: v.EngineReady) -> list[str]:
    inexact = ", ".join(f"{name} ({why})" for name, why in event.inexact)
    at = f"the engine {event.worker}:{event.incarnation} is ready"
    return [f"{at}, not exact: {inexact}" if inexact else at]


def _restored(event: v.RestoreDone) -> list[str]:
    took = f"{event.bytes} bytes in {event.duration_us / 1000:.1f} ms"
    return [f"{event.tokens} tokens were restored from {event.holder}: {took}"]


def _canary(event: v.CanaryReported) -> list[str]:
    engine = f"{event.worker}:{event.incarnation}"
    if event.error:
        return [f"{engine} did not answer canary {event.canary}: {event.error}"]
    how = ("alone" if event.alone else "busy") + (", exact" if event.exact else ", not exact")
    why = ", because its answer before differed" if event.confirms else ""
    tokens = " ".join(map(str, event.tokens))
    return [
        f"{engine} answered canary {event.canary} in {event.took_us / 1000:.1f} ms ({how}){why}",
        f"tokens {tokens}",
    ]


def _canary_values(event: v.CanaryValuesDecided) -> list[str]:
    names = ", ".join(event.witnesses)
    only = ": the class has no other worker" if event.workers == 1 else ""
    return [
        f"right answer to canary {event.canary} for {event.kind}, version {event.version}",
        f"{len(event.witnesses)} of {event.workers} workers agree ({names}){only}",
    ]


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


def _cross_checked(event: v.CrossChecked) -> list[str]:
    engine, took = f"{event.by}:{event.by_incarnation}", f"{event.took_us / 1000:.1f} ms"
    if event.error:
        return [f"no answer of {engine} to compare: {event.error}"]
    if event.differs < 0:
        return [f"{engine} gave the same tokens, in {took}"]
    return [f"{engine} gave another token {event.differs + 1} than the client has, in {took}"]


def _hung(event: v.EngineHung) -> list[str]:
    engine = f"{event.worker}:{event.incarnation}"
    step = "in no step"
    if event.step_age_us:
        expected = f", expected to take {event.expected_us / 1000:.0f} ms" * (
            event.expected_us >= 0
        )
        step = f"in a step for {event.step_age_us / 1e6:.1f} s{expected}"
    used = f", CPU time used {event.cpu_us / 1e6:.1f} s" if event.cpu_us >= 0 else ""
    lines = [
        f"the agent found the engine {engine} hung: no turn of its loop for "
        f"{event.silent_us / 1e6:.1f} s in {event.looks} looks, {step}{used}"
    ]
    if event.stacks:
        lines.append(f"the stacks of its threads are in {event.stacks} on its host")
    return lines


def _reports_dropped(event: v.ReportsDropped) -> list[str]:
    engine = f"{event.worker}:{event.incarnation}"
    what = (
        f"the agent dropped {_count(event.count, 'report')} of the engine {engine}: {event.reason}"
    )
    return [what, "it reads no more of the process that sent them"] if event.muted else [what]


_WORDS: dict[type, Callable[[Any], list[str]]] = {
    v.RequestArrived: _arrived,
    v.RouteDecided: _decided,
    v.TransportObserved: _observed,
    v.RequestEnded: _ended,
    v.RequestHeld: _held,
    v.RequestShed: _shed,
    v.ClientReturned: _returned,
    v.AdminCommanded: _commanded,
    v.StallJudged: _judged,
    v.StreamJudged: _stream_judged,
    v.RequestQueued: lambda e: [f"the engine took attempt {e.attempt}: {e.prompt_tokens} tokens"],
    v.RequestAdmitted: lambda e: [
        f"admitted with {e.blocks} KV blocks, {e.cached_tokens} tokens were cached"
    ],
    v.FirstToken: lambda e: ["prefill done: the model made the first token"],
    v.RequestPreempted: lambda e: ["preempted: it lost its KV blocks and waits"],
    v.EngineFinished: lambda e: [f"the engine finished: {e.reason}, {e.output_tokens} tokens"],
    v.EngineReady: _ready,
    v.EngineDied: lambda e: [f"the engine {e.worker}:{e.incarnation} died ({e.reason})"],
    v.EngineHung: _hung,
    v.CrossCheckDecided: _cross_check,
    v.CrossChecked: _cross_checked,
    v.CanaryReported: _canary,
    v.CanaryValuesDecided: _canary_values,
    v.ReportsDropped: _reports_dropped,
    v.EngineRecovered: lambda e: [
        f"the engine {e.worker}:{e.incarnation} recovered after {e.hung_us / 1e6:.1f} s"
    ],
    v.CheckpointsVoided: lambda e: [
        f"blocks of {_count(len(e.attempts), 'attempt')} are not used: "
        f"{e.worker}:{e.incarnation} computes wrong results"
    ],
    v.HolderChosen: _holders,
    v.RecoveryPlanned: _plan,
    v.MigrationPlanned: _migration,
    v.MigrationAbandoned: lambda e: [f"not migrated from {e.worker}: {e.reason}"],
    v.RestoreStarted: lambda e: [
        f"{e.tokens} tokens to restore from {e.holder}"
        + (f", where {e.lender} has the same prefix" if e.lender else "")
    ],
    v.RestoreDone: _restored,
    v.RestoreFailed: lambda e: [
        f"restored {f'only {e.tokens}' if e.tokens else 'no'} tokens from {e.holder}: {e.reason}; "
        "what its engine does not have is recomputed"
    ],
    v.CheckpointEvicted: lambda e: [f"{e.holder} was short of memory: it keeps {e.tokens} tokens"],
    v.WorkerSuspected: lambda e: [f"{e.worker}:{e.incarnation} is suspected: {e.reason}"],
    v.WorkerCleared: lambda e: [f"{e.worker}:{e.incarnation} is cleared: {e.evidence}"],
    v.HealthDecided: _health,
    v.VerdictsWithheld: lambda e: [
        f"{len(e.workers)} of {e.serving} workers of {e.model} fail at once: no breaker opens"
        if e.workers
        else f"verdicts on workers of {e.model} are no longer withheld"
    ],
    v.DegradationDecided: level_lines,
    v.RolloutDecided: lambda e: [rollout_line(e)],
    v.WorkerLeaving: lambda e: [
        f"the agent of {e.worker} stops: requests leave within {e.within_ms / 1000:g} s"
    ],
    v.FeatureLevelRaised: lambda e: [
        f"feature level {e.level}, was {e.was}: {', '.join(e.replicas)} read it"
        if e.level != e.was
        else f"feature level {e.level}, stated again"
    ],
    v.SegmentSkipped: lambda e: [
        f"segment {e.segment} of {e.stream} is skipped: {e.reason}; the stream is read up to "
        f"segment {e.after}, until another one follows it"
    ],
    codec.UnreadableRecord: lambda e: [f"a record that cannot be read: {e.reason}"],
    v.SparesDecided: spares_lines,
    v.WorkerLost: lambda e: [f"worker {e.worker} is lost: {e.reason}"],
    v.WorkerForgotten: lambda e: [f"worker {e.worker} left long ago and is removed from the state"],
    v.ReplicaLost: lambda e: [f"its gateway {e.replica} is lost"],
    v.ReplicaStopped: _replica_stopped,
}
