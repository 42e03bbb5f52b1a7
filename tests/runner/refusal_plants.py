"""Bugs put into the product on purpose (`tests.runner.plants`): requests fail without need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.controlplane.replica.resumptions import StreamResumptions
from relume.controlplane.replica.scheduler import Scheduler

Set = Callable[[Any, str, Any], None]


def _no_wait_for_workers(patch: Set) -> None:
    """a request for which no worker is open at the moment fails at once"""

    async def none(self: Scheduler, request: str, timeout_s: float) -> bool:
        return False

    patch(Scheduler, "capacity", none)


def _streams_unknown(patch: Set) -> None:
    """a stream is unknown to any other replica to which its client returns"""
    patch(StreamResumptions, "known", lambda self, request: None)


BUGS: tuple[tuple[str, str, Callable[[Set], None]], ...] = (
    ("I22", "composed 13", _no_wait_for_workers),
    ("I22", "composed 7", _streams_unknown),
)
"""Promises of which any finds it, scenario and seed of a run in which one did, and how to put it in."""
