"""Decisions about checkpoints, repeated: holders, recovery plans and migrations; and doubts, which
follow from the blocks that attempts could restore."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, ClassVar

from relume.controlplane.replay.answers import Answer, moved, placed, planned
from relume.controlplane.replay.divergence import Verdict
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AttemptMode
from relume.policies.checkpoints import decisions
from relume.policies.checkpoints.checkpoint_settings import config_of
from relume.policies.migration import moves
from relume.policies.recovery.lineage import CorruptEngines, Lineage, engine_of
from relume.policies.state.overlay.view import View


def check_holders(
    view: View, stream: str, position: int, event: v.HolderChosen, verdict: Verdict
) -> None:
    """The question is the request, its primary and the blocks expected; the rest is answered."""
    verdict.decisions += 1
    verdict.holders += 1
    expected: Any = (
        event.policy, event.wanted, event.holders, event.reason, event.expected_bytes,
        event.candidates,
    )  # fmt: skip
    try:
        config = config_of(view)
        found, size = decisions.place(view, event.request, event.primary, event.expected_blocks)
    except (KeyError, ValueError) as error:
        verdict.differ(event.basis.revision, stream, position, "decision", event, repr(error))
        return
    actual = (
        config.placement, config.holders, found.holders, found.reason, size, found.candidates,
    )  # fmt: skip
    if actual != expected:
        place = event.request, event, stream, position
        verdict.changed("holders", *place, placed(*expected), placed(*actual))


def check_plan(
    view: View, stream: str, position: int, event: v.RecoveryPlanned, verdict: Verdict
) -> None:
    """The question is what was lost, and where; the answer is how each request continues."""
    verdict.decisions += 1
    verdict.plans += 1
    lost = [decisions.Lost(c.request, c.attempt, c.tokens, c.avoid, c.tier) for c in event.choices]
    try:
        policy = config_of(view).recovery
        choices = tuple(decisions.plan(view, event.worker, event.incarnation, lost))
    except (KeyError, ValueError) as error:
        verdict.differ(event.basis.revision, stream, position, "decision", event, repr(error))
        return
    texts = partial(planned, event.policy), partial(planned, policy)
    same = policy == event.policy and choices == event.choices
    if not same:
        _differ("plan", verdict, stream, position, event, choices, *texts)


def check_migration(
    view: View, stream: str, position: int, event: v.MigrationPlanned, verdict: Verdict
) -> None:
    """The question is what runs on which worker; whether and where it leaves is answered."""
    verdict.decisions += 1
    verdict.migrations += 1
    running = [
        moves.Running(
            request=c.request,
            attempt=c.attempt,
            tokens=c.tokens,
            left=c.left,
            avoid=c.avoid,
            tier=c.tier,
        )
        for c in event.choices
    ]
    choices: tuple[v.MigrationChoice, ...] = ()
    try:
        leaves = (event.worker, event.cause) in moves.sources(view)
        if leaves:
            place = event.worker, event.incarnation
            choices = tuple(moves.plan(view, event.cause, *place, running))
    except (KeyError, ValueError) as error:
        verdict.differ(event.basis.revision, stream, position, "decision", event, repr(error))
        return
    if event.tick != view.fleet.tick:
        texts, now = f"tick {event.tick}", f"tick {view.fleet.tick}"
        verdict.differ(event.basis.revision, stream, position, "decision", texts, now)
    if not leaves or choices != event.choices:
        cause = event.cause if leaves else f"not to be left for {event.cause}"
        words = partial(moved, event.cause), partial(moved, cause)
        _differ("migration", verdict, stream, position, event, choices, *words)


def _differ(
    kind: str, verdict: Verdict, stream: str, position: int, event: Any,
    choices: Sequence[Any], recorded: Callable[[Any], Answer], actual: Callable[[Any], Answer],
) -> None:  # fmt: skip
    """Note which choices differ, in `recorded` and `actual`."""
    others = {choice.request: choice for choice in choices}
    for choice in event.choices:
        other = others.pop(choice.request, None)
        was, comes = recorded(choice), actual(other)
        if choice != other or was != comes:
            verdict.changed(kind, choice.request, event, stream, position, was, comes)
    if others or not event.choices:
        place = event.basis.revision, stream, position
        verdict.differ(*place, "decision", f"{kind} of {len(event.choices)}", sorted(others))


class Doubts:
    """Which of one replica's requests have something of a corrupt engine, by its own events in their
    order. Unknown are requests that it had before the log begins or that came back to it from another
    replica (`foreign`: those that another one claimed), and those of which an event is missing."""

    def __init__(self, corrupt: CorruptEngines, foreign: Container[str]) -> None:
        self._corrupt = corrupt
        self._foreign = foreign
        self._known: dict[str, Lineage | None] = {}
        self._open: dict[str, str] = {}
        """By request, the engine of the attempt that has not ended."""
        self._is_whole = False

    def of(self, view: View, event: v.RouteDecided) -> bool | None:
        """Whether the request is in doubt when `event` is decided; None: unknown."""
        lineage = self._known.get(event.request)
        if lineage is None:
            return None
        return lineage.is_doubted(self._corrupt, view.fleet.requests.get(event.request))

    def own(self, view: View, event: Any) -> None:
        """The replica wrote `event`, and the view has it."""
        handler = self._HANDLERS.get(type(event))
        if handler is not None:
            handler(self, view, event)

    def _on_started(self, view: View, event: v.ReplicaStarted) -> None:
        self._known.clear()
        self._open.clear()
        self._is_whole = True

    def _on_arrived(self, view: View, event: v.RequestArrived) -> None:
        self._known[event.request] = Lineage() if self._is_whole else None

    def _on_returned(self, view: View, event: v.ClientReturned) -> None:
        if event.request not in self._known:
            self._known[event.request] = Lineage(is_adopted=True) if self._is_whole else None
        elif event.request in self._foreign:
            self._known[event.request] = None

    def _on_routed(self, view: View, event: v.RouteDecided) -> None:
        lineage = self._known.get(event.request)
        if lineage is None:
            return
        if event.request in self._open:  # the end of its last attempt could not be written
            self._known[event.request] = None
            return
        if event.mode == AttemptMode.NEW:
            lineage.start_over(bool(self.of(view, event)))
        if event.worker:
            engine = self._open[event.request] = engine_of(event.worker, event.incarnation)
            lineage.begin(engine, event.delivered, _can_restore(view, event))

    def _on_observed(self, view: View, event: v.TransportObserved) -> None:
        self._open.pop(event.request, None)
        if (lineage := self._known.get(event.request)) is not None:
            lineage.end(engine_of(event.worker, event.incarnation), event.delivered)

    def _on_ended(self, view: View, event: v.RequestEnded) -> None:
        self._known.pop(event.request, None)
        self._open.pop(event.request, None)

    _HANDLERS: ClassVar[dict[type, Callable[[Doubts, View, Any], None]]] = {
        v.ReplicaStarted: _on_started,
        v.RequestArrived: _on_arrived,
        v.ClientReturned: _on_returned,
        v.RouteDecided: _on_routed,
        v.TransportObserved: _on_observed,
        v.RequestEnded: _on_ended,
    }


def _can_restore(view: View, event: v.RouteDecided) -> bool:
    """Whether the attempt was sent with holders to restore from."""
    lost = event.attempt - 1
    if not lost or not decisions.takes_part(view, event.worker):
        return False
    return bool(decisions.sources(view, event.request, event.worker, lost))
