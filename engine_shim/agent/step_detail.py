"""Step records with less detail, while etcd is short of room (ETCD.md: shed at 60 %).

Changes of a request's state (queued, admitted, first token, preempted, finished) are written
immediately, with everything before them, in order. Records in between hold only statistics and
progress; they are merged, and what is merged is due PER_S times a second. Nothing the account of a
worker is made of is left out: counts add up, and of the blocks a request filled its last word
stays.
"""

from __future__ import annotations

from relume.events.log.codec import decode, encode
from relume.events.log.errors import LogError
from relume.events.vocabulary import (
    AnyChange,
    EngineStep,
    KvBlocksFilled,
    PrefillChunkDone,
    PrefixBlocksChanged,
)
from relume.events.wire.prefix import HASH_BYTES, pack, unpack

PER_S = 4.0
_PROGRESS = (KvBlocksFilled, PrefillChunkDone)


def merged(first: EngineStep, then: EngineStep) -> EngineStep | None:
    """One record for both; None when they cannot be one (another incarnation, a loss)."""
    if first.incarnation != then.incarnation or then.lost:
        return None
    last = then if then.duration_us else first  # a record between steps has no statistics
    return EngineStep(
        incarnation=then.incarnation,
        step=last.step,
        duration_us=max(first.duration_us, then.duration_us),
        batch=last.batch,
        sum_context=last.sum_context,
        prefill_tokens=first.prefill_tokens + then.prefill_tokens,
        waiting=then.waiting,
        kv_used=then.kv_used,
        changes=_latest(first.changes + then.changes),
        lost=first.lost,
        gap_us=max(first.gap_us, then.gap_us),
        wait_us=max(first.wait_us, then.wait_us),
    )


def merged_prefixes(first: PrefixBlocksChanged, then: PrefixBlocksChanged) -> PrefixBlocksChanged:
    """One record for both, of one incarnation."""
    if then.reset or first.incarnation != then.incarnation:
        return then
    lost = dict.fromkeys(unpack(then.removed))
    gathered = dict.fromkeys(unpack(first.stored))
    return PrefixBlocksChanged(
        incarnation=then.incarnation,
        stored=pack([*(one for one in gathered if one not in lost), *unpack(then.stored)]),
        removed=first.removed + pack([one for one in lost if one not in gathered]),
        reset=first.reset,
        block_tokens=first.block_tokens,
    )


def _latest(changes: tuple[AnyChange, ...]) -> tuple[AnyChange, ...]:
    """Without what a later change of filled blocks of the same attempt replaces."""
    last = {(c.request, c.attempt): c for c in changes if type(c) is KvBlocksFilled}
    return tuple(
        c for c in changes if type(c) is not KvBlocksFilled or last[c.request, c.attempt] is c
    )


def _urgent(step: EngineStep) -> bool:
    return bool(step.lost) or any(type(c) not in _PROGRESS for c in step.changes)


class Merger:
    """Holds back at most one step and one change of the prefix cache, which is written ahead
    of it. `max_bytes`: of a record written."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: EngineStep | None = None
        self._prefixes: PrefixBlocksChanged | None = None
        self.merged = 0
        """Records that went into others."""

    def offer(self, record: bytes) -> list[bytes]:
        """What is due now that `record` came, in order; empty when it is held back."""
        try:
            step = decode(record)
        except LogError:
            return [*self.rest(), record]
        if type(step) is PrefixBlocksChanged:
            return self._offer_prefixes(step)
        if type(step) is not EngineStep:
            return [*self.rest(), record]
        out = []
        if self._held is not None:
            one = merged(self._held, step)
            if one is None or len(encode(one)) > self._max_bytes:
                out = self.rest()
            else:
                self.merged += 1
                step = one
        self._held = step
        return out + self.rest() if _urgent(step) else out

    def _offer_prefixes(self, then: PrefixBlocksChanged) -> list[bytes]:
        out = []
        if (first := self._prefixes) is not None:
            held = len(first.stored) + len(first.removed) + HASH_BYTES
            if held + len(then.stored) + len(then.removed) > self._max_bytes // 2:
                out = self.rest()
            else:
                self.merged += 1
                then = merged_prefixes(first, then)
        self._prefixes = then
        return out

    def rest(self) -> list[bytes]:
        """What is held back, to be written now."""
        held = [record for record in (self._prefixes, self._held) if record is not None]
        self._prefixes = self._held = None
        return [encode(record) for record in held]
