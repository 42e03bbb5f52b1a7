"""Faults of a composed scenario that need no other fleet and no other traffic, each drawn by itself."""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import cast

from msgspec.structs import replace

from relume.chaos.scenario.catalogue import FAULTS, PHASES, FaultKind
from relume.chaos.scenario.checks import targets
from relume.chaos.scenario.language import (
    Fault,
    Fleet,
    When,
)  # fmt: skip

SLOW = "link-slow"

FRAMES = ("frame-cut", "frame-lost", "frame-repeated")
"""Drawn separately too: faults of the frames that a gateway reads."""

ANSWERS = ("dispatch-refused", "answer-broken")

ERRORS = "engine-errors"
"""Drawn separately too: faults of workers' replies to requests."""

STUCK = "stream-stuck"
"""Drawn separately too: it strikes while its worker decodes."""

UNREADABLE, GARBLED = "record-unreadable", "reports-unreadable"

TERMINATE, DAMAGED = "agent-terminate", "segment-damaged"
STRAY, ABSURD = "stray-key", "notice-absurd"
HALF = "cut-from-half"

_AMOUNTS = {
    "worker-slow": (2.0, 20.0), "reload-fails": (1, 3), "block-corrupt": (1, 32),
    "dram-budget": (0.1, 0.8), "stream-loss": (0.01, 0.3), "stream-duplicate": (0.05, 0.5),
    "stream-reorder": (0.05, 0.5), "disk-slow": (50, 2000), "clock-jump": (1, 7200),
    "cpu-limit": (0.05, 0.9), "gateway-cpu-limit": (0.05, 0.9), "clock-back": (1, 7200),
    "frame-lost": (0.02, 0.3), "frame-repeated": (0.02, 0.3),
    "dispatch-refused": (0.05, 0.9), "answer-broken": (0.05, 0.9), "engine-errors": (0.3, 1.0),
    GARBLED: (0.05, 1.0),
}  # fmt: skip

_OF_ALL = frozenset(
    "worker-slow dram-budget stream-loss stream-duplicate stream-reorder block-corrupt "
    "cpu-limit disk-full frame-lost frame-repeated dispatch-refused answer-broken".split()
)
"""Faults that may strike all workers at once without ending the service."""

FEWEST_PLANES = {"leader-stop": 2, "gateway-kill": 2}
"""Minimum number of control planes per fault; with fewer, it only ends the service."""


