"""The part of a view's overlay about checkpoints: placements and planned moves of
the replica's own that the fold does not hold yet.

As all of the overlay it is a function of the basis: what comes in is only stored, and compared with
the fold on a query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.events import vocabulary as v
from relume.policies.state.coverage import placed_by, planned_by, share
from relume.policies.state.fleet import Fleet, Placed, Planned

PLACEMENT_VERSION = "version.placement"
"""The setting by which replicas record how they choose holders."""
FORMER_VERSIONS = ("", "1")
"""Versions by which a pending placement counts whatever the fold has."""


class OwnCheckpoints:
    """Pending own events that place, plan or end requests, by request: the latest counts. But, as in the
    fold, no placement of an earlier attempt than the fold has one of: another replica may have continued
    the request meanwhile. `version`: of the replica's placements; before 2 it counts."""

    def __init__(self, fleet: Fleet, version: Callable[[], str]) -> None:
        self._fleet = fleet
        self._version = version
        self.cached_index: Any = None
        """A cache of `checkpoints.index_of`; no part of the view's answers."""
        self._placed: dict[str, tuple[int, Placed | None]] = {}
        self._planned: dict[str, tuple[int, Planned]] = {}

    def chosen(self, position: int, event: v.HolderChosen) -> None:
        self._placed[event.request] = (position, placed_by(event))

    def planned(self, position: int, event: v.RecoveryPlanned | v.MigrationPlanned) -> None:
        for choice in event.choices:
            if planned := planned_by(event, choice):
                self._planned[choice.request] = (position, planned)

    def ended(self, position: int, request: str) -> None:
        self._placed[request] = (position, None)

    def forget(self, position: int, event: v.HolderChosen | v.RequestEnded) -> None:
        """The fold holds the event now."""
        pending = self._placed.get(event.request)
        if pending is not None and pending[0] == position:
            del self._placed[event.request]

    def forget_plan(self, position: int, event: v.RecoveryPlanned | v.MigrationPlanned) -> None:
        for choice in event.choices:
            pending = self._planned.get(choice.request)
            if pending is not None and pending[0] == position:
                del self._planned[choice.request]

    def placement(self, request: str) -> Placed | None:
        """Where the request's checkpoint goes; None when nothing was chosen, or it ended."""
        pending = self._placed.get(request)
        if pending is None or self._is_former(request, pending[1]):
            return self._fleet.placed.get(request)
        return pending[1]

    def plan(self, request: str) -> Planned | None:
        """The move decided last for the request."""
        pending = self._planned.get(request)
        return pending[1] if pending is not None else self._fleet.planned.get(request)

    def shares(self) -> dict[str, tuple[int, int]]:
        """(blocks, promised bytes) that pending events add to each holder's sums."""
        sums: dict[str, tuple[int, int]] = {}
        for request, (_, placed) in self._placed.items():
            if self._is_former(request, placed):
                continue
            for sign, counted in ((-1, self._fleet.placed.get(request)), (1, placed)):
                if counted is None:
                    continue
                for name in counted.holders:
                    site = self._fleet.holders.get(name)
                    if site is None:
                        continue
                    blocks, promised = share(counted, site.covered.get(request))
                    had = sums.get(name, (0, 0))
                    sums[name] = (had[0] + sign * blocks, had[1] + sign * promised)
        return sums

    def _is_former(self, request: str, placed: Placed | None) -> bool:
        """Whether the fold has the placement of a later attempt."""
        known = self._fleet.placed.get(request)
        if placed is None or known is None or known.attempt <= placed.attempt:
            return False
        return self._version() not in FORMER_VERSIONS
