"""Decisions about checkpoints, taken again: holders, recovery plans and migrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relume.events import vocabulary as v
from relume.policies import checkpoints, migration
from relume.policies.checkpoint_settings import config_of
from relume.policies.view import View

if TYPE_CHECKING:
    from relume.controlplane.replay.verify import Verdict


def check_holders(
    view: View, stream: str, position: int, event: v.HolderChosen, verdict: Verdict
) -> None:
    """The question is the request, its primary and the blocks expected; the rest is answered."""
    verdict.decisions += 1
    verdict.holders += 1
    expected = (
        event.policy, event.wanted, event.holders, event.reason, event.expected_bytes,
        event.candidates,
    )  # fmt: skip
    try:
        config = config_of(view)
        placed, size = checkpoints.place(view, event.request, event.primary, event.expected_blocks)
    except (KeyError, ValueError) as error:
        actual: Any = repr(error)
    else:
        actual = (
            config.placement, config.holders, placed.holders, placed.reason, size,
            placed.candidates,
        )  # fmt: skip
    if actual != expected:
        verdict.differ(
            event.basis.revision, stream, position, "decision", _told(expected), _told(actual)
        )


def check_plan(
    view: View, stream: str, position: int, event: v.RecoveryPlanned, verdict: Verdict
) -> None:
    """The question is what was lost, and where; how each goes on is answered."""
    verdict.decisions += 1
    verdict.plans += 1
    lost = [checkpoints.Lost(c.request, c.attempt, c.tokens, c.avoid) for c in event.choices]
    try:
        policy: Any = config_of(view).recovery
        choices = checkpoints.plan(view, event.worker, event.incarnation, lost)
    except (KeyError, ValueError) as error:
        policy, choices = repr(error), ()
    revision = event.basis.revision
    if policy != event.policy or len(choices) != len(event.choices):
        verdict.differ(revision, stream, position, "decision", event.policy, policy)
        return
    for recorded, chosen in zip(event.choices, choices, strict=True):
        if recorded != chosen:
            verdict.differ(
                revision, stream, position, "decision", _choice(recorded), _choice(chosen)
            )


def check_migration(
    view: View, stream: str, position: int, event: v.MigrationPlanned, verdict: Verdict
) -> None:
    """The question is what runs on which worker; whether and where it leaves is answered."""
    verdict.decisions += 1
    verdict.migrations += 1
    running = [
        migration.Running(c.request, c.attempt, c.tokens, c.left, c.avoid) for c in event.choices
    ]
    asked: Any = event.worker, event.cause, event.tick
    try:
        known = (event.worker, event.cause) in migration.sources(view)
        actual: Any = (*asked[:2], view.fleet.tick) if known else "not to be left"
        choices = migration.plan(view, event.cause, event.worker, event.incarnation, running)
    except (KeyError, ValueError) as error:
        actual, choices = repr(error), ()
    revision = event.basis.revision
    if actual != asked or len(choices) != len(event.choices):
        verdict.differ(revision, stream, position, "decision", asked, actual)
        return
    for recorded, chosen in zip(event.choices, choices, strict=True):
        if recorded != chosen:
            verdict.differ(revision, stream, position, "decision", _move(recorded), _move(chosen))


def _move(choice: v.MigrationChoice) -> str:
    weighed = f"{choice.go_us} us there, {choice.stay_us} us here, {choice.reason or 'goes'}"
    return f"{_choice(choice)}: {weighed}"


def _told(answer: Any) -> str:
    if not isinstance(answer, tuple):
        return str(answer)
    policy, wanted, holders, reason, size, candidates = answer
    looked = ", ".join(
        f"{c.worker} load {c.load}, {c.free_bytes} bytes free"
        + (f", {c.excluded}" if c.excluded else "")
        for c in candidates
    )
    named = ",".join(holders) or f"nobody ({reason})"
    return f"{policy} x{wanted}: {named} for {size} bytes of [{looked}]"


def _choice(choice: v.RecoveryChoice | v.MigrationChoice) -> str:
    options = ", ".join(
        f"{o.kind} on {o.worker}"
        + (f" from {o.holder}" if o.holder else "")
        + f" in {o.done_us} us"
        + (f", {o.excluded}" if o.excluded else "")
        for o in choice.options
    )
    return f"{choice.request}: option {choice.chosen} of [{options}]"
