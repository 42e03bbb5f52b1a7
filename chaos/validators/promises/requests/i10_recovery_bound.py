"""I10: recovery ends within its bound.

From the log: an attempt that was cut (its connection broke, or its engine died) gets its next first
token, or an honest end, within `bound_ms`. From the clients: no gap in a completed stream is
longer. A stuck stream is found within its recorded bound and `STUCK_MS`, once its engine made enough
steps. Times are those of the segments, so hosts' clocks must agree much better than the bound.
Clocks of one machine do, and a `Log` corrects known jumps. A resumable stream may wait for its
absent client: its recovery begins when the client returns. So it is where the replica that served it was
killed, which breaks its connection: no one waits before the return. A stream that ends as cancelled, that
the leader ends, or that ends with an unknown number of tokens, had no client. Time in the queue of its
next engine does not count while requests wait in the queue of each engine that may get any. What a
fault slows the next engine down by does not count either: up to the first token, and for tokens in doubt
up to the last of these, which no client gets anew. Nor does time in which each worker of its
model that gets requests fails most of them by a fault, one at a time, nor time in which a fault keeps a replica
from reading the log and each engine that it could have read of is dead. Where an agent dropped reports of its
engine, only its silence says that a stream is stuck; the first token of an attempt may be among
reports that were lost, also with the agent: then only its replica says that it gave tokens. While a
fault keeps the log from a replica, it sees no engine steps. Then it cannot know that a stream is stuck
if the engine has further requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relume.chaos.validators.promises.requests.recoveries import Recovery, recoveries
from relume.chaos.validators.records import (
    ClientRecord,
    Course,
    Entry,
    Violation,
    courses,
    events_of,
    of_clients,
)
from relume.chaos.validators.strikes import NOT_SLOWED, Slowed
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import HealthState, RequestOutcome
from relume.policies.liveness.overdue import OverdueConfig
from relume.policies.liveness.stall import StallConfig

PROMISE = "I10"
BOUND_MS = 10_000
"""Stall bound (3 s), waiting for a worker that restarts, and recomputing."""


STUCK_MS = 2000
"""What a stuck stream may be silent for beyond its recorded bound."""
ENOUGH_STEPS = 2 * OverdueConfig().steps
"""A judgement with fewer steps may have waited for them."""

PROBE_TRIPS = 8
"""Ways to an engine and back in two probes, each with a connection and an answer: the first may come too
early."""

EXCLUDED = (HealthState.UNHEALTHY, HealthState.PROBING, HealthState.QUARANTINED)
"""States of a worker that gets few requests or none."""

REPORTS_MS = 1000
"""An agent writes at most that often what it dropped."""

SILENCE_MS = 3000
"""Time without a tick after which the log counts as stopped."""


def _unread_ms(course: Course, dropped: Sequence[Entry]) -> int:
    """How much longer a stream may be stuck because nobody could read what its engine reported."""
    ran_on = {(decision.worker, decision.incarnation) for decision in course.decisions}
    began_ms, ended_ms = course.events[0].at_ms, course.events[-1].at_ms
    unread = any(
        began_ms - REPORTS_MS <= at.at_ms <= ended_ms
        and (at.event.worker, at.event.incarnation) in ran_on
        for at in dropped
    )
    return StallConfig().step_cap_us // 1000 if unread else 0


def _summed(stopped: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Total time of stops per stream."""
    found: dict[str, int] = {}
    for stream, ms in stopped:
        found[stream] = found.get(stream, 0) + ms
    return found


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    bound_ms: int = BOUND_MS,
    stopped: Sequence[tuple[str, int]] = (),
    unserved_ms: int = 0,
    killed: Sequence[tuple[str, int]] = (),
    cut_off: Sequence[tuple[str, int, int]] = (),
    slowed: Slowed = NOT_SLOWED,
) -> list[Violation]:
    """Recoveries that took too long or never ended. `stopped`: streams of stopped replicas, and the
    duration in ms, which extends the bound of their requests. `unserved_ms`: time in which no
    process could reach a worker. `killed`: streams of killed replicas, and the time (wall ms), at
    which the recovery of their requests starts over. `cut_off`: streams whose owners could not write,
    from when to when (wall ms). `slowed`: workers and links that faults slowed down."""
    out = []
    bound_ms += unserved_ms
    still = _summed(stopped)
    patience = _patience(groups, clients, still) if stopped else {}
    silences, unheard = list(_silences(groups)), _unheard(groups, cut_off)
    full, waited = list(_full(groups)), _unseen(groups, slowed)
    spans = dict[str, list[tuple[int, int]]]()
    engineless = _engineless(groups, slowed) if slowed.blind else {}
    by_name = courses(groups)
    for one in recoveries(groups):
        course = by_name[one.request]
        kills = list(_restarts(course, killed, one.back_ms))
        begun_ms, lost_ms = max([one.begun_ms, *kills]), max([one.lost_ms, *kills])
        late = unheard.get(one.resumed_on, ())
        queued, admitted = one.queued_ms
        waits = [(max(since, queued), min(until, admitted)) for since, until in full]
        waits += engineless.get(one.sent_by, ())
        waits += _failing(course, slowed)
        away = [
            span for owner in course.owners if owner not in still
            for span in unheard.get(owner, ())
        ]  # fmt: skip
        slow_ms = _slowed_ms(slowed, one, one.back_ms)
        waited[one.request] = waited.get(one.request, 0) + _slowed_ms(slowed, one, one.again_ms)
        spans.setdefault(one.request, []).extend(
            (max(since, lost_ms), min(until, one.back_ms)) for since, until in waits
        )
        unknown = _covered(
            [*silences, *away, *((max(s, one.sent_ms), until) for s, until in late), *waits],
            begun_ms, one.back_ms,
        )  # fmt: skip
        bound = bound_ms + patience.get(one.request, 0) + unknown + slow_ms
        if one.back_ms < 0:
            text = f"attempt {one.attempt} was cut, and nothing followed"
            out.append(Violation(PROMISE, one.request, text))
        elif one.back_ms - begun_ms > bound:
            took = one.back_ms - begun_ms
            text = f"took {took} ms to recover from {one.kind} on {one.worker}, bound {bound} ms"
            out.append(Violation(PROMISE, one.request, text))
    probes_ms = PROBE_TRIPS * slowed.link_ms
    dropped = [at for at in events_of(groups, "w.") if type(at.event) is v.ReportsDropped]
    for worker, since, until in slowed.cut:  # nor could it answer probes
        unheard.setdefault(worker, []).append((since, until))
    out += _stuck(groups, patience, unserved_ms + probes_ms, silences, unheard)
    for client, found in of_clients(by_name, clients):
        longest = max(client.gaps_ms, default=0.0)
        bound = bound_ms + patience.get(client.request, 0)
        if found is not None:
            bound += waited.get(found.request, 0) + _unread_ms(found, dropped)
            bound += _covered(spans.get(found.request, ()), 0, 1 << 62)
        if client.outcome == RequestOutcome.COMPLETED and longest > bound:
            text = f"its client waited {longest:.0f} ms between tokens, bound {bound} ms"
            out.append(Violation(PROMISE, client.request, text))
    return out


