"""One fenced append: its transaction, and what an answer to it means.

    create_revision(own) == epoch  and  create_revision(seg n) == 0
    and  create_revision(seg n-1) > 0        -> put seg n
    else get own, get seg n, get key of seg n-1

The transaction is idempotent, so an unknown outcome is resolved by sending it again.
"""

from __future__ import annotations

import enum
from typing import Any

from aetcd import rpc

from relume.events.etcd.keys import Keys
from relume.events.etcd.writer.ownership import CREATE, EQUAL, GREATER, Tail
from relume.events.log.errors import BrokenChain, CorruptSegment, Fenced
from relume.events.log.segment import digest, pack, unpack


class Outcome(enum.Enum):
    """What became of an append."""

    LANDED = "landed"
    LAPSED = "the stream has no owner: it is not written, and cannot be under this epoch"


class Append:
    """Segment `tail.seq + 1` of a stream, ready to send."""

    __slots__ = ("data", "epoch", "first", "hash", "records", "seq", "shape", "size", "stream")

    def __init__(self, shape: Shape, tail: Tail, records: list[bytes], at_ms: int) -> None:
        self.shape = shape
        self.stream = shape.stream
        self.epoch = shape.epoch
        self.seq = tail.seq + 1
        self.first = tail.position
        self.records = records
        data = pack(self.stream, self.epoch, self.seq, self.first, tail.hash, records, at_ms)
        self.hash = digest(data)
        self.data = data
        self.size = len(data)

    @property
    def request(self) -> Any:
        """The TxnRequest, valid until the shape makes another."""
        return self.shape.request(self.seq - 1, self.data)

    def landed_as(self, revision: int) -> Tail:
        """The stream's end once this append is known to be at `revision`."""
        return Tail(self.seq, self.hash, revision, self.first + len(self.records))

    def judge(self, answer: Any) -> tuple[Outcome, int]:
        """(outcome, its revision) from a TxnResponse.

        Raises Fenced, and BrokenChain if the predecessor is missing: the end of the stream was
        deleted.
        """
        if answer.succeeded:
            return Outcome.LANDED, answer.header.revision
        owner, there, *before = (op.response_range.kvs for op in answer.responses)
        if there:
            if digest(there[0].value) == self.hash:
                return Outcome.LANDED, there[0].create_revision
            raise Fenced(self.stream, self.epoch, _foreign(self.seq, there[0].value))
        if before and not before[0]:
            raise BrokenChain(self.stream, self.seq, "its predecessor is missing from etcd")
        if not owner:
            return Outcome.LAPSED, 0
        raise Fenced(self.stream, self.epoch, f"epoch {owner[0].create_revision} owns it")


class Shape:
    """The append transaction of one stream under one epoch.

    A new one for each append costs five times as much as filling in this one, so there
    is one request, and one append at a time that may use it.
    """

    def __init__(self, keys: Keys, stream: str, epoch: int) -> None:
        self.stream = stream
        self.epoch = epoch
        self.owner = keys.owner(stream)
        self._prefix = keys.stream(stream)
        self._behind: _AppendTemplate | None = None

    def request(self, before: int, data: bytes) -> Any:
        """The TxnRequest that puts `data` after segment `before` (0: as the first)."""
        key = self.key(before + 1)
        if not before:
            return _AppendTemplate(self.owner, self.epoch, False).filled(key, b"", data)
        if self._behind is None:
            self._behind = _AppendTemplate(self.owner, self.epoch, True)
        return self._behind.filled(key, self.key(before), data)

    def key(self, seq: int) -> bytes:
        """Of segment `seq`."""
        return self._prefix + b"%016x" % seq


class _AppendTemplate:
    """A TxnRequest with what stays, and hold of the parts that change."""

    def __init__(self, owner: bytes, epoch: int, behind: bool) -> None:
        compare = [
            rpc.Compare(key=owner, target=CREATE, result=EQUAL, create_revision=epoch),
            rpc.Compare(target=CREATE, result=EQUAL, create_revision=0),
        ]
        failure = [_read(owner), _read(b"")]
        if behind:
            compare.append(rpc.Compare(target=CREATE, result=GREATER, create_revision=0))
            failure.append(_read(b"", keys_only=True))
        put = rpc.RequestOp(request_put=rpc.PutRequest())
        self._request = rpc.TxnRequest(compare=compare, success=[put], failure=failure)
        self._put = self._request.success[0].request_put
        # [absence, predecessor's presence], and the reads of both.
        self._compares = list(self._request.compare)[1:]
        self._reads = [op.request_range for op in self._request.failure][1:]

    def filled(self, key: bytes, predecessor: bytes, data: bytes) -> Any:
        self._put.key = key
        self._put.value = data
        for compare, read, named in zip(
            self._compares, self._reads, (key, predecessor), strict=False
        ):
            compare.key = read.key = named
        return self._request


def _foreign(seq: int, data: bytes) -> str:
    """What stands in the place of segment `seq`."""
    try:
        unpack(data)
    except CorruptSegment:
        return f"at segment {seq} stands a key that is no segment: relume doctor names it"
    return f"segment {seq} is another's"


def _read(key: bytes, keys_only: bool = False) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key, keys_only=keys_only))
