"""What is known of a run beside its log and its clients: which faults struck what, for how long no
worker could serve, and which settings applied. Validators excuse by these facts.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from relume.chaos.outcome import FiredFault, Outcome
from relume.chaos.runner.strikes import span_ms, stops_log, strikes_of
from relume.chaos.scenario.language import Disorder
from relume.chaos.sim.gateway.request_body import may_keep
from relume.chaos.validators import RecordedFacts
from relume.chaos.validators.corrupt_engines import CorruptSince
from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import Log, events_of
from relume.chaos.validators.service_limits import limits_of
from relume.chaos.validators.strikes import DEATHS_OF_REPLICAS, WRONG_WEIGHTS, Slowed, Strike
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.vocabulary.enums import EffectKind, HealthState

MS = 1_000_000
MOST_FAIL = 0.5
"""Share of its requests that a worker fails from which on a breaker that opens stays open."""


def facts_of(run: Outcome, log: Log) -> RecordedFacts:
    """What validators get of a run beside its log and its clients."""
    given, strikes = run.scenario.fleet.checkpoint_bytes, strikes_of(run)
    return RecordedFacts(
        given_bytes=given or None,
        stopped=[
            (f"r.{name}", strike.until_ms - strike.since_ms)
            for name, strike in _struck(strikes, ("leader-stop",))
        ],
        killed=[
            (f"r.{name}", strike.since_ms) for name, strike in _struck(strikes, DEATHS_OF_REPLICAS)
        ],
        unserved_ms=_unserved_ms(run, log),
        shared=_shared(run),
        landed=run.landed,
        commands=run.commands,
        corrupt=[
            CorruptSince(name, strike.since_ms, strike.incarnations.get(name, 0))
            for name, strike in _struck(strikes, WRONG_WEIGHTS)
        ],
        unkept=_unkept(run),
        truth=run.truth,
        began_ms=run.began_ms,
        away={name for _, _, name in _away(run)},
        cut_off=_cut_off(run) if run.kind == "sim" else None,
        strikes=strikes,
        limits=limits_of(run.scenario.fleet.settings_of("waiting")),
        late_ms=_late(run.scenario.fleet.disorder),
        report_ms=_report_ms(run),
        slowed=Slowed(
            workers=tuple(_slow_workers(run)),
            link_ms=_link_ms(run),
            cut=tuple(_cut_workers(run)),
            blind=tuple(_blind_replicas(run)),
            outages=tuple(_outages(run)),
            lives=tuple(_lives(run)),
            failing=tuple(_failing(run, log)),
        ),
    )


def _link_ms(run: Outcome) -> int:
    """The most that a fault delayed messages between engines and gateways by."""
    fired = {fired.name for fired in run.fired if fired.what == "link-slow"}
    slow = (p for p in run.schedule.faults if p.name in fired and p.peer == "gateway")
    return max((int(planned.amount or 0) for planned in slow), default=0)


def _slow_workers(run: Outcome) -> Iterator[tuple[str, int, int, float]]:
    """Workers that a fault made slow, from when to when (wall ms), and by which factor."""
    amounts = {planned.name: planned.amount or 1.0 for planned in run.schedule.faults}
    for fired in run.fired:
        if fired.what in ("worker-slow", "cpu-limit"):
            amount = amounts[fired.name]
            times = 1 / amount if fired.what == "cpu-limit" else amount
            for name in fired.target.split(","):
                yield name, *span_ms(run, fired), times


def _cut_workers(run: Outcome) -> Iterator[tuple[str, int, int]]:
    """Workers that a fault cut from the gateways, from when to when (wall ms)."""
    for fired in run.fired:
        if _cut_from(run, fired) == "gateway":
            for name in fired.target.split(","):
                yield name, *span_ms(run, fired)


def _blind_replicas(run: Outcome) -> Iterator[tuple[str, int, int]]:
    """Streams of replicas that could not read the log, from when to when (wall ms). Events still reach
    one whose calls are lost, until the log is silent and it compares its watch with a read."""
    silences = [(since - EtcdConfig().silence_ms, until) for since, until in _outages(run)]
    for fired in run.fired:
        since_ms, until_ms = span_ms(run, fired)
        is_blind = fired.what in _CUTS_OF_REPLICAS and (
            fired.what != _CALLS_LOST
            or any(since <= until_ms and since_ms <= until for since, until in silences)
        )
        if is_blind:
            yield from ((f"r.{name}", since_ms, until_ms) for name in fired.target.split(","))


def _lives(run: Outcome) -> Iterator[tuple[int, int]]:
    """From when to when (wall ms) each engine of a simulated run served."""
    truth = run.truth or GroundTruth()
    for changes in truth.serving.values():
        for (at_ns, serves), (until_ns, _) in itertools.pairwise([*changes, (1 << 62, False)]):
            if serves:
                since_ms, until_ms = (
                    run.began_ms + (ns - truth.began_ns) // 1_000_000 for ns in (at_ns, until_ns)
                )
                yield since_ms, until_ms


def _outages(run: Outcome) -> Iterator[tuple[int, int]]:
    """From when to when (wall ms) nothing could be written into the log. Slow disks only delay it."""
    for fired in run.fired:
        if stops_log(run, fired) and fired.what != "disk-slow":
            yield span_ms(run, fired)


def _cut_from(run: Outcome, fired: FiredFault) -> str:
    """What the fault cut its targets from; empty if it is no cut."""
    if fired.what == "cut-from-half":
        return "gateway"
    if fired.what not in ("cut", "cut-one-way"):
        return ""
    return next(p.peer or "" for p in run.schedule.faults if p.name == fired.name)


def _late(disorder: Disorder) -> dict[str, int]:
    """By stream, how late its writer's records come at most (see `Disorder`)."""
    late_ms = 2 * disorder.late_writer_ms
    return {f"{kind}.{disorder.late_writer}": late_ms for kind in "rw"} if late_ms else {}


