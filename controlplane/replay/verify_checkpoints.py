"""Decisions about checkpoints, repeated: holders, recovery plans and migrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from relume.controlplane.replay.answers import Answer, moved, placed, planned
from relume.controlplane.replay.divergence import Verdict
from relume.events import vocabulary as v
from relume.policies.checkpoints import decisions as checkpoints
from relume.policies.checkpoints.checkpoint_settings import config_of
from relume.policies.migration import moves as migration
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
        found, size = checkpoints.place(view, event.request, event.primary, event.expected_blocks)
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
    lost = [
        checkpoints.Lost(c.request, c.attempt, c.tokens, c.avoid, c.tier) for c in event.choices
    ]
    try:
        policy = config_of(view).recovery
        choices = tuple(checkpoints.plan(view, event.worker, event.incarnation, lost))
    except (KeyError, ValueError) as error:
        verdict.differ(event.basis.revision, stream, position, "decision", event, repr(error))
        return
    told = partial(planned, event.policy), partial(planned, policy)
    same = policy == event.policy and choices == event.choices
    if not same:
        _differ("plan", verdict, stream, position, event, choices, *told)


def check_migration(
    view: View, stream: str, position: int, event: v.MigrationPlanned, verdict: Verdict
) -> None:
    """The question is what runs on which worker; whether and where it leaves is answered."""
    verdict.decisions += 1
    verdict.migrations += 1
    running = [
        migration.Running(
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
        leaves = (event.worker, event.cause) in migration.sources(view)
        if leaves:
            place = event.worker, event.incarnation
            choices = tuple(migration.plan(view, event.cause, *place, running))
    except (KeyError, ValueError) as error:
        verdict.differ(event.basis.revision, stream, position, "decision", event, repr(error))
        return
    if event.tick != view.fleet.tick:
        told, now = f"tick {event.tick}", f"tick {view.fleet.tick}"
        verdict.differ(event.basis.revision, stream, position, "decision", told, now)
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
