"""Schedules and the library as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from relume.chaos.scenario import scenario_reader as reading
from relume.chaos.scenario.catalogue import FAULTS, PROMISES, applicable
from relume.chaos.scenario.language import Scenario
from relume.chaos.scenario.schedule import PlannedFault, Request, Schedule
from relume.chaos.validators import CHECKS


def shown(schedule: Schedule, most: int) -> Iterator[str]:
    """A schedule line by line, with its first `most` requests."""
    prompt = sum(request.prompt_tokens for request in schedule.requests)
    output = sum(request.output_tokens for request in schedule.requests)
    yield f"scenario {schedule.scenario}, seed {schedule.seed}, digest {schedule.digest()}"
    placed = " ".join(f"{name}/{domain}" for name, domain in schedule.workers.items())
    yield from textwrap.wrap(f"workers {placed}", 100, subsequent_indent="  ")
    yield f"control plane {' '.join(schedule.control_planes)}, etcd {' '.join(schedule.etcd)}"
    yield f"{len(schedule.requests)} requests, {prompt} prompt and {output} output tokens"
    for fault in schedule.faults:
        yield f"  {fault.name:6} {_when(fault):28} {_strike(fault)}"
    for request in schedule.requests[:most]:
        yield f"  {request.name:6} {_sent(request):28} {_parameters(request)}"
    if len(schedule.requests) > most:
        yield f"  and {len(schedule.requests) - most} more requests (--requests shows more)"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s"


def _when(fault: PlannedFault) -> str:
    if fault.at_ns is not None:
        return f"at {_seconds(fault.at_ns)}"
    where = "".join(f" {key}={value}" for key, value in sorted(fault.where.items()))
    if fault.phase:
        return f"during {fault.phase} #{fault.nth}{where}, {fault.fraction:.0%} of it"
    delay = f" +{_seconds(fault.after_ns)}" if fault.after_ns else ""
    return f"on {fault.event} #{fault.nth}{where}{delay}"


def _strike(fault: PlannedFault) -> str:
    words = [fault.what, fault.target]
    if fault.peer:
        words.append(f"to {fault.peer}")
    if fault.amount is not None:
        words.append(f"{fault.amount:g} {(FAULTS[fault.what].amount or ('',))[0]}")
    if fault.pause_ms is not None:
        words.append(f"with {fault.pause_ms:g} ms before each step")
    if fault.for_ns is not None:
        words.append(f"for {_seconds(fault.for_ns)}")
    if not fault.applicable:
        words.append(f"(not yet applicable: {FAULTS[fault.what].needs} does not exist)")
    return " ".join(words)


def _sent(request: Request) -> str:
    if request.at_ns is not None:
        return f"at {_seconds(request.at_ns)}"
    return f"{_seconds(request.think_ns)} after {request.after}"


def _parameters(request: Request) -> str:
    words = [f"{request.prompt_tokens} + {request.output_tokens} tokens", request.tier]
    if request.priority:
        words.append(f"priority {request.priority}")
    if request.temperature:
        words.append(f"temperature {request.temperature:g}")
    if request.top_p != 1.0:
        words.append(f"top_p {request.top_p:g}")
    if request.n != 1:
        words.append(f"n {request.n}")
    if request.seed is not None and request.temperature:
        words.append(f"seed {request.seed}")
    if request.prefix:
        words.append(f"prefix {request.prefix[0]}")
    return ", ".join(words)


def listed(library: Mapping[str, Path]) -> Iterator[str]:
    """The library, then the faults and promises that are not yet available."""
    scenarios = {name: reading.load(path) for name, path in library.items()}
    width = max(map(len, scenarios), default=0)
    for name, scenario in scenarios.items():
        mark = "" if usable(scenario) else "  [not yet applicable]"
        yield f"{name:{width}}  {scenario.about}{mark}"
    waiting = {name: kind.needs for name, kind in FAULTS.items() if not applicable(name)}
    if waiting:
        yield "\nfaults not yet applicable:"
        yield from (f"  {name}: needs {needs}" for name, needs in waiting.items())
    missing = [name for name in PROMISES if name not in CHECKS]
    if missing:
        yield f"\npromises without a validator yet: {', '.join(missing)}"


def usable(scenario: Scenario) -> bool:
    """Whether every fault of it is applicable."""
    return all(applicable(fault.what) for fault in scenario.faults)