def at_effects(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of ten seeds, an operator gives commands, and the process that decides or applies
    them dies. Drawn separately, so that it does not change the rest of a seed's scenario."""
    rng = Random(f"compose-effects:{seed}")
    what = rng.choice(("agent-kill", "agent-kill", "gateway-kill"))
    if rng.random() >= 0.1 or what in without:
        return ()
    if what == "gateway-kill" and fleet.control_planes < FEWEST_PLANES[what]:
        return ()
    target = "leader" if what == "gateway-kill" else "subject"
    return (Fault(what=what, when=When(during="effect", nth=rng.randint(1, 6)), target=target),)


def slow_link(seed: int, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of ten seeds, a link is slow. Drawn separately, as above."""
    rng = Random(f"compose-links:{seed}")
    if rng.random() >= 0.1 or SLOW in without:
        return ()
    return (
        Fault(
            what=SLOW, when=When(at_s=round(rng.uniform(0.5, 9), 3)), target=rng.choice(("any", "all")),
            peer=rng.choice(FAULTS[SLOW].peers), for_s=round(rng.uniform(1, 20), 2),
            amount=float(rng.randint(5, 500)),
        ),
    )  # fmt: skip


def of_frames(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of six seeds, faults of `FRAMES`. Drawn separately, as above."""
    rng = Random(f"compose-frames:{seed}")
    chosen = rng.choices(FRAMES, k=rng.choice((1, 2, 3)))
    if rng.random() >= 1 / 6:
        return ()
    return tuple(drawn_fault(w, FAULTS[w], fleet, rng) for w in chosen if w not in without)


def of_answers(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of four seeds, faults of `ANSWERS`. Drawn separately, as above."""
    rng = Random(f"compose-answers:{seed}")
    chosen = rng.choices(ANSWERS, k=rng.choice((1, 2, 3)))
    if rng.random() >= 0.25:
        return ()
    return tuple(drawn_fault(w, FAULTS[w], fleet, rng) for w in chosen if w not in without)


def of_errors(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of eight seeds, workers answer with errors. Drawn separately, as above."""
    rng = Random(f"compose-errors:{seed}")
    if rng.random() >= 0.125 or ERRORS in without:
        return ()
    return (drawn_fault(ERRORS, FAULTS[ERRORS], fleet, rng),)


def stuck_streams(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of eight seeds, one or two streams get no more tokens. Drawn separately, as above."""
    rng = Random(f"compose-stuck:{seed}")
    times = rng.choice((1, 1, 2))
    if rng.random() >= 0.125 or STUCK in without:
        return ()
    return tuple(drawn_fault(STUCK, FAULTS[STUCK], fleet, rng) for _ in range(times))


def nobody_left(seed: int, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of ten seeds, all engines die at once, and fail to start once or twice: they are back
    within the bound of I10. Drawn separately, as above."""
    rng = Random(f"compose-nobody-left:{seed}")
    at_s, starts = round(rng.uniform(0.5, 6), 3), rng.randint(1, 2)
    if rng.random() >= 0.1 or {"engine-kill", "reload-fails"} & {*without}:
        return ()
    return (
        Fault(what="reload-fails", when=When(at_s=at_s), target="all", amount=float(starts)),
        Fault(what="engine-kill", when=When(at_s=at_s), target="all"),
    )


def unreadable(seed: int, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of twelve seeds, an agent writes a record that nobody can read. Drawn separately, as above."""
    rng = Random(f"compose-unreadable:{seed}")
    at_s = round(rng.uniform(0.5, 8), 3)
    if rng.random() >= 1 / 12 or UNREADABLE in without:
        return ()
    return (Fault(what=UNREADABLE, when=When(at_s=at_s), target="any"),)


def damaged(seed: int, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of twenty seeds, bytes that are no segment stand in a worker's stream. Drawn separately, as
    above."""
    rng = Random(f"compose-damaged:{seed}")
    at_s = round(rng.uniform(0.5, 8), 3)
    if rng.random() >= 1 / 20 or DAMAGED in without:
        return ()
    return (Fault(what=DAMAGED, when=When(at_s=at_s), target="any"),)


def stray(seed: int, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of twenty-five seeds, stray keys stand in streams of replicas. Drawn separately, as above."""
    rng = Random(f"compose-stray:{seed}")
    at_s, target = round(rng.uniform(0.5, 8), 3), rng.choice(("any", "leader", "all"))
    if rng.random() >= 1 / 25 or STRAY in without:
        return ()
    return (Fault(what=STRAY, when=When(at_s=at_s), target=target),)


def four_replicas(seed: int, fleet: Fleet) -> Fleet:
    """In one of fifteen seeds, four replicas. Drawn separately, as above."""
    rng = Random(f"compose-half:{seed}")
    return replace(fleet, control_planes=4) if rng.random() < 1 / 15 else fleet


def cut_from_half(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fault, ...]:
    """Two of four replicas cannot reach a worker for a while. Drawn separately, as above."""
    rng = Random(f"compose-half-cut:{seed}")
    at_s, for_s = round(rng.uniform(0.5, 6), 3), round(rng.uniform(4, 12), 2)
    if fleet.control_planes < 4 or HALF in without:
        return ()
    return (Fault(what=HALF, when=When(at_s=at_s), target="any", for_s=for_s),)


def absurd(seed: int, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of twenty-five seeds, absurd notices come. Drawn separately, as above."""
    rng = Random(f"compose-absurd:{seed}")
    times = [round(rng.uniform(0.5, 8), 3) for _ in range(rng.choice((1, 1, 3)))]
    if rng.random() >= 1 / 25 or ABSURD in without:
        return ()
    return tuple(Fault(what=ABSURD, when=When(at_s=at_s), target="any") for at_s in times)


def garbled(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of fifteen seeds, an agent cannot read reports of its engine. Drawn separately, as above."""
    rng = Random(f"compose-garbled:{seed}")
    if rng.random() >= 1 / 15 or GARBLED in without:
        return ()
    return (drawn_fault(GARBLED, FAULTS[GARBLED], fleet, rng),)


def terminated(seed: int, without: Collection[str]) -> tuple[Fault, ...]:
    """In one of eight seeds, agents get SIGTERM, as in a rolling restart. Drawn separately, as above."""
    rng = Random(f"compose-terminate:{seed}")
    times = [round(rng.uniform(0.5, 10), 3) for _ in range(rng.choice((1, 1, 2)))]
    if rng.random() >= 1 / 8 or TERMINATE in without:
        return ()
    return tuple(Fault(what=TERMINATE, when=When(at_s=at_s), target="any") for at_s in times)


def drawn_fault(name: str, kind: FaultKind, fleet: Fleet, rng: Random) -> Fault:
    when = _when(rng, kind)
    alone = {"control plane": fleet.control_planes, "etcd": fleet.etcd}.get(kind.target) == 1
    allowed = ["any", "any", *(role for role in kind.roles if not alone or role != "follower")]
    # The subject of an event is a worker or a request, never another kind of target.
    if when.at_s is None and (kind.target == "request" or kind.target == "worker"):
        allowed += ["subject", "subject"]
    if name in _OF_ALL:
        allowed.append("all")
    if kind.target == "request":
        allowed = ["subject"]
    target = rng.choice(allowed)
    if target == "any" and kind.target != "request" and rng.random() < 0.3:
        target = rng.choice(targets(kind.target, fleet))
    if name in ("block-corrupt", "disk-full"):
        target = "all"  # at any time, few daemons hold blocks, or have them in files
    elif name == "primary-and-holder-kill":
        when, target = When(during="decode", nth=max(cast(int, when.nth), 4)), "subject"
    elif name in ("frame-cut", STUCK):
        when, target = When(during="decode", nth=rng.randint(1, 24)), "subject"
    amount = None
    if kind.amount is not None:
        low, high = _AMOUNTS[name]
        whole = isinstance(low, int) and isinstance(high, int)
        amount = float(rng.randint(int(low), int(high))) if whole else rng.uniform(low, high)
        amount = round(amount, 3)
    peers = [p for p in kind.peers if p != "holder" or fleet.checkpoint_mb]
    lasts = kind.lasts == "must" or (kind.lasts == "may" and rng.random() < 0.5)
    return Fault(
        what=name,
        when=when,
        target=target,
        peer=rng.choice(peers) if peers else None,
        for_s=round(rng.choice((0.5, 2, 5, 12, 20)) * rng.uniform(0.7, 1.3), 2) if lasts else None,
        amount=amount,
    )


def _when(rng: Random, kind: FaultKind) -> When:
    """At a time, or during a phase that occurs in every fleet."""
    if kind.target == "request" or rng.random() < 0.4:
        phase = rng.choice([p for p in PHASES if p in ("prefill", "decode")])
        return When(during=phase, nth=rng.randint(1, 24))
    return When(at_s=round(rng.uniform(0.5, 9), 3))
