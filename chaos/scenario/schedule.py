"""The expansion of a scenario by a seed: every request and every fault, before anything runs.

Each request and each fault draws from its own generator, named by seed and place, so that its
removal changes no other. Times are nanoseconds from the start of the run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from relume.chaos.scenario import request_traces as traces
from relume.chaos.scenario.catalogue import FAULTS, PHASES, applicable
from relume.chaos.scenario.checks import targets
from relume.chaos.scenario.language import (
    Burst,
    Closed,
    Fault,
    Fixed,
    Fleet,
    FromTrace,
    Poisson,
    Sampling,
    Scenario,
    Tenant,
    Tier,
    Trace,
    Traffic,
    Uniform,
)  # fmt: skip

NS = 1_000_000_000


Shared = TypeVar("Shared", Tier, Sampling, Tenant)

Client = Literal[
    "streaming", "whole", "resumable", "choices", "relayed", "counted", "unnamed", "restarting"
]
"""Kind of request: a stream, an answer in one piece, a stream to which the client returns; or one of
`UNUSUAL`."""
UNUSUAL: tuple[Client, ...] = ("choices", "relayed", "counted", "unnamed", "restarting")
"""Two choices; a relayed route; a prompt that the gateway counts; a stream whose worker does not name
its token ids; and one that cannot be continued."""


class Request(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request. It is sent at `at_ns`, or, if that is None, `think_ns` after the answer to
    request `after`. `prefix` holds ids of the prompt's first blocks of `prefix_block` tokens:
    equal leading ids are equal tokens. `seed` is None if its sampling has none. `model`: empty if the
    fleet has but one."""

    name: str
    at_ns: int | None
    prompt_tokens: int
    output_tokens: int
    tier: str = "default"
    priority: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    after: str | None = None
    think_ns: int = 0
    prefix: tuple[int, ...] = ()
    prefix_block: int = 0
    tenant: str = ""
    client: Client = "streaming"
    model: str = ""


