"""Refusals and broken answers of a simulated engine under a fault.

The fate of an attempt is a function of its name alone.
"""

from __future__ import annotations

from random import Random

from relume.events.vocabulary.enums import AttemptMode
from relume.events.wire.frames import FailureKind

REFUSALS = (200, 302, 400, 400, 404, 409, 413, 429, 429, 500, 503, 503)
"""Status codes of refusals; 200: an answer with an invalid body."""
LATEST_S = 2.0
"""An answer breaks within this time."""
UNHEARD_OF = "unheard-of"
"""A kind of failure that no gateway knows."""
GARBAGE = "garbage"
"""The frame contradicts earlier ones."""
BROKEN = frozenset((*FailureKind, UNHEARD_OF, GARBAGE))
LATE_CUT, LATE_MOVED = "late-cut", "late-moved"
"""Replacements of the end frame, after all tokens: nothing, or a handover to another worker."""
LATE = frozenset((LATE_CUT, LATE_MOVED))
NOBODY_TAKES = (400, 400, 409, 422)


def refusal(attempt: str, share: float) -> int:
    """The status with which an engine that refuses `share` answers; 0: it accepts the request. For
    some requests, all engines refuse every attempt after the first."""
    request, _, number = attempt.partition("/")
    chance = Random(f"{request}:refused")
    if number != "1" and chance.random() < share / 2:
        return chance.choice(NOBODY_TAKES)
    chance = Random(f"{attempt}:refused")
    return chance.choice(REFUSALS) if share and chance.random() < share else 0


def errs(attempt: str, share: float) -> bool:
    """Whether an engine that answers `share` of its requests with an error does so to this one."""
    return share > 0 and Random(f"{attempt}:errs").random() < share


def break_off(attempt: str, mode: str, share: float) -> tuple[str, float]:
    """How the answer breaks, and after how many seconds; an empty kind: not at all. An engine
    detects a token mismatch only in tokens that it generates again."""
    chance = Random(f"{attempt}:broken")
    if not share or chance.random() >= share:
        return "", 0.0
    kinds = [FailureKind.ENGINE, FailureKind.ENGINE, FailureKind.INTERNAL, FailureKind.MOVED]
    kinds += [FailureKind.MISMATCH] * 2 if mode != AttemptMode.NEW else []
    kind = chance.choice([*kinds, UNHEARD_OF, *[GARBAGE] * 4, *sorted(LATE)])
    return str(kind), LATEST_S * chance.random() ** 4
