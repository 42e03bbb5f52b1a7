"""Checks beyond types: names exist, bounds are in order, faults can strike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relume.chaos.scenario import request_traces as traces
from relume.chaos.scenario.catalogue import EVENTS, FAULTS, FIGURES, HARDWARE, PHASES, PROMISES
from relume.chaos.scenario.language import (
    Bound,
    Burst,
    Closed,
    Fault,
    Fleet,
    FromTrace,
    Poisson,
    Scenario,
    Trace,
    Traffic,
    Uniform,
    When,
)  # fmt: skip
from relume.chaos.scenario.problems import Path_
from relume.controlplane.admin.errors import BadRequest
from relume.controlplane.admin.settings import KNOWN, checked
from relume.policies.recorded_settings import INTEGERS

Found = tuple[Path_, str, str]
"""A place, its error, the remedy."""

MOST_SPAN = 1_000_000
"""Maximum of a time in seconds or of a count: more is a mistake."""

COMMANDS = (
    "drain", "drain-unforced", "undrain", "hold", "release", "restart", "resign", "rollout", "trust",
)  # fmt: skip
"""What an operator of a scenario may command."""

HOLDERS = frozenset(
    "holder-kill holder-stop primary-and-holder-kill block-corrupt dram-budget disk-full "
    "stream-loss stream-duplicate stream-reorder".split()
)
"""Faults that need a fleet with checkpoints."""


def check(scenario: Scenario, folder: Path) -> list[Found]:
    """All errors of `scenario`; trace files are relative to `folder`."""
    found = [*_fleet(scenario.fleet), *_traffic(scenario.traffic, folder)]
    for index, fault in enumerate(scenario.faults):
        found += _fault(fault, scenario.fleet, ("faults", index))
    for index, bound in enumerate(scenario.expect):
        found += _bound(bound, ("expect", index))
    for index, promise in enumerate(scenario.promises or ()):
        found += _known(promise, PROMISES, ("promises", index), "promise")
    return found


def _known(given: str, known: Iterable[str], path: Path_, noun: str) -> Iterator[Found]:
    known = list(known)
    if given not in known:
        close = difflib.get_close_matches(given, known, 1)
        remedy = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
        yield path, f"names no {noun}: {given!r}", remedy


def _ordered(span: Any, path: Path_, least: int = 0) -> Iterator[Found]:
    if span is None:
        return
    low, high = span if isinstance(span, tuple) else (span, span)
    if not (least <= low and least <= high < MOST_SPAN):
        yield path, "is out of bounds", f"give {least} to {MOST_SPAN:,}"
    elif low > high:
        yield path, "has its bounds in the wrong order", f"write [{high}, {low}]"


def _fleet(fleet: Fleet) -> Iterator[Found]:
    at: Path_ = ("fleet",)
    if fleet.domains > fleet.workers:
        remedy = f"give at most {fleet.workers}"
        yield (*at, "domains"), "are more than there are workers", remedy
    if fleet.checkpoint_file_mb and not fleet.checkpoint_mb:
        message = "extend checkpoint memory, and this fleet has none"
        yield (*at, "checkpoint_file_mb"), message, "set fleet.checkpoint_mb"
    yield from _known(fleet.model, HARDWARE, (*at, "model"), "model")
    if fleet.model in HARDWARE:
        classes = HARDWARE[fleet.model]
        yield from _known(
            fleet.hardware, classes, (*at, "hardware"), f"hardware class of {fleet.model}"
        )
    if sum(fleet.others.values()) >= fleet.workers:
        message = f"leave no worker for {fleet.model}"
        yield (*at, "others"), message, f"give them at most {fleet.workers - 1} together"
    if fleet.model in fleet.others:
        message = f"name {fleet.model}, which is fleet.model"
        yield (*at, "others"), message, "give another name"
    yield from _settings(fleet.settings, (*at, "settings"))
    yield from _simulated(fleet, at)
    if fleet.etcd % 2 == 0:
        yield (*at, "etcd"), "has an even number of members", f"give {fleet.etcd - 1}"


def _simulated(fleet: Fleet, at: Path_) -> Iterator[Found]:
    """What only simulated fleets have."""
    if name := fleet.disorder.late_writer:
        writers = [*targets("worker", fleet), *targets("control plane", fleet)]
        yield from _known(name, writers, (*at, "disorder", "late_writer"), "worker or replica")
    if fleet.limits.checkpoint_kb and not fleet.checkpoint_mb:
        message = "is the budget of checkpoints, and this fleet has none"
        yield (*at, "limits", "checkpoint_kb"), message, "set fleet.checkpoint_mb"
    for command in (one for group in fleet.operator.each for one in group):
        yield from _known(command, COMMANDS, (*at, "operator", "each"), "command")


def _settings(settings: Mapping[str, int | str], at: Path_) -> Iterator[Found]:
    for name, value in settings.items():
        yield from _known(name, KNOWN, (*at, name), "setting")
        if name in KNOWN and not _is_allowed(name, value):
            yield (*at, name), f"is {value!r}", f"give {KNOWN[name].expected}"


def _is_allowed(name: str, value: int | str) -> bool:
    try:
        checked(name, value)
    except BadRequest:
        return False
    return isinstance(value, int) == (name in INTEGERS)


def _traffic(traffic: Traffic, folder: Path) -> Iterator[Found]:
    at: Path_ = ("traffic",)
    arrivals, lengths = traffic.arrivals, traffic.lengths
    bounded = traffic.requests or (traffic.for_s and not isinstance(arrivals, Closed))
    if not bounded and not isinstance(arrivals, Trace):
        yield at, "never ends", "add `requests: ...`, the number of requests"
    elif not traffic.requests and _rate(traffic) * (traffic.for_s or 0) > MOST_SPAN:
        yield at, f"are more than {MOST_SPAN:,} requests", "add `requests: ...`, or make it shorter"
    for part, value in (("arrivals", arrivals), ("lengths", lengths)):
        if isinstance(value, Trace | FromTrace):
            yield from _file(value.file, folder, (*at, part, "file"), isinstance(value, Trace))
    if isinstance(arrivals, Closed):
        yield from _ordered(arrivals.think_s, (*at, "arrivals", "think_s"))
    if isinstance(lengths, Uniform):
        yield from _ordered(lengths.prompt, (*at, "lengths", "prompt"))
        yield from _ordered(lengths.output, (*at, "lengths", "output"))
    for part, shares in (
        ("tiers", [tier.share for tier in traffic.tiers]),
        ("sampling", [sampling.share for sampling in traffic.sampling]),
        ("tenants", [tenant.share for tenant in traffic.tenants] or [1.0]),
    ):
        if abs(sum(shares) - 1) > 1e-6:
            message = f"have shares that add up to {sum(shares):g}"
            yield (*at, part), message, "make the shares add up to 1"
    if traffic.whole + traffic.resumable > 1:
        yield (*at, "resumable"), "and `whole` together exceed 1", "make their sum at most 1"
    names = [tier.name for tier in traffic.tiers]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (*at, "tiers", index, "name"), f"is a second {name!r}", "give another name"


def _rate(traffic: Traffic) -> float:
    """Mean requests per second; 0 for arrivals without a rate."""
    match traffic.arrivals:
        case Poisson(per_s=per_s):
            return per_s
        case Burst(size=size, every_s=every_s):
            return size / every_s
    return 0.0


def _file(name: str, folder: Path, path: Path_, timed: bool) -> Iterator[Found]:
    try:
        rows = traces.read(name, folder)
    except traces.TraceError as error:
        yield path, error.message, error.remedy
        return
    if timed and rows[0].at_ns is None:
        yield path, "has no arrival times", "use it under `lengths`, with other arrivals"


def _fault(fault: Fault, fleet: Fleet, at: Path_) -> Iterator[Found]:
    yield from _known(fault.what, FAULTS, (*at, "what"), "fault")
    yield from _when(fault.when, (*at, "when"))
    yield from _ordered(fault.for_s, (*at, "for_s"))
    kind = FAULTS.get(fault.what)
    if kind is None:
        return
    if kind.lasts == "must" and fault.for_s is None:
        yield at, f"{fault.what} lasts until it is undone", "add `for_s: ...`, in seconds"
    if kind.lasts == "no" and fault.for_s is not None:
        yield (*at, "for_s"), f"{fault.what} is over at once", "delete it"
    if kind.amount is None and fault.amount is not None:
        yield (*at, "amount"), f"{fault.what} has no amount", "delete it"
    if kind.amount is not None:
        unit, most = kind.amount
        if fault.amount is None:
            yield at, f"{fault.what} needs an amount", f"add `amount: ...`, {unit}"
        elif fault.amount > most:
            yield (*at, "amount"), "is too much", f"give {unit}, at most {most:g}"
    if fault.pause_ms is not None and not kind.pauses:
        yield (*at, "pause_ms"), f"{fault.what} pauses nothing", "delete it"
    if kind.peers and fault.peer not in kind.peers:
        message = f"{fault.what} needs the other end of the link"
        yield at, message, f"add `peer: ...`, one of {', '.join(kind.peers)}"
    if not kind.peers and fault.peer is not None:
        yield (*at, "peer"), f"{fault.what} strikes no link", "delete it"
    if (fault.what in HOLDERS or fault.peer == "holder") and not fleet.checkpoint_mb:
        yield at, "strikes checkpoints, but this fleet has none", "set fleet.checkpoint_mb"
    if fault.what == "disk-full" and not fleet.checkpoint_file_mb:
        yield (
            at,
            "strikes checkpoint files, but this fleet has none",
            "set fleet.checkpoint_file_mb",
        )
    allowed = [*targets(kind.target, fleet), "any", "all", *kind.roles]
    if fault.when.at_s is None:
        allowed.append("subject")
    yield from _known(fault.target, allowed, (*at, "target"), kind.target)


def targets(kind: str, fleet: Fleet) -> list[str]:
    """Names of a fleet's targets of one kind, in order."""
    count, letter = {
        "worker": (fleet.workers, "w"), "domain": (fleet.domains, "d"),
        "control plane": (fleet.control_planes, "r"), "etcd": (fleet.etcd, "e"),
    }.get(kind, (0, ""))  # fmt: skip
    return [f"{letter}{index}" for index in range(count)]


