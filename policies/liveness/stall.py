"""Is a silent engine hung? A stall timeout derived from recorded steps, and a judgement.

A step that takes long is not a stall: the bound follows the slowest recent step
(`step_us_high`, which fades by 1/32 a step), so a worker slowed tenfold widens its own bound while
it continues. Silence alone is never enough: the gateway probes the engine (`/relume/state`) after
half the bound and again at its end. Steps made in between are progress, and so is CPU time used: a
long prefill computes. An engine that does not answer, or holds requests and does nothing at all, is
hung.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings
from relume.events.vocabulary.enums import ProbeResult
from relume.policies.state.fleet import Worker


class StallConfig(Struct, frozen=True, kw_only=True):
    """Bounds of the stall timeout. `step_cap_us`: what no single step, and no engine that says
    it has nothing to do, may exceed in silence."""

    floor_us: Annotated[
        int, option("Minimum stall timeout", unit="microseconds", ge=10_000, le=600_000_000)
    ] = 1_000_000
    cap_us: Annotated[
        int, option("Maximum stall timeout", unit="microseconds", ge=10_000, le=600_000_000)
    ] = 3_000_000
    factor: Annotated[
        int,
        option("Stall timeout, as a multiple of the slowest recent engine step", ge=1, le=10_000),
    ] = 8
    step_cap_us: Annotated[int, option("Maximum silence within one engine step")] = 60_000_000


SETTINGS = RecordedSettings("stall.", StallConfig)
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of


def bound_us(worker: Worker, config: StallConfig) -> int:
    """Silence, in microseconds, after which `worker` is judged.

    An engine of which no step is known yet may be warming up: it gets the cap.
    """
    if not worker.step_us_high:
        return config.cap_us
    return min(config.cap_us, max(config.floor_us, config.factor * worker.step_us_high))


class ProbeEvidence(Struct, frozen=True, kw_only=True):
    """What asking the engine twice showed.

    `probe`: answered, silent, refused (the second time). `steps`: made in between; -1
    unknown. `step_age_us`: age of the step it is in, 0 in none. `cpu_us`: CPU time that
    the stepping thread used in between; -1 unknown. `held`: requests it has; -1 unknown.
    """

    probe: ProbeResult
    steps: int = -1
    step_age_us: int = 0
    cpu_us: int = -1
    held: int = -1


WORKING_CPU_US = 5_000
"""CPU time between two looks that counts as computing; a stopped thread uses none."""


def hung(silent_us: int, look: ProbeEvidence, bound: int, config: StallConfig) -> bool:
    """The judgement, after `silent_us` without a byte or a recorded step."""
    if silent_us < bound:
        return False
    if look.probe != ProbeResult.ANSWERED:
        return True
    if look.steps > 0:
        return False
    if look.held == 0 or look.cpu_us >= WORKING_CPU_US:
        return max(silent_us, look.step_age_us) > config.step_cap_us
    if look.cpu_us >= 0:
        return True
    return look.step_age_us > max(bound, config.cap_us)


def recovered(look: ProbeEvidence) -> bool:
    """Whether a suspected engine may be used again: it has nothing to do, or it does it."""
    if look.probe != ProbeResult.ANSWERED:
        return False
    return look.held == 0 or look.steps > 0 or look.cpu_us >= WORKING_CPU_US


def evidence_of(look: ProbeEvidence) -> str:
    """The same in words, for the log."""
    return "idle and answering" if look.held == 0 else f"{look.steps} steps made"