def _report_ms(run: Outcome) -> dict[str, int]:
    """By worker, how late its engine's reports come into the log at most (see `Disorder`)."""
    disorder = run.scenario.fleet.disorder
    late_ms = _late(disorder)
    return {
        name: disorder.report_delay_ms + late_ms.get(f"w.{name}", 0)
        for name in run.schedule.workers
    }


def _struck(strikes: Iterable[Strike], what: Collection[str]) -> Iterator[tuple[str, Strike]]:
    """Whom faults of these kinds struck."""
    for strike in strikes:
        if strike.what in what:
            for name in sorted(strike.targets):
                yield name, strike


_DEATHS_OF_AGENTS = ("agent-kill", "agent-spool-torn", "agent-spool-corrupt")
_OF_AGENTS = (*_DEATHS_OF_AGENTS, "agent-stop", "cpu-limit", "segment-damaged")
_OF_LINKS = ("cut", "cut-one-way", "link-slow")
_CALLS_LOST = "replica-calls-lost"
_CUTS_OF_REPLICAS = ("replica-cut", "replica-answers-lost", _CALLS_LOST)
_OF_REPLICAS = ("leader-stop", *DEATHS_OF_REPLICAS, *_CUTS_OF_REPLICAS)
_LASTING = frozenset((*_OF_AGENTS, *_OF_LINKS, "leader-stop", *_CUTS_OF_REPLICAS)).difference(
    _DEATHS_OF_AGENTS
)


def _cut_off(run: Outcome) -> list[tuple[str, int, int]]:
    """Streams whose owners a fault ended, stopped, slowed down or cut from etcd, and from when to
    when, ms."""
    peers = {planned.name: planned.peer for planned in run.schedule.faults}
    found = []
    for fired in run.fired:
        targets = fired.target.split(",")
        streams = [
            f"w.{name}" for name, domain in run.schedule.workers.items() if domain in targets
        ]
        if fired.what in _OF_AGENTS or (
            fired.what in _OF_LINKS and peers.get(fired.name) == "etcd"
        ):
            streams = [f"w.{name}" for name in targets]
        elif fired.what in _OF_REPLICAS:
            streams = [f"r.{name}" for name in targets]
        elif fired.what != "domain-loss":
            continue
        since_ms, until_ms = span_ms(run, fired, fired.what in _LASTING)
        found += [(stream, since_ms, until_ms) for stream in streams]
    return found


def _shared(run: Outcome) -> dict[str, int]:
    """Per client request, the number of tokens of its prefix shared with others."""
    planned = {r.name: len(r.prefix) * r.prefix_block for r in run.schedule.requests if r.prefix}
    return {
        history.record.request: planned[history.request]
        for history in run.histories
        if history.request in planned
    }


def _unkept(run: Outcome) -> set[str]:
    """Client requests whose prompts may not be kept. Live clients let all be."""
    if run.kind != "sim":
        return set()
    return {h.record.request for h in run.histories if not may_keep(h.request)}


