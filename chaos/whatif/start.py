"""The beginning of a continuation: fleet, requests and faults in the simulator's terms.

The fleet is the fold's: workers with their engines, state daemons, replicas, settings. The
continuation dispatches each live request again, to its worker, with the tokens generated so far as
part of its prompt; their KV is there and costs nothing. Later requests arrive at their recorded
times and get as many tokens. Faults strike at their recorded times, and loads last as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from relume.chaos.scenario.language import Burst, Fixed, Fleet, Scenario, Traffic
from relume.chaos.scenario.schedule import PlannedFault, Request, Schedule
from relume.chaos.sim.engine import host_types as hosts
from relume.chaos.sim.engine.host_types import TOKEN_ID_BYTES, HostSpec
from relume.chaos.sim.engine.step_cost import names
from relume.chaos.whatif.facts import Facts, Read
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import EnginePhase, Guarantee, RequestOutcome, TransportKind
from relume.policies.state.fleet import Fleet as Fold

MS = 1_000_000
LEAD_NS = 20 * MS
"""Time before the start at which live requests are dispatched."""
DOWN_S = 1.0
"""Time before the start at which engines that were down are killed."""
NEVER_S = 1e5
RESTARTED_MS = 1000
"""Time before its restart at which a replica died."""
COMMANDS = ("drain", "undrain", "hold", "release", "restart", "config")


class Start(Struct, kw_only=True):
    """Input of the simulator. `pins`: live requests, and their workers; `warm`: tokens of prompts
    that cost nothing; `made`: tokens generated before; `down`: workers without an engine;
    `loads`: seconds of engine starts; `commands`: (ns, command, target, value); `left_out`:
    counts of the parts that the continuation lacks."""

    at_ms: int
    schedule: Schedule
    scenario: Scenario
    host: HostSpec
    pins: dict[str, str] = field(default_factory=dict)
    warm: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    down: list[str] = field(default_factory=list)
    loads: dict[str, list[float]] = field(default_factory=dict)
    commands: list[tuple[int, str, str, str]] = field(default_factory=list)
    decided: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)


class NoStart(ValueError):
    """The log has too little to continue from."""


def start_of(fold: Fold, events: Sequence[Entry], cut: int, known: Read, seed: int) -> Start:
    """The start of a log's continuation after `cut`; `fold` is the state there. Raises NoStart."""
    engines = _engines(fold, events)
    if not engines:
        raise NoStart("no engine was ever ready in this log")
    model, host = _host(fold, engines, events)
    left_out: Counter[str] = Counter()
    start = Start(
        at_ms=known.at_ms,
        schedule=Schedule(
            scenario="what-if",
            seed=seed,
            workers={},
            control_planes=(),
            etcd=("e0",),
            requests=(),
            faults=(),
        ),
        scenario=Scenario(
            name="what-if",
            about="A recorded log continues.",
            fleet=Fleet(workers=1),
            traffic=Traffic(arrivals=Burst(1, 1.0), lengths=Fixed(1, 1), requests=1),
        ),
        host=host,
    )
    requests = [*_live(start, known, host, left_out), *_coming(start, known, host, left_out)]
    faults = _faults(start, fold, events[cut:], left_out)
    _loads(start, fold, events, cut)
    order = [
        *(n for n in fold.workers if n in engines),
        *(n for n in engines if n not in fold.workers),
    ]
    domains = {n: fold.workers[n].domain if n in fold.workers else "" for n in order}
    replicas = tuple(name for name, replica in fold.replicas.items() if replica.alive) or ("r0",)
    budgets = [h.budget_bytes for h in fold.holders.values() if h.alive]
    budget_mb = max(int(median(budgets)) >> 20, 1) if budgets else 0
    start.schedule = Schedule(
        scenario="what-if",
        seed=seed,
        workers=domains,
        control_planes=replicas,
        etcd=("e0",),
        requests=tuple(requests),
        faults=tuple(faults),
    )
    start.scenario = replace(
        start.scenario,
        fleet=Fleet(
            workers=len(engines),
            model=model,
            hardware="log",
            control_planes=len(replicas),
            checkpoint_mb=budget_mb,
        ),
    )
    start.decided = dict(known.decided)
    start.left_out = dict(left_out)
    return start


