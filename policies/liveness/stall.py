"""Is a silent engine hung? A stall timeout derived from recorded steps, and a judgement.

A step that takes long is not a stall: the bound follows the slowest recent step
(`step_us_high`, which fades by 1/32 a step), so a worker slowed tenfold widens its own bound while
it continues. Silence alone is never enough: the gateway probes the engine (`/relume/state`) after
half the bound and again at its end. One that does not answer is hung at the cap only: before, it may
be starved, which its agent sees and a replica does not. Progress means steps, or turns of the
engine's loop that found nothing to compute. A step in progress is allowed a multiple of what the
engine expects of it: a long prefill computes. CPU time says nothing, since a thread that spins uses
it too; a thread that waited for a CPU most of the time is starved, not hung, unless it has used more
CPU time without a turn than its step may take. An engine that refuses a probe, or holds requests and
makes no progress, is hung.

A server that does not say what it expects (one without the plugin) is judged by CPU time: what it
uses counts as work.
"""

from __future__ import annotations

from collections.abc import Callable
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
        int,
        option(
            "Maximum stall timeout, at which an engine that answers no probe is hung",
            unit="microseconds",
            ge=10_000,
            le=600_000_000,
        ),
    ] = 2_500_000
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
    unknown. `step_age_us`: age of the step it is in, 0 in none. `expected_us`: the longest that it
    should take; -1 if the engine does not say. `cpu_us`, `wait_us`: CPU time that the stepping thread
    used in between, and for which it waited for a CPU; -1 unknown. `held`: requests it has; -1
    unknown. `turns` of its loop in between; -1 unknown.
    """

    probe: ProbeResult
    steps: int = -1
    step_age_us: int = 0
    cpu_us: int = -1
    held: int = -1
    expected_us: int = -1
    wait_us: int = -1
    turns: int = -1


STRETCH = 4
"""A step may take so many times what the engine expects of it."""
STARVED_US = 100_000
"""Time for which a thread waited for a CPU between two looks, and used it for less: no hang."""
WORKING_CPU_US = 5_000
"""CPU time between two looks that counts as computing; a stopped thread uses none."""


def hung(silent_us: int, look: ProbeEvidence, bound: int, config: StallConfig) -> bool:
    """The judgement, after `silent_us` without a byte or a recorded step."""
    if look.probe == ProbeResult.SILENT and silent_us < config.cap_us:
        return False
    spins = look.cpu_us > STRETCH * look.expected_us
    return _hung(silent_us, look, bound, config, starved=_waits(look) and not spins)


def _hung(
    silent_us: int, look: ProbeEvidence, bound: int, config: StallConfig, starved: bool
) -> bool:
    if silent_us < bound:
        return False
    if look.probe != ProbeResult.ANSWERED:
        return True
    if look.steps > 0:
        return False
    if look.expected_us >= 0:
        # It says what it expects of its step, and ended none.
        excused = look.held == 0 or look.turns > 0 or starved or _within(look)
        return not excused or max(silent_us, look.step_age_us) > config.step_cap_us
    if look.held == 0 or look.cpu_us >= WORKING_CPU_US:
        return max(silent_us, look.step_age_us) > config.step_cap_us
    if look.cpu_us >= 0:
        return True
    return look.step_age_us > max(bound, config.cap_us)


def _waits(look: ProbeEvidence) -> bool:
    """Whether its thread waited for a CPU, for longer than it had one."""
    return look.wait_us >= STARVED_US and look.wait_us > look.cpu_us


def _within(look: ProbeEvidence) -> bool:
    """Whether it is in a step that may take longer still."""
    return 0 < look.step_age_us < STRETCH * look.expected_us


def _hung_v2(silent_us: int, look: ProbeEvidence, bound: int, config: StallConfig) -> bool:
    """An engine that did not answer was hung at the end of its bound, and a thread that had less
    than half of a CPU was starved, however much it computed."""
    return _hung(silent_us, look, bound, config, starved=_waits(look))


HUNG: dict[int, Callable[[int, ProbeEvidence, int, StallConfig], bool]] = {
    1: _hung_v2,
    2: _hung_v2,
    3: hung,
}
"""The judgement in each version of the decision: 1 is 2 for engines that do not say what they expect
of a step."""


def recovered(look: ProbeEvidence) -> bool:
    """Whether a suspected engine may be used again: it steps, its loop turns, or its step may take
    longer."""
    if look.probe != ProbeResult.ANSWERED:
        return False
    if look.expected_us >= 0:
        return look.steps > 0 or look.turns > 0 or _within(look)
    return look.held == 0 or look.steps > 0 or look.cpu_us >= WORKING_CPU_US


def evidence_of(look: ProbeEvidence) -> str:
    """The same in words, for the log."""
    if look.held == 0:
        return "idle and answering"
    if look.steps > 0 or look.expected_us < 0:
        return f"{look.steps} steps made"
    return f"{look.turns} turns of its loop" if look.turns > 0 else "in a step that may take longer"
