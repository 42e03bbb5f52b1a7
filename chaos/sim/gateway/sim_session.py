"""One request in the simulated gateway: the real `RequestSession`, fed with real frames.

An engine sends stretches of tokens, from which a session makes frames with ids and events; clients
read the bytes that the state machine passes on. A lost connection cuts the current frame at some
byte.
"""

from __future__ import annotations

from random import Random

import msgspec

from relume.chaos.sim.engine.manners import GARBAGE, LATE, LATE_CUT, LATE_MOVED
from relume.chaos.sim.gateway.answer_bytes import (
    CHOICES,
    DONE,
    NOTE_EVERY,
    OTHER_CHOICE,
    RELAYED,
    UNNAMED,
    WHOLE,
    WRONG,
    has_note,
    second_choice,
    style_of,
    tokens_of,
)
from relume.chaos.sim.gateway.client_connection import SimClientConnection
from relume.chaos.sim.gateway.request_body import RequestBody, encode
from relume.chaos.sim.gateway.sim_connections import SimUpstream
from relume.chaos.sim.message_ports import Ask, Dispatch, Stretch
from relume.chaos.sim.world.virtual_loop import NS
from relume.controlplane.gateway.context import Context
from relume.controlplane.gateway.request_session import RequestSession, ResumableStreams
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.event_ids import Position
from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.stream_states import Declining, Receiving, Relaying
from relume.events.vocabulary.enums import AttemptMode, TransportKind
from relume.events.wire import headers as h
from relume.events.wire.envelope import Envelope
from relume.events.wire.frames import (
    CONTENT_TYPE,
    UNKNOWN_START,
    FailureKind,
    encode_end,
    encode_envelope,
    encode_failure,
    encode_response,
    encode_tokens,
)
from relume.events.wire.resumption import DeliveredChoice, parse_resume
from relume.events.wire.worker_calls import ATTACH_PATH, Attach, decode

PATH = "/v1/completions"