RELOAD_NS = 5_000_000_000
"""Time after its death in which an engine need not be back, whatever restarts it."""


def _unserved_ms(run: Outcome, log: Log) -> int:
    """Total time in which no worker of some model could get requests."""
    unserved = _unserved(run, [*_no_service(run, log)])
    return sum(until - begun for _, begun, until in unserved) // MS


def _no_service(run: Outcome, log: Log) -> Iterator[tuple[int, int, str]]:
    """From when to when (ns) which worker could get no requests: a fault kept it from the gateways, an
    operator had drained it, or its agent stopped, or the log could not close its breaker, or its engine
    failed to start too often, or it was quarantined rightly."""
    yield from _away(run)
    yield from _drained(run, log)
    yield from _left(run, log)
    yield from _held(run, log)
    yield from _failing_starts(run)
    yield from _distrusted(run, log)


def _unserved(
    run: Outcome, away: Sequence[tuple[int, int, str]]
) -> Iterator[tuple[frozenset[str], int, int]]:
    """The models of which all workers were `away`, and from when to when (ns)."""
    of_model: dict[str, set[str]] = {}
    for name in run.schedule.workers:
        model = run.schedule.models.get(name, run.scenario.fleet.model)
        of_model.setdefault(model, set()).add(name)
    times = sorted({at for begun, until, _ in away for at in (begun, until)})
    for begun, until in itertools.pairwise(times):
        gone = {name for since, to, name in away if since <= begun and until <= to}
        if models := frozenset(model for model, names in of_model.items() if gone >= names):
            yield models, begun, until


def _failing(run: Outcome, log: Log) -> Iterator[tuple[str, int, int]]:
    """From when to when (wall ms) each worker of a model failed most requests by a fault, or got none: a
    breaker lets one of those that wait through at a time."""
    shares = {planned.name: planned.amount or 0.0 for planned in run.schedule.faults}
    failing = [
        (fired.at_ns, fired.until_ns or run.ended_ns, name)
        for fired in run.fired
        if fired.what == "engine-errors" and shares[fired.name] >= MOST_FAIL
        for name in fired.target.split(",")
    ]
    if failing:
        for models, begun, until in _unserved(run, [*_no_service(run, log), *failing]):
            since_ms, until_ms = run.began_ms + begun // MS, run.began_ms + until // MS
            yield from ((model, since_ms, until_ms) for model in models)


def _away(run: Outcome) -> Iterator[tuple[int, int, str]]:
    """From when to when (ns) a fault prevented which worker from serving: it was cut from the
    gateways, stopped, what its agent wrote cannot be read, or it was dead while its agent was stopped or
    cut from etcd, or no log could report its return."""
    deaths = list(_deaths(run))
    for fired in run.fired:
        until_ns = fired.until_ns or run.ended_ns
        cut = _cut_from(run, fired)
        if fired.what == "segment-damaged":  # its agent ends as well, and cannot start
            yield from ((fired.at_ns, run.ended_ns, name) for name in fired.target.split(","))
        if cut == "gateway" or fired.what in ("engine-stop", "record-unreadable"):
            for name in fired.target.split(","):
                yield fired.at_ns, until_ns, name
        unreported = stops_log(run, fired)
        silenced = cut == "etcd" or fired.what == "agent-stop"
        for died_ns, dead in deaths:
            is_silent = silenced and dead in fired.target.split(",")
            since_ns = _log_away_since(run, fired) if unreported else fired.at_ns
            if (unreported or is_silent) and since_ns - RELOAD_NS <= died_ns < until_ns:
                yield max(fired.at_ns, died_ns), until_ns, dead


def _drained(run: Outcome, log: Log) -> Iterator[tuple[int, int, str]]:
    """From when to when (ns) an operator's drain was in force on which worker."""
    drained: dict[str, int] = {}
    for at in events_of(log, "fleet"):
        if type(at.event) is not v.EffectsDecided or at.event.again >= 0:
            continue
        at_ns = (at.at_ms - run.began_ms) * 1_000_000
        for effect in at.event.effects:
            if effect.kind == EffectKind.DRAIN:
                drained.setdefault(effect.worker, at_ns)
            elif effect.kind == EffectKind.UNDRAIN and effect.worker in drained:
                yield drained.pop(effect.worker), at_ns, effect.worker
    for worker, since_ns in drained.items():
        yield since_ns, run.ended_ns, worker