def _when(when: When, at: Path_) -> Iterator[Found]:
    given = [name for name in ("at_s", "event", "during") if getattr(when, name) is not None]
    if len(given) != 1:
        remedy = "give exactly one of at_s, event, during"
        yield at, f"has {' and '.join(given) or 'no time'}", remedy
    for name in ("at_s", "after_s", "nth"):
        yield from _ordered(getattr(when, name), (*at, name), int(name == "nth"))
    if when.at_s is not None:
        for name, value, default in (
            ("where", when.where, {}), ("nth", when.nth, 1), ("after_s", when.after_s, 0.0)
        ):  # fmt: skip
            if value != default:
                yield (*at, name), "has no effect with at_s", "delete it, or name an event"
    if when.during is not None:
        yield from _known(when.during, PHASES, (*at, "during"), "phase")
        if when.after_s != 0.0:
            yield (*at, "after_s"), "has no effect with during", "delete it"
    begins = PHASES.get(when.during or "", (when.event or "",))[0]
    if when.event is not None:
        yield from _known(when.event, EVENTS, (*at, "event"), "event")
    for field in when.where if begins in EVENTS else ():
        yield from _known(field, EVENTS[begins], (*at, "where", field), f"field of {begins}")


def _bound(bound: Bound, at: Path_) -> Iterator[Found]:
    yield from _known(bound.figure, FIGURES, (*at, "figure"), "figure")
    if bound.least is None and bound.most is None:
        yield at, "bounds nothing", "add `least: ...` or `most: ...`"
    elif bound.least is not None and bound.most is not None and bound.least > bound.most:
        yield at, "can never hold", "give a `least` that does not exceed `most`"
