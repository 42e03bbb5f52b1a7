"""Whether what clients saw of one key of etcd is possible if each call takes effect at one moment
between its begin and its answer.

The search is that of Wing and Gong, with the memo of Lowe: take calls one after the other, each one
that began before every other remaining call had its answer, and go back where the key's state does
not permit what it saw. A call without an answer may take effect at any time after its begin, or never.

A transaction is seen from one key: if it succeeded, what it compares of this key was true. If it did
not, and compares this key alone, that was false. So histories of single keys that are fine do not
prove that transactions of several keys are; one that is not fine is a proof.

The search is exponential at worst. It gives up after `most` states, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

MOST_STATES = 200_000
NEVER = math.inf
"""Time of the answer of a call that got none."""


class Value(Struct, frozen=True):
    """What a key has. `created`: the revision of its creation, 0 where only the creator of the key
    could know it and got no answer. `value`: None where a read did not ask for it."""

    created: int
    value: bytes | None


class KeyCall(Struct, frozen=True, kw_only=True):
    """One call, as far as it concerns one key.

    `begun`, `answered`: times of one clock. `compares`: create revisions of the key that it must have,
    each with whether greater ones are meant instead; 0: the key is absent. `is_alone`: it compares no
    other key. `succeeded`: None if that is not known. `put`: the value that it writes; `is_drop`: it
    deletes the key. `reads`: whether it saw `seen`, and `seen` (None: the key was absent). `revision`:
    that of the answer.
    """

    client: str
    begun: float
    answered: float = NEVER
    compares: tuple[tuple[int, bool], ...] = ()
    is_alone: bool = True
    succeeded: bool | None = None
    put: bytes | None = None
    is_drop: bool = False
    reads: bool = False
    seen: Value | None = None
    revision: int = 0


class Judgement(Struct, frozen=True):
    """`is_possible`: None if the search gave up. `stuck`: where it is not possible, the call with the
    earliest answer among those that no order can hold, in the longest order that was found."""

    is_possible: bool | None
    stuck: KeyCall | None = None


def judge(calls: Sequence[KeyCall], *, is_leased: bool, most: int = MOST_STATES) -> Judgement:
    """Judge the history of a key that is absent at its begin. `is_leased`: etcd may delete it at any
    time, since its lease can end."""
    ordered = sorted(calls, key=lambda call: (call.begun, call.answered))
    needed = sum(1 << number for number, call in enumerate(ordered) if call.answered < NEVER)
    pending: list[tuple[int, Value | None]] = [(0, None)]
    seen = set(pending)
    best, best_count = 0, -1
    while pending:
        done, state = pending.pop()
        if done & needed == needed:
            return Judgement(True)
        if (count := done.bit_count()) > best_count:
            best, best_count = done, count
        for number in _next(ordered, done):
            for after in _after(ordered[number], state, is_leased):
                found = done | 1 << number, after
                if found not in seen:
                    seen.add(found)
                    pending.append(found)
        if len(seen) > most:
            return Judgement(None)
    left = [
        call
        for number, call in enumerate(ordered)
        if not best >> number & 1 and call.answered < NEVER
    ]
    return Judgement(False, min(left, key=lambda call: call.answered))


def without_implied(calls: Iterable[KeyCall]) -> list[KeyCall]:
    """The calls without those that others imply, in any order. A create revision does not come back: if
    one call found it before another one began, and a third found it after that one's answer, the one
    between found it too. So of the thousands of appends of one epoch a few remain."""
    found: list[KeyCall] = []
    epochs: dict[int, list[KeyCall]] = {}
    for call in calls:
        if _finds_only_epoch(call):
            epochs.setdefault(call.compares[0][0], []).append(call)
        else:
            found.append(call)
    for same in epochs.values():
        first = min(call.answered for call in same)
        last = max(call.begun for call in same)
        found.extend(call for call in same if call.begun < first or call.answered > last)
    return found


def _finds_only_epoch(call: KeyCall) -> bool:
    """Whether all that it says of the key is that it had one create revision."""
    is_write = call.put is not None or call.is_drop
    if call.succeeded is not True or is_write or call.reads or len(call.compares) != 1:
        return False
    revision, is_greater = call.compares[0]
    return revision > 0 and not is_greater


def _next(ordered: Sequence[KeyCall], done: int) -> list[int]:
    """Calls that may take effect next: none of the others had its answer before they began. The one
    that began first comes last: it is tried first."""
    first = (~done & (done + 1)).bit_length() - 1
    found: list[int] = []
    earliest = NEVER
    for number in range(first, len(ordered)):
        call = ordered[number]
        if call.begun > earliest:
            break
        if not done >> number & 1:
            found.append(number)
            earliest = min(earliest, call.answered)
    found.reverse()
    return found


def _after(call: KeyCall, state: Value | None, is_leased: bool) -> Iterator[Value | None]:
    """The states that the key may have after a call that meets `state`; none: it cannot meet it."""
    if is_leased and state is not None:
        yield from _effect(call, None)
    yield from _effect(call, state)


def _effect(call: KeyCall, state: Value | None) -> Iterator[Value | None]:
    found = _compared(call, state)
    if found is _IMPOSSIBLE:
        return
    assert found is None or isinstance(found, Value)
    if call.reads:
        found = _read(call.seen, found)
        if found is _IMPOSSIBLE:
            return
        assert found is None or isinstance(found, Value)
    if call.succeeded is False:
        yield found
    elif call.is_drop:
        yield None
    elif call.put is not None:
        yield Value(found.created if found is not None else call.revision, call.put)
    else:
        yield found


_IMPOSSIBLE = object()


def _compared(call: KeyCall, state: Value | None) -> object:
    """`state`, or what is known of it now; impossible where a comparison contradicts it."""
    if call.succeeded is False:
        holds = _hold(call.compares, state)
        return _IMPOSSIBLE if call.is_alone and call.compares and holds is True else state
    if _hold(call.compares, state) is False:
        return (
            _IMPOSSIBLE  # without an answer it may have had no effect: then it is not taken at all
        )
    if state is not None and not state.created:
        exact = [revision for revision, is_greater in call.compares if not is_greater]
        return Value(exact[0], state.value) if exact else state
    return state


def _hold(compares: Sequence[tuple[int, bool]], state: Value | None) -> bool | None:
    """Whether comparisons are true of a state; None: that depends on a revision that is not known."""
    created = state.created if state is not None else 0
    if state is not None and not created:
        return False if (0, False) in compares else None
    return all(created > rev if is_greater else created == rev for rev, is_greater in compares)


def _read(seen: Value | None, state: Value | None) -> object:
    """`state`, or what a read says of it; impossible where they differ."""
    if seen is None or state is None:
        return state if seen is state else _IMPOSSIBLE
    if state.created and state.created != seen.created:
        return _IMPOSSIBLE
    if seen.value is not None and seen.value != state.value:
        return _IMPOSSIBLE
    return Value(seen.created, state.value)
