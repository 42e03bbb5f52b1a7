"""An engine process's links to state daemons: one `Peer` an endpoint, made on first use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from relume.engine_shim.checkpoints.link.channel import Channel, LocalChannel, Wake
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import Fingerprint
from relume.events.wire.kv.kv_errors import Unreachable

MAX_LINKS = 64
REMAKE_S = 2.0
"""Time without requests to a daemon that refused us."""

BOUND_BYTES = 12 << 20
BLOCKS = 4
"""Maximum backlog of a link: bytes, or a number of blocks if that is larger."""


class LinkConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From `kv_connector_extra_config`. `secret_file` for plaintext on a private network;
    `curve_public`, `curve_secret_file` and `curve_servers` (endpoint to key) for CURVE.
    `epoch` is the worker's, `bound_bytes` what may wait on one link before it sheds; 0:
    BOUND_BYTES, and BLOCKS blocks at the least.

    `staging_bytes`: size of one buffer between the cache and the links (`staged_cache`); 0: its
    STAGING_BYTES."""

    epoch: int = 0
    secret_file: str = ""
    curve_public: str = ""
    curve_secret_file: str = ""
    curve_servers: dict[str, str] = {}
    bound_bytes: int = 0
    lookup_timeout_s: float = 0.5
    load_timeout_s: float = 5.0
    staging_bytes: int = 0

    @staticmethod
    def of(extra: Mapping[str, Any]) -> LinkConfig:
        """Raises msgspec.ValidationError for names or types that are not ours."""
        return msgspec.convert(dict(extra), LinkConfig)


class Links:
    """Peers by endpoint, all of one role. Any thread."""

    def __init__(
        self,
        config: LinkConfig,
        worker: str,
        incarnation: int,
        role: str,
        fingerprint: Fingerprint | None,
        on_refused: Callable[[str, m.Piece, str], None] = lambda endpoint, piece, code: None,
        on_reset: Callable[[str], None] = lambda endpoint: None,
    ) -> None:
        self._config = config
        self.fingerprint = fingerprint
        block = fingerprint.image_bytes if fingerprint is not None else 0
        self.bound_bytes = config.bound_bytes or max(BOUND_BYTES, BLOCKS * block)
        self._hello = m.Hello(
            version=m.VERSION,
            worker=worker,
            epoch=config.epoch,
            incarnation=incarnation,
            role=role,
            nonce=b"",
            fingerprint=fingerprint,
        )
        self._on_refused = on_refused
        self._on_reset = on_reset
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._secret = _content(config.secret_file)

    def peer(self, endpoint: str) -> Peer:
        """The link to `endpoint`; one that gave up is replaced after a while, by one with the same
        state. Raises Unreachable, also when there are too many."""
        with self._lock:
            peer = self._peers.get(endpoint)
            if peer is not None and not peer.gone:
                return peer
            if peer is None and len(self._peers) >= MAX_LINKS:
                raise Unreachable(endpoint, f"more than {MAX_LINKS} links")
            if peer is not None and time.monotonic() - peer.gone_s < REMAKE_S:
                raise Unreachable(endpoint, peer.gone)
            peer = self._peers[endpoint] = self._make(endpoint, peer)
            return peer

    def _make(self, endpoint: str, before: Peer | None) -> Peer:
        return Peer(
            endpoint,
            lambda wake: self._connect(endpoint, wake),
            self._hello,
            self._secret,
            on_refused=lambda piece, code: self._on_refused(endpoint, piece, code),
            on_reset=self._on_reset,
            bound_bytes=self.bound_bytes,
            patient=self._hello.role == "writer",
            boot=before.boot if before is not None else "",
            daemon_epoch=before.daemon_epoch if before is not None else 0,
        )

    def _connect(self, endpoint: str, wake: Wake) -> Channel:
        if endpoint.startswith("unix:"):
            staging = 2 * max(self.bound_bytes, m.MAX_CHUNK_BYTES)
            return LocalChannel(endpoint.removeprefix("unix:"), wake, staging)
        from relume.engine_shim.checkpoints.link.zmq_channel import CurveKeys, ZmqChannel

        config = self._config
        if server := config.curve_servers.get(endpoint):
            secret = _content(config.curve_secret_file)
            keys = CurveKeys(config.curve_public.encode(), secret, server.encode())
            return ZmqChannel(endpoint, wake, keys)
        if not self._secret:
            raise Unreachable(endpoint, "there is neither a key of it nor a shared secret")
        return ZmqChannel(endpoint, wake)

    def close(self) -> None:
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()


def _content(path: str) -> bytes:
    """A secret file's content; empty without one. Raises OSError."""
    if not path:
        return b""
    with open(path, "rb") as file:
        return file.read().strip()
