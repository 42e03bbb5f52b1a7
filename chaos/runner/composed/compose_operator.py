"""An operator's commands, for composed scenarios: planned work that would leave no worker, and trust."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from msgspec.structs import replace

from relume.chaos.runner.composed.compose_disorder import Composed
from relume.chaos.runner.composed.compose_settings import with_part
from relume.chaos.scenario.language import Closed, Commands, Fault, Fleet, Traffic, Uniform, When

_UNREADABLE = "record-unreadable"


def operated(
    seed: int, fleet: Fleet, traffic: Traffic, faults: Sequence[Fault], without: Collection[str]
) -> Composed:
    """In one of three seeds without other commands, an operator works on the fleet: drains all workers at
    once where the minimum of open ones forbids it, trusts workers again and again while agents write
    records that nobody can read, or gives commands of all kinds. Drawn from random numbers of its own."""
    rng = Random(f"compose-operator:{seed}")
    kind = rng.choice((_drains_all, _trusts, _does_all))
    waits_for_effects = any(fault.when.during == "effect" for fault in faults)
    if rng.random() >= 1 / 3 or fleet.operator.each or waits_for_effects:
        return fleet, traffic, ()
    fleet_of, more = kind(rng, fleet)
    if {fault.what for fault in more} & {*without}:
        return fleet, traffic, ()
    traffic = replace(
        traffic,
        arrivals=Closed(3 * fleet.workers, (0.0, 0.3)),
        lengths=Uniform((16, 300), (32, 160)),
        requests=max(traffic.requests or 0, 160),
    )
    return fleet_of, traffic, more


def _drains_all(rng: Random, fleet: Fleet) -> tuple[Fleet, tuple[Fault, ...]]:
    commands = Commands(
        each=(("drain-unforced",), ("undrain",)), at_once=True,
        every_s=round(rng.uniform(1, 4), 2), most=2 * rng.randint(1, 3),
    )  # fmt: skip
    fleet = with_part(fleet, "migration", {"drain_floor": rng.choice((1, 1, 2))})
    return replace(fleet, operator=commands), ()


def _trusts(rng: Random, fleet: Fleet) -> tuple[Fleet, tuple[Fault, ...]]:
    """The same worker writes such a record again after it was trusted."""
    every_s, worker = round(rng.uniform(1, 3), 2), f"w{rng.randrange(fleet.workers)}"
    commands = Commands(each=(("trust",),), at_once=True, every_s=every_s)
    faults = (
        Fault(what=_UNREADABLE, when=When(at_s=round(rng.uniform(0.5, 3), 3)), target=worker),
        Fault(what=_UNREADABLE, when=When(at_s=round(rng.uniform(5, 9), 3)), target=worker),
    )
    return replace(fleet, operator=commands), faults


def _does_all(rng: Random, fleet: Fleet) -> tuple[Fleet, tuple[Fault, ...]]:
    groups = (
        ("trust",), ("drain-unforced",), ("drain-unforced", "restart"), ("undrain",), ("hold",),
        ("release",), ("hold", "restart"), ("resign",),
    )  # fmt: skip
    chosen = tuple(rng.choice(groups) for _ in range(rng.randint(3, 6)))
    commands = Commands(
        each=chosen, every_s=rng.choice((0.3, 1.0, 2.0)), most=len(chosen) * rng.randint(1, 4)
    )
    return replace(fleet, operator=commands), ()
