"""Bugs put into the product on purpose (`tests.runner.plants`): what clients get is worse than it
need be, and no decision in the log is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.controlplane.stream.retry_budget import RetryBudget
from relume.policies.admission.admission_queue import FULL, Room

Set = Callable[[Any, str, Any], None]


def _half_full_is_full(patch: Set) -> None:
    """a queue that is half full refuses newcomers as if it were full"""
    make_room = Room._make_room

    def half(self: Room, line: Any, entry: Any, config: Any) -> Any:
        if 2 * len(self.entries) >= config.requests:
            return FULL, ()
        return make_room(self, line, entry, config)

    patch(Room, "_make_room", half)


def _one_try(patch: Set) -> None:
    """a request fails with its first attempt"""

    def at_once(self: RetryBudget, *given: Any, **more: Any) -> tuple[int, str]:
        return 502, "1 workers failed on this request"

    patch(RetryBudget, "failed", at_once)


BUGS: tuple[tuple[str, int, Callable[[Set], None]], ...] = (
    ("I22", 279, _half_full_is_full),
    ("I22", 0, _one_try),
)
"""Promises of which any finds it, the first seed at which one did, and how to put it in."""
