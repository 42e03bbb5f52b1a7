"""Fleets with two models, for composed scenarios: requests name one, and each has its workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from msgspec.structs import replace

from relume.chaos.runner.composed.compose_disorder import Composed
from relume.chaos.scenario.language import Closed, Fault, Fleet, Traffic, Uniform, When

SECOND = "second"


def two_models(seed: int, fleet: Fleet) -> Fleet:
    """In one of eight seeds with three workers or more, the last of them serve a second model. Drawn from
    random numbers of its own, so that the rest of the seed's scenario stays."""
    rng = Random(f"compose-models:{seed}")
    count = 1 + int(rng.random() * (fleet.workers - 1))
    if rng.random() >= 0.125 or fleet.workers < 3:
        return fleet
    return replace(fleet, others={SECOND: count})


def one_of_second(
    seed: int, fleet: Fleet, traffic: Traffic, faults: Sequence[Fault], without: Collection[str]
) -> Composed:
    """In one of three fleets with a second model and four workers or more, one of its two workers is
    excluded for a record that nobody can read while the other one fails requests: what is open of
    another model is of no use to them. Drawn separately, as above."""
    rng = Random(f"compose-second:{seed}")
    at_s, for_s = round(rng.uniform(1, 4), 3), round(rng.uniform(25, 45), 2)
    whats = "record-unreadable", "engine-errors"
    has_them = {*whats} & {*without, *(fault.what for fault in faults)}
    if rng.random() >= 1 / 3 or not fleet.others or fleet.workers < 4 or has_them:
        return fleet, traffic, ()
    first, second = f"w{fleet.workers - 2}", f"w{fleet.workers - 1}"
    more = (
        Fault(what=whats[0], when=When(at_s=round(at_s / 2, 3)), target=first),
        Fault(what=whats[1], when=When(at_s=at_s), target=second, for_s=for_s, amount=0.97),
    )
    traffic = replace(
        traffic,
        arrivals=Closed(4 * fleet.workers, (0.1, 0.4)),
        lengths=Uniform((16, 200), (16, 96)),
        requests=max(traffic.requests or 0, 240),
    )
    return replace(fleet, others={SECOND: 2}), traffic, more
