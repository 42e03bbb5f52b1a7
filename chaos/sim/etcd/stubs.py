"""gRPC's side of simulated etcd: the stubs' methods, over the simulated network.

The real client, writer, reader and related classes of `relume.events.etcd` run on it unchanged;
`Endpoint` stands for their channel and its methods. A call without an answer in time fails with
DEADLINE_EXCEEDED, though the member may still execute it; a call to a member that is dead or dies
fails with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from grpc import aio
from msgspec.structs import replace

from relume.chaos.sim.etcd.key_store import Txn, range_of, txn_of
from relume.chaos.sim.world.network import End
from relume.chaos.sim.world.virtual_loop import Process
from relume.events.etcd.client.connection import AppendCall, EtcdClient
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.writer.appends import Append, Shape

_READ: dict[str, Callable[[Any], Any]] = {
    "Txn": lambda request: request if type(request) is Txn else txn_of(request),
    "Range": range_of,
    "LeaseGrant": lambda request: request.TTL,
    "LeaseRevoke": lambda request: request.ID,
    "DeleteRange": lambda request: (request.key, request.range_end),
}
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


Reply = Callable[[Any], object]


class Cluster(Protocol):
    """A client's interface to a cluster."""

    def line(self, process: Process, address: str) -> End | None:
        """A connection to the member at `address`; None when it is not running."""
        ...

    def serve(self, end: End, method: str, request: Any, reply: Reply) -> None:
        """Receive a client's message in the member's process; answers go to `reply`."""
        ...


