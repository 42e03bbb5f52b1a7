"""The worker's side of a world: the one true stream, and the frames that carry it."""

from __future__ import annotations

import json
from random import Random

from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import Stream
from relume.events.wire.frames import (
    CONTENT_TYPE,
    encode_end,
    encode_envelope,
    encode_failure,
    encode_response,
    encode_tokens,
)
from relume.events.wire.resumption import parse_resume

PATH = "/v1/completions"
TOKEN = "T" * 22
BODY = b'{"prompt":"x"}'
DONE = b"data: [DONE]\n\n"


class Truth:
    """The one true stream. `shown[i]`: what shows token i; `between[i]`: what stands in front of
    it in a frame of its own; the last entry follows the last token. `starts`: tokens that begin a
    frame."""

    def __init__(self, rng: Random) -> None:
        count = rng.randint(1, 7)
        self.ids = [rng.randrange(1 << 17) for _ in range(count)]
        self.shown = [self._shown(rng, i) for i in range(count)]
        self.between = [
            b'data: {"note":%d}\n\n' % i * rng.choice((1, 2)) if rng.random() < 0.15 else b""
            for i in range(count + 1)
        ]
        self.starts = [i for i in range(count) if i == 0 or self.between[i] or rng.random() < 0.8]
        if rng.random() < 0.5:
            self.shown[-1] += DONE
            self.between[-1] = b""
        else:
            self.between[-1] += DONE

    @staticmethod
    def _shown(rng: Random, index: int) -> bytes:
        event = b'data: {"created":17,"i":%d}\n\n' % index
        kind = rng.random()
        if kind < 0.1 and index:
            return b""  # part of a character
        return b'data: {"role":%d}\n\n%b' % (index, event) if kind < 0.2 else event

    def bytes(self) -> bytes:
        """All of it."""
        parts = zip(self.between, [*self.shown, b""], strict=True)
        return b"".join(between + shown for between, shown in parts)

    def until(self, tokens: int) -> bytes:
        """What shows the first `tokens` tokens."""
        parts = zip(self.between[:tokens], self.shown[:tokens], strict=True)
        return b"".join(between + shown for between, shown in parts)

    def frames(
        self, start: int, base: int = 0, apart: bool = True, single: bool = False
    ) -> list[bytes]:
        """From token `start` on; payloads of tokens in front of `base` are no longer there.
        `apart`: what shows no token has frames of its own; else it is in the next token's. `single`:
        each frame has one token."""
        out = []
        at = start
        while at < len(self.ids):
            if at < base:
                out.append(encode_tokens(at, self.ids[at:base]))
                at = base
                continue
            note = self.between[at]
            if note and apart:
                out += notes(at, note)
                note = b""
            size = 1
            while not single and at + size < len(self.ids) and at + size not in self.starts:
                size += 1
            shown = note + b"".join(self.shown[at : at + size])
            out.append(encode_tokens(at, self.ids[at : at + size], shown))
            at += size
        if self.between[-1]:
            out += notes(len(self.ids), self.between[-1])
        return [*out, encode_end("stop")]


def notes(at: int, events: bytes) -> list[bytes]:
    """Events that show no token, each in a frame of its own."""
    return [encode_tokens(at, [], part + b"\n\n") for part in events.split(b"\n\n")[:-1]]


