"""What-if of the waiting room: what becomes of each arrival under other settings of it.

The room is built again from the stream as in `verify_waiting`, under the other settings, and put
right behind each answer: what follows is what was recorded. So up to the first difference it is
the room that would have been, and later differences are of single questions. Arrivals that went
straight on left no question in the log: it is put together where the other settings would have had
them wait. What nobody knows of them (how large, how long their answers) decides only whether there
is room for them, which is therefore not asked.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

from relume.controlplane.replay.debugger_estimates import Answer
from relume.controlplane.replay.verify_waiting import ON_ARRIVAL, entry_of
from relume.events import vocabulary as v
from relume.policies import waiting, waiting_settings
from relume.policies.fair_queue import Entry
from relume.policies.saturation import FREE, NO_WORKER, SATURATED, held_back, saturation
from relume.policies.view import View
from relume.policies.waiting import Judged, Room
from relume.policies.waiting_settings import WaitingConfig, config_of

DEFAULTS = dict(waiting_settings.settings_of(WaitingConfig()))
"""What may be set otherwise, with the defaults."""
ON = "goes on at once"


class Note(Protocol):
    """Takes an answer. `asked`: False where the log has no such question; `counted`: it is a
    decision of its own."""

    def __call__(
        self,
        about: str,
        event: Any,
        stream: str,
        position: int,
        recorded: Answer,
        other: Answer,
        asked: bool = True,
        counted: bool = True,
    ) -> None: ...


class OtherRoom:
    """The room of one replica, whose view shows the other settings."""

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
        self, event: Any, position: int, recorded: Answer, other: Answer,
        asked: bool = True, counted: bool = True,
    ) -> None:  # fmt: skip
        stream = self._view.stream
        self._note(event.request, event, stream, position, recorded, other, asked, counted)

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
        """What becomes of a newcomer, and who is gone for it."""
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
        told = Judged("", event.evicted, event.ahead_requests, event.ahead_tokens,
                      event.predicted_us)  # fmt: skip
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
        if founded and event.worker and (waits or event.cause == "arrival"):
            other = (
                self._turn(room, event, config) if waits else self._straight(room, event, config)
            )
            recorded = "its turn" if waits else ON
            if other and other != recorded:
                self._tell(event, position, (recorded, ()), (other, ()), waits, counted=False)
        if event.worker and waits:
            room.take(event.request, event.at_us, event.ttft_us, config)

    def _turn(self, room: Room, event: v.RouteDecided, config: WaitingConfig) -> str:
        """Of one that was called; empty: nobody knows, the log was away."""
        if event.cause != "wait_over":
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
        """Of one that did not wait; empty: it would not have been asked, or the log was away."""
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


def _said(judged: Judged) -> str:
    if judged.refused:
        return f"is refused: {judged.refused}"
    return f"waits in place of {', '.join(judged.evicted)}" if judged.evicted else "waits"


def _weighed(cause: str, judged: Judged) -> tuple[str, ...]:
    foretold = f"{judged.predicted_us} us foretold" if judged.predicted_us >= 0 else "none foretold"
    return (
        f"{cause}: {judged.ahead_requests} requests, {judged.ahead_tokens} tokens go first, "
        f"{foretold}",
    )
