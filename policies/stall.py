"""Is a silent engine hung? A bound learnt from recorded steps, and a judgement.

A step that takes long is not a stall: the bound follows the slowest recent step
(`step_us_high`, which fades by 1/32 a step), so a worker slowed tenfold widens its own
bound while it goes on. Silence is therefore never enough: the engine is asked
(`/relume/state`) when half its bound is over and again at the end. Steps made in
between are progress, and so is CPU time used: a long prefill computes. An engine that
does not answer, or holds requests and does nothing at all, is hung.
"""

from __future__ import annotations

from msgspec import Struct

from relume.policies.state import Worker
from relume.policies.view import View


class StallConfig(Struct, frozen=True):
    """`floor_us` below which silence is never judged, `cap_us` above which the bound never
    goes, `factor` times the slowest recent step in between. `step_cap_us`: what no single
    step, and no engine that says it has nothing to do, is allowed to exceed in silence."""

    floor_us: int = 1_000_000
    cap_us: int = 3_000_000
    factor: int = 8
    step_cap_us: int = 60_000_000


def settings_of(config: StallConfig) -> tuple[tuple[str, str], ...]:
    """The settings as a replica records them when it starts."""
    return tuple((f"stall.{n}", str(getattr(config, n))) for n in config.__struct_fields__)


def config_of(view: View) -> StallConfig:
    """The settings in force at `view`, from the log alone."""
    default = StallConfig()
    return StallConfig(*(int(view.setting(n, d)) for n, d in settings_of(default)))


def bound_us(worker: Worker, config: StallConfig) -> int:
    """Silence, in microseconds, after which `worker` is judged.

    An engine of which no step is known yet may be warming up: it gets the cap.
    """
    if not worker.step_us_high:
        return config.cap_us
    return min(config.cap_us, max(config.floor_us, config.factor * worker.step_us_high))


class Look(Struct, frozen=True):
    """What asking the engine twice showed.

    `probe`: answered, silent, refused (the second time). `steps`: made in between; -1
    unknown. `step_age_us`: age of the step it is in, 0 in none. `cpu_us`: CPU time that
    the stepping thread used in between; -1 unknown. `held`: requests it has; -1 unknown.
    """

    probe: str
    steps: int = -1
    step_age_us: int = 0
    cpu_us: int = -1
    held: int = -1


WORKING_CPU_US = 5_000
"""CPU time between two looks that counts as computing; a stopped thread uses none."""


def hung(silent_us: int, look: Look, bound: int, config: StallConfig) -> bool:
    """The judgement, after `silent_us` without a byte or a recorded step."""
    if silent_us < bound:
        return False
    if look.probe != "answered":
        return True
    if look.steps > 0:
        return False
    if look.held == 0 or look.cpu_us >= WORKING_CPU_US:
        return max(silent_us, look.step_age_us) > config.step_cap_us
    if look.cpu_us >= 0:
        return True
    return look.step_age_us > max(bound, config.cap_us)


def recovered(look: Look) -> bool:
    """Whether a suspected engine may be used again: it has nothing to do, or it does it."""
    return look.held == 0 or look.steps > 0 or look.cpu_us >= WORKING_CPU_US
