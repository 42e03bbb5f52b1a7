"""The bytes of an answer: the events of a simulated engine, and how its clients read them.

Token i of a request is a function of the request's content and of i, so a client can detect a gap,
a repetition or another request's answer. An event has one number. Before some tokens of some
requests comes a note without a token. After the last token an engine sends a usage event, then
`DONE`.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from relume.controlplane.stream.event_ids import parse

_CYCLE = 256
_TABLE = list(range(_CYCLE)) * 16
WRONG = _CYCLE
"""A token that no healthy engine makes."""
NOTE_EVERY = 5
_NOTE, _USAGE, _DONE = 0xFFFD, 0xFFFE, 0xFFFF
DONE = b"data: [DONE]\n\n"


def tokens_of(content_id: str, start: int, count: int) -> list[int]:
    """Tokens `start..start+count-1` of the fault-free answer."""
    found: list[int] = []
    at = (zlib.crc32(content_id.encode()) + start) % _CYCLE
    while len(found) < count:
        found += _TABLE[at : at + count - len(found)]
        at = (at + len(found)) % _CYCLE if len(found) < count else at
    return found


def bare(numbers: Sequence[int]) -> bytes:
    """Events of two bytes each."""
    return array("H", numbers).tobytes()


def server_sent(numbers: Sequence[int]) -> bytes:
    """Server-sent events, which may carry ids."""
    return b"".join([b"data: %d\n\n" % number for number in numbers])


class Style(Struct, frozen=True, kw_only=True):
    """How an answer is written: its events, a note, a usage event. `is_small`: it comes in frames
    of few tokens, with notes between them."""

    shown: Callable[[Sequence[int]], bytes]
    note: bytes
    usage: bytes
    is_small: bool = False


WHOLE = Style(shown=bare, note=b"", usage=b"")
LARGE = Style(shown=bare, note=b"", usage=bare((_USAGE,)))
SMALL = Style(shown=bare, note=bare((_NOTE,)), usage=bare((_USAGE,)), is_small=True)
UNNAMED = Style(shown=bare, note=b"", usage=bare((_USAGE,)))
RELAYED = Style(shown=bare, note=b"", usage=b"")
CHOICES = Style(shown=bare, note=b"", usage=bare((_USAGE,)))
OTHER_CHOICE = 512
"""Offset of the numbers of the second choice."""
RESUMABLE = Style(
    shown=server_sent, note=server_sent((_NOTE,)), usage=server_sent((_USAGE,)), is_small=True
)


_STYLES = {
    "resumable": RESUMABLE,
    "whole": WHOLE,
    "choices": CHOICES,
    "relayed": RELAYED,
    "unnamed": UNNAMED,
}


def second_choice(tokens: Sequence[int]) -> list[int]:
    """Tokens of the second choice where the first has these."""
    return [token if token == WRONG else (token + _CYCLE // 2) % _CYCLE for token in tokens]


def style_of(content_id: str, kind: str) -> Style:
    """The style of an answer to a client of that kind. One streaming one of eight is in small
    frames; one of two that cannot be continued does not stream."""
    if kind == "restarting" and zlib.crc32(content_id.encode()) % 2:
        return WHOLE
    if kind in _STYLES:
        return _STYLES[kind]
    return SMALL if zlib.crc32(content_id.encode()) % 8 == 0 else LARGE


def has_note(at: int) -> bool:
    """Whether a note comes before token `at` of an answer in small frames."""
    return at % NOTE_EVERY == 0


class AnswerReader:
    """Reads one answer's bytes as they come. Invalid bytes read as WRONG. `last_id`: id of the last
    whole event; `other_tokens`: number of tokens read of the second choice; `_due`: the second
    choice's next tokens, by the first."""

    __slots__ = (
        "_count",
        "_due",
        "_noted",
        "_odd",
        "_over",
        "_position",
        "_style",
        "_used",
        "last_id",
        "other_tokens",
    )

    def __init__(self, style: Style) -> None:
        self.last_id = ""
        self.other_tokens = 0
        self._due: deque[int] = deque()
        self._style = style
        self._odd = b""
        self._used = self._over = self._noted = False
        self._count = 0
        self._position = (0, 0)

    def read(self, data: bytes) -> list[int]:
        """The tokens in these bytes."""
        data = self._odd + data
        if self._style is RESUMABLE:
            return self._judged(self._numbers(data))
        wrong = [WRONG] if self._over and data else []
        ended = data.endswith(DONE)
        if ended:
            data = data[: -len(DONE)]
        found = wrong + self._read_bare(data)
        self._over = self._over or ended
        return found

    def _read_bare(self, data: bytes) -> list[int]:
        """The tokens in events of two bytes."""
        whole = len(data) & ~1
        self._odd = data[whole:]
        tokens = list(array("H", data[:whole]))
        if self._style.is_small:
            return self._judged(tokens)
        if self._used and tokens:
            return [WRONG, *tokens]
        if tokens and tokens[-1] == _USAGE:
            self._used = True
            tokens.pop()
        if self._style is CHOICES:
            tokens = self._first_choice(tokens)
        return [token if token <= WRONG else WRONG for token in tokens]

    def _first_choice(self, numbers: list[int]) -> list[int]:
        """The tokens of the first choice; WRONG for a token of the second, which comes after it, that
        differs from the expected one: it counts once."""
        tokens = []
        for number in numbers:
            if number < OTHER_CHOICE:
                tokens.append(number)
                self._due.extend(second_choice((number,)))
                continue
            if self._due and self._due.popleft() == number - OTHER_CHOICE:
                self.other_tokens += 1
            else:
                tokens.append(WRONG)
        return tokens

    @property
    def is_complete(self) -> bool:
        """Whether the last event has come."""
        if self._style in (WHOLE, RELAYED):
            return True
        return self._over and not self._due

    def cut(self) -> None:
        """The connection is gone: drop a partial event."""
        self._odd = b""

    def _numbers(self, data: bytes) -> list[int]:
        """The numbers of whole server-sent events."""
        *events, self._odd = data.split(b"\n\n")
        numbers = []
        for event in events:
            line, _, shown = event.partition(b"\n")
            found = parse(line.removeprefix(b"id: ").decode())
            if found is None or found.position <= self._position:
                numbers.append(WRONG)  # an event without an id, or a repeated one
                continue
            self._position = found.position
            self.last_id = line.removeprefix(b"id: ").decode()
            text = shown.removeprefix(b"data: ")
            numbers.append(_DONE if text == b"[DONE]" else int(text))
        return numbers

    def _judged(self, numbers: list[int]) -> list[int]:
        """The tokens among these numbers; WRONG for a missing note, a surplus one, and numbers after
        the end."""
        tokens = []
        for number in numbers:
            due = has_note(self._count) and not self._noted
            if self._over:
                tokens.append(WRONG)
            elif number == _NOTE and due:
                self._noted = True
            elif number == _USAGE and not self._used:
                self._used = True
            elif number == _DONE:
                self._over = True
            else:
                tokens.append(WRONG if due or self._used or number > WRONG else number)
                self._count += 1
                self._noted = False
        return tokens