class PlannedFault(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A fault of a schedule, with all choices of the seed made.

    It strikes at `at_ns`; or, if that is None, `after_ns` after the `nth` event of type
    `event` (fields as in `where`); with `phase`, that event begins the phase and the fault
    strikes when `fraction` of it is over. `target` stays a role if only the run can resolve it.
    """

    name: str
    what: str
    target: str
    at_ns: int | None = None
    event: str | None = None
    where: dict[str, str | int | bool] = {}
    nth: int = 1
    after_ns: int = 0
    phase: str | None = None
    fraction: float = 0.0
    peer: str | None = None
    for_ns: int | None = None
    amount: float | None = None
    pause_ms: float | None = None
    applicable: bool = True


class Schedule(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A scenario expanded by a seed. `workers` maps each to its failure domain, `models` those that serve
    another model than the fleet's to it."""

    scenario: str
    seed: int
    workers: dict[str, str]
    control_planes: tuple[str, ...]
    etcd: tuple[str, ...]
    requests: tuple[Request, ...]
    faults: tuple[PlannedFault, ...]
    models: dict[str, str] = {}

    def digest(self) -> str:
        """SHA-256 of the whole, 16 hex digits: equal schedules have equal ones."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]


def expand(scenario: Scenario, seed: int, folder: Path | None = None) -> Schedule:
    """The schedule of a checked scenario; trace files are relative to `folder`.

    Raises traces.TraceError if a trace file has gone since the check.
    """
    fleet = scenario.fleet
    workers = targets("worker", fleet)
    return Schedule(
        scenario=scenario.name,
        seed=seed,
        workers={name: f"d{index % fleet.domains}" for index, name in enumerate(workers)},
        control_planes=tuple(targets("control plane", fleet)),
        etcd=tuple(targets("etcd", fleet)),
        requests=tuple(requests_of(scenario.traffic, seed, folder or Path(), fleet.models)),
        faults=tuple(
            _planned(fault, scenario, index, _rng(seed, "fault", index))
            for index, fault in enumerate(scenario.faults)
        ),
        models=_others(fleet, workers),
    )


def _others(fleet: Fleet, workers: Sequence[str]) -> dict[str, str]:
    of_workers = (model for model, count in fleet.models.items() for _ in range(count))
    pairs = zip(workers, of_workers, strict=True)
    return {name: model for name, model in pairs if model != fleet.model}


def _rng(seed: int, *place: str | int) -> Random:
    return Random(":".join(map(str, (seed, *place))))


def _whole(low: int, high: int, rng: Random) -> int:
    return low + int(rng.random() * (high - low + 1))


def requests_of(
    traffic: Traffic, seed: int, folder: Path, models: Mapping[str, int] | None = None
) -> Iterator[Request]:
    """The requests of a traffic, in the order of their numbers. `models`: those of the fleet, with their
    shares. Raises traces.TraceError."""
    names = list(models or ())
    most = traffic.requests
    until = math.inf if traffic.for_s is None else traffic.for_s * NS
    lengths = _Lengths(traffic, folder)
    for index, (at_ns, after, think_ns) in enumerate(_arrivals(traffic, seed, folder)):
        if index == most or (at_ns is not None and at_ns > until):
            return
        rng = _rng(seed, "request", index)
        prompt, output, prefix, block = lengths.of(index, rng)
        tier = _shared(traffic.tiers, rng)
        sampling = _shared(traffic.sampling, rng)
        seed_of = _whole(0, (1 << 31) - 1, rng) if sampling.seeded else None
        tenant = _shared(traffic.tenants, rng).name if traffic.tenants else ""
        yield Request(
            name=_name(index),
            at_ns=at_ns,
            prompt_tokens=prompt,
            output_tokens=output,
            tier=tier.name,
            priority=tier.priority,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            n=sampling.n,
            seed=seed_of,
            after=None if after is None else _name(after),
            think_ns=think_ns,
            prefix=prefix,
            prefix_block=block,
            tenant=tenant,
            client=_client(traffic, _rng(seed, "client", index)),
            model=_rng(seed, "model", index).choices(names, [*(models or {}).values()])[0]
            if len(names) > 1
            else "",
        )


def _client(traffic: Traffic, rng: Random) -> Client:
    drawn = rng.random() if traffic.whole or traffic.resumable else 1.0
    if drawn < traffic.whole:
        return "whole"
    if drawn < traffic.whole + traffic.resumable:
        return "resumable"
    return rng.choice(UNUSUAL) if rng.random() < traffic.unusual else "streaming"


def _name(index: int) -> str:
    return f"q{index:05}"


def _shared(options: Sequence[Shared], rng: Random) -> Shared:
    """One of `options` by their shares."""
    left = rng.random()
    for option in options:
        left -= option.share
        if left < 0:
            return option
    return options[-1]


def _arrivals(
    traffic: Traffic, seed: int, folder: Path
) -> Iterator[tuple[int | None, int | None, int]]:
    """Per request: its time, or the index of the request that it follows and the pause."""
    match traffic.arrivals:
        case Poisson(per_s=per_s):
            rng, now = _rng(seed, "arrivals"), 0.0
            while True:
                now -= math.log(1.0 - rng.random()) / per_s
                yield round(now * NS), None, 0
        case Burst(size=size, every_s=every_s):
            index = 0
            while True:
                yield round(index // size * every_s * NS), None, 0
                index += 1
        case Closed(clients=clients, think_s=think_s):
            index = 0
            while True:
                pause = _drawn(think_s, _rng(seed, "think", index).random())
                if index < clients:
                    yield pause, None, 0
                else:
                    yield None, index - clients, pause
                index += 1
        case Trace(file=file, speed=speed):
            for row in traces.read(file, folder):
                yield round((row.at_ns or 0) / speed), None, 0


class _Lengths:
    """Lengths and prefix of each request."""

    def __init__(self, traffic: Traffic, folder: Path) -> None:
        self._how, self._prefixes = traffic.lengths, traffic.prefixes
        self._in_order = False
        if isinstance(self._how, FromTrace):
            self._rows = traces.read(self._how.file, folder)
            arrivals = traffic.arrivals
            self._in_order = isinstance(arrivals, Trace) and arrivals.file == self._how.file

    def of(self, index: int, rng: Random) -> tuple[int, int, tuple[int, ...], int]:
        """Tokens of the prompt and of the output, ids of the prefix and tokens of each."""
        prefix: tuple[int, ...] = ()
        match self._how:
            case Fixed(prompt=prompt, output=output):
                pass
            case Uniform(prompt=prompts, output=outputs):
                prompt, output = _whole(*prompts, rng), _whole(*outputs, rng)
            case FromTrace(prompt_most=prompt_most, output_most=output_most):
                at = index if self._in_order else _whole(0, len(self._rows) - 1, rng)
                row = self._rows[at]
                prompt, output = min(row.prompt, prompt_most), min(row.output, output_most)
                prefix = row.prefix[: -(-prompt // traces.PREFIX_BLOCK_TOKENS)]
        if self._prefixes is not None:
            group = _whole(0, self._prefixes.groups - 1, rng)
            return prompt, output, (group,), self._prefixes.tokens
        return prompt, output, prefix, traces.PREFIX_BLOCK_TOKENS if prefix else 0


def _planned(fault: Fault, scenario: Scenario, index: int, rng: Random) -> PlannedFault:
    when, kind = fault.when, FAULTS[fault.what]
    # Every fault draws the same numbers in the same order, regardless of which ones it uses.
    at, after, lasting, chosen, fraction, nth = (rng.random() for _ in range(6))
    names = targets(kind.target, scenario.fleet)
    target = fault.target
    if target == "any" and names:
        target = names[int(chosen * len(names))]
    low, high = when.nth if isinstance(when.nth, tuple) else (when.nth, when.nth)
    return PlannedFault(
        name=f"f{index}",
        what=fault.what,
        target=target,
        at_ns=None if when.at_s is None else _drawn(when.at_s, at),
        event=PHASES[when.during][0] if when.during else when.event,
        where=when.where,
        nth=low + int(nth * (high - low + 1)),
        after_ns=_drawn(when.after_s, after),
        phase=when.during,
        fraction=round(0.1 + 0.8 * fraction, 6) if when.during else 0.0,
        peer=fault.peer,
        for_ns=None if fault.for_s is None else _drawn(fault.for_s, lasting),
        amount=fault.amount,
        pause_ms=fault.pause_ms,
        applicable=applicable(fault.what),
    )


def _drawn(span: float | tuple[float, float], share: float) -> int:
    low, high = span if isinstance(span, tuple) else (span, span)
    return round((low + (high - low) * share) * NS)
