"""The leader's effects for this worker, from stream `fleet`, carried out at most once (I15).

An effect is known by (decision, index). It is first written into the state file together
with the target state it leads to, then into the worker's stream as `EffectApplied`, and
only then does it act. After a crash in between, the effect is in the state file: it goes into the
log again and is not carried out again. The answer may also be in the spool of the earlier life,
which lands later: then the worker's own stream is read once more before the answer is repeated.
The next start acts on the target state. On another host, without the file, the worker's own stream
shows what was applied. The leader repeats unanswered effects, so trimming the log loses none.

It also says, in the same stream, how much of the engine's steps is to be written, and of which
feature level events may be; these are states and need no answer.

- hold: an engine that ends is not restarted; a running one is left alone. release undoes it.
- restart: the engine is killed and restarted, without a backoff.
- canary: the engine gets all canaries at once.
- limit_batch, reset_prefix_cache: written to the page that the engine's scheduler reads.
- drain, undrain: noted and shown; routing around the worker is the control plane's part.

An effect that the state file has no room for is neither carried out nor answered; the
leader states it again.

`CheckpointsReleased` and `CheckpointsVoided` of the same stream are passed on: dropping twice what is
gone harms nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.engine_process.supervisor import Supervisor
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.events.log.codec import decode
from relume.events.log.errors import Compacted, LogError, LogUnavailable
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary import (
    CheckpointsReleased,
    CheckpointsVoided,
    DetailDecided,
    Effect,
    EffectApplied,
    EffectsDecided,
    FeatureLevelRaised,
    HealthDecided,
)
from relume.events.vocabulary.enums import EffectKind, StepDetail

FLEET = "fleet"
APPLIED = "applied"
RETRY_S = 1.0
MAX_RETRY_S = 30.0
_DECIDED_TAG = b"\xb1effects_decided/1"
_DETAIL_TAG = b"\xb0detail_decided/1"
_APPLIED_TAG = b"\xb0effect_applied/1"
_RELEASED_TAG = b"\xb6checkpoints_released/1"
_RAISED_TAG = b"\xb6feature_level_raised/1"
_VOIDED_TAG = b"\xb4checkpoints_voided/1"
_HEALTH_TAG = b"\xb0health_decided/1"

Key = tuple[str, int]


class EffectReader(Protocol):
    """The part of a LogReader that is needed here, and which log it reads; it may show two streams
    only."""

    async def identity(self) -> str:
        """The id of the log that etcd holds; empty: it has none yet."""
        ...

    async def is_empty(self) -> bool:
        """Whether etcd holds no segment of any stream."""
        ...

    async def read(self) -> list[RevisionGroup]:
        """What the log holds of stream `fleet` and the worker's own."""
        ...

    def follow(self, after: int) -> AsyncIterator[RevisionGroup]:
        """The groups of stream `fleet` with revision > `after`, for ever."""
        ...


# kind -> the (held, draining) it leads to; None leaves that as it is.
_TARGETS: dict[str, tuple[bool | None, bool | None]] = {
    "hold": (True, None),
    "release": (False, None),
    "drain": (None, True),
    "undrain": (None, False),
    "restart": (None, None),
    "canary": (None, None),
    "limit_batch": (None, None),
    "reset_prefix_cache": (None, None),
}


_PERCENTAGES = frozenset(map(str, range(1, 101)))


def judge(effect: Effect, incarnation: int, held: bool) -> str:
    """`applied`, or why the effect is refused."""
    if effect.kind not in _TARGETS:
        return f"refused: unknown kind {effect.kind}"
    if effect.incarnation and effect.incarnation != incarnation:
        age = "stale" if effect.incarnation < incarnation else "unknown"
        return f"refused: {age} incarnation {effect.incarnation}, now {incarnation}"
    if effect.kind == EffectKind.RESTART and held:
        return "refused: the worker is held"
    if effect.kind == EffectKind.LIMIT_BATCH and effect.argument not in _PERCENTAGES:
        return "refused: no percentage"
    return APPLIED