def _engines(fold: Fold, events: Sequence[Entry]) -> dict[str, v.EngineReady]:
    """The first engine of each worker, without workers that left before the cut."""
    found: dict[str, v.EngineReady] = {}
    for at in events:
        if type(at.event) is v.EngineReady:
            found.setdefault(at.event.worker, at.event)
    for worker in fold.workers.values():
        if worker.block_size and worker.name not in found:
            found[worker.name] = v.EngineReady(
                worker=worker.name,
                incarnation=worker.incarnation,
                host=worker.host,
                port=worker.port,
                model=worker.model,
                max_model_len=worker.max_model_len,
                block_size=worker.block_size,
                kv_blocks=worker.kv_blocks,
                block_bytes=worker.block_bytes,
            )
    return found


def _host(
    fold: Fold, engines: dict[str, v.EngineReady], events: Sequence[Entry]
) -> tuple[str, HostSpec]:
    """The model, and the properties of its hosts by the engines' ready records."""
    one = next(iter(engines.values()))
    known = [n for n in names() if n.rpartition("_")[0] == one.model]
    base = hosts.spec(*known[0].rsplit("_", 1)) if known else hosts.spec("tiny", "cpu")
    took = [s for found in load_times(events).values() for _, s in found]
    kv = one.block_bytes // one.block_size - TOKEN_ID_BYTES if one.block_bytes else 0
    batch = max((a.event.batch for a in events if type(a.event) is v.EngineStep), default=0)
    return one.model, replace(
        base, source="the log",
        kv_blocks=one.kv_blocks, block_tokens=one.block_size, max_model_len=one.max_model_len,
        max_seqs=max(base.max_seqs, batch), max_tokens=max(base.max_tokens, batch),
        kv_bytes_per_token=kv if kv > 0 else base.kv_bytes_per_token,
        reload_s=median(took) if took else base.reload_s,
    )  # fmt: skip


def load_times(events: Sequence[Entry]) -> dict[str, list[tuple[int, float]]]:
    """Per worker: start times of its engines (ms), and seconds until they were ready."""
    begun: dict[tuple[str, int], int] = {}
    found: dict[str, list[tuple[int, float]]] = {}
    for at in events:
        event = at.event
        if type(event) is v.EngineStarted:
            begun[event.worker, event.incarnation] = at.at_ms
        elif type(event) is v.EngineReady:
            from_ms = begun.get((event.worker, event.incarnation))
            if from_ms is not None:
                took = max(at.at_ms - from_ms, 50) / 1000
                found.setdefault(event.worker, []).append((from_ms, took))
    return found


def _loads(start: Start, fold: Fold, events: Sequence[Entry], cut: int) -> None:
    """Set which workers are down, and the durations of later starts."""
    ready: dict[str, int] = {}
    for at in events[cut:]:
        if type(at.event) is v.EngineReady:
            ready.setdefault(at.event.worker, at.at_ms)
    engines = {a.event.worker for a in events if type(a.event) is v.EngineReady}
    times = load_times(events)
    for name in engines | set(fold.workers):
        later = [took for at, took in times.get(name, ()) if at >= start.at_ms]
        worker = fold.workers.get(name)
        if worker is None or worker.engine != EnginePhase.READY:
            start.down.append(name)
            if name in ready:
                later = [DOWN_S + max(ready[name] - start.at_ms, 0) / 1000, *later]
            else:
                later = [NEVER_S]
        elif worker.held or worker.draining:
            start.commands.append((0, "hold" if worker.held else "drain", name, ""))
        if later:
            start.loads[name] = later


def _live(start: Start, known: Read, host: HostSpec, left_out: Counter[str]) -> list[Request]:
    """Live requests, decoding ones first, each with its tokens so far."""
    found = []
    order = sorted(known.live.items(), key=lambda one: (not one[1].decoding, -one[1].computed))
    for name, place in order:
        facts = known.facts[name]
        made = facts.tokens_at(start.at_ms)
        output = _output(facts, known, left_out)
        if not output:
            continue
        made = min(made, output - 1)
        request = _request(facts, 0, facts.prompt + made, output - made, host, left_out)
        if request is None:
            continue
        start.made[name] = made
        if place.worker:
            start.pins[name] = place.worker
        start.warm[name] = facts.prompt + made if place.decoding else place.computed
        found.append(request)
    return found


def _coming(start: Start, known: Read, host: HostSpec, left_out: Counter[str]) -> list[Request]:
    """Requests that arrive later."""
    found = []
    for name, facts in known.facts.items():
        if name in known.live or name in known.over or not facts.known:
            continue
        at_ns = max(facts.arrived_ms - start.at_ms, 0) * MS + LEAD_NS
        output = _output(facts, known, left_out)
        request = _request(facts, at_ns, facts.prompt, output, host, left_out) if output else None
        if request is not None:
            start.warm[name] = facts.cached
            found.append(request)
    return found