class SimSession(RequestSession):
    """The real session; stretches of tokens come as frames, and leave as stretches."""

    __slots__ = ("_altered", "_differs", "_first_ns", "_gap_ns", "_groups", "_has_head", "_has_of",
                 "_last_ns", "_next", "_preface",
                 "_style", "_whole", "connection", "failed_with", "stretch", "what")  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        client: SimClientConnection,
        stream: Stream,
        streams: ResumableStreams | None = None,
    ) -> None:
        super().__init__(ctx, client, stream, streams)
        client.session = self
        self.connection = client
        self.what = client.what
        self.failed_with = 0
        self.stretch: Stretch | None = None
        self._style = style_of(self.what.content_id, self.what.kind)
        self._has_head = False
        self._has_of = [0, 0]
        self._next = 0
        self._altered = self._differs = False
        self._groups = True
        self._preface = self._whole = b""
        self._first_ns = -1
        self._last_ns = -1
        self._gap_ns = 0

    def came_back(self, client: SimClientConnection, have: Position) -> None:  # type: ignore[override]
        """See RequestSession."""
        client.session = self
        self.connection.forget()
        self.connection = client
        super().came_back(client, have)

    def look(self) -> None:
        """Receive all tokens that have left the engine by now."""
        upstream = self.upstream
        if isinstance(upstream, SimUpstream):
            upstream.look()

    def gone(self) -> None:
        """The client's present connection is gone."""
        self.look()
        if self.client is self.connection:
            self.client_gone()

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, do.Send):
                self._dispatch(effect)
                continue
            if isinstance(effect, do.ReportFailover):
                continue
            if isinstance(effect, do.Fail):
                self.failed_with = effect.status
            if isinstance(effect, do.RecordEnd):
                effect = self._with_times(effect)
            if isinstance(effect, do.RecordEnd | do.LetGo):
                self.connection.forget()
            super()._carry_out([effect])

    def _dispatch(self, sent: do.Send) -> None:
        to, upstream, what = self.machine.attempt, self.upstream, self.what
        assert to is not None and isinstance(upstream, SimUpstream)
        self._has_head = self._altered = self._differs = False
        self._preface = b""
        self._groups = not self.stream.again
        path, fields = _parsed(sent.head)
        if path == ATTACH_PATH:
            self._groups = False
            upstream.attach(self, decode(sent.body, Attach))
            return
        choices = _resumed_from(fields, sent)
        known = choices[0]
        self._whole = known.note
        # An engine that gets tokens that differ from its own continues with other tokens.
        self._altered = known.ids != tuple(tokens_of(what.content_id, 0, len(known.ids)))
        begun = len(known.ids)
        if self._style is CHOICES:
            other = choices[1].ids if len(choices) > 1 else ()
            due = tuple(second_choice(tokens_of(what.content_id, 0, len(other))))
            self._altered = self._altered or other != due
            self._has_of = [begun, len(other)]
            begun = min(self._has_of)
        # One that generates them again finds out.
        self._differs = self._altered and to.mode == AttemptMode.REPLAY
        self._next = begun
        envelope = h.parse_endpoints(h.ENVELOPE, fields.get(h.ENVELOPE, ""))
        if envelope:
            self._preface = self._envelope()
        grace = fields.get(h.GRACE, "")
        upstream.dispatch(
            self,
            Dispatch(
                request=to.request,
                attempt=to.attempt,
                incarnation=to.incarnation,
                mode=to.mode,
                content_id=what.content_id,
                prompt_tokens=what.prompt_tokens,
                output_tokens=what.output_tokens,
                delivered=begun,
                record=h.decode_dispatch(to.dispatch),
                checkpoint=to.checkpoint,
                restore=to.restore,
                priority=to.priority,
                prefix=what.prefix,
                prefix_block=what.prefix_block,
                claim=fields.get(h.CLAIM, ""),
                grace_s=h.Grace.parse(grace).grace_s if grace else 0,
                envelope=envelope,
                origin=fields.get(h.ORIGIN, ""),
                is_stock=what.kind == "unnamed",
                model=what.model,
            ),
        )

    def _envelope(self) -> bytes:
        stream = self.stream
        created = stream.created.decode()
        envelope = Envelope(PATH, self.what.client_id, created, body_of(self.what))
        return encode_envelope(envelope.pack())

    def _with_times(self, effect: do.RecordEnd) -> do.RecordEnd:
        """Times of tokens are those at which they left their engine."""
        if self._first_ns < 0:
            return effect
        ttft_us = int((self._first_ns - self.stream.arrived_at * NS) / 1000)
        return msgspec.structs.replace(effect, ttft_us=ttft_us, longest_gap_us=self._gap_ns // 1000)

    # --- from the engine

    def on_stretch(self, stretch: Stretch) -> None:
        """More tokens."""
        if self._style is RELAYED:
            self._relay(stretch)
            return
        if not isinstance(self.machine.state, Receiving):
            return
        if self._differs:
            self.on_broken(FailureKind.MISMATCH)
            return
        due = self._next if self._style in (CHOICES, UNNAMED) else self.delivered
        if stretch.start == due:
            self._time(stretch)
        self._next = stretch.start + stretch.count
        self.stretch = stretch
        tokens = self._tokens(stretch.start, stretch.count, stretch.wrong)
        if self._style.is_small:
            self._on_small_frames(stretch, tokens)
            return
        if self._style is WHOLE:
            self._whole += self._style.shown(tokens)
        frame = self._frame(stretch.start, tokens)
        upstream = self.upstream
        assert isinstance(upstream, SimUpstream)
        copies = upstream.frame_copies()
        if self._style is WHOLE:
            copies = max(copies, 1)  # the answer has no positions, so a lost frame would not show
        elif self._style is UNNAMED:
            copies = 1  # a lost or repeated frame would not show
        if copies != 1:
            self._on_frames(frame * copies)
        elif stretch.count != 1 or not self.take_chunk(_chunk_of(frame), stretch.last_ns / NS):
            self._on_frames(frame)

    def _frame(self, start: int, tokens: list[int]) -> bytes:
        """The frame, or the frames of both choices, of these tokens."""
        style = self._style
        if style is UNNAMED:
            return encode_tokens(UNKNOWN_START, [], style.shown(tokens))
        if style is not CHOICES:
            return encode_tokens(start, tokens, style.shown(tokens))
        both = b""
        for choice, ids in enumerate((tokens, second_choice(tokens))):
            first = max(start, self._has_of[choice])
            if ids := ids[first - start :]:
                self._has_of[choice] = first + len(ids)
                shown = style.shown([OTHER_CHOICE * choice + token for token in ids])
                both += encode_tokens(first, ids, shown, choice)
        return both

    def _last_frames(self, sent: int) -> tuple[bytes, bytes]:
        """The frames of the usage event and of the end, after `sent` tokens."""
        usage = self._style.usage
        if self._style is UNNAMED:
            return encode_tokens(UNKNOWN_START, [], usage), encode_tokens(UNKNOWN_START, [], DONE)
        if self._style is CHOICES:
            empty = encode_tokens(UNKNOWN_START, [], b"", 0)
            return empty + encode_tokens(sent, [], usage, 1), encode_tokens(0, [], DONE)
        return encode_tokens(sent, [], usage), encode_tokens(sent, [], DONE)

    def _relay(self, stretch: Stretch) -> None:
        """More tokens, on a route without frames."""
        self._on_relayed_head(200)
        if isinstance(self.machine.state, Relaying):
            self._time(stretch)
            self.stretch = stretch
            tokens = self._tokens(stretch.start, stretch.count, stretch.wrong)
            self.feed(e.Data(self._style.shown(tokens)))
            self.stretch = None  # the answer to HEAD has no body

    def _on_relayed_head(self, status: int) -> None:
        if not self._has_head:
            self._has_head = True
            if self.machine.accepts(e.Head):
                self.feed(e.Head(status, {b"content-type": b"application/json"}))

    def _on_small_frames(self, stretch: Stretch, tokens: list[int]) -> None:
        """More tokens, in frames of few tokens with notes between them; the reads end at any byte,
        or are one HTTP chunk each."""
        chance = Random(f"{self.stream.arrival.request}:{stretch.start}")
        to, client = self.machine.attempt, self.client
        frames = self._small_frames(stretch.start, tokens, chance)
        if chance.random() < 0.3:
            reads = frames
        else:
            data = b"".join(frames)
            ends = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(4)))
            cuts = zip([0, *ends], [*ends, len(data)], strict=True)
            reads = [data[a:b] for a, b in cuts if a < b]
        if isinstance(client, SimClientConnection):
            client.hold()
        for read in reads:
            if self.machine.attempt is not to:
                break  # a frame was refused
            if not self.take_chunk(_chunk_of(read), stretch.last_ns / NS):
                self._on_frames(read)
        if isinstance(client, SimClientConnection):
            client.send_held()

    def _small_frames(self, first: int, tokens: list[int], chance: Random) -> list[bytes]:
        """The frames of these tokens. An engine groups new tokens of a resumable stream at will, and
        sends repeated or recomputed ones singly."""
        style, upstream = self._style, self.upstream
        assert isinstance(upstream, SimUpstream)
        sizes = (1, 1, 1, 2, 3) if self._groups else (1,)
        frames: list[bytes] = []
        at = 0
        while at < len(tokens):
            start = first + at
            if has_note(start):
                frames.append(encode_tokens(start, [], style.note))
            size = min(chance.choice(sizes), NOTE_EVERY - start % NOTE_EVERY)
            ids = tokens[at : at + size]
            frames += [encode_tokens(start, ids, style.shown(ids))] * upstream.frame_copies()
            at += size
        return frames

    def _tokens(self, start: int, count: int, wrong: bool) -> list[int]:
        if (wrong and self._style is not RELAYED) or self._altered:
            return [WRONG] * count
        return tokens_of(self.what.content_id, start, count)

    def on_cut_frame(self, sent: int, at_ns: int) -> None:
        """The connection breaks at `at_ns` within the frame after token `sent`, of which some bytes
        arrive, never all: of two choices perhaps the first one's. If all tokens have arrived, the
        usage event arrives, and a part of the rest."""
        if not isinstance(self.machine.state, Receiving):
            return
        at, style = sent, self._style
        chance = Random(f"{self.stream.arrival.request}:{at}")
        before = b""
        if at < self.what.output_tokens:
            if style.is_small and has_note(at):
                before = encode_tokens(at, [], style.note)
            size = min(1 + chance.randrange(3), NOTE_EVERY - at % NOTE_EVERY)
            frame = self._frame(at, self._tokens(at, size, False))
            if style is CHOICES:
                self.stretch = Stretch(start=at, count=size, first_ns=at_ns, last_ns=at_ns)
        elif style is WHOLE:
            frame = encode_response(200, self._whole)
        else:
            before, frame = self._last_frames(at)
        if data := before + frame[: chance.randrange(len(frame))]:
            self._on_frames(data)
        if style is CHOICES:
            self.stretch = None

    def _time(self, stretch: Stretch) -> None:
        if self._first_ns < 0:
            self._first_ns = stretch.first_ns
        else:
            self._gap_ns = max(self._gap_ns, stretch.first_ns - self._last_ns)
        if stretch.count > 1:
            within = (stretch.last_ns - stretch.first_ns) // (stretch.count - 1)
            self._gap_ns = max(self._gap_ns, within)
        self._last_ns = stretch.last_ns

    def on_end(self, finish: str, sent: int) -> None:
        """The last events after `sent` tokens, and the end frame."""
        if self._style is RELAYED:
            self._on_relayed_head(200)
            if isinstance(self.machine.state, Relaying):
                cut = e.ConnectionLost(TransportKind.EOF, "no end came")
                self.feed(cut if finish in LATE else e.ResponseEnded())
            return
        if self._differs:
            self.on_broken(FailureKind.MISMATCH)
            return
        if self._style is WHOLE:
            last = encode_response(200, self._whole)
        else:
            last = b"".join(self._last_frames(sent))
        if finish == LATE_MOVED:
            self._on_frames(last + encode_failure(FailureKind.MOVED, "over"))
        elif finish == LATE_CUT:
            self._on_frames(last)
            if isinstance(self.machine.state, Receiving):
                self.feed(e.ConnectionLost(TransportKind.EOF, "no end came"))
        else:
            self._on_frames(last + encode_end(finish))

    def on_moved(self) -> None:
        """The engine gave it up on request."""
        self.on_broken(FailureKind.MOVED)

    def on_broken(self, kind: str) -> None:
        """The engine gave it up. A route without frames cannot report that."""
        if kind == GARBAGE and self._style is not RELAYED:
            self._on_frames(self._garbage())
        elif self._style is not RELAYED:
            self._on_frames(encode_failure(kind, "over"))
        elif self.machine.accepts(e.ConnectionLost):
            self.feed(e.ConnectionLost(TransportKind.EOF, "the engine gave it up"))

    def _garbage(self) -> bytes:
        """A frame that is invalid here."""
        if self._style is WHOLE:
            return encode_tokens(self.delivered, [], b"what no answer in one piece has")
        if not (self.stream.begun or self.delivered or self.stream.have > (0, 0)):
            return encode_end("stop")
        if self.stream.stamp is None and Random(self.what.content_id).random() < 0.5:
            return encode_envelope(b"")
        return encode_response(200, b"{}")

    def on_taken(self) -> None:
        """Another connection has the stream."""
        self._on_frames(encode_failure(FailureKind.TAKEN, "another connection has it"))

    def on_attached(self, base: int, known: int) -> None:
        """Attached: the stream's request, and ids of the tokens without payload."""
        headers = {b"content-type": CONTENT_TYPE, h.FROM.encode(): b"%d" % base}
        self._has_head = True
        if not isinstance(self.machine.state, Receiving):
            return
        self.feed(e.Head(200, headers))
        if isinstance(self.machine.state, Receiving):
            ids = encode_tokens(0, self._tokens(0, known, False)) if known else b""
            self.feed(e.Data(self._envelope() + ids))

    def on_refused(self, status: int) -> None:
        """The engine has no such stream, lacks the request, or refuses it."""
        to = self.machine.attempt
        if self._style is RELAYED:
            self._on_relayed_head(500 if status == 200 else status)
        else:
            self._has_head = True
            if self.machine.accepts(e.Head):
                headers = {b"retry-after": b"2"} if status == 413 else {}
                self.feed(e.Head(status, headers))
        parts = [b'{"error": {"message": "', b"no", b'"}}']
        if status == 404 and to is not None and to.attempt % 2 == 0:
            parts[1] *= self.stream.limits.max_error_body_bytes
        for event in (*map(e.Data, parts), e.ResponseEnded()):
            if self.machine.attempt is to and isinstance(self.machine.state, Declining | Relaying):
                self.feed(event)

    def _on_frames(self, data: bytes) -> None:
        to = self.machine.attempt
        if not self._has_head:
            self._has_head = True
            if self.machine.accepts(e.Head):
                self.feed(e.Head(200, {b"content-type": CONTENT_TYPE, h.CACHED_BYTES: b"16"}))
            data = self._preface + data
        if isinstance(self.machine.state, Receiving) and self.machine.attempt is to:
            self.feed(e.Data(data))

    def worker_lost(self, cause: str, detail: str = "") -> None:
        """See RequestSession; bytes that came before count."""
        to = self.machine.attempt
        self.look()
        if self.machine.attempt is to:
            super().worker_lost(cause, detail)


def body_of(what: Ask) -> bytes:
    """The body of the client's request."""
    return encode(
        RequestBody(
            content_id=what.content_id,
            prompt_tokens=what.prompt_tokens,
            output_tokens=what.output_tokens,
            model=what.model,
        )
    )


def _parsed(head: bytes) -> tuple[str, dict[str, str]]:
    """Path and header fields of a request."""
    first, *lines = head.decode("latin-1").split("\r\n")
    return first.split(" ")[1], dict(line.split(": ", 1) for line in lines if line)


def _resumed_from(fields: dict[str, str], sent: do.Send) -> tuple[DeliveredChoice, ...]:
    """The tokens of each choice that the client has, by the dispatch."""
    if h.RESUME not in fields:
        return (DeliveredChoice(),)
    return parse_resume(fields[h.RESUME], sent.body + sent.tail)[0].choices


def _chunk_of(frame: bytes) -> bytes:
    """A frame in one chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(frame), frame)