def _failing(course: Course, slowed: Slowed) -> Iterator[tuple[int, int]]:
    """When each worker of its model failed most requests, or got none."""
    model = course.arrived.event.model if course.arrived is not None else ""
    return ((since, until) for of, since, until in slowed.failing if of == model)


def _restarts(course: Course, killed: Sequence[tuple[str, int]], back_ms: int) -> Iterator[int]:
    """When its recovery starts over because a replica that owned it was killed: at the kill, or when the
    client of that one returned, if it did."""
    owned = [at for at in course.events if type(at.event) in (v.RequestArrived, v.ClientReturned)]
    for stream, ms in killed:
        if stream not in course.owners or ms >= back_ms:
            continue
        before = [at.stream for at in owned if at.at_ms <= ms]
        after = [at.at_ms for at in owned if at.at_ms > ms]
        yield min(after[0], back_ms) if before[-1:] == [stream] and after else ms


def _slowed_ms(slowed: Slowed, one: Recovery, until_ms: int) -> int:
    """How much longer its next engine took for it up to then because a fault made it slow."""
    return sum(
        int(_covered([(since, until)], one.sent_ms, until_ms) * (1 - 1 / times))
        for worker, since, until, times in slowed.workers
        if worker == one.resumed_on
    )


def _unseen(groups: Sequence[RevisionGroup], slowed: Slowed) -> dict[str, int]:
    """By request, for how much longer its stuck streams were silent because a fault kept the log from
    their replica. It may have written its judgement late, so each silence lies anywhere after its dispatch;
    and the dispatch too, so the silence is no shorter than it says."""
    sent, found = dict[tuple[str, int], int](), dict[str, int]()
    for at in events_of(groups, "r."):
        event = at.event
        if type(event) is v.RouteDecided:
            sent[event.request, event.attempt] = at.at_ms
        elif type(event) is v.StreamJudged and event.stuck:
            blind = [(since, until) for stream, since, until in slowed.blind if stream == at.stream]
            since_ms = sent.get((event.request, event.attempt), at.at_ms)
            since_ms = min(since_ms, at.at_ms - event.silent_us // 1000)
            unseen = _covered([*slowed.outages, *blind], since_ms, at.at_ms)
            late_ms = max(0, event.silent_us - event.bound_us) // 1000
            found[event.request] = found.get(event.request, 0) + min(unseen, late_ms)
    return found


def _stuck(
    groups: Sequence[RevisionGroup],
    patience: dict[str, int],
    more_ms: int,
    silences: Sequence[tuple[int, int]],
    unheard: dict[str, list[tuple[int, int]]],
) -> Iterator[Violation]:
    """Stuck streams that were found too late. Times in which the log stood still, or their worker
    could not write or answer, do not count."""
    for at in events_of(groups, "r."):
        event = at.event
        if type(event) is not v.StreamJudged or event.steps < ENOUGH_STEPS:
            continue
        silent_ms = event.silent_us // 1000
        away = [*silences, *unheard.get(event.worker, ())]
        bound = event.bound_us // 1000 + STUCK_MS + more_ms + patience.get(event.request, 0)
        bound += _covered(away, at.at_ms - silent_ms, at.at_ms)
        if silent_ms > bound:
            text = f"was stuck on {event.worker} for {silent_ms} ms, bound {bound} ms"
            yield Violation(PROMISE, event.request, text)


def _covered(times: Sequence[tuple[int, int]], begun_ms: int, back_ms: int) -> int:
    """How much of the time between lies in `times`, which may overlap."""
    covered, reached = 0, begun_ms
    for since, until in sorted(times):
        since, until = max(since, reached), min(until, back_ms)
        if until > since:
            covered, reached = covered + until - since, until
    return covered


def _silences(groups: Sequence[RevisionGroup]) -> Iterator[tuple[int, int]]:
    """Times in which no process could write, according to ticks: events of that time were written
    after it. Clients' records are more exact."""
    last = 0
    for at in events_of(groups, "fleet"):
        if type(at.event) is v.Tick:
            if last and at.at_ms - last > SILENCE_MS:
                yield last, at.at_ms
            last = at.at_ms


def _unheard(
    groups: Sequence[RevisionGroup], cut_off: Sequence[tuple[str, int, int]]
) -> dict[str, list[tuple[int, int]]]:
    """By worker, or stream of a replica, the times in which it could not write, according to lost leases
    and to what is known of faults: its events of that time have the time of its next segment."""
    written: dict[str, list[int]] = {stream: [] for stream, _, _ in cut_off}
    found: dict[str, list[tuple[int, int]]] = {}
    last: dict[str, int] = {}
    lost: set[str] = set()
    for at in events_of(groups):
        if type(at.event) is v.WorkerLost:
            lost.add(at.event.worker)
        elif at.stream.startswith("w."):
            worker = at.stream.removeprefix("w.")
            if worker in lost:
                lost.discard(worker)
                found.setdefault(worker, []).append((last.get(worker, at.at_ms), at.at_ms))
            last[worker] = at.at_ms
        if at.stream in written:
            written[at.stream].append(at.at_ms)
    for stream, since, until in cut_off:
        before = max((ms for ms in written[stream] if ms <= since), default=since)
        after = min((ms for ms in written[stream] if ms >= until), default=until)
        found.setdefault(stream.removeprefix("w."), []).append((before, after))
    return found


def _full(groups: Sequence[RevisionGroup]) -> Iterator[tuple[int, int]]:
    """Times in which requests waited in the queue of each engine that might get any."""
    waiting: dict[str, int] = {}
    excluded: set[str] = set()
    since = 0
    for at in events_of(groups):
        event = at.event
        if type(event) is v.EngineReady:
            waiting[event.worker] = 0
        elif type(event) is v.EngineStep:
            if (worker := at.stream.removeprefix("w.")) in waiting:
                waiting[worker] = event.waiting
        elif type(event) is v.EngineDied or type(event) is v.WorkerLost:
            waiting.pop(event.worker, None)
        elif type(event) is v.HealthDecided:
            (excluded.add if event.state in EXCLUDED else excluded.discard)(event.worker)
        else:
            continue
        open_queues = [n for worker, n in waiting.items() if worker not in excluded]
        is_full = bool(open_queues) and all(open_queues)
        if is_full and not since:
            since = at.at_ms
        elif since and not is_full:
            yield since, at.at_ms
            since = 0
    if since:
        yield since, 1 << 62


def _engineless(
    groups: Sequence[RevisionGroup], slowed: Slowed
) -> dict[str, list[tuple[int, int]]]:
    """By stream of a replica, the times in which it could not read the log, and each engine that was
    ready before was dead: of the next ones only the log tells."""
    lives = slowed.lives or _lives(groups)
    found: dict[str, list[tuple[int, int]]] = {}
    for stream, since, until in slowed.blind:
        dead_ms = max((died for began, died in lives if began < since), default=since)
        if (dead_ms := max(dead_ms, since)) < until:
            found.setdefault(stream, []).append((dead_ms, until))
    return found


def _lives(groups: Sequence[RevisionGroup]) -> list[tuple[int, int]]:
    """From when to when each engine was ready, by the log. A worker that was declared lost may serve
    on; an agent that stood still wrote late that its engine had died."""
    lives, ready = list[tuple[int, int]](), dict[str, int]()
    for at in events_of(groups):
        event = at.event
        if type(event) is v.EngineReady:
            ready[event.worker] = at.at_ms
        elif type(event) in (v.EngineDied, v.EngineStarted) and event.worker in ready:
            lives.append((ready.pop(event.worker), at.at_ms))
    return lives + [(since_ms, 1 << 62) for since_ms in ready.values()]


def _patience(
    groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord], stopped: dict[str, int]
) -> dict[str, int]:
    """Time for which a request's replica stood still, by the log's id and by the client's."""
    found: dict[str, int] = {}
    for client, course in of_clients(courses(groups), clients):
        if course is not None:
            longest = max((stopped.get(owner, 0) for owner in course.owners), default=0)
            found[client.request] = found[course.request] = longest
    return found
