"""The protocol of the daemon, for one connection, without the connection.

`Session.answer(header, chunk)` takes one message and gives the one that answers it. The
servers carry both over their transports.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from relume.engine_shim.checkpoints.daemon.contents import Content
from relume.engine_shim.checkpoints.daemon.store.block_store import BlockStore
from relume.engine_shim.checkpoints.link import link_auth
from relume.engine_shim.checkpoints.link.image import Buffer
from relume.engine_shim.generation import reported
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import Fingerprint, usable
from relume.events.wire.kv.kv_errors import MalformedMessage, Refusal
from relume.events.wire.kv.token_chain import CHAIN_BYTES, MAX_CHAINS

PINNED_REPLIES = 64
ROLES = ("writer", "reader", "keeper", "control")


class Reply(Struct, frozen=True):
    """Header of an answer, and its chunk in parts, which must be copied before another message is
    answered, or stay unchanged until `left` is called. `close`: close the connection."""

    header: bytes
    parts: tuple[Buffer, ...] = ()
    close: bool = False
    left: Callable[[], None] | None = None


class Service:
    """What all connections share. `now` is a monotonic clock in seconds."""

    def __init__(
        self, store: BlockStore, host: str, epoch: int, secret: bytes, now: Callable[[], float]
    ) -> None:
        self.store = store
        self.host = host
        self.epoch = epoch
        self.boot = secrets.token_hex(8)
        self.secret = secret
        self.now = now
        self.notes: tuple[str, ...] = ()
        self.polled_s = now()
        """Time of its agent's last poll."""
        self._writers: dict[str, tuple[int, int]] = {}

    def fence(self, hello: m.Hello) -> None:
        """Raises Refusal when a newer life of the worker has written here."""
        mine = hello.epoch, hello.incarnation
        newest = self._writers.get(hello.worker, (0, 0))
        if mine < newest:
            raise Refusal("fenced", f"{hello.worker} {newest} has written, this is {mine}")
        self._writers[hello.worker] = mine

    def pinned(self, contents: list[Content]) -> Callable[[], None]:
        """Pins images where they lie; what is returned unpins them."""
        for content in contents:
            self.store.contents.pin(content)

        def unpin() -> None:
            for content in contents:
                self.store.contents.unpin(content)

        return unpin


