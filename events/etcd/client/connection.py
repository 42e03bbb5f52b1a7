"""A thin asyncio client for the calls the log needs, on the generated stubs.

Every unary call has a deadline. A call that fails as unavailable, or passes its
deadline, moves the client to the next endpoint; reads are then tried again here, while
writes are tried once, because only their caller knows what an unknown outcome means.
Streams (watch, lease keepalive) are opened at the current endpoint by their owners, which detect a
rotation by `rotations` and reopen.

Errors are those of `relume.events.etcd.errors`; see `_typed` for the mapping.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import grpc
from aetcd import rpc
from grpc import aio

from relume.events.etcd.config import BACKOFF_MIN_MS, EtcdConfig, TlsConfig
from relume.events.etcd.errors import (
    PERMISSIONS_REMEDY,
    AccessRefused,
    CallFailed,
    LeaseGone,
    LogWentBack,
    NoSpace,
    RequestRefused,
    ResponseTooLarge,
)
from relume.events.log.errors import Compacted, LogError, LogUnavailable

Metadata = tuple[tuple[str, str], ...]

DIAL_TIMEOUT_MS = 1_000
"""Timeout of a connection to etcd."""
KEEPALIVE_TIMEOUT_MS = 3_000
"""Timeout of a ping."""
_HAS_LEADER = ("hasleader", "true")
# etcd wraps its own errors in these codes; all of them may go away by themselves.
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}


class AppendCall(Protocol):
    """What the client needs of an append (`relume.events.etcd.writer.appends`)."""

    @property
    def request(self) -> Any: ...


class _Endpoint:
    """One address with its channel and the bound methods of all stubs."""

    def __init__(self, address: str, config: EtcdConfig) -> None:
        self.address = address
        self.channel = _open(address, config)
        stubs = (
            rpc.KVStub(self.channel),
            rpc.LeaseStub(self.channel),
            rpc.WatchStub(self.channel),
            rpc.MaintenanceStub(self.channel),
            rpc.AuthStub(self.channel),
            rpc.ClusterStub(self.channel),
        )
        self.methods: dict[str, Any] = {k: v for stub in stubs for k, v in vars(stub).items()}


class EtcdClient:
    """Calls to one etcd cluster. An async context manager; needs a running loop."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self.rotations = 0
        """Grows whenever the client leaves an endpoint; streams compare and reopen."""
        self._ring = config.endpoints
        self._at = 0
        self._open: dict[str, _Endpoint] = {}
        self._token = ""
        self._renewing = asyncio.Lock()
        self._call_s = config.call_timeout_ms / 1000

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        opened, self._open = self._open, {}
        for endpoint in opened.values():
            await endpoint.channel.close()

    @property
    def endpoint(self) -> str:
        """The address in use."""
        return self._ring[self._at]

    # --- reads: tried again at the next endpoint -------------------------------------

    async def range(self, key: bytes, end: bytes = b"", **options: Any) -> Any:
        """RangeResponse; options are RangeRequest's fields. Linearizable by default."""
        return await self._read("Range", rpc.RangeRequest(key=key, range_end=end, **options))

    async def read_txn(self, request: Any) -> Any:
        """TxnResponse of a transaction that only reads."""
        return await self._read("Txn", request)

    async def members(self) -> Any:
        """MemberListResponse."""
        return await self._read("MemberList", rpc.MemberListRequest())

    async def alarms(self) -> Any:
        """AlarmResponse with all active alarms."""
        return await self._read("Alarm", rpc.AlarmRequest(action=0))

    async def status(self, endpoint: str = "") -> Any:
        """StatusResponse of one member (default: the one in use)."""
        if not endpoint:
            return await self._read("Status", rpc.StatusRequest())
        return await self.call("Status", rpc.StatusRequest(), at=endpoint)

    async def compacted_revision(self, key: bytes) -> int:
        """The revision below which history is gone; 0 when nothing was compacted."""
        try:
            await self.range(key, count_only=True, revision=1)
        except Compacted:
            return await self._refused_from(key)
        return 0

    async def _refused_from(self, key: bytes) -> int:
        """etcd refuses a watch from the beginning, and only that answer has the revision."""
        endpoint = self.endpoint
        watch = await self._open_stream("Watch")
        try:
            async with asyncio.timeout(self._call_s):
                request = rpc.WatchCreateRequest(key=key, start_revision=1)
                await watch.write(rpc.WatchRequest(create_request=request))
                async for answer in watch:
                    if answer.compact_revision:
                        return int(answer.compact_revision)
        except TimeoutError:
            raise CallFailed("Watch", endpoint, "TIMEOUT", "not answered") from None
        except aio.AioRpcError as error:
            raise self.broken(error, "Watch", endpoint) from None
        finally:
            watch.cancel()
        raise await self.ended(watch, "Watch", endpoint)

    # --- writes: tried once, CallFailed means the outcome is unknown -------------------

    async def txn(self, request: Any, timeout_s: float = 0.0) -> Any:
        """TxnResponse."""
        return await self.call("Txn", request, timeout_s=timeout_s)

    async def append(self, append: AppendCall) -> Any:
        """TxnResponse of an append."""
        return await self.txn(append.request)

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> Any:
        """PutResponse."""
        return await self.call("Put", rpc.PutRequest(key=key, value=value, lease=lease))

    async def delete(self, key: bytes, end: bytes = b"") -> Any:
        """DeleteRangeResponse."""
        return await self.call("DeleteRange", rpc.DeleteRangeRequest(key=key, range_end=end))

    async def compact(self, revision: int, physical: bool = False) -> Any:
        """CompactionResponse. `physical` waits until the space is free for reuse."""
        request = rpc.CompactionRequest(revision=revision, physical=physical)
        return await self.call("Compact", request, timeout_s=30.0 if physical else 0.0)

    async def lease_grant(self, ttl_s: int, timeout_s: float = 0.0) -> Any:
        """LeaseGrantResponse; etcd may grant a longer TTL than requested."""
        return await self.call("LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_s), timeout_s=timeout_s)

    async def lease_revoke(self, lease: int) -> Any:
        """LeaseRevokeResponse. Raises LeaseGone."""
        return await self.call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease))

    async def disarm(self, member: int, alarm: int) -> Any:
        """AlarmResponse; `alarm` as in AlarmMember (1 NOSPACE, 2 CORRUPT)."""
        request = rpc.AlarmRequest(action=2, memberID=member, alarm=alarm)
        return await self.call("Alarm", request)

    async def defragment(self, endpoint: str, timeout_s: float = 60.0) -> Any:
        """DefragmentResponse. The member answers nothing else meanwhile."""
        return await self.call(
            "Defragment", rpc.DefragmentRequest(), at=endpoint, timeout_s=timeout_s
        )

    # --- streams -----------------------------------------------------------------------

    async def open_watch(self) -> Any:
        """A Watch stream call at the present endpoint; breaks when it loses its leader."""
        return await self._open_stream("Watch")

    async def open_keepalive(self) -> Any:
        """A LeaseKeepAlive stream call at the present endpoint."""
        return await self._open_stream("LeaseKeepAlive")

    def broken(self, error: aio.AioRpcError, method: str, endpoint: str) -> LogError:
        """Our error for a failed stream; leaves the endpoint when that is at fault.

        A stale token is CallFailed: opening the next stream renews it.
        """
        if self.config.user and self._token_is_stale(error):
            self._token = ""
            return CallFailed(method, endpoint, "UNAUTHENTICATED", "token to be renewed")
        typed = _typed(error, method, endpoint, 0)
        if isinstance(typed, CallFailed):
            self.rotate(endpoint)
        return typed

    async def ended(self, call: Any, method: str, endpoint: str) -> LogError:
        """Our error for a stream that the server ended, clean or not."""
        code = await call.code()
        if code is grpc.StatusCode.OK:
            self.rotate(endpoint)
            return CallFailed(method, endpoint, "OK", "the server ended the stream")
        metadata = await call.initial_metadata(), await call.trailing_metadata()
        error = aio.AioRpcError(code, *metadata, details=await call.details())
        return self.broken(error, method, endpoint)

    def rotate(self, address: str) -> None:
        """Leave `address` for the next endpoint; nothing when it is not in use any more."""
        if address == self._ring[self._at]:
            self._at = (self._at + 1) % len(self._ring)
            self.rotations += 1

    # --- inside ------------------------------------------------------------------------

    async def call(self, method: str, request: Any, at: str = "", timeout_s: float = 0.0) -> Any:
        """One unary call, once (twice when the token had to be renewed).

        Raises CallFailed, NoSpace, Compacted, LeaseGone, LogWentBack, AccessRefused,
        RequestRefused, ResponseTooLarge.
        """
        address = at or self._ring[self._at]
        endpoint = self._connected(address)
        timeout = timeout_s or self._call_s
        for last in (False, True):
            token = self._token
            if self.config.user and not token:
                token = await self._renew(endpoint, token)
            metadata = (("token", token),) if token else None
            try:
                return await endpoint.methods[method](request, timeout=timeout, metadata=metadata)
            except aio.AioRpcError as error:
                if not last and self._token_is_stale(error):
                    await self._renew(endpoint, token)
                    continue
                typed = _typed(error, method, address, _requested_revision(request))
                if isinstance(typed, CallFailed):
                    self.rotate(address)
                raise typed from None
        raise AssertionError("unreachable")

    async def _read(self, method: str, request: Any) -> Any:
        attempts = len(self._ring) + 1
        pause = BACKOFF_MIN_MS / 1000
        while True:
            attempts -= 1
            try:
                return await self.call(method, request)
            except LogUnavailable:
                if not attempts:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.config.backoff_max_ms / 1000)

    async def _open_stream(self, method: str) -> Any:
        endpoint = self._connected(self.endpoint)
        if self.config.user and not self._token:
            await self._renew(endpoint, "")
        metadata: Metadata = (_HAS_LEADER,)
        if self._token:
            metadata += (("token", self._token),)
        return endpoint.methods[method](metadata=metadata)

    def _connected(self, address: str) -> _Endpoint:
        endpoint = self._open.get(address)
        if endpoint is None:
            endpoint = self._open[address] = _Endpoint(address, self.config)
        return endpoint

    def _token_is_stale(self, error: aio.AioRpcError) -> bool:
        if not self.config.user:
            return False
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return True
        return "auth store is old" in (error.details() or "")

    async def _renew(self, endpoint: _Endpoint, stale: str) -> str:
        async with self._renewing:
            if self._token != stale:
                return self._token  # another caller renewed it while we waited
            request = rpc.AuthenticateRequest(name=self.config.user, password=self.config.password)
            try:
                answer = await endpoint.methods["Authenticate"](request, timeout=self._call_s)
            except aio.AioRpcError as error:
                typed = _typed(error, "Authenticate", endpoint.address, 0)
                if isinstance(typed, CallFailed):
                    self.rotate(endpoint.address)
                raise typed from None
            self._token = answer.token
            return self._token