def _left(run: Outcome, log: Log) -> Iterator[tuple[int, int, str]]:
    """From when to when (ns) which worker took no requests because its agent stopped: until the next
    agent's engine is ready."""
    for name in run.schedule.workers:
        since_ns = -1
        for at in events_of(log, f"w.{name}"):
            at_ns = (at.at_ms - run.began_ms) * 1_000_000
            if type(at.event) is v.WorkerLeaving:
                since_ns = at_ns
            elif type(at.event) is v.EngineReady and since_ns >= 0:
                yield since_ns, at_ns, name
                since_ns = -1
        if since_ns >= 0:
            yield since_ns, run.ended_ns, name


def _held(run: Outcome, log: Log) -> Iterator[tuple[int, int, str]]:
    """From when to when (ns) which worker's breaker was open while a fault kept the log away: it holds
    for a number of ticks, and there are none without the log."""
    for fired in run.fired:
        if not stops_log(run, fired) or fired.what == "disk-slow":
            continue
        held = set[str]()
        for at in events_of(log, "fleet"):
            if type(at.event) is v.HealthDecided and at.at_ms < span_ms(run, fired)[0]:
                is_open = at.event.state == HealthState.UNHEALTHY
                (held.add if is_open else held.discard)(at.event.worker)
        for name in sorted(held):
            yield fired.at_ns, fired.until_ns or run.ended_ns, name


def _distrusted(run: Outcome, log: Log) -> Iterator[tuple[int, int, str]]:
    """From when to when (ns) which worker was in quarantine whose weights or model files a fault had
    changed."""
    struck = {
        name
        for fired in run.fired
        if fired.what in (*WRONG_WEIGHTS, "model-file-damaged")
        for name in fired.target.split(",")
    }
    since = dict[str, int]()
    for at in events_of(log, "fleet"):
        if type(at.event) is not v.HealthDecided or at.event.worker not in struck:
            continue
        at_ns = (at.at_ms - run.began_ms) * 1_000_000
        if at.event.state == HealthState.QUARANTINED:
            since.setdefault(at.event.worker, at_ns)
        elif at.event.worker in since:
            yield since.pop(at.event.worker), at_ns, at.event.worker
    for worker, since_ns in since.items():
        yield since_ns, run.ended_ns, worker


FEW_STARTS = 3
"""So many starts may fail before an engine starts within the bound of I10: a pause follows each."""


def _failing_starts(run: Outcome) -> Iterator[tuple[int, int, str]]:
    """From when to when (ns) the engine of which worker of a simulated run was dead while more starts
    failed than few."""
    amounts = {planned.name: planned.amount or 1 for planned in run.schedule.faults}
    struck = [fired for fired in run.fired if fired.what == "reload-fails"]
    truth = run.truth or GroundTruth()
    for name, changes in truth.serving.items():
        of_worker = [fired for fired in struck if name in fired.target.split(",")]
        if sum(amounts[fired.name] for fired in of_worker) <= FEW_STARTS:
            continue
        for (at_ns, serves), (until_ns, _) in itertools.pairwise([*changes, (1 << 62, True)]):
            if not serves and at_ns - truth.began_ns >= min(f.at_ns for f in of_worker):
                yield at_ns - truth.began_ns, until_ns - truth.began_ns, name


_DEATHS_OF_ENGINES = ("engine-kill", *_DEATHS_OF_AGENTS)


def _deaths(run: Outcome) -> Iterator[tuple[int, str]]:
    """When (ns) the engine of which worker died: by the faults, and in simulated runs of other causes,
    such as the death of its state daemon."""
    truth = run.truth or GroundTruth()
    for name, changes in truth.serving.items():
        pairs = itertools.pairwise(changes)
        ended = (at_ns for (_, served), (at_ns, serves) in pairs if served and not serves)
        yield from ((at_ns - truth.began_ns, name) for at_ns in ended)
    for fired in run.fired:
        targets = fired.target.split(",")
        for name, domain in run.schedule.workers.items():
            if (fired.what in _DEATHS_OF_ENGINES and name in targets) or (
                fired.what == "domain-loss" and domain in targets
            ):
                yield fired.at_ns, name


def _log_away_since(run: Outcome, fired: FiredFault) -> int:
    """When (ns) the log went away before or with this fault, without the time between outages in which
    no engine could have loaded."""
    since_ns = fired.at_ns
    for other in sorted(run.fired, key=lambda one: -one.at_ns):
        until_ns = other.until_ns or run.ended_ns
        if stops_log(run, other) and other.at_ns < since_ns <= until_ns + RELOAD_NS:
            since_ns = other.at_ns
    return since_ns
