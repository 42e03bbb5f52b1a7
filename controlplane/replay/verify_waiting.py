"""Waiting, verified: the room is built again from what the replica wrote, and asked again.

Who was held and why, who lost its place to whom, who was refused on arrival and with what figures,
who was called next: each follows from the settings at the basis and from what came before, all of
which is in the stream. What is taken as told: when the clock was looked at, what a client said of
its tenant, tier and deadline, until when it would wait, that a gateway stopped, that there was no
worker for a refusal, why a wait was over, when to try again, and how many waited at a refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relume.events import vocabulary as v
from relume.policies import waiting
from relume.policies.fair_queue import Entry
from relume.policies.saturation import held_back, saturation
from relume.policies.view import View
from relume.policies.waiting import Judged, Room, rank_of
from relume.policies.waiting_settings import config_of

if TYPE_CHECKING:
    from relume.controlplane.replay.verify import Verdict

ON_ARRIVAL = (waiting.DEADLINE, waiting.EXPIRED, waiting.FULL, waiting.SHARE)


class RoomReplay:
    """The room of one replica. It is known from a start of the replica on."""

    def __init__(self, view: View, verdict: Verdict) -> None:
        self._view = view
        self._verdict = verdict
        self._room: Room | None = Room() if not view.fleet.revision else None
        self._evicted: dict[str, str] = {}

    def seen(self, position: int, event: Any, founded: bool) -> None:
        """An own event that the view is about to have. `founded`: the view stands at the basis of
        the decision it is."""
        kind, room = type(event), self._room
        if kind is v.ReplicaStarted:
            self._room, self._evicted = Room(), {}
        elif room is None:
            return
        elif kind is v.RequestEnded:
            room.leave(event.request)
        elif kind is v.RouteDecided:
            if event.request in room.entries:
                self._routed(room, position, event, founded)
        elif kind is v.RequestHeld:
            self._held(room, position, event, founded)
        elif kind is v.RequestShed:
            self._shed(room, position, event)

    def _held(self, room: Room, position: int, event: v.RequestHeld, founded: bool) -> None:
        view, config = self._view, config_of(self._view)
        cause, _ = saturation(view, event.model, config, event.at_us)
        cause = held_back(cause, room.waiting(event.model))
        judged = room.enter(entry_of(event), event.at_us, config)
        self._evicted = dict.fromkeys(judged.evicted, event.request)
        told = event.cause, event.ahead_requests, event.ahead_tokens, event.predicted_us
        found = cause, judged.ahead_requests, judged.ahead_tokens, judged.predicted_us
        if founded:
            self._compare(
                position, event,
                (*told, event.depth, event.evicted, ""),
                (*found, len(room.entries), judged.evicted, judged.refused),
            )  # fmt: skip

    def _shed(self, room: Room, position: int, event: v.RequestShed) -> None:
        waited = room.leave(event.request)
        if event.reason == waiting.DISPLACED:
            self._compare(position, event, event.behalf, self._evicted.pop(event.request, "nobody"))
        elif waited is not None:
            in_time = event.at_us < waited.end_us and event.reason != waiting.STOPPING
            self._compare(position, event, False, in_time)
        elif event.reason in ON_ARRIVAL:
            judged = room.enter(entry_of(event), event.at_us, config_of(self._view))
            room.leave(event.request)
            told = event.ahead_requests, event.ahead_tokens, event.predicted_us
            self._compare(position, event, Judged(event.reason, (), *told), judged)

    def _routed(self, room: Room, position: int, event: v.RouteDecided, founded: bool) -> None:
        config = config_of(self._view)
        if event.cause == "wait_over":
            found = room.next(event.model, event.at_us, config)
            if founded:
                turn = found.request if found is not None else "nobody"
                self._compare(position, event, event.request, turn)
        if event.worker:
            room.take(event.request, event.at_us, event.ttft_us, config)

    def _compare(self, position: int, event: Any, expected: Any, actual: Any) -> None:
        self._verdict.waits += 1
        if expected != actual:
            where = event.basis.revision, self._view.stream, position
            self._verdict.differ(*where, "decision", expected, actual)


def entry_of(event: v.RequestHeld | v.RequestShed) -> Entry:
    """The request as it came to the room."""
    until_us = event.until_us if type(event) is v.RequestHeld else event.at_us + 1
    return Entry(
        event.request, event.model, rank_of(event.tier), event.tenant, event.tokens, event.size,
        event.at_us, until_us, event.deadline_us,
    )  # fmt: skip
