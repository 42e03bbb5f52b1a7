"""What a client has of its answer, so that any worker can continue it at the next token.

What was delivered is defined by frames, whose ids and bytes count together or not at all. Bytes
after the last token (a usage event, the first event of a chat) are stored too: a resumed attempt
sends them again, and they are compared and dropped. Once `[DONE]`, or what another API ends with,
is with the client, nothing that happens afterwards matters.
"""

from __future__ import annotations

from array import array

from relume.controlplane.stream.event_ids import Stamp
from relume.events.wire.errors import FrameError
from relume.events.wire.frames import MAX_DIGITS, TOKEN_CHUNK_HEAD
from relume.events.wire.resumption import format_resume

DONE = b"data: [DONE]\n\n"
ENDS = (DONE, b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
"""The last bytes of a stream: of OpenAI's older APIs, and of Anthropic's."""
LAST_CHUNKS = tuple(end + b"\r\n" for end in ENDS)
MAX_TAIL_BYTES = 64 << 10  # beyond it the bytes after the last token are not remembered
NEWLINE = b"\n"[0]

NUMBERED = frozenset(("/v1/responses",))
"""Routes whose events have numbers."""
_NUMBER = b'"sequence_number":'
_LAST = b"event: response.completed\n"
"""Of the last event, which a line of its own begins: no text has a bare line break."""


class Answer:
    """Token ids, and what follows them.

    `ids` are those of a request of one choice. `tail`: bytes after the last token.
    `unresumable`: why no other worker can continue. `whole`: status and body of an answer in one
    piece. `finish`: the reason of the end frame. `done`: the stream's last bytes were passed on.
    Times are those of reads, -1 before the first token.
    """

    __slots__ = (
        "_choices",
        "_notes",
        "done",
        "finish",
        "first_at",
        "ids",
        "last_at",
        "longest_gap",
        "stamp",
        "tail",
        "unresumable",
        "whole",
    )

    def __init__(self, stamp: Stamp | None = None) -> None:
        self.stamp = stamp
        self.done = False
        self.finish = ""
        self.whole: tuple[int, bytes] | None = None
        self.unresumable = ""
        self.tail = b""
        self.first_at = self.last_at = -1.0
        self.longest_gap = 0.0
        self.restart(array("I"))

    def restart(self, known: array[int]) -> None:
        """Hold these tokens, and no others."""
        self.ids = array("I", known)
        self._choices: dict[int, array[int]] = {}
        self._notes: dict[int, bytearray] = {}

    @property
    def count(self) -> int:
        """Tokens held, of all choices."""
        return len(self.ids) + sum(map(len, self._choices.values()))

    # --- the hot path

    def take(self, data: bytes, now: float) -> bytes | None:
        """One token frame in one HTTP chunk, with the client in midstream: the rule while an
        engine decodes. Everything is checked as the parser does; what is not just so is left
        to it."""
        ids = self.ids
        begin = data.find(b"\n") + 1  # of the frame
        at = data.find(b"\n", begin) + 1  # its payload
        size = len(data) - at - 2
        head = TOKEN_CHUNK_HEAD % (len(data) - begin - 2, len(ids), size)
        token = data[len(head) : at - 1]
        if (
            not data.startswith(head)
            or not token.isdigit()
            or len(token) > MAX_DIGITS
            or at < begin
            or size <= 0
            or data.endswith(LAST_CHUNKS)
        ):
            return None
        ids.append(int(token))
        gap = now - self.last_at
        if gap > self.longest_gap:
            self.longest_gap = gap
        self.last_at = now
        self.tail = b""
        return b"%x\r\n%b" % (size, data[at:])

    def take_with_id(self, data: bytes, now: float) -> bytes | None:
        """The same where events carry ids."""
        ids = self.ids
        begin = data.find(b"\n") + 1
        at = data.find(b"\n", begin) + 1
        size = len(data) - at - 2
        place = len(ids) + 1
        head = TOKEN_CHUNK_HEAD % (len(data) - begin - 2, place - 1, size)
        token = data[len(head) : at - 1]
        if (
            not data.startswith(head)
            or not token.isdigit()
            or len(token) > MAX_DIGITS
            or at < begin
            or data.find(b"\n", at) != at + size - 2  # one line, so one event
            or data[at + size - 1] != NEWLINE
            or data.endswith(LAST_CHUNKS)
        ):
            return None
        ids.append(int(token))
        gap = now - self.last_at
        if gap > self.longest_gap:
            self.longest_gap = gap
        self.last_at = now
        self.tail = b""
        stamp = self.stamp
        assert stamp is not None
        stamp.at = (place, 0)
        line = b"%b%d\n" % (stamp.prefix, place)
        return b"%x\r\n%b%b" % (size + len(line), line, data[at:])

    # --- tokens

    def ids_of(self, choice: int) -> array[int]:
        """The ids of one of several choices, to add to."""
        return self._choices.setdefault(choice, array("I"))

    def expect(self, ids: array[int], start: int) -> None:
        """Raises FrameError unless token `start` is the next of a choice."""
        if start != len(ids):
            raise FrameError(f"token {start} came where {len(ids)} was due")

    def add(self, ids: array[int], new: list[int]) -> None:
        """Add to the ids of a choice. Raises FrameError, with nothing added, on one out of
        range."""
        try:
            ids.fromlist(new)
        except OverflowError:
            raise FrameError("a token id is out of range") from None

    def note(self, choice: int, payload: bytes) -> None:
        """Keep what the engine noted with the tokens just added. It is no longer than a part of
        the answer, which will be held as well."""
        self._notes.setdefault(choice, bytearray()).extend(payload)

    def resumption(self, mode: str) -> tuple[str, bytes]:
        """The value of header `RESUME`, and the bytes that follow the client's body."""
        several = self._choices or {0: self.ids}
        return format_resume(
            mode,
            (
                (several.get(choice, array("I")), self._notes.get(choice, b""))
                for choice in range(max(several) + 1)
            ),
        )

    def follow(self, payload: bytes, shows_tokens: bool) -> None:
        """These bytes go to the client: remember those that follow the last token."""
        if shows_tokens:
            self.tail = b""
        elif len(self.tail) + len(payload) <= MAX_TAIL_BYTES:
            self.tail += payload
        else:
            self.unresumable = "too many bytes since the last token"
        self.done = payload.endswith(ENDS)

    def time(self, now: float) -> None:
        """A token came: keep the time of the first one, and the longest gap."""
        if self.first_at < 0:
            self.first_at = now
        elif now - self.last_at > self.longest_gap:
            self.longest_gap = now - self.last_at
        self.last_at = now

    @property
    def next_event(self) -> int:
        """Number of the event after those of the last token, where events have numbers and this one
        is known; else -1."""
        return -1

    @property
    def next_after_all(self) -> int:
        """The same after all that was passed on."""
        return -1

    @property
    def is_complete(self) -> bool:
        """Whether all of it is there, so that a failure changes nothing."""
        return bool(self.finish) or self.done or self.whole is not None


class NumberedAnswer(Answer):
    """Remembers the events that show its last token, to know their numbers when another worker is to
    continue after them: it may show the same tokens in more or fewer events."""

    __slots__ = ("_latest",)

    def __init__(self, stamp: Stamp | None = None) -> None:
        self._latest = b""
        super().__init__(stamp)

    def restart(self, known: array[int]) -> None:
        super().restart(known)
        self._latest = b""

    def take(self, data: bytes, now: float) -> bytes | None:
        if _LAST in data:
            return None
        chunk = super().take(data, now)
        if chunk is not None:
            self._latest = data
        return chunk

    def take_with_id(self, data: bytes, now: float) -> bytes | None:
        chunk = super().take_with_id(data, now)
        if chunk is not None:
            self._latest = data
        return chunk

    def follow(self, payload: bytes, shows_tokens: bool) -> None:
        super().follow(payload, shows_tokens)
        self.done = _LAST in payload
        if shows_tokens:
            self._latest = payload

    @property
    def next_event(self) -> int:
        return _after(self._latest)

    @property
    def next_after_all(self) -> int:
        return _after(self._latest + self.tail)


def _after(events: bytes) -> int:
    """One more than the last number in `events`; -1 without one."""
    at = events.rfind(_NUMBER)
    if at < 0:
        return -1
    rest = events[at + len(_NUMBER) :][:12].lstrip()
    digits = rest[: len(rest) - len(rest.lstrip(b"0123456789"))]
    return int(digits) + 1 if digits else -1


_CREATED = (b'"created_at":', b'"created":')  # the first is that of the Responses API


def created_in(payload: bytes) -> bytes:
    """The unix seconds at which the answer was created by its first event, or empty."""
    for name in _CREATED:
        at = payload.find(name)
        if at < 0:
            continue
        rest = payload[at + len(name) :][:22].lstrip()
        if digits := rest[: len(rest) - len(rest.lstrip(b"0123456789"))]:
            return digits
    return b""
