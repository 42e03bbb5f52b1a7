"""A request's chain of causes (`why`) in plain words: what happened. What was decided: `decision_words`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from relume.controlplane.replay import decision_words
from relume.controlplane.replay.decision_words import counted
from relume.controlplane.replay.why import Step, Why
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.vocabulary.enums import RouteCause, TransportKind
from relume.events.wire.prefix import HASH_BYTES

JOURNALLED = "known only from the worker's journal: the gateway died before it recorded this"


def lines_of(found: Why) -> Iterator[str]:
    """The lines of the chain, for a terminal."""
    yield headline(found)
    yield ""
    begun_ms = found.steps[0].entry.at_ms if found.steps else 0
    for step in found.steps:
        first, *rest = words(step)
        place = f"{step.entry.stream}:{step.entry.position}"
        yield f"{_clock(step.entry.at_ms, begun_ms):>10}  {place:<12} {first}"
        for line in (*rest, *measured(found, step)):
            yield f"{'':10}  {'':12}   {line}"


def measured(found: Why, step: Step) -> Iterator[str]:
    """What came of a dispatch: when its first token existed, how long the wait was that it ended."""
    event = step.event
    if type(event) is not v.RouteDecided or not event.worker:
        return
    if event.attempt in found.first_tokens_us:
        yield f"measured TTFT: {found.first_tokens_us[event.attempt] / 1000:.1f} ms"
    if event.cause == RouteCause.WAIT_OVER and found.waited_us >= 0:
        yield f"time in the admission queue: {found.waited_us / 1000:.1f} ms"


def headline(found: Why) -> str:
    """The result of the request, in one line."""
    name = found.request
    if found.arrived is not None and found.arrived.client_id:
        name += f" (client's id {found.arrived.client_id})"
    ended = found.ended
    if ended is None:
        tried = len([d for d in found.decisions if d.worker])
        return f"{name}: no end in this log, {counted(tried, 'attempt')} so far"
    gap = f", longest gap {ended.longest_gap_us / 1000:.0f} ms" if ended.longest_gap_us >= 0 else ""
    tokens = f", {ended.tokens} tokens" if ended.tokens >= 0 else ""
    status = f" (HTTP {ended.status})" if ended.status not in (0, 200) else ""
    return f"{name}: {ended.outcome}{status}{tokens}, {counted(ended.attempts, 'attempt')}{gap}"


def words(step: Step) -> list[str]:
    """One link: what happened, then details line by line."""
    render = _WORDS.get(type(step.event))
    lines = render(step.event) if render is not None else [codec.tag_of(step.event)]
    return [*lines, JOURNALLED] if step.journalled else lines


def brief(event: Any) -> str:
    """Any event of the log, or change in an engine step, in one line."""
    if type(event) is v.RecoveryPlanned and len(event.choices) > 1:
        ways = [c.options[c.chosen].kind if c.chosen >= 0 else "no worker" for c in event.choices]
        counts = (f"{ways.count(kind)} to {kind}" for kind in ("restore", "recompute"))
        left = f", {ways.count('no worker')} that no worker can take" if "no worker" in ways else ""
        return (
            f"{counted(len(ways), 'request')} of {event.worker}:{event.incarnation} planned "
            f"together by {event.policy}: {', '.join(counts)}{left}"
        )
    if type(event) is v.MigrationPlanned and len(event.choices) > 1:
        moved = sum(choice.chosen >= 0 for choice in event.choices)
        return (
            f"{moved} of {counted(len(event.choices), 'request')} on {event.worker}:"
            f"{event.incarnation} to migrate because of {event.cause}"
        )
    if type(event) is v.PrefixBlocksChanged:
        gained, lost = (len(data) // HASH_BYTES for data in (event.stored, event.removed))
        emptied = "emptied, " if event.reset else ""
        return f"prefix cache: {emptied}{gained} prefixes added, {lost} removed"
    if type(event) in _WORDS:
        return _WORDS[type(event)](event)[0]
    if type(event) is v.EngineStep:
        changed = f", {counted(len(event.changes), 'change')}" if event.changes else ""
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
    beyond = f" and {counted(event.events, 'event')} after them" if event.events else ""
    return [
        f"its client returned with {counted(event.tokens, 'token')}{beyond}: "
        f"this gateway serves it from now on (resume token {event.claim})"
    ]


def _ended(event: v.RequestEnded) -> list[str]:
    first = f", first token after {event.ttft_us / 1000:.0f} ms" if event.ttft_us >= 0 else ""
    lines = [f"ended: {event.outcome}, HTTP {event.status}, finish {event.finish or '-'}{first}"]
    return [*lines, event.detail] if event.detail else lines


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
        lines[0] += f", deadline {counted(event.deadline_ticks, 'tick')}"
    if event.force:
        lines[0] += ", forced"
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


def _weights_digested(event: v.WeightsDigested) -> list[str]:
    files = f"the model files of {event.worker}:{event.incarnation}"
    if event.error:
        return [f"{files} have no digest: {event.error}"]
    how = "read" if event.reread else "partly known before"
    return [f"{files} have digest {event.digest} ({how}, {event.took_ms / 1000:.1f} s)"]


def _weights_loading(event: v.WeightsLoading) -> list[str]:
    read, size = event.read_bytes / 2**20, event.bytes / 2**20
    return [
        f"{event.worker}:{event.incarnation} read {read:.1f} of {size:.1f} MiB of its model's files"
    ]


def _weights_loaded(event: v.WeightsLoaded) -> list[str]:
    weights = f"{event.worker}:{event.incarnation} loaded {event.bytes / 2**20:.1f} MiB of weights"
    where = f"{event.read_bytes / 2**20:.1f} MiB from files" if event.read_bytes else "from memory"
    lines = [f"{weights}, {where}, in {event.took_ms} ms"]
    return [*lines, f"they do not outlive the engine: {event.why}"] if event.why else lines


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
        f"the agent dropped {counted(event.count, 'report')} of the engine {engine}: {event.reason}"
    )
    return [what, "it reads no more of the process that sent them"] if event.muted else [what]


_WORDS: dict[type, Callable[[Any], list[str]]] = {
    **decision_words.WORDS,
    v.RequestArrived: _arrived,
    v.TransportObserved: _observed,
    v.RequestEnded: _ended,
    v.ClientReturned: _returned,
    v.AdminCommanded: _commanded,
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
    v.CrossChecked: _cross_checked,
    v.CanaryReported: _canary,
    v.WeightsReadStarted: lambda e: [
        f"the agent of {e.worker} reads its model files, {e.size_bytes / 2**30:.1f} GiB"
    ],
    v.WeightsDigested: _weights_digested,
    v.WeightsLoaded: _weights_loaded,
    v.WeightsLoading: _weights_loading,
    v.ReportsDropped: _reports_dropped,
    v.EngineRecovered: lambda e: [
        f"the engine {e.worker}:{e.incarnation} recovered after {e.hung_us / 1e6:.1f} s"
    ],
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
    v.WorkerLeaving: lambda e: [
        f"the agent of {e.worker} stops: requests leave within {e.within_ms / 1000:g} s"
    ],
    v.SegmentSkipped: lambda e: [
        f"segment {e.segment} of {e.stream} is skipped: {e.reason}; the stream is read up to "
        f"segment {e.after}, until another one follows it"
    ],
    codec.UnreadableRecord: lambda e: [f"a record that cannot be read: {e.reason}"],
    v.WorkerLost: lambda e: [f"worker {e.worker} is lost: {e.reason}"],
    v.WorkerForgotten: lambda e: [f"worker {e.worker} left long ago and is removed from the state"],
    v.ReplicaLost: lambda e: [f"its gateway {e.replica} is lost"],
    v.ReplicaStopped: _replica_stopped,
}