def _output(facts: Facts, known: Read, left_out: Counter[str]) -> int:
    """Tokens it gets; 0: it got none, and the continuation leaves it out."""
    end = facts.end
    if end is not None and end.outcome in (RequestOutcome.COMPLETED, RequestOutcome.CANCELLED):
        if not end.tokens:
            left_out[f"requests without tokens ({end.outcome})"] += 1
        return end.tokens
    if end is not None and end.outcome == RequestOutcome.REJECTED:
        left_out["rejected requests"] += 1
        return 0
    left_out["requests whose number of tokens is assumed"] += 1
    had = max((tokens for _, tokens in facts.points), default=0)
    return max(facts.most or known.usual, had + 1)


def _request(
    facts: Facts, at_ns: int, prompt: int, output: int, host: HostSpec, left_out: Counter[str]
) -> Request | None:
    if prompt + output > host.kv_blocks * host.block_tokens:
        left_out["requests beyond an engine's KV cache"] += 1
        return None
    if facts.verdict not in (Guarantee.EXACT, Guarantee.SAMPLED):
        left_out[f"{facts.verdict} requests, taken for exact"] += 1
    exact = facts.verdict != Guarantee.SAMPLED
    return Request(
        name=facts.request,
        at_ns=at_ns,
        prompt_tokens=prompt,
        output_tokens=output,
        temperature=0.0 if exact else 1.0,
    )


def _faults(
    start: Start, fold: Fold, events: Sequence[Entry], left_out: Counter[str]
) -> list[PlannedFault]:
    """Faults after the cut, at their recorded times."""
    found: list[PlannedFault] = []
    seen_ms: dict[tuple[str, int], int] = {}
    agents: dict[str, int] = {}
    replicas = {name for name, replica in fold.replicas.items() if replica.alive}
    hung: dict[tuple[str, int], v.StallJudged] = {}
    cleared = {
        (a.event.worker, a.event.incarnation): a.at_ms
        for a in events if type(a.event) is v.WorkerCleared
    }  # fmt: skip
    last_ms = events[-1].at_ms if events else start.at_ms

    def strike(what: str, target: str, ms: float, for_ms: float | None = None) -> None:
        at_ns = max(int((ms - start.at_ms) * MS), 0) + LEAD_NS
        lasts = None if for_ms is None else int(max(for_ms, 1) * MS)
        found.append(
            PlannedFault(name=f"f{len(found)}", what=what, target=target, at_ns=at_ns, for_ns=lasts)
        )

    for at in events:
        event = at.event
        match event:
            case v.TransportObserved() if event.kind in (
                TransportKind.RESET,
                TransportKind.EOF,
                TransportKind.ENGINE_DEAD,
                TransportKind.REFUSED,
            ):
                seen_ms.setdefault((event.worker, event.incarnation), at.at_ms)
            case v.WorkerRegistered():
                agents[event.worker] = at.at_ms
            case v.EngineDied():
                key = event.worker, event.incarnation
                ms = min(at.at_ms, seen_ms.get(key, at.at_ms))
                if event.worker in agents:
                    strike("agent-kill", event.worker, ms)
                elif event.reason not in ("hung", "replaced") and key not in hung:
                    strike("engine-kill", event.worker, ms)
                agents.pop(event.worker, None)
            case v.StateDaemonLost():
                strike("holder-kill", event.worker, at.at_ms)
            case v.StallJudged() if event.hung and (event.worker, event.incarnation) not in hung:
                key = event.worker, event.incarnation
                hung[key] = event
                began = at.at_ms - event.silent_us / 1000
                strike("engine-stop", event.worker, began, cleared.get(key, last_ms) - began)
            case v.ReplicaStarted() if event.replica in replicas:
                strike("gateway-kill", event.replica, at.at_ms - RESTARTED_MS)
            case v.ReplicaStopped():
                replicas.discard(event.replica)
            case v.AdminCommanded() if event.command in COMMANDS:
                ns = (at.at_ms - start.at_ms) * MS + LEAD_NS
                start.commands.append((max(ns, 0), event.command, event.target, event.value))
            case v.AdminCommanded() | v.WorkerDeregistered() | v.WorkerLost() | v.ReplicaLost():
                left_out[f"{type(event).__name__} events"] += 1
    return found