class Failure(Exception):
    """A call failed at its member, with a status."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def _error(code: grpc.StatusCode, detail: str) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details=detail)


class Form:
    """The request of the appends of one stream under one epoch, parsed once: later appends differ in
    their keys and data alone."""

    __slots__ = ("_names", "_template")

    def __init__(self, append: Append) -> None:
        self._template = txn_of(append.request)
        self._names = names_of(append)

    def txn(self, append: Append) -> Txn:
        """The content of `append.request`."""
        of = dict(zip(self._names, names_of(append), strict=True)).get
        template = self._template
        return Txn(
            compares=tuple(
                (of(key, key), revision, there) for key, revision, there in template.compares
            ),
            puts=tuple((of(key, key), append.data, lease) for key, _, lease in template.puts),
            reads=tuple(replace(read, key=of(read.key, read.key)) for read in template.reads),
            otherwise=tuple(
                replace(read, key=of(read.key, read.key)) for read in template.otherwise
            ),
            drops=template.drops,
        )


def names_of(append: Append) -> tuple[bytes, bytes]:
    """The keys that differ: that of its segment, and that of the one before."""
    shape = append.shape
    return shape.key(append.seq), shape.key(append.seq - 1)


class SimClient(EtcdClient):
    """The client of one process."""

    def __init__(self, config: EtcdConfig, etcd: Cluster, process: Process) -> None:
        super().__init__(config)
        self._etcd = etcd
        self._process = process
        self._forms: dict[tuple[Shape, bool], Form] = {}

    async def append(self, append: AppendCall) -> Any:
        """See EtcdClient; builds the request only for the first append of a stream and epoch."""
        assert isinstance(append, Append)
        which = append.shape, append.seq == 1
        form = self._forms.get(which)
        if form is None:
            form = self._forms[which] = Form(append)
        return await self.call("Txn", form.txn(append))

    def _connected(self, address: str) -> Any:
        endpoint = self._open.get(address)
        if endpoint is None:
            made: Any = Endpoint(self._etcd, self._process, address)
            endpoint = self._open[address] = made
        return endpoint


class Endpoint:
    """One member for one client. `channel.close` has no simulated effect."""

    def __init__(self, etcd: Cluster, process: Process, address: str) -> None:
        self._etcd = etcd
        self._process = process
        self._address = address
        self._end: End | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, Stream] = {}
        self._number = 0
        self._late: deque[tuple[float, int]] = deque()
        """Deadlines of calls, in order, with those of answered calls."""
        self.channel = self
        self.methods: dict[str, Callable[..., Any]] = {
            name: self._unary(name, read) for name, read in _READ.items()
        }
        self.methods["Watch"] = lambda metadata: Stream(self, "watch")
        self.methods["LeaseKeepAlive"] = lambda metadata: Stream(self, "keep")

    async def close(self) -> None:
        """The client is closed."""
        if self._end is not None:
            self._end.close()
            self._lost("eof", "the channel is closed")

    def number(self) -> int:
        """A new number for a call of this endpoint."""
        self._number += 1
        return self._number

    def connected(self) -> End:
        """The connection to the member. Raises AioRpcError if there is none."""
        if self._end is None:
            end = self._etcd.line(self._process, self._address)
            if end is None:
                raise _error(_UNAVAILABLE, "failed to connect to all addresses")
            end.lost = self._lost
            self._end = end
        return self._end

    def follow(self, stream: Stream, number: int, method: str, request: Any) -> None:
        """Begin, or write to, a stream of answers."""
        self._streams[number] = stream
        end = self.connected()
        tell = end.peer.send
        end.send(
            self._etcd.serve,
            end.peer,
            method,
            (number, request),
            lambda answer: tell(self._streamed, number, answer),
        )

    def unfollow(self, number: int) -> None:
        """End the stream on this side."""
        if self._streams.pop(number, None) is not None and self._end is not None:
            end = self._end
            end.send(self._etcd.serve, end.peer, "unwatch", (number, None), _nobody)

    def _streamed(self, number: int, answer: Any) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.take(answer)

    def _unary(self, method: str, read: Callable[[Any], Any]) -> Callable[..., Any]:
        async def call(request: Any, timeout: float, metadata: Any = None) -> Any:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            try:
                end = self.connected()
            except aio.AioRpcError:
                await asyncio.sleep(2e-4)
                raise
            number = self.number()
            self._calls[number] = future
            tell = end.peer.send
            end.send(
                self._etcd.serve,
                end.peer,
                method,
                read(request),
                lambda answer: tell(self._answered, number, answer),
            )
            self._wait_for(loop.time() + timeout, number)
            try:
                return await future
            except Failure as failure:
                raise _error(failure.code, failure.detail) from None
            finally:
                self._calls.pop(number, None)

        return call

    def _wait_for(self, due_s: float, number: int) -> None:
        """Fail a call at its deadline. One timer serves many calls: most get their answers long
        before."""
        late = self._late
        if late and due_s < late[-1][0]:
            self._process.call_at(due_s, self._too_late, number)
            return
        if not late:
            self._process.call_at(due_s, self._overdue)
        late.append((due_s, number))

    def _overdue(self) -> None:
        late, calls = self._late, self._calls
        now_s = asyncio.get_running_loop().time()
        while late and (late[0][0] <= now_s or late[0][1] not in calls):
            self._too_late(late.popleft()[1])
        if late:
            self._process.call_at(late[0][0], self._overdue)

    def _answered(self, number: int, answer: Any) -> None:
        future = self._calls.get(number)
        if future is None or future.done():
            return
        if isinstance(answer, Failure):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _too_late(self, number: int) -> None:
        self._answered(number, Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _lost(self, kind: str, detail: str) -> None:
        self._end = None
        gone = Failure(_UNAVAILABLE, f"Socket closed: {detail}")
        for number in list(self._calls):
            self._answered(number, gone)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.take(gone)


class Stream:
    """A call with many answers: a watch or a lease's keepalive."""

    def __init__(self, endpoint: Endpoint, method: str) -> None:
        self._endpoint = endpoint
        self._method = method
        self._number = endpoint.number()
        self._answers: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._failure: Failure | None = None

    async def write(self, request: Any) -> None:
        """Send a request. Raises AioRpcError; InvalidStateError if the call is over."""
        if self._failure is not None:
            raise asyncio.InvalidStateError
        if self._method == "keep":
            what: Any = request.ID
        else:
            create = request.create_request
            what = (create.key, create.range_end, create.start_revision)
        self._endpoint.follow(self, self._number, self._method, what)

    async def read(self) -> Any:
        """The next answer. Raises AioRpcError."""
        while not self._answers:
            if self._failure is not None:
                raise _error(self._failure.code, self._failure.detail)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._answers.popleft()

    def cancel(self) -> None:
        """End it."""
        self._endpoint.unfollow(self._number)

    def take(self, answer: Any) -> None:
        """An answer came, or the end of the call."""
        if isinstance(answer, Failure):
            self._failure = answer
        else:
            self._answers.append(answer)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def code(self) -> grpc.StatusCode:
        """How it ended."""
        return self._failure.code if self._failure is not None else grpc.StatusCode.OK

    async def details(self) -> str:
        """Why it ended."""
        return self._failure.detail if self._failure is not None else ""

    async def initial_metadata(self) -> Any:
        """Metadata: none."""
        return aio.Metadata()

    trailing_metadata = initial_metadata

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        return await self.read()


def _nobody(answer: Any) -> None:
    pass
