"""The fold of checkpoints: who holds how much of which request.

`CheckpointAcknowledged` of the holder's living boot is the only source of coverage; what
a writer sent, or a decision meant, covers nothing. A record of an older boot of the daemon
changes nothing, whatever its place in the total order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events import vocabulary as v
from policies.state import Coverage, Fleet, Holder, Placed


def covered_tokens(fleet: Fleet, holder: str, request: str) -> int:
    """Tokens of `request` that can be had from `holder`: |C_r|, of its worst child."""
    site = fleet.holders.get(holder)
    found = site.covered.get(request) if site is not None and site.alive else None
    return min(found.tokens.values(), default=0) if found else 0


def forget(fleet: Fleet, request: str) -> None:
    """The request ended: no placement stands. Its bytes are held until the holder says
    that they are gone."""
    fleet.placed.pop(request, None)


def lose(fleet: Fleet, worker: str) -> None:
    """The worker's host is lost, its state daemon with it."""
    if site := fleet.holders.get(worker):
        _empty(site)
        site.alive = False


def _empty(site: Holder) -> None:
    site.covered.clear()
    site.held_bytes = 0


def _living(fleet: Fleet, stream: str, holder: str, boot: str) -> Holder | None:
    """The holder, when `stream` is its own worker's and `boot` its present life."""
    site = fleet.holders.get(holder)
    if site is None or stream != f"w.{holder}" or site.boot != boot or not site.alive:
        return None
    return site


def _on_started(fleet: Fleet, stream: str, epoch: int, event: v.StateDaemonStarted) -> None:
    site = fleet.holders.setdefault(event.worker, Holder(event.worker))
    if event.epoch < site.epoch:
        return
    if event.boot != site.boot:
        _empty(site)
    site.boot = event.boot
    site.epoch = event.epoch
    site.address = event.address
    site.family = event.family
    site.budget_bytes = event.budget_bytes
    site.alive = True


def _on_lost(fleet: Fleet, stream: str, epoch: int, event: v.StateDaemonLost) -> None:
    site = fleet.holders.get(event.worker)
    if site is not None and site.boot == event.boot:
        lose(fleet, event.worker)


def _on_acknowledged(
    fleet: Fleet, stream: str, epoch: int, event: v.CheckpointAcknowledged
) -> None:
    site = _living(fleet, stream, event.holder, event.boot)
    if site is None:
        return
    found = site.covered.get(event.request)
    if found is None:
        found = site.covered[event.request] = Coverage(event.attempt)
    found.attempt = event.attempt
    _set(site, found, event.child, event.tokens, event.bytes)


def _set(site: Holder, found: Coverage, child: int, tokens: int, held: int) -> None:
    site.held_bytes += held - found.bytes.get(child, 0)
    found.tokens[child] = tokens
    found.bytes[child] = held


def _on_evicted(fleet: Fleet, stream: str, epoch: int, event: v.CheckpointEvicted) -> None:
    site = _living(fleet, stream, event.holder, event.boot)
    if site is None:
        return
    site.evicted += 1
    if found := site.covered.get(event.request):
        _set(site, found, event.child, event.tokens, event.bytes)


def _on_dropped(fleet: Fleet, stream: str, epoch: int, event: v.CheckpointDropped) -> None:
    site = _living(fleet, stream, event.holder, event.boot)
    found = site.covered.get(event.request) if site else None
    if site is None or found is None:
        return
    found.tokens.pop(event.child, None)
    site.held_bytes -= found.bytes.pop(event.child, 0)
    if not found.tokens:
        del site.covered[event.request]


def _on_chosen(fleet: Fleet, stream: str, epoch: int, event: v.HolderChosen) -> None:
    fleet.decisions += 1
    known = fleet.placed.get(event.request)
    if event.request not in fleet.requests or (known and known.attempt > event.attempt):
        return
    fleet.placed[event.request] = Placed(
        event.primary,
        event.attempt,
        event.holders,
        event.expected_blocks,
        event.expected_bytes,
    )


def _on_planned(fleet: Fleet, stream: str, epoch: int, event: v.RecoveryPlanned) -> None:
    fleet.decisions += 1


def _on_restore_started(fleet: Fleet, stream: str, epoch: int, event: v.RestoreStarted) -> None:
    _count(fleet, "started", 1)


def _on_restore_done(fleet: Fleet, stream: str, epoch: int, event: v.RestoreDone) -> None:
    _count(fleet, "done", 1)
    _count(fleet, "tokens", event.tokens)


def _on_restore_failed(fleet: Fleet, stream: str, epoch: int, event: v.RestoreFailed) -> None:
    _count(fleet, "failed", 1)
    _count(fleet, "tokens", event.tokens)


def _count(fleet: Fleet, name: str, number: int) -> None:
    fleet.restores[name] = fleet.restores.get(name, 0) + number


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.StateDaemonStarted: _on_started,
    v.StateDaemonLost: _on_lost,
    v.CheckpointAcknowledged: _on_acknowledged,
    v.CheckpointEvicted: _on_evicted,
    v.CheckpointDropped: _on_dropped,
    v.HolderChosen: _on_chosen,
    v.RecoveryPlanned: _on_planned,
    v.RestoreStarted: _on_restore_started,
    v.RestoreDone: _on_restore_done,
    v.RestoreFailed: _on_restore_failed,
}