class Session:
    """One connection. `trusted`: the transport has authenticated it (CURVE keys, or the kernel).
    `shared`: the other end maps the arena."""

    def __init__(self, service: Service, trusted: bool, shared: bool) -> None:
        self._service = service
        self._trusted = trusted
        self._shared = shared
        self._hello: m.Hello | None = None
        self._raw_hello = b""
        self._nonce = b""
        self._open = False
        self._pins: dict[int, list[Content]] = {}

    def answer(self, header: bytes | memoryview, chunk: memoryview) -> Reply:
        """Never raises for what the other end sent; it is refused instead."""
        seq = 0
        try:
            message = m.decode(header)
            seq = getattr(message, "seq", 0)
            if isinstance(message, m.Hello):
                return self._greet(message, bytes(header))
            if isinstance(message, m.Proof):
                return self._prove(message)
            if not self._open or self._hello is None:
                raise Refusal("session", "say hello first")
            handler = _HANDLERS.get(type(message))
            if handler is None:
                raise MalformedMessage(f"{m.name_of(message)} is not for a daemon")
            return handler(self, self._hello, message, chunk)
        except MalformedMessage as error:
            refused = m.RefusalAnswer(seq, "malformed", str(error)[:200])
            return Reply(m.encode(refused), close=True)
        except Refusal as refusal:
            refused = m.RefusalAnswer(seq, refusal.code, refusal.detail[:200])
            close = refusal.code in ("authentication", "version")
            return Reply(m.encode(refused), close=close)

    def closed(self) -> None:
        """The connection is gone; what it pinned is free."""
        for seq in list(self._pins):
            self._unpin(seq)

    # --- opening -----------------------------------------------------------------------

    def _greet(self, hello: m.Hello, raw: bytes) -> Reply:
        if hello.version != m.VERSION:
            raise Refusal("version", f"this daemon speaks {m.VERSION}, not {hello.version}")
        if hello.role not in ROLES or len(hello.worker) > m.MAX_NAME:
            raise MalformedMessage("no such role")
        if hello.role == "control" and not self._shared:
            raise Refusal("authentication", "control is for this host only")
        if hello.role in ("writer", "reader") and hello.fingerprint is None:
            raise Refusal("fingerprint", "none given")
        self.closed()
        self._hello, self._raw_hello, self._open = hello, raw, False
        if self._trusted:
            return self._welcome(hello)
        if len(hello.nonce) != link_auth.NONCE_BYTES:
            raise Refusal("authentication", "a nonce is needed")
        self._nonce = link_auth.new_nonce()
        mac = link_auth.server_mac(self._service.secret, hello.nonce, self._nonce, raw)
        return Reply(m.encode(m.Challenge(self._nonce, mac)))

    def _prove(self, proof: m.Proof) -> Reply:
        hello, nonce = self._hello, self._nonce
        self._nonce = b""
        if hello is None or not nonce:
            raise Refusal("authentication", "no challenge is open")
        expected = link_auth.client_mac(self._service.secret, hello.nonce, nonce, self._raw_hello)
        if not link_auth.equal(expected, proof.mac):
            raise Refusal("authentication", "the proof is wrong")
        return self._welcome(hello)

    def _welcome(self, hello: m.Hello) -> Reply:
        if hello.role == "writer":
            self._service.fence(hello)
        self._open = True
        service = self._service
        return Reply(m.encode(m.Welcome(service.boot, service.epoch, service.host)))

    # --- messages ----------------------------------------------------------------------

    def _put(self, hello: m.Hello, put: m.Put, chunk: memoryview) -> Reply:
        if hello.role != "writer" or hello.fingerprint is None:
            raise Refusal("authentication", "only writers write")
        self._service.fence(hello)
        m.check_put(put, len(chunk))
        positions: dict[tuple[str, int, int], m.Position] = {}
        refused: list[tuple[int, str]] = []
        at, now_s = 0, self._service.now()
        for number, piece in enumerate(put.pieces):
            data = chunk[at : at + piece.length]
            at += piece.length
            try:
                if failpoint_client.active and reported(piece.request):
                    _reach_store(hello.worker, piece)
                position = self._service.store.put(
                    hello.worker, hello.fingerprint, piece, data, now_s
                )
                positions[piece.request, piece.child, piece.rank] = position
            except Refusal as refusal:
                refused.append((number, refusal.code))
        ack = m.Ack(put.seq, tuple(positions.values()), tuple(refused))
        return Reply(m.encode(ack))

    def _ask(self, hello: m.Hello, ask: m.Ask, chunk: memoryview) -> Reply:
        if len(ask.requests) > m.MAX_REQUESTS:
            raise MalformedMessage(f"{len(ask.requests)} requests in one question")
        positions: list[m.Position] = []
        fits: list[str] = []
        for request in ask.requests:
            self._service.store.touch(request, self._service.now())
            found, theirs = self._service.store.position(request)
            fit = _fit(hello.fingerprint, theirs)
            positions += found
            fits += [fit] * len(found)
        return Reply(m.encode(m.Held(ask.seq, tuple(positions), tuple(fits))))

    def _match(self, hello: m.Hello, match: m.Match, chunk: memoryview) -> Reply:
        """The sequence whose blocks begin like the caller's request."""
        count, rest = divmod(len(match.chains), CHAIN_BYTES)
        if rest or count > MAX_CHAINS or hello.fingerprint is None:
            raise MalformedMessage(f"{len(match.chains)} bytes of chains")
        chains = [match.chains[n * CHAIN_BYTES : (n + 1) * CHAIN_BYTES] for n in range(count)]
        found = self._service.store.match(chains, hello.fingerprint)
        return Reply(m.encode(m.MatchAnswer(match.seq, *found)))

    def _get(self, hello: m.Hello, get: m.Get, chunk: memoryview) -> Reply:
        store = self._service.store
        _, theirs = store.position(get.request)
        if theirs is None:
            raise Refusal("unknown", f"nothing is held of {get.request}")
        if (fit := _fit(hello.fingerprint, theirs)) == "" or (get.chain and fit != "same"):
            raise Refusal("fingerprint", f"{get.request} was written for another engine")
        if not (0 <= get.first < m.MAX_INDEX and 0 < get.count <= m.MAX_PIECES):
            raise MalformedMessage("blocks out of bounds")
        place = get.request, get.child, get.rank, get.first, get.count
        if get.chain:  # a lender does not count as used: the client did not name it
            run = store.lend(*place, get.chain)
        else:
            store.touch(get.request, self._service.now())
            run = store.run(*place)
        if self._shared:
            if reply := self._grant(get, run):
                return reply
        return self._copies(get, run)

    def _grant(self, get: m.Get, run: list[Content]) -> Reply | None:
        """Where the blocks lie in the arena; they stay there until released. None when the
        first is not in memory."""
        store = self._service.store
        if len(self._pins) >= PINNED_REPLIES:
            raise Refusal("busy", "release what you hold first")
        found = []
        for content in run:
            if content.tier != store.arena.name:
                break
            found.append(content)
        if not found:
            return None
        for content in found:
            store.contents.pin(content)
            store.served(content.length, bool(get.chain))
        self._pins[get.seq] = found
        at = [m.BlockAt(get.first + n, c.offset, c.length, c.digest) for n, c in enumerate(found)]
        return Reply(m.encode(m.Blocks(get.seq, tuple(at), shared=True)))

    def _copies(self, get: m.Get, run: list[Content]) -> Reply:
        """The blocks' images in one chunk. The reader checks them, on what it has copied, and
        says when one is damaged; what a disk did not return ends the run here."""
        store = self._service.store
        parts: list[Buffer] = []
        at: list[m.BlockAt] = []
        size = 0
        for number, content in enumerate(run):
            if size and size + content.length > m.MAX_CHUNK_BYTES:
                break
            index = get.first + number
            image = store.contents.read(content)
            if len(image) != content.length:
                store.discard(get.request, get.child, get.rank, index)
                break
            parts.append(image)
            at.append(m.BlockAt(index, size, content.length, content.digest))
            size += content.length
            store.served(content.length, bool(get.chain))
        sent = run[: len(at)]
        if span := store.contents.span(sent, m.MAX_CHUNK_BYTES):
            first = sent[0].offset
            moved = [
                m.BlockAt(b.index, c.offset - first, b.length, b.digest)
                for b, c in zip(at, sent, strict=True)
            ]
            left = self._service.pinned(sent)
            return Reply(m.encode(m.Blocks(get.seq, tuple(moved), False)), (span,), left=left)
        return Reply(m.encode(m.Blocks(get.seq, tuple(at), shared=False)), tuple(parts))

    def _release(self, hello: m.Hello, release: m.Release, chunk: memoryview) -> Reply:
        return Reply(m.encode(m.Done(release.seq, self._unpin(release.get))))

    def _unpin(self, get: int) -> int:
        contents = self._pins.pop(get, [])
        for content in contents:
            self._service.store.contents.unpin(content)
        return len(contents)

    def _corrupt(self, hello: m.Hello, found: m.Corrupt, chunk: memoryview) -> Reply:
        """A reader says a block is damaged; believed only when it is so here."""
        store = self._service.store
        for content in store.run(found.request, found.child, found.rank, found.index, 1):
            if store.contents.verified(content) is None:
                store.discard(found.request, found.child, found.rank, found.index)
        return Reply(m.encode(m.Done(found.seq)))

    def _drop(self, hello: m.Hello, drop: m.Drop, chunk: memoryview) -> Reply:
        if len(drop.requests) > m.MAX_REQUESTS:
            raise MalformedMessage(f"{len(drop.requests)} requests at once")
        if hello.role == "reader":
            raise Refusal("authentication", "readers drop nothing")
        blocks = size = 0
        for request in drop.requests:
            gone = self._service.store.drop(request, drop.attempt, drop.moved)
            blocks, size = blocks + gone[0], size + gone[1]
        return Reply(m.encode(m.Done(drop.seq, blocks, size)))

    def _void(self, hello: m.Hello, void: m.Void, chunk: memoryview) -> Reply:
        _control_only(hello)
        if len(void.attempts) > m.MAX_REQUESTS:
            raise MalformedMessage(f"{len(void.attempts)} attempts at once")
        blocks = size = 0
        for request, attempt in void.attempts:
            gone = self._service.store.void(request, attempt)
            blocks, size = blocks + gone[0], size + gone[1]
        return Reply(m.encode(m.Done(void.seq, blocks, size)))

    def _keep(self, hello: m.Hello, keep: m.Keep, chunk: memoryview) -> Reply:
        return self._store(hello, keep, keep.envelope, m.MAX_INLINE_ENVELOPE)

    def _keep_chunk(self, hello: m.Hello, keep: m.KeepChunk, chunk: memoryview) -> Reply:
        return self._store(hello, keep, chunk, m.MAX_ENVELOPE_BYTES, keep.digest)

    def _store(
        self, hello: m.Hello, keep: m.Keep | m.KeepChunk, envelope: Buffer, limit: int,
        digest: bytes = b"",
    ) -> Reply:  # fmt: skip
        if hello.role != "keeper":
            raise Refusal("authentication", "only keepers keep")
        size = len(envelope)
        if not 0 < len(keep.request) <= m.MAX_NAME or not 0 < size <= limit:
            raise MalformedMessage(f"an envelope of {size} bytes")
        service = self._service
        service.store.keep(keep.request, keep.attempt, envelope, service.now(), digest)
        return Reply(m.encode(m.Done(keep.seq, 0, size)))

    def _recall(self, hello: m.Hello, recall: m.Recall, chunk: memoryview) -> Reply:
        if hello.role != "keeper":
            raise Refusal("authentication", "only keepers ask for envelopes")
        attempt, envelope = self._service.store.envelopes.recall(recall.request)
        if len(envelope) <= m.MAX_INLINE_ENVELOPE:
            return Reply(m.encode(m.Envelope(recall.seq, attempt, bytes(envelope))))
        return Reply(m.encode(m.Envelope(recall.seq, attempt, b"")), (envelope,))

    def _changes(self, hello: m.Hello, ask: m.Changes, chunk: memoryview) -> Reply:
        _control_only(hello)
        self._service.polled_s = self._service.now()
        limit = min(max(ask.limit, 1), m.MAX_REQUESTS)
        cursor, changes, more = self._service.store.ledger.since(ask.cursor, limit)
        changed = m.ChangesAnswer(
            seq=ask.seq, cursor=cursor, boot=self._service.boot, changes=tuple(changes), more=more
        )
        return Reply(m.encode(changed))

    def _stats(self, hello: m.Hello, ask: m.StatsAsk, chunk: memoryview) -> Reply:
        _control_only(hello)
        service = self._service
        stats = m.Stats(ask.seq, service.boot, service.store.stats(), service.notes)
        return Reply(m.encode(stats))


def _reach_store(worker: str, piece: m.Piece) -> None:
    """Raises Refusal where a failpoint says so."""
    failpoint_client.reach(
        Failpoint.CHECKPOINT_STORE,
        lambda text: Refusal("budget", text),
        worker=worker,
        request=piece.request,
        block=piece.index,
    )


def _control_only(hello: m.Hello) -> None:
    if hello.role != "control":
        raise Refusal("authentication", "for the host's agent only")


def _fit(mine: Fingerprint | None, theirs: Fingerprint | None) -> str:
    return usable(mine, theirs) if mine is not None and theirs is not None else ""


_HANDLERS: dict[type, Callable[[Session, m.Hello, Any, memoryview], Reply]] = {
    m.Put: Session._put,
    m.Ask: Session._ask,
    m.Match: Session._match,
    m.Get: Session._get,
    m.Release: Session._release,
    m.Corrupt: Session._corrupt,
    m.Drop: Session._drop,
    m.Void: Session._void,
    m.Keep: Session._keep,
    m.KeepChunk: Session._keep_chunk,
    m.Recall: Session._recall,
    m.Changes: Session._changes,
    m.StatsAsk: Session._stats,
}
