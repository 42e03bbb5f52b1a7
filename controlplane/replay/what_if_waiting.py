"""What-if of the admission queue: what happens to each arrival under other settings.

The queue is rebuilt from the stream as in `verify_waiting`, under the other settings, and corrected
after each answer: the recorded events continue from there. Up to the first difference it is
therefore the queue that would have been; later differences concern single questions. Arrivals that
did not wait left no question in the log: it is reconstructed if they would have waited under the
other settings. Their unknown properties (size, length of the answer) decide only whether the queue
has room for them, so that is not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from relume.controlplane.replay.answers import Answer
from relume.controlplane.replay.verify_waiting import ON_ARRIVAL, entry_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RouteCause
from relume.policies.admission import admission_queue as waiting
from relume.policies.admission import admission_settings as waiting_settings
from relume.policies.admission.admission_queue import QueueDecision, Room
from relume.policies.admission.admission_settings import WaitingConfig, config_of
from relume.policies.admission.fair_queue import Entry
from relume.policies.routing.saturation import FREE, NO_WORKER, SATURATED, held_back, saturation
from relume.policies.state.overlay.view import View

DEFAULTS = dict(waiting_settings.settings_of(WaitingConfig()))
"""The settings that may differ, with the defaults."""
ON = "is sent immediately"


Note = Callable[..., None]
"""Takes an answer, as `Verdict.changed` of what-if does: about, event, stream, position, recorded,
other; `asked`: False where the log has no such question."""


class ChangedQueue:
    """The queue of one replica, whose view shows the other settings."""

    def __init__(self, view: View, note: Note) -> None:
        self._view = view
        self._note = note
        self._room: Room | None = Room() if not view.fleet.revision else None

    def seen(self, position: int, event: Any, founded: bool) -> None:
        """See RoomReplay.seen."""
        kind, room = type(event), self._room
        if kind is v.ReplicaStarted:
            self._room = Room()
        elif room is None:
            return
        elif kind is v.RequestEnded:
            room.leave(event.request)
        elif kind is v.RouteDecided:
            self._routed(room, position, event, founded)
        elif kind is v.RequestHeld:
            self._held(room, position, event, founded)
        elif kind is v.RequestShed:
            self._shed(room, position, event, founded)

    def _tell(
        self, event: Any, position: int, recorded: Answer, other: Answer, asked: bool = True
    ) -> None:
        if recorded != other:
            place = event.request, event, self._view.stream, position
            self._note(*place, recorded, other, asked=asked)

    def _recorded(self) -> WaitingConfig:
        """The settings that the log has."""
        view = self._view
        plain: Any = SimpleNamespace(setting=lambda key, text: View.setting(view, key, text))
        return config_of(plain)

    def _cause(self, room: Room, config: WaitingConfig, model: str, at_us: int) -> str:
        if not config.requests:
            return FREE
        cause, _ = saturation(self._view, model, config, at_us)
        return held_back(cause, room.waiting(model))

    def _enter(
        self, room: Room, entry: Entry, cause: str, config: WaitingConfig
    ) -> tuple[Answer, dict[str, Entry]]:
        """The answer for a newcomer, and the request that it displaces."""
        if cause == FREE:
            return (ON, ()), {}
        before = dict(room.entries) if len(room.entries) >= config.requests else room.entries
        judged = room.enter(entry, entry.entered_us, config)
        gone = {name: before[name] for name in judged.evicted}
        return (_said(judged), _weighed(cause, judged)), gone

    def _held(self, room: Room, position: int, event: v.RequestHeld, founded: bool) -> None:
        config = config_of(self._view)
        cause = self._cause(room, config, event.model, event.at_us)
        entry = entry_of(event)
        if cause not in (FREE, NO_WORKER):
            entry.until_us = event.at_us + config.most_ms * 1000
        told = QueueDecision(
            refused="",
            evicted=event.evicted,
            ahead_requests=event.ahead_requests,
            ahead_tokens=event.ahead_tokens,
            predicted_us=event.predicted_us,
        )
        other, gone = self._enter(room, entry, cause, config)
        if founded:
            recorded = _said(told), _weighed(event.cause, told)
            self._tell(event, position, recorded, other)
        for name, lost in gone.items():  # as it was
            if name not in event.evicted:
                room.put(lost, event.at_us)
        if event.request not in room.entries:
            room.put(entry, event.at_us)

    def _shed(self, room: Room, position: int, event: v.RequestShed, founded: bool) -> None:
        waited, config = room.leave(event.request), config_of(self._view)
        if not founded:
            return
        recorded: Answer = f"is refused: {event.reason}", ()
        if waited is not None:
            other = recorded
            if event.reason == waiting.TOO_LONG and event.at_us < waited.end_us:
                other = "waits on", ()
            self._tell(event, position, recorded, other)
        elif event.reason in ON_ARRIVAL:
            entry = entry_of(event)
            cause = self._cause(room, config, event.model, event.at_us)
            other, gone = self._enter(room, entry, cause, config)
            room.leave(entry.request)
            for lost in gone.values():
                room.put(lost, event.at_us)
            self._tell(event, position, recorded, (other[0], ()))

    def _routed(self, room: Room, position: int, event: v.RouteDecided, founded: bool) -> None:
        config = config_of(self._view)
        waits = event.request in room.entries
        if founded and event.worker and (waits or event.cause == RouteCause.ARRIVAL):
            other = (
                self._turn(room, event, config) if waits else self._straight(room, event, config)
            )
            recorded = "its turn" if waits else ON
            if other:
                self._tell(event, position, (recorded, ()), (other, ()), waits)
        if event.worker and waits:
            room.take(event.request, event.at_us, event.ttft_us, config)

    def _turn(self, room: Room, event: v.RouteDecided, config: WaitingConfig) -> str:
        """Of one that was called; empty: unknown, the log was unavailable."""
        if event.cause != RouteCause.WAIT_OVER:
            return ""
        if config.most_ms < self._recorded().most_ms:
            if room.entries[event.request].end_us <= event.at_us:
                return f"is refused: {waiting.TOO_LONG}"
        here = self._busy(event, config)
        if here and not self._busy(event, self._recorded()):
            return "waits on: saturated"
        turn = room.next(event.model, event.at_us, config)
        return (
            "its turn"
            if turn is None or turn.request == event.request
            else (f"the turn of {turn.request}")
        )

    def _straight(self, room: Room, event: v.RouteDecided, config: WaitingConfig) -> str:
        """Of one that did not wait; empty: no decision was needed, or the log was unavailable."""
        if event.attempt > 1:
            return ""
        cause = self._cause(room, config, event.model, event.at_us)
        if cause != SATURATED or self._cause(
            room, self._recorded(), event.model, event.at_us
        ) not in (FREE, NO_WORKER):
            return ""
        return f"waits: {cause}"

    def _busy(self, event: v.RouteDecided, config: WaitingConfig) -> bool:
        cause, _ = saturation(self._view, event.model, config, event.at_us, glance=False)
        return cause == SATURATED and config.requests > 0


def _said(judged: QueueDecision) -> str:
    if judged.refused:
        return f"is refused: {judged.refused}"
    return f"waits in place of {', '.join(judged.evicted)}" if judged.evicted else "waits"


def _weighed(cause: str, judged: QueueDecision) -> tuple[str, ...]:
    foretold = f"{judged.predicted_us} us foretold" if judged.predicted_us >= 0 else "none foretold"
    return (
        f"{cause}: {judged.ahead_requests} requests, {judged.ahead_tokens} tokens go first, "
        f"{foretold}",
    )