def _requested_revision(request: Any) -> int:
    """The revision a request is pinned at, for Compacted."""
    return getattr(request, "revision", 0)


def _typed(error: aio.AioRpcError, method: str, endpoint: str, requested: int) -> LogError:
    """etcd's gRPC status as our error. Codes and texts: etcd api/v3rpc/rpctypes/error.go."""
    code, detail = error.code(), error.details() or ""
    if "database space exceeded" in detail:
        return NoSpace(detail)
    if "has been compacted" in detail:
        return Compacted(requested, 0)
    if "future revision" in detail:
        return LogWentBack(requested, 0)
    if "lease not found" in detail:
        return LeaseGone(0)
    if "message larger than max" in detail.lower():
        sent = re.search(r"(?i)sent message larger", detail) or "request" in detail
        return RequestRefused(detail) if sent else ResponseTooLarge(detail)
    if code is grpc.StatusCode.PERMISSION_DENIED or detail.endswith("permission denied"):
        return AccessRefused(f"{method} at {endpoint}: {detail}; {PERMISSIONS_REMEDY}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AccessRefused(f"{method} at {endpoint}: {detail}")
    if "authentication failed" in detail or "user name is empty" in detail:
        return AccessRefused(f"{method} at {endpoint}: {detail}")
    if code in _TRANSIENT:
        return CallFailed(method, endpoint, code.name, detail)
    return RequestRefused(f"{method} at {endpoint}: {code.name} {detail}")


def _open(address: str, config: EtcdConfig) -> aio.Channel:
    options: Sequence[tuple[str, Any]] = [
        ("grpc.keepalive_time_ms", config.keepalive_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Without this a stopped etcd stays silent for a minute though pings go unanswered.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", DIAL_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", config.backoff_max_ms),
        ("grpc.max_receive_message_length", config.receive_limit_bytes),
        ("grpc.max_send_message_length", 16 * 1024 * 1024),
        ("grpc.enable_retries", 0),
        # The cluster is never reached through the environment's HTTP proxy.
        ("grpc.enable_http_proxy", 0),
        # A channel of ours shares no connection with another client's of this process.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if config.tls is None:
        return aio.insecure_channel(address, options=options)
    if config.tls.server_name:
        options = [*options, ("grpc.ssl_target_name_override", config.tls.server_name)]
    return aio.secure_channel(address, _credentials(config.tls), options=options)


def _credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Raises OSError when a file cannot be read."""

    def pem(path: str) -> bytes | None:
        return Path(path).read_bytes() if path else None

    return grpc.ssl_channel_credentials(pem(tls.ca), pem(tls.key), pem(tls.cert))
