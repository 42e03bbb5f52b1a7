"""A request's chain of causes (`why`) in plain words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from relume.controlplane.replay.why import Step, Why
from relume.events import codec
from relume.events import vocabulary as v
from relume.events.prefix import HASH_BYTES


def told(found: Why) -> Iterator[str]:
    """The lines of the story, for a terminal."""
    yield headline(found)
    yield ""
    begun_ms = found.steps[0].at_ms if found.steps else 0
    for step in found.steps:
        first, *rest = words(step)
        place = f"{step.stream}:{step.position}"
        yield f"{_clock(step.at_ms, begun_ms):>10}  {place:<12} {first}"
        for line in (*rest, *_came(found, step), *_waited(found, step)):
            yield f"{'':10}  {'':12}   {line}"


def _came(found: Why, step: Step) -> Iterator[str]:
    """When the first token of a dispatch was there."""
    event = step.event
    if type(event) is v.RouteDecided and event.worker and event.attempt in found.first_tokens_us:
        yield f"it came after {found.first_tokens_us[event.attempt] / 1000:.1f} ms"


def _waited(found: Why, step: Step) -> Iterator[str]:
    """How long the wait was that a dispatch ended."""
    event = step.event
    if type(event) is v.RouteDecided and event.cause == "wait_over" and event.worker:
        if found.waited_us >= 0:
            yield f"it had waited {found.waited_us / 1000:.1f} ms in the room"


def headline(found: Why) -> str:
    """What became of it, in one line."""
    name = found.request
    if found.arrived is not None and found.arrived.client_id:
        name += f" (the client calls it {found.arrived.client_id})"
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
    tell = _WORDS.get(type(step.event))
    lines = tell(step.event) if tell is not None else [codec.tag_of(step.event)]
    if step.journalled:
        lines.append(
            "known from the journal alone: its gateway died before it could write this down"
        )
    return lines


def brief(event: Any) -> str:
    """Any event of the log, or change in an engine step, in one line."""
    if type(event) is v.RecoveryPlanned and len(event.choices) > 1:
        ways = [c.options[c.chosen].kind if c.chosen >= 0 else "nobody" for c in event.choices]
        told = (f"{ways.count(kind)} to {kind}" for kind in ("restore", "recompute"))
        left = f", {ways.count('nobody')} that nobody can take" if "nobody" in ways else ""
        return (
            f"{_count(len(ways), 'request')} of {event.worker}:{event.incarnation} planned "
            f"together by {event.policy}: {', '.join(told)}{left}"
        )
    if type(event) is v.MigrationPlanned and len(event.choices) > 1:
        moved = sum(choice.chosen >= 0 for choice in event.choices)
        return (
            f"{moved} of {_count(len(event.choices), 'request')} on {event.worker}:"
            f"{event.incarnation} to move because of {event.cause}"
        )
    if type(event) is v.PrefixBlocksChanged:
        gained, lost = (len(data) // HASH_BYTES for data in (event.stored, event.removed))
        anew = "empty, " if event.reset else ""
        return f"prefix cache: {anew}{gained} prefixes more, {lost} fewer"
    if type(event) in _WORDS:
        return _WORDS[type(event)](event)[0]
    if type(event) is v.EngineStep:
        changed = f", {_count(len(event.changes), 'change')}" if event.changes else ""
        return (
            f"step {event.step} of {event.duration_us / 1000:.1f} ms: {event.batch} decoded, "
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
                "revision": s.revision,
                "stream": s.stream,
                "position": s.position,
                "at_ms": s.at_ms,
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
        f"{about}{event.prompt_tokens} prompt tokens, at most {event.max_tokens} to make"
    ]
    reason = f": {event.reason}" if event.reason else ""
    lines.append(f"can survive a cut: {event.verdict}{reason}")
    return lines


def _decided(event: v.RouteDecided) -> list[str]:
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    if event.worker:
        kept = f", {event.delivered} tokens are with the client" if event.delivered else ""
        lines = [
            f"attempt {event.attempt} sent to {event.worker}:{event.incarnation} "
            f"because of {event.cause.replace('_', ' ')} (mode {event.mode}{kept})"
        ]
    else:
        lines = [f"nobody could take it (cause {event.cause.replace('_', ' ')})"]
    lines.append(f"{event.decision} by {event.policy} on {basis}")
    for candidate in event.candidates:
        chosen = (candidate.worker, candidate.incarnation) == (event.worker, event.incarnation)
        lines.append(
            f"{'->' if chosen else '  '} {candidate.worker}:{candidate.incarnation} "
            f"costs {candidate.cost} ({candidate.prefill_tokens} prompt tokens to compute, "
            f"{_count(candidate.requests, 'request')}{_expected(candidate)})"
            + (f", not taken: {candidate.excluded}" if candidate.excluded else "")
        )
    for why, count in event.others:
        told = f"not taken: {why}" if why else "could take it and cost no less"
        lines.append(f"   and {_count(count, 'other')}, {told}")
    if event.ttft_us >= 0:
        lines.append(f"its first token was expected after {event.ttft_us / 1000:.1f} ms")
    if event.refused:
        lines.append(f"it was refused: {event.refused}")
    if event.avoid:
        lines.append(f"it failed before on {', '.join(event.avoid)}")
    return lines


def _expected(candidate: v.Candidate) -> str:
    """What policies that predict time add of a worker."""
    if candidate.ttft_us < 0:
        return ""
    held = f", {candidate.hit_tokens} of this prompt held" if candidate.hit_tokens else ""
    return (
        f", {candidate.batch} of them decode {candidate.context_tokens} tokens{held}, "
        f"{candidate.kv_free} blocks left; first token expected after "
        f"{candidate.ttft_us / 1000:.1f} ms, then one each {candidate.tpot_us / 1000:.1f} ms"
    )


_HELD = {
    "saturated": "no worker has use for one more at present",
    "no worker": "no worker is open",
    "behind": "others wait already",
}


def _held(event: v.RequestHeld) -> list[str]:
    lines = [f"held back: {_HELD.get(event.cause, event.cause)}", *_in_room(event)]
    if event.deadline_us:
        lines.append(f"its first token is due {(event.deadline_us - event.at_us) / 1000:.0f} ms on")
    if event.evicted:
        lines.append(f"{', '.join(event.evicted)} had to go for it")
    return lines


def _shed(event: v.RequestShed) -> list[str]:
    waited = f" after {event.waited_us / 1000:.1f} ms" if event.waited_us >= 0 else " on arrival"
    lines = [f"refused{waited}: {event.reason}", *_in_room(event)]
    if event.deadline_us:
        due_ms = (event.deadline_us - event.at_us) / 1000
        lines.append(f"its first token was due {due_ms:.0f} ms from then")
    if event.behalf:
        lines.append(f"{event.behalf} has its place")
    lines.append(f"its client was told to come back after {event.retry_after_s} s")
    return lines


def _in_room(event: v.RequestHeld | v.RequestShed) -> list[str]:
    """What it was and what was before it, when it came."""
    whose = f" of tenant {event.tenant}" if event.tenant else ""
    expected = ""
    if event.predicted_us >= 0:
        expected = f", expected to take {event.predicted_us / 1000:.1f} ms"
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    return [
        f"{event.tier}{whose}, charged {event.tokens} tokens, {event.size} bytes",
        f"{_count(event.ahead_requests, 'request')} of {event.ahead_tokens} tokens ahead"
        f"{expected}; {event.depth} in the room",
        f"{event.decision} on {basis}",
    ]


def _observed(event: v.TransportObserved) -> list[str]:
    if event.kind == "moved":
        place = f"{event.worker}:{event.incarnation}"
        return [f"{place} handed it over after {event.delivered} tokens"]
    detail = f": {event.detail}" if event.detail else ""
    return [
        f"the gateway saw {event.kind.replace('_', ' ')} on {event.worker}:{event.incarnation} "
        f"after {event.delivered} tokens{detail}"
    ]


def _returned(event: v.ClientReturned) -> list[str]:
    beyond = f" and {_count(event.events, 'event')} behind them" if event.events else ""
    return [
        f"its client came back with {_count(event.tokens, 'token')}{beyond}: "
        f"served here from now on ({event.claim})"
    ]


def _ended(event: v.RequestEnded) -> list[str]:
    first = f", first token after {event.ttft_us / 1000:.0f} ms" if event.ttft_us >= 0 else ""
    lines = [f"ended: {event.outcome}, HTTP {event.status}, finish {event.finish or '-'}{first}"]
    return [*lines, event.detail] if event.detail else lines


def _judged(event: v.StallJudged) -> list[str]:
    answer = "hung" if event.hung else "not hung"
    return [
        f"{event.worker}:{event.incarnation} was silent for {event.silent_us / 1000:.0f} ms "
        f"(allowed {event.bound_us / 1000:.0f} ms), its probe {event.probe}: judged {answer}"
    ]


def _holders(event: v.HolderChosen) -> list[str]:
    cause = event.cause.replace("_", " ")
    size = f"{event.expected_blocks} blocks, {event.expected_bytes} bytes expected"
    if event.holders:
        first = f"its checkpoint goes to {', '.join(event.holders)} because of {cause} ({size})"
    else:
        first = f"nobody holds its checkpoint: {event.reason} (cause {cause}, {size})"
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    lines = [first, f"{event.decision} by {event.policy} on {basis}"]
    for candidate in event.candidates:
        lines.append(
            f"{'->' if candidate.worker in event.holders else '  '} {candidate.worker} "
            f"has a recovery load of {candidate.load}, {candidate.free_bytes} bytes free"
            + (f", not taken: {candidate.excluded}" if candidate.excluded else "")
        )
    return lines


def _plan(event: v.RecoveryPlanned) -> list[str]:
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    lines = [f"planned with all that {event.worker}:{event.incarnation} was running"]
    for choice in event.choices:
        if choice.chosen < 0:
            lines[0] += ": nobody could take it"
        else:
            option = choice.options[choice.chosen]
            how = f"computed again on {option.worker}"
            if option.kind == "restore":
                how = f"restored on {option.worker} from {option.holder}"
            lines[0] += f": {choice.tokens} tokens to be {how} in {option.done_us / 1000:.1f} ms"
        lines.append(f"{event.decision} by {event.policy} on {basis}")
        for at, option in enumerate(choice.options):
            lines.append(f"{'->' if at == choice.chosen else '  '} {_option(option)}")
    return lines


def _migration(event: v.MigrationPlanned) -> list[str]:
    basis = f"basis ({event.basis.revision}, {event.basis.position})"
    why = "drains" if event.cause == "drain" else "has had more to do than others for long"
    lines = [f"{event.worker}:{event.incarnation} {why}"]
    for choice in event.choices:
        if choice.chosen < 0:
            lines[0] += f": it stays there ({choice.reason})"
        else:
            option = choice.options[choice.chosen]
            how = f"restored from {option.holder}" if option.holder else "computed again"
            lines[0] += f": {choice.tokens} tokens are to move to {option.worker}, {how}"
        lines.append(f"{event.decision} by {event.cause} on {basis}")
        ends = f"{choice.stay_us / 1000:.1f} ms here, {choice.go_us / 1000:.1f} ms there"
        lines.append(f"about {choice.left} tokens to come: {ends}")
        for at, option in enumerate(choice.options):
            lines.append(f"{'->' if at == choice.chosen else '  '} {_option(option)}")
    return lines


def _option(option: v.RecoveryOption) -> str:
    what = f"compute all on {option.worker}"
    if option.kind == "restore":
        what = f"restore {option.restored} tokens of {option.holder} on {option.worker}"
    parts = (("move", option.move_us), ("wait", option.wait_us), ("compute", option.compute_us))
    took = ", ".join(f"{name} {us / 1000:.1f}" for name, us in parts if us)
    refused = f", not possible: {option.excluded}" if option.excluded else ""
    return f"{what}: {option.done_us / 1000:.1f} ms ({took}){refused}"


def _ready(event: v.EngineReady) -> list[str]:
    not_so = ", ".join(f"{name} ({why})" for name, why in event.inexact)
    at = f"the engine {event.worker}:{event.incarnation} is ready"
    return [f"{at}, not exact: {not_so}" if not_so else at]


def _restored(event: v.RestoreDone) -> list[str]:
    took = f"{event.bytes} bytes in {event.duration_us / 1000:.1f} ms"
    return [f"{event.tokens} tokens were restored from {event.holder}: {took}"]


_WORDS: dict[type, Callable[[Any], list[str]]] = {
    v.RequestArrived: _arrived,
    v.RouteDecided: _decided,
    v.TransportObserved: _observed,
    v.RequestEnded: _ended,
    v.RequestHeld: _held,
    v.RequestShed: _shed,
    v.ClientReturned: _returned,
    v.StallJudged: _judged,
    v.RequestQueued: lambda e: [f"the engine took attempt {e.attempt}: {e.prompt_tokens} tokens"],
    v.RequestAdmitted: lambda e: [
        f"admitted with {e.blocks} KV blocks, {e.cached_tokens} tokens were cached"
    ],
    v.FirstToken: lambda e: ["prefill over: the first token left the model"],
    v.RequestPreempted: lambda e: ["preempted: it lost its blocks and waits"],
    v.EngineFinished: lambda e: [f"the engine finished: {e.reason}, {e.output_tokens} tokens"],
    v.EngineReady: _ready,
    v.EngineDied: lambda e: [f"the engine {e.worker}:{e.incarnation} died ({e.reason})"],
    v.HolderChosen: _holders,
    v.RecoveryPlanned: _plan,
    v.MigrationPlanned: _migration,
    v.MigrationAbandoned: lambda e: [f"it was not moved from {e.worker}: {e.reason}"],
    v.RestoreStarted: lambda e: [
        f"{e.tokens} tokens are fetched from {e.holder}"
        + (f", where {e.lender} has the same prefix" if e.lender else "")
    ],
    v.RestoreDone: _restored,
    v.RestoreFailed: lambda e: [
        f"only {e.tokens} tokens could be had from {e.holder}: {e.reason}; the rest is computed"
    ],
    v.CheckpointEvicted: lambda e: [f"{e.holder} needed the room: it keeps {e.tokens} tokens"],
    v.WorkerSuspected: lambda e: [f"{e.worker}:{e.incarnation} is suspected: {e.reason}"],
    v.WorkerCleared: lambda e: [f"{e.worker}:{e.incarnation} is cleared: {e.evidence}"],
    v.WorkerLost: lambda e: [f"worker {e.worker} is lost: {e.reason}"],
    v.WorkerForgotten: lambda e: [f"worker {e.worker} left long ago and is forgotten"],
    v.ReplicaLost: lambda e: [f"its gateway {e.replica} is lost"],
    v.ReplicaStopped: lambda e: [f"its gateway {e.replica} stopped: {e.reason}"],
}