class WorkerSide:
    """Answers what the machine sends, and feeds it with frames, cut anywhere or wrong."""

    rng: Random
    faults: float
    calm: bool
    truth: Truth
    kind: str
    stream: Stream
    machine: StreamMachine
    now: float
    attempt: int
    head: e.Head | None
    sent: list[bytes] | None
    raw: bytes

    def feed(self, event: object) -> None:
        """Let the machine handle `event`."""
        raise NotImplementedError

    def tell_client(self, effect: do.Effect) -> None:
        """Give the client what `effect` has for it."""
        raise NotImplementedError

    def unlucky(self, probability: float) -> bool:
        return self.rng.random() < probability and not self.calm

    def serve(self, send: do.Send) -> None:
        self.answer(send)
        if self.rng.random() < self.faults / 4:  # it ends in front of its end frame
            del self.sent[self.rng.randint(0, len(self.sent)) :]

    def answer(self, send: do.Send) -> None:
        rng = self.rng
        first, *lines = send.head.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        self.raw = b""
        good = {b"content-type": CONTENT_TYPE}
        if "/relume/attach" in first:
            claim = json.loads(send.body)
            assert claim["claim"] == TOKEN
            assert claim["tokens"] == self.stream.have[0]
            if self.unlucky(0.2):
                self.head, self.sent = e.Head(rng.choice((404, 409)), {}), []
                return
            bases = (0, 0, 0, *self.truth.starts, len(self.truth.ids))
            base = 0 if self.calm else rng.choice(bases)
            self.head = e.Head(200, {**good, b"x-relume-from": b"%d" % base})
            single = self.attempt % 2 == 0
            self.sent = [self.envelope(), *self.truth.frames(0, base, single=single)]
            return
        if self.kind == "relayed":
            status = rng.choice((200, 200, 404, 500, 429))
            self.head, self.sent = e.Head(status, {b"content-type": b"x/y"}), [b"one", b"two"]
            return
        drawn = rng.random()
        if drawn < self.faults / 3:
            status = rng.choice((409, 429, 500, 503, 400, 422, 424, 302))
            self.head, self.sent = e.Head(status, {b"retry-after": b"3"}), [b'{"detail":"no"}']
            return
        if drawn < self.faults / 2:
            self.head, self.sent = e.Head(200, {b"content-type": b"text/html"}), [b"<html>"]
            return
        self.head = e.Head(200, good)
        start = 0
        if "x-relume-resume" in headers:
            resume, body = parse_resume(headers["x-relume-resume"], send.body + send.tail)
            known = resume.choice(0).ids
            start = len(known)
            assert body == BODY
            assert list(known) == self.truth.ids[:start], "resumed after other tokens"
            if self.kind == "plain":  # what came in whole frames, no more and no less
                assert start == len(self.stream.answer.ids), "resumed at another token"
        if self.kind == "whole":
            notes = [encode_tokens(i, [t]) for i, t in enumerate(self.truth.ids)][start:]
            whole = encode_response(200, b'{"whole":1}')
            self.sent = [*notes, whole, encode_end("stop")]
        elif "x-relume-envelope" in headers:
            self.sent = [self.envelope(), *self.truth.frames(0)]
        else:
            apart = self.kind == "resumable" or rng.random() < 0.5  # ids count frames
            single = self.attempt % 2 == 0
            self.sent = self.truth.frames(start, apart=apart, single=single)

    def envelope(self) -> bytes:
        head = json.dumps({"path": PATH, "id": "q", "created": "17"}).encode()
        return encode_envelope(head + b"\n" + BODY)

    def produce(self) -> None:
        """The worker's next bytes, cut anywhere."""
        if self.head is not None:
            head, self.head = self.head, None
            self.feed(head)
            return
        rng = self.rng
        assert self.sent is not None
        if not self.sent and not self.raw:
            self.feed(e.ResponseEnded())
            return
        if not self.raw and rng.random() < 0.5:  # one frame in one chunk
            frame = self.sent.pop(0)
            chunk = b"%x\r\n%b\r\n" % (len(frame), frame)
            shown = self.machine.state.take(chunk, self.now)
            if shown is not None:
                size, _, rest = shown.partition(b"\r\n")
                assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\r\n")
                self.tell_client(do.ToClient(rest[:-2]))
            else:
                self.feed(e.Data(frame))
            return
        for _ in range(rng.randint(1, 3)):
            if self.sent:
                self.raw += self.sent.pop(0)
        cut = len(self.raw) if rng.random() < 0.4 else rng.randint(1, len(self.raw))
        data, self.raw = self.raw[:cut], self.raw[cut:]
        self.feed(e.Data(data))

    def misbehave(self) -> None:
        """Frames that are wrong, or end the attempt."""
        due = len(self.stream.answer.ids)
        after = b"".join((self.sent or [])[:2])
        has_part = self.kind in ("plain", "resumable") and (due or self.stream.have > (0, 0))
        bad = self.rng.choice(
            (
                encode_response(200, b"{}") + encode_end("stop") if has_part else b"garbage\n",
                b"garbage\n",
                encode_tokens(due + 1, [1], b"data: wrong\n\n"),
                encode_tokens(due, [1 << 33], b"data: wrong\n\n"),
                encode_failure("engine", "dead"),
                encode_failure("mismatch", "differs"),
                encode_failure("internal", "bug"),
                encode_failure("moved", "over"),
                encode_failure("taken", "by another"),
                encode_envelope(b"nonsense"),
            )
        )
        if self.rng.random() < 0.2 and self.sent:  # the last good frame, in the same read
            bad = self.sent[0] + encode_failure("engine", "dead")
        if self.rng.random() < 0.5:
            shown = self.machine.state.take(b"%x\r\n%b\r\n" % (len(bad), bad), self.now)
            assert shown is None, "a bad frame was taken"
        self.sent = []
        self.feed(e.Data(bad + after if self.rng.random() < 0.5 else bad))
