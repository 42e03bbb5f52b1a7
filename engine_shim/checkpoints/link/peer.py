"""One state daemon, as seen from an engine: greeting, order, retries, and bounds.

Theory of operation. A thread owns the channel. `flush` gives it a batch of pieces and
returns immediately: True if the batch was accepted, False if the backlog is at its bound, in which
case the caller sheds (the blocks stay in the engine's cache and may be offered again). `fetch` asks
and waits, with a deadline.

A broken connection is reopened, with a growing delay; what was not acknowledged is
sent again, in order. Questions wait for that too, unless the peer is impatient: then a question
that cannot be sent fails if the daemon cannot be reached. The daemon accepts everything
idempotently, so a batch that arrives twice, late or out of order changes nothing. A daemon that
answers with another boot name has lost what it held: `on_reset` is called, and nothing is sent
again.

Whenever the thread wakes it takes the interpreter's lock from the engine. So while blocks
stream it wakes once a tick: it sends what came since, reads what was acknowledged, and sleeps.
Questions, a full window and a message's worth of bytes do not wait for the tick.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from relume.engine_shim.checkpoints.link import link_auth
from relume.engine_shim.checkpoints.link.channel import Channel, Wake
from relume.engine_shim.checkpoints.link.image import Buffer, digest_of
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import (
    KvStreamError,
    MalformedMessage,
    Refusal,
    Unreachable,
)

ANSWER_TIMEOUT_S = 3.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
IDLE_S = 0.5
TICK_S = 0.04
JOIN_BYTES = 1 << 20
"""Batches wait for the tick, or until they are so much, to leave as one message."""
HOPELESS = ("version", "authentication", "fingerprint", "fenced")
"""Refusals of a greeting that trying again does not cure."""


class _Batch:
    """Pieces and their bytes. The header is made on the peer's thread, and with it the
    digests of whole images, so that the caller pays for a copy only."""

    __slots__ = ("bytes", "header", "parts", "pieces", "sent_s", "seq")

    def __init__(self, seq: int, pieces: Sequence[m.Piece], parts: Sequence[Buffer]) -> None:
        self.seq = seq
        self.pieces = pieces
        self.parts = parts
        self.bytes = sum(piece.length for piece in pieces)
        self.header = b""
        self.sent_s = 0.0

    def join(self, later: _Batch, limit: int) -> bool:
        """Takes another batch in, unless together they are too much for one message."""
        if self.header or later.header or self.bytes + later.bytes > limit:
            return False
        if len(self.pieces) + len(later.pieces) > m.MAX_PIECES // 4:
            return False
        self.pieces = [*self.pieces, *later.pieces]
        self.parts = [*self.parts, *later.parts]
        self.bytes += later.bytes
        return True

    def seal(self) -> None:
        if self.header:
            return
        sealed = []
        for piece, part in zip(self.pieces, self.parts, strict=True):
            if not piece.digest and piece.length == piece.total:
                piece = msgspec.structs.replace(piece, digest=digest_of(part))
            sealed.append(piece)
        self.header = m.encode(m.Put(self.seq, tuple(sealed)))


class _Question:
    __slots__ = ("answer", "bytes", "chunk", "done", "error", "header", "parts", "sent", "seq")

    def __init__(self, seq: int, header: bytes, parts: Sequence[Buffer] = ()) -> None:
        self.seq = seq
        self.header = header
        self.parts = parts
        self.bytes = sum(map(len, parts))
        self.done = threading.Event()
        self.answer: m.Message | None = None
        self.chunk = memoryview(b"")
        self.error: KvStreamError | None = None
        self.sent = False


class Peer:
    """A link to one daemon. `flush` and `fetch` may be called from any thread."""

    def __init__(
        self,
        endpoint: str,
        connect: Callable[[Wake], Channel],
        hello: m.Hello,
        secret: bytes = b"",
        on_ack: Callable[[m.Ack], None] = lambda ack: None,
        on_refused: Callable[[m.Piece, str], None] = lambda piece, code: None,
        on_reset: Callable[[str], None] = lambda endpoint: None,
        bound_bytes: int = 12 << 20,
        patient: bool = True,
        boot: str = "",
        daemon_epoch: int = 0,
    ) -> None:
        """`on_ack`, `on_refused` (of one piece) and `on_reset` are called on the peer's
        thread. `bound_bytes`: unanswered and waiting batches together, but always one; local
        channels stage twice of it. `boot`, `daemon_epoch`: what is known of the daemon already."""
        self.endpoint = endpoint
        self.boot = boot
        self.daemon_epoch = daemon_epoch
        self.host = ""
        self.shed = 0
        self.gone = ""
        self.gone_s = 0.0
        self.read_bytes = 4 << 20
        self._connect = connect
        self._hello = hello
        self._secret = secret
        self._on_ack = on_ack
        self._on_refused = on_refused
        self._on_reset = on_reset
        self._bound = bound_bytes
        self._patient = patient
        self._seq = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: deque[_Batch] = deque()
        self._unanswered: OrderedDict[int, _Batch] = OrderedDict()
        self._bytes = self._waiting_bytes = 0
        self._ticking = False
        self._hurried = 0
        self._questions: OrderedDict[int, _Question] = OrderedDict()
        self._in_flight: dict[int, int] = {}  # bytes of chunks that are not answered, by seq
        self._wake = Wake()
        self._closing = False
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="relume-kv-peer", daemon=True)
        self._thread.start()

    # --- from any thread ---------------------------------------------------------------

    def flush(self, pieces: Sequence[m.Piece], parts: Sequence[Buffer]) -> bool:
        """Sends pieces whose bytes are `parts`, one part each; False: shed.

        The parts must stay as they are until acknowledged. A whole image may come
        without its digest.
        """
        batch = _Batch(next(self._seq), pieces, parts)
        with self._lock:
            if self.gone or (self._bytes and self._bytes + batch.bytes > self._bound):
                self.shed += 1
                return False
            self._bytes += batch.bytes
            self._waiting.append(batch)
            full = self._waiting_bytes < JOIN_BYTES <= self._waiting_bytes + batch.bytes
            self._waiting_bytes += batch.bytes
            if full or (len(self._waiting) == 1 and not self._ticking):
                self._wake.set()
        return True

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait or are not acknowledged yet."""
        return self._bytes

    def drained(self, timeout_s: float) -> bool:
        """Waits until everything flushed is answered, which then waits for no tick; False
        when time is over."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._hurried += 1
            if not self.gone:
                self._wake.set()
        while self._bytes and time.monotonic() < deadline:
            time.sleep(0.0005)
        with self._lock:
            self._hurried -= 1
        return not self._bytes

    def ask(
        self, message: Any, timeout_s: float, parts: Sequence[Buffer] = ()
    ) -> tuple[Any, memoryview]:
        """Sends `message` (its `seq` is set here) with the chunk that `parts` are, and returns
        its answer and chunk.

        Raises Refusal, Unreachable.
        """
        return self._await(self._question(message, parts), timeout_s)

    def _question(self, message: Any, parts: Sequence[Buffer] = ()) -> _Question:
        seq = next(self._seq)
        question = _Question(seq, m.encode(msgspec.structs.replace(message, seq=seq)), parts)
        with self._lock:
            if self.gone:
                raise Refusal("session", self.gone)
            self._questions[seq] = question
            self._wake.set()
        return question

    def _await(self, question: _Question, timeout_s: float) -> tuple[Any, memoryview]:
        if not question.done.wait(timeout_s):
            with self._lock:
                self._questions.pop(question.seq, None)
            raise Unreachable(self.endpoint, f"no answer in {timeout_s} s")
        if question.error is not None:
            raise question.error
        return question.answer, question.chunk

    def request(self, message: m.Get | m.Ask | m.Match) -> _Question:
        """Sends it; its answer is fetched later, so that several are on their way.

        Raises Refusal.
        """
        return self._question(message)

    @contextlib.contextmanager
    def fetch(
        self, get: m.Get | _Question, timeout_s: float
    ) -> Iterator[list[tuple[m.BlockAt, memoryview]]]:
        """The requested blocks, as views: into the daemon's memory on one host, into the
        received chunk otherwise. Their digests are for the caller to check.

        Raises Refusal, Unreachable, MalformedMessage.
        """
        question = self._question(get) if isinstance(get, m.Get) else get
        answer, chunk = self._await(question, timeout_s)
        if not isinstance(answer, m.Blocks):
            raise MalformedMessage(f"{m.name_of(answer)} in answer to Get")
        channel = self._channel
        try:
            if answer.shared:
                if channel is None:
                    raise Unreachable(self.endpoint, "closed")
                yield [(b, channel.arena(b.offset, b.length)) for b in answer.blocks]
            else:
                if any(b.offset < 0 or b.offset + b.length > len(chunk) for b in answer.blocks):
                    raise MalformedMessage("blocks outside their chunk")
                yield [(b, chunk[b.offset : b.offset + b.length]) for b in answer.blocks]
        finally:
            if answer.shared:
                self._tell(m.Release(0, answer.seq))

    def forget(self, question: _Question) -> None:
        """An answer that is no longer needed."""
        with self._lock:
            self._questions.pop(question.seq, None)
        if question.done.is_set() and getattr(question.answer, "shared", False):
            self._tell(m.Release(0, question.seq))

    def corrupt(self, request: str, child: int, rank: int, index: int) -> None:
        """Tells the daemon that a block it gave is damaged; no answer is awaited."""
        self._tell(m.Corrupt(seq=0, request=request, child=child, rank=rank, index=index))

    def drop(self, request: str, attempt: int, moved: bool = False) -> None:
        """Tells the daemon that the request ended, or is held by others now (`moved`); no
        answer is awaited."""
        self._tell(m.Drop(0, (request,), attempt, moved))

    def _tell(self, message: Any) -> None:
        """Sends a message whose answer does not matter."""
        seq = next(self._seq)
        question = _Question(seq, m.encode(msgspec.structs.replace(message, seq=seq)))
        with self._lock:
            if self.gone or self._closing:
                return
            self._questions[seq] = question
            self._wake.set()

    def close(self) -> None:
        """Stops; what waits is lost."""
        with self._lock:
            self._closing = True
            if not self.gone:
                self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    # --- the peer's thread -------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._live()
        finally:
            # Also if this thread failed: no caller may wait for it.
            if self._channel is not None:
                self._channel.close()
            self._give_up(self.gone or "closed")
            with self._lock:
                self._wake.close()

    def _live(self) -> None:
        pause = FIRST_PAUSE_S
        while not (self._closing or self.gone):
            greeted = False
            try:
                self._channel = self._connect(self._wake)
                self.read_bytes = self._channel.read_bytes
                self._greet(self._channel)
                greeted, pause = True, FIRST_PAUSE_S
                self._serve(self._channel)
            except (Unreachable, MalformedMessage) as error:
                if not (greeted or self._patient):
                    self._fail_questions(str(error))
            except Refusal as refusal:
                if refusal.code in HOPELESS:
                    self._give_up(str(refusal))
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            if not (self._closing or self.gone):
                if self._patient:
                    time.sleep(pause)
                else:
                    self._wake.wait(pause)  # a question in the meantime is tried immediately
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _greet(self, channel: Channel) -> None:
        """Raises Refusal, Unreachable, MalformedMessage."""
        nonce = b"" if channel.trusted else link_auth.new_nonce()
        hello = msgspec.structs.replace(self._hello, nonce=nonce)
        raw = m.encode(hello)
        channel.send(raw, ())
        answer = self._next(channel)
        if isinstance(answer, m.Challenge):
            if channel.trusted or not self._secret:
                raise Refusal("authentication", "a challenge, but no secret")
            expected = link_auth.server_mac(self._secret, nonce, answer.nonce, raw)
            if not link_auth.equal(expected, answer.mac):
                raise Refusal("authentication", "the daemon does not know the secret")
            mac = link_auth.client_mac(self._secret, nonce, answer.nonce, raw)
            channel.send(m.encode(m.Proof(mac)), ())
            answer = self._next(channel)
        elif not channel.trusted and isinstance(answer, m.Welcome):
            raise Refusal("authentication", "the daemon did not prove itself")
        if isinstance(answer, m.RefusalAnswer):
            raise Refusal(answer.code, answer.detail)
        if not isinstance(answer, m.Welcome):
            raise MalformedMessage(f"{m.name_of(answer)} in answer to hello")
        self._welcomed(answer)

    def _welcomed(self, welcome: m.Welcome) -> None:
        if welcome.epoch < self.daemon_epoch:
            raise Refusal("fenced", f"a daemon of epoch {welcome.epoch}, older than seen")
        lost = bool(self.boot) and welcome.boot != self.boot
        self.boot, self.daemon_epoch, self.host = welcome.boot, welcome.epoch, welcome.host
        with self._lock:
            if lost:
                self._unanswered.clear()
                self._waiting.clear()
                self._bytes = self._waiting_bytes = 0
            else:
                # Before what waits, and in its own order.
                self._waiting.extendleft(reversed(self._unanswered.values()))
                self._unanswered.clear()
                self._waiting_bytes = self._bytes
            self._in_flight.clear()
            for question in self._questions.values():
                question.sent = False
        if lost:
            self._on_reset(self.endpoint)

    def _next(self, channel: Channel) -> m.Message:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0 and not self._closing:
            if (received := channel.receive(left)) is not None:
                return m.decode(received[0])
        raise Unreachable(self.endpoint, "no answer to the greeting")

    def _serve(self, channel: Channel) -> None:
        due = True
        while not self._closing:
            self._send_all(channel, due)
            due = False
            if self._may_tick(channel):
                due = not self._wake.wait(TICK_S)
                self._ticking = False
                received = channel.receive(0)
            else:
                due = bool(self._questions or self._hurried)
                received = channel.receive(IDLE_S)
            while received is not None:
                self._take(m.decode(received[0]), received[1])
                self._send_all(channel, due)
                received = channel.receive(0)
            oldest = next(iter(self._unanswered.values()), None)
            if oldest and time.monotonic() - oldest.sent_s > ANSWER_TIMEOUT_S:
                raise Unreachable(self.endpoint, "a batch was not acknowledged")

    def _send_all(self, channel: Channel, due: bool) -> None:
        """Questions first: a restore does not wait for checkpoints."""
        while not self._closing:
            with self._lock:
                question = self._next_question(channel)
                if question is not None:
                    question.sent = True
                    if question.bytes:
                        self._in_flight[question.seq] = question.bytes
                batch = self._next_batch(channel, due) if question is None else None
            if question is not None:
                channel.send(question.header, question.parts)
            elif batch is not None:
                batch.seal()
                batch.sent_s = time.monotonic()
                channel.send(batch.header, batch.parts)
            else:
                return

    def _next_question(self, channel: Channel) -> _Question | None:
        """The next question to send. One with a chunk waits for room. Abandoned questions occupy
        room too: the daemon may not have read them yet."""
        for question in self._questions.values():
            if not question.sent and (not question.bytes or self._fits(channel, question.bytes)):
                return question
        return None

    def _fits(self, channel: Channel, size: int) -> bool:
        return size <= self._space(channel) or not (self._in_flight or self._unanswered)

    def _next_batch(self, channel: Channel, due: bool) -> _Batch | None:
        """The next one to send, while the channel has room for what is not answered yet."""
        if not self._waiting or not (due or self._waiting_bytes >= JOIN_BYTES):
            return None
        first = self._waiting[0]
        space = self._space(channel)
        if (self._unanswered or self._in_flight) and first.bytes > space:
            return None
        self._waiting.popleft()
        while self._waiting and first.join(self._waiting[0], min(space, JOIN_BYTES)):
            self._waiting.popleft()
        self._waiting_bytes -= first.bytes
        self._unanswered[first.seq] = first
        return first

    def _space(self, channel: Channel) -> int:
        """Bytes the channel takes now, beside what is unanswered."""
        waiting = sum(self._in_flight.values()) if self._in_flight else 0
        return channel.window_bytes - self._bytes + self._waiting_bytes - waiting

    def _may_tick(self, channel: Channel) -> bool:
        """Whether what comes from the daemon can wait for a tick. If so, `flush` does not wake
        us for small batches."""
        with self._lock:
            if self._questions or self._hurried or not (self._waiting or self._unanswered):
                return False
            full = self._waiting and self._waiting[0].bytes > self._space(channel)
            if full and self._unanswered:
                return False  # answers make room
            self._ticking = True
            return True

    def _take(self, message: m.Message, chunk: memoryview) -> None:
        seq = getattr(message, "seq", 0)
        with self._lock:
            batch = self._unanswered.pop(seq, None)
            if batch is not None:
                self._bytes -= batch.bytes
            question = self._questions.pop(seq, None)
            self._in_flight.pop(seq, None)
        if question is not None:
            if isinstance(message, m.RefusalAnswer):
                if message.code == "session":
                    with self._lock:
                        self._questions[seq] = question
                    raise Unreachable(self.endpoint, "the daemon does not know us any more")
                question.error = Refusal(message.code, message.detail)
            question.answer, question.chunk = message, chunk
            question.done.set()
        elif isinstance(message, m.Blocks) and message.shared:
            self._tell(m.Release(0, seq))  # its caller gave up
        elif isinstance(message, m.RefusalAnswer):
            # Of one batch, or (seq 0) of the session: then the session restarts and everything is
            # sent again.
            if message.code == "fenced":
                raise Refusal(message.code, message.detail)
            if batch is None or message.code == "session":
                raise Unreachable(self.endpoint, f"session refused: {message.code}")
        elif isinstance(message, m.Ack) and batch is not None:
            for number, code in message.refused:
                if 0 <= number < len(batch.pieces):
                    self._on_refused(batch.pieces[number], code)
            self._on_ack(message)

    def _give_up(self, why: str) -> None:
        """What was accepted and not acknowledged counts as never held."""
        with self._lock:
            self.gone, self.gone_s = why, time.monotonic()
            lost = bool(self._waiting or self._unanswered)
            self._waiting.clear()
            self._unanswered.clear()
            self._bytes = self._waiting_bytes = 0
        if lost and not self._closing:
            self._on_reset(self.endpoint)
        self._fail_questions(why)

    def _fail_questions(self, why: str) -> None:
        with self._lock:
            questions = list(self._questions.values())
            self._questions.clear()
        for question in questions:
            question.error = Unreachable(self.endpoint, why)
            question.done.set()
