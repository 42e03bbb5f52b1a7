"""Is a stream stuck whose engine makes steps without it? A bound of silence, and a judgement.

The stall watch (`relume.policies.liveness.stall`) looks at engines: one that makes steps is well.
A stream can get no more tokens all the same: an output is lost within the engine, or the path of
its connection is. Silence alone is no evidence. A healthy stream is silent while it waits, while
it is preempted, while its prompt is computed, and while its client does not read. So a stream is
stuck only if all of these hold:

- The fold's account of the worker says that the engine decodes the attempt, or is done with it. For
  a request that the leader ended, because it took the gateway for lost, the replica remembers that.
  Without the log, the engine itself says it: a stream that has begun there is done if the engine, when
  probed, has no request at all.
- While it decodes, the log shows `steps` engine steps since the replica found the stream silent.
  Each step gives each request that decodes a token. A replica that is cut from the log sees none,
  and judges nothing.
- The silence exceeds a bound that follows the slowest recent step.
- The engine's HTTP server answered a probe after most of the silence: a server that is busy
  renders no output for any stream. Or it answered none, and none of its streams got a byte, for
  `unanswered_us`: then the path to the engine is cut, while the engine's reports reach the log.

Replicas judge only while every living replica knows the decision: an older one cannot read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings
from relume.events.vocabulary.enums import EnginePhase, ProbeResult
from relume.policies.agreement import known_to_all
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Fleet, Worker

VERSION = "version.overdue"
"""The setting by which replicas record that they know this decision."""
OUT_OF_REACH = "it makes steps and answers no probe"
"""Why streams leave an engine to which no path leads."""


class OverdueConfig(Struct, frozen=True, kw_only=True):
    """Bounds of the silence of one stream."""

    floor_us: Annotated[
        int,
        option(
            "Minimum silence of a stream before it moves although its engine makes steps",
            unit="microseconds",
            ge=100_000,
            le=600_000_000,
        ),
    ] = 1_500_000
    factor: Annotated[
        int,
        option(
            "The same silence, as a multiple of the slowest recent engine step", ge=1, le=10_000
        ),
    ] = 4
    steps: Annotated[
        int,
        option(
            "Minimum number of engine steps in that silence; more than vLLM's --stream-interval",
            ge=1,
            le=1_000_000,
        ),
    ] = 32
    unanswered_us: Annotated[
        int,
        option(
            "The same silence, of all streams of an engine, if it answers no probe",
            unit="microseconds",
            ge=100_000,
            le=600_000_000,
        ),
    ] = 4_000_000


SETTINGS = RecordedSettings("overdue.", OverdueConfig)
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of


class Silence(Struct, frozen=True, kw_only=True):
    """What a replica saw of one stream; fields as in `StreamJudged`."""

    silent_us: int
    from_step: int
    probe: ProbeResult
    held: int = -1


class Judgement(Struct, frozen=True, kw_only=True):
    """What the log adds, and the answer; fields as in `StreamJudged`."""

    steps: int
    decodes: bool
    finished: bool
    bound_us: int
    stuck: bool


def bound_us(worker: Worker, config: OverdueConfig, is_answered: bool = True) -> int:
    """Silence, in microseconds, after which a stream on `worker` is overdue. `is_answered`: whether
    the engine answers probes."""
    floor_us = config.floor_us if is_answered else max(config.floor_us, config.unanswered_us)
    return max(floor_us, config.factor * worker.step_us_high)


def decodes(worker: Worker, request: str, attempt: int) -> bool:
    """Whether the engine decodes the attempt, by its own reports: its prompt is computed, and it
    neither waits nor is preempted."""
    found = worker.attempts.get(key_of(request, attempt))
    return found is not None and found.queued and found.decoding


def decodes_v1(worker: Worker, request: str, attempt: int) -> bool:
    """The same as versions 1 and 2 of the decision have it: not of a request that the leader ended."""
    found = worker.attempts.get(key_of(request, attempt))
    return decodes(worker, request, attempt) and found is not None and not found.ended


def is_finished(fleet: Fleet, worker: Worker, request: str, attempt: int) -> bool:
    """Whether the engine took the attempt and is done with it, by its own reports: it has none of
    the request's choices any more. The report may have come before the dispatch. Of a request that
    the leader ended while its gateway stood still, the fold knows only that the engine does not
    have it. Only the replica that has its stream knows that the engine finished it, so no other
    one may ask."""
    if request in fleet.requests:
        return is_finished_v2(fleet, worker, request, attempt)
    key = key_of(request, attempt)
    if not worker.step or key in worker.attempts or key in worker.finished_early:
        return False
    return not _has_choices(worker, request)


def is_finished_v2(fleet: Fleet, worker: Worker, request: str, attempt: int) -> bool:
    """The same as version 2 of the decision has it: only of a request that the fold has."""
    found = fleet.requests.get(request)
    sent_there = found is not None and (found.worker, found.incarnation, found.attempt) == (
        worker.name,
        worker.incarnation,
        attempt,
    )
    if sent_there and key_of(request, attempt) not in worker.attempts:
        return not _has_choices(worker, request)
    return is_finished_v1(fleet, worker, request, attempt)


def is_finished_v1(fleet: Fleet, worker: Worker, request: str, attempt: int) -> bool:
    """The same as version 1 of the decision has it: not of an attempt that was finished before its
    dispatch was folded."""
    found, key = fleet.requests.get(request), key_of(request, attempt)
    if found is None or key in worker.attempts or (worker.name, key) not in found.places:
        return False
    return not _has_choices(worker, request)


def _has_choices(worker: Worker, request: str) -> bool:
    return any(held.request.startswith(f"{request}#") for held in worker.attempts.values())


class Rule(Struct, frozen=True, kw_only=True):
    """What the account of a worker says of an attempt there."""

    decodes: Callable[[Worker, str, int], bool]
    is_finished: Callable[[Fleet, Worker, str, int], bool]
    knows_idle: bool = False
    """Whether an engine that has no request is done with the stream."""
    knows_path: bool = False
    """Whether an engine that answers no probe is out of reach, though it makes steps."""


RULES: dict[int, Rule] = {
    1: Rule(decodes=decodes_v1, is_finished=is_finished_v1),
    2: Rule(decodes=decodes_v1, is_finished=is_finished_v2),
    3: Rule(decodes=decodes, is_finished=is_finished),
    4: Rule(decodes=decodes, is_finished=is_finished, knows_idle=True),
    5: Rule(decodes=decodes, is_finished=is_finished, knows_idle=True, knows_path=True),
}
"""By version of the decision."""


def judge(
    fleet: Fleet,
    at: tuple[str, int],
    of: tuple[str, int],
    seen: Silence,
    config: OverdueConfig,
    rule: Rule = RULES[5],
) -> Judgement:
    """Whether the stream `of` (request, attempt) `at` (worker, incarnation) is stuck."""
    worker = fleet.workers.get(at[0])
    if worker is None or worker.incarnation != at[1] or worker.engine != EnginePhase.READY:
        return Judgement(
            steps=0, decodes=False, finished=False, bound_us=config.floor_us, stuck=False
        )
    is_cut_off = rule.knows_path and seen.probe == ProbeResult.SILENT
    steps, bound = worker.step - seen.from_step, bound_us(worker, config, not is_cut_off)
    is_decoding, is_over = rule.decodes(worker, *of), rule.is_finished(fleet, worker, *of)
    is_idle = rule.knows_idle and seen.held == 0 and not is_cut_off
    stuck = (
        (seen.probe == ProbeResult.ANSWERED or is_cut_off)
        and seen.silent_us >= bound
        and ((is_decoding and steps >= config.steps) or is_over or is_idle)
    )
    return Judgement(
        steps=steps, decodes=is_decoding, finished=is_over, bound_us=bound, stuck=stuck
    )


def is_known(fleet: Fleet) -> bool:
    """Whether every living replica can read the decision."""
    return any(r.alive for r in fleet.replicas.values()) and known_to_all(fleet, VERSION)
