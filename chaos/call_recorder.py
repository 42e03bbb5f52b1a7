"""A recorder of calls to etcd: what each client sent, when, and what came back.

It takes the place of `EtcdClient.call`, of real and of simulated clients, and reads requests as the
simulated etcd does. `judge_keys` judges the history of each key (`validators.linearizability`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Set
from typing import Any

from msgspec import Struct

from relume.chaos.sim.etcd.key_store import Range, Txn, range_of, txn_of
from relume.chaos.validators.linearizability import (
    NEVER,
    Judgement,
    KeyCall,
    Value,
    judge,
    without_implied,
)
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.keys import Keys
from relume.events.log.errors import LogError, LogUnavailable

Request = Txn | Range | tuple[bytes, bytes]
"""A transaction, a read, or the (first key, end) of what is deleted."""


class EtcdCall(Struct, kw_only=True):
    """One call. `answer` None and `answered` NEVER: its outcome is unknown."""

    client: str
    begun: float
    request: Request
    answered: float = NEVER
    answer: Any = None


class CallRecorder:
    """Records the calls of clients that concern owner keys or manifests under `prefix`, by a clock that
    all of them share."""

    def __init__(self, now: Callable[[], float], prefix: str) -> None:
        self.calls: list[EtcdCall] = []
        self._now = now
        keys = Keys(prefix)
        self._owned = keys.own
        self._folders = keys.own, keys.snap

    def watch(self, client: EtcdClient, name: str) -> None:
        """Record the calls of `client` from now on."""
        call: Callable[..., Awaitable[Any]] = client.call

        async def recorded(method: str, request: Any, *args: Any, **options: Any) -> Any:
            found = _request(method, request)
            if found is None or not self._is_of_interest(found):
                return await call(method, request, *args, **options)
            entry = EtcdCall(client=name, begun=self._now(), request=found)
            self.calls.append(entry)
            try:
                entry.answer = await call(method, request, *args, **options)
            except LogUnavailable:
                raise
            except LogError:
                if entry in self.calls:
                    self.calls.remove(entry)  # etcd refused it: it had no effect
                raise
            entry.answered = self._now()
            return entry.answer

        client.call = recorded  # type: ignore[method-assign]  # of this client only

    def forget(self) -> None:
        """Etcd is another one from now on: what was recorded says nothing of it."""
        self.calls.clear()

    def judge_keys(self) -> dict[bytes, Judgement]:
        """Owner keys and manifests that clients wrote, each with the judgement on its history."""
        written = {
            key
            for call in self.calls
            if type(call.request) is Txn
            for key, *_ in call.request.puts
            if key.startswith(self._folders)
        }
        calls = self._by_key(written)
        return {
            key: judge(
                without_implied(history_of(key, calls[key])),
                is_leased=key.startswith(self._owned),
            )
            for key in sorted(written)
        }

    def explained(self) -> dict[str, str | None]:
        """As `GroundTruth.etcd_keys`."""
        return {key.decode(): _why(found) for key, found in self.judge_keys().items()}

    def _by_key(self, written: Set[bytes]) -> dict[bytes, list[EtcdCall]]:
        """The calls that name a key, or a range with it."""
        found: dict[bytes, list[EtcdCall]] = {key: [] for key in written}
        for call in self.calls:
            for first, end in _named(call.request):
                within = [key for key in written if first <= key < end] if end else (first,)
                for key in within:
                    of_key = found.get(key)
                    if of_key is not None and not (of_key and of_key[-1] is call):
                        of_key.append(call)
        return found

    def _is_of_interest(self, request: Request) -> bool:
        one, other = self._folders
        return any(
            first.startswith(self._folders) or (first < one < end or first < other < end)
            for first, end in _named(request)
        )


def _why(found: Judgement) -> str | None:
    if found.is_possible is None:
        return None
    stuck = found.stuck
    if stuck is None:
        return ""
    times = f"from {stuck.begun:.4f} s to {stuck.answered:.4f} s"
    what = "read" if stuck.reads else "wrote" if stuck.put is not None else "compared"
    return f"no order of the calls explains what {stuck.client} {what} {times}"


def _named(request: Request) -> Iterator[tuple[bytes, bytes]]:
    """The keys and ranges that a request names, as (first, end); the end of a key is empty."""
    if type(request) is Txn:
        yield from ((key, b"") for key, *_ in request.compares)
        yield from ((key, b"") for key, *_ in request.puts)
        yield from ((key, b"") for key in request.drops)
        yield from ((read.key, read.end) for read in (*request.reads, *request.otherwise))
    elif type(request) is Range:
        yield request.key, request.end
    elif isinstance(request, tuple):
        yield request


def _request(method: str, request: Any) -> Request | None:
    if method == "Txn":
        return request if type(request) is Txn else txn_of(request)
    if method == "Range":
        found = range_of(request)
        return None if found.revision else found
    return (request.key, request.range_end) if method == "DeleteRange" else None


def history_of(key: bytes, calls: Iterable[EtcdCall]) -> Iterator[KeyCall]:
    """What the calls say of one key."""
    for call in calls:
        request = call.request
        if type(request) is Txn:
            yield from _of_txn(key, call, request)
        elif type(request) is Range:
            if call.answered < NEVER and _covers(request, key):
                yield _read_of(key, call, request)
        elif isinstance(request, tuple) and _is_within(key, *request):
            known = True if call.answered < NEVER else None
            yield _call(call, succeeded=known, is_drop=True)


def _of_txn(key: bytes, call: EtcdCall, txn: Txn) -> Iterator[KeyCall]:
    compares = tuple((rev, is_greater) for k, rev, is_greater in txn.compares if k == key)
    put = next((value for k, value, _ in txn.puts if k == key), None)
    is_drop = key in txn.drops
    is_known = call.answered < NEVER
    succeeded = bool(call.answer.succeeded) if is_known else None
    if not is_known:
        if put is not None or is_drop:
            yield _call(call, compares=compares, put=put, is_drop=is_drop)
        return
    reads, seen = _reads_of(key, txn, call.answer)
    if compares or put is not None or is_drop or reads:
        yield _call(
            call,
            compares=compares,
            is_alone=len(compares) == len(txn.compares),
            succeeded=succeeded,
            put=put,
            is_drop=is_drop,
            reads=reads,
            seen=seen,
        )


def _reads_of(key: bytes, txn: Txn, answer: Any) -> tuple[bool, Value | None]:
    """Whether a transaction read the key as it was before it, and what it had."""
    if answer.succeeded and (txn.puts or txn.drops):
        return False, None
    reads = txn.reads if answer.succeeded else txn.otherwise
    if len(reads) != len(answer.responses):
        return False, None
    for read, response in zip(reads, answer.responses, strict=True):
        if _covers(read, key):
            return True, _value_of(key, response.response_range.kvs, read)
    return False, None


def _covers(read: Range, key: bytes) -> bool:
    if read.count_only or read.limit or read.revision:
        return False
    return _is_within(key, read.key, read.end)


def _is_within(key: bytes, first: bytes, end: bytes) -> bool:
    return first <= key < end if end else first == key


def _read_of(key: bytes, call: EtcdCall, read: Range) -> KeyCall:
    return _call(call, succeeded=True, reads=True, seen=_value_of(key, call.answer.kvs, read))


def _value_of(key: bytes, kvs: Iterable[Any], read: Range) -> Value | None:
    found = next((kv for kv in kvs if kv.key == key), None)
    if found is None:
        return None
    return Value(found.create_revision, None if read.keys_only else bytes(found.value))


def _call(call: EtcdCall, **what: Any) -> KeyCall:
    revision = call.answer.header.revision if call.answered < NEVER else 0
    return KeyCall(
        client=call.client, begun=call.begun, answered=call.answered, revision=revision, **what
    )