class EffectRunner:
    """Follows the log for one worker. First `catch_up`, before an engine runs; then `run`."""

    def __init__(
        self,
        worker: str,
        reader: EffectReader,
        directory: RunDirectory,
        journal: Journal,
        supervisor: Supervisor,
        logger: Logger,
        on_released: Callable[[tuple[str, ...]], None] = lambda _requests: None,
        on_voided: Callable[[tuple[tuple[str, int], ...]], None] = lambda _attempts: None,
    ) -> None:
        self._worker = worker
        self._on_released = on_released
        self._on_voided = on_voided
        self._reader = reader
        self._directory = directory
        self._journal = journal
        self._supervisor = supervisor
        self._logger = logger
        self._answered: dict[Key, str] = {}
        self._is_complete = False
        """Whether `_told` has all answers of earlier lives."""
        self._unanswered: dict[Key, None] = {}
        """Applied by an earlier life, whose answer may be on its way into the log."""
        self._after = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._following: asyncio.Task[None] | None = None

    async def catch_up(self) -> None:
        """Read what the log holds: what was applied, then what was not yet. Waits for etcd."""
        is_complete = self._journal.has_landed_spool
        groups = await self._history()
        self._learn(groups)
        self._is_complete = is_complete
        for group in groups:
            self._take(group)

    def _learn(self, groups: list[RevisionGroup]) -> None:
        for group in groups:
            event: EffectApplied
            for event in self._events(group, self._journal.stream, _APPLIED_TAG):
                self._answered[event.decision, event.index] = event.outcome

    async def _history(self) -> list[RevisionGroup]:
        while True:
            try:
                return await self._reader.read()
            except (LogUnavailable, Compacted) as away:
                self._logger.warning("waiting for the log's history", why=str(away))
                await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        """Carry out effects as they are decided, without end."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._answer())
            self._following = tasks.create_task(self._follow())

    def begin_anew(self) -> None:
        """Another log began: follow it from its beginning. It has no answer of ours."""
        self._answered, self._unanswered = {}, {}
        self._is_complete = True
        self._after = 0
        if self._tasks is not None and self._following is not None:
            self._following.cancel()
            self._following = self._tasks.create_task(self._follow())

    async def _answer(self) -> None:
        """Record what earlier lives applied and did not record, once their spool has landed."""
        if self._is_complete:
            return
        await self._journal.landed_spool()
        while not self._is_complete:
            try:
                self._learn(await self._history())
                self._is_complete = True
            except LogError as error:
                self._logger.error("cannot read which effects were recorded", why=str(error))
                await asyncio.sleep(MAX_RETRY_S)
        for key in self._unanswered:
            if key not in self._answered:
                self._tell(key, APPLIED)

    async def _follow(self) -> None:
        """An unreadable log is no reason to stop a serving engine: it is logged and read again,
        from the beginning of the log; what was carried out already is known."""
        pause_s = RETRY_S
        while True:
            try:
                async for group in self._reader.follow(self._after):
                    self._take(group)
                    pause_s = RETRY_S
            except LogError as error:
                if isinstance(error, Compacted):
                    self._journal.shed(False)  # what it missed may have said so
                if not isinstance(error, Compacted | LogUnavailable):
                    self._logger.error("cannot follow the fleet's effects", why=str(error))
                self._after = 0
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _take(self, group: RevisionGroup) -> None:
        decided: EffectsDecided
        for decided in self._events(group, FLEET, _DECIDED_TAG):
            for index, effect in enumerate(decided.effects, max(decided.again, 0)):
                if effect.worker == self._worker:
                    self._carry_out((decided.decision, index), effect)
        released: CheckpointsReleased
        for released in self._events(group, FLEET, _RELEASED_TAG):
            self._on_released(released.requests)
        voided: CheckpointsVoided
        for voided in self._events(group, FLEET, _VOIDED_TAG):
            self._on_voided(voided.attempts)
        health: HealthDecided
        for health in self._events(group, FLEET, _HEALTH_TAG):
            if health.worker == self._worker:
                self._supervisor.judge(health.incarnation, health.state)
        detail: DetailDecided
        for detail in self._events(group, FLEET, _DETAIL_TAG):
            self._journal.shed(detail.detail != StepDetail.FULL)
        raised: FeatureLevelRaised
        for raised in self._events(group, FLEET, _RAISED_TAG):
            self._journal.raise_level(raised.level)
        self._after = group.revision

    def _events(self, group: RevisionGroup, stream: str, tag: bytes) -> Iterator[Any]:
        """Those of a kind. One that cannot be read is left out, as replicas do: the others count."""
        for segment in group.segments:
            if segment.stream != stream:
                continue
            for record in segment.records:
                if not record.startswith(tag, 1):
                    continue
                try:
                    yield decode(record)
                except LogError as error:
                    why, revision = str(error), group.revision
                    self._logger.error(
                        "record left out: unreadable", stream=stream, revision=revision, why=why
                    )

    def _carry_out(self, key: Key, effect: Effect) -> None:
        state = self._directory.state
        if key in self._answered:
            if key not in state.applied and self._answered[key] == APPLIED:
                self._remember(key, effect)  # the file is younger than the log
            return
        if key in state.applied:  # we died between the file and the log
            if self._is_complete:
                self._tell(key, APPLIED)
            else:
                self._unanswered[key] = None
            return
        outcome = judge(effect, self._supervisor.incarnation, state.held)
        if outcome == APPLIED and not self._remember(key, effect):
            return
        self._tell(key, outcome)
        self._logger.info("effect", decision=key[0], kind=effect.kind, outcome=outcome)
        if outcome != APPLIED:
            return
        if effect.kind == EffectKind.RESTART:
            self._supervisor.replace(f"restart requested by {key[0]}")
        elif effect.kind == EffectKind.RELEASE:
            self._supervisor.poke()
        elif effect.kind == EffectKind.CANARY:
            self._supervisor.hurry_canaries()
        elif effect.kind == EffectKind.LIMIT_BATCH:
            self._supervisor.limit_batch(int(effect.argument))
        elif effect.kind == EffectKind.RESET_PREFIX_CACHE:
            self._supervisor.reset_prefix_cache()

    def _remember(self, key: Key, effect: Effect) -> bool:
        """Whether the state file has it."""
        state = self._directory.state
        held, draining = _TARGETS[effect.kind]
        try:
            self._directory.remember_applied(
                key,
                held=state.held if held is None else held,
                draining=state.draining if draining is None else draining,
            )
        except OSError as error:
            self._logger.error(
                "effect cannot be remembered; it waits to be stated again",
                decision=key[0],
                kind=effect.kind,
                why=str(error),
                remedy=f"make room on the disk of {self._directory.path}",
            )
            return False
        return True

    def _tell(self, key: Key, outcome: str) -> None:
        self._answered[key] = outcome
        self._journal.record(EffectApplied(decision=key[0], index=key[1], outcome=outcome))
