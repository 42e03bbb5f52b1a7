"""Small bugs planted in the codecs: the properties of `test_codecs` find each.

Each is found by an example that is always tried, never by the luck of a draw. Drawn examples look
for bugs that nobody thought of; `test_codecs` tries them on the codecs as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest

import pytest
from hypothesis import Phase, settings

from relume.events.wire import (
    envelope,
    frames,
    headers,
    notices,
    reports,
    resumption,
    stream_origin,
    worker_calls,
)
from relume.events.wire.kv import kv_messages, local_frames
from tests.wire import frame_codec, message_codecs
from tests.wire.properties import some_examples
from tests.wire.test_codecs import PROPERTIES

always_tried = settings(some_examples, phases=[Phase.explicit])

BUGS: dict[ModuleType, dict[str, tuple[str, str]]] = {
    frames: {
        "one token: length off by one": (
            "(start, len(payload), ids[0], payload)", "(start, len(payload) + 1, ids[0], payload)",
        ),
        "several tokens: length off by one": (
            'b":r %d %d" % (start, len(payload))', 'b":r %d %d" % (start, len(payload) - 1)',
        ),
        "choice dropped by the encoder": ("if choice < 0:", "if choice < 1:"),
        "choice dropped by the parser": (
            "self._sink.on_choice(int(choice), start", "self._sink.on_choice(0, start",
        ),
        "choice and start swapped": ("% (choice, start, len(payload))", "% (start, choice, len(payload))"),
        "message length counts characters": ("len(text), text)", "len(message), text)"),
        "start index ignored in a run": ("if int(start) != due:", "if due < 0:"),
        "start index ignored between frames": ("and start == due and merge", "and merge"),
        "a run counts frames, not tokens": ("due += len(ids)", "due += 1"),
        "frames merged although each is wanted": ("and start == due and merge", "and start == due"),
        "one token: payload one byte short": (
            "shown.append(data[at:end])\n            pos = end",
            "shown.append(data[at:end - 1])\n            pos = end",
        ),
        "one token: incomplete payload taken": ("if end > size or end == at:", "if end == at:"),
        "several tokens: incomplete payload taken": (
            "if end > size or at - pos > MAX_HEADER_BYTES:", "if at - pos > MAX_HEADER_BYTES:",
        ),
        "held frame complete one byte late": (
            "self._held_bytes < self._need",
            "self._held_bytes <= self._need",
        ),
        "held bytes not counted": ("self._held_bytes += len(data)", "pass"),
        "held pieces kept after the join": ("self._held.clear()", "pass"),
        "frames after the last one taken": (
            "if end < len(data):\n                raise", "if end < 0:\n                raise",
        ),
        "reads after the last frame taken": ("self._ended = True", "pass"),
        "payload without bound": ("if end - at > MAX_PAYLOAD_BYTES:", "if False:"),
        "payload bound off by one": ("if end - at > MAX_PAYLOAD_BYTES:", "if end - at >= MAX_PAYLOAD_BYTES:"),
        "header in pieces without bound": ("if self._held_bytes > MAX_HEADER_BYTES:", "if False:"),
        "header without bound": ("at - pos > MAX_HEADER_BYTES", "False"),
        "anything may begin a header": ('if rest[:1] != b":":', "if False:"),
        "double spaces skipped": ('numbers.split(b" ")', "numbers.split()"),
        "start below -1": (r"(-1|\d{1,9})", r"(-?\d{1,9})"),
        "any status": (r"([2-5]\d\d)", r"(\d+)"),
        "envelope taken for an end": ("elif envelope:", "elif envelope and len(data) > end:"),
        "reason with spaces": (r":e ([!-~]{1,64})", r":e ([ -~]{1,64})"),
        "the chunk's head names a choice": (
            'TOKEN_CHUNK_HEAD = b"%x\\r\\n:r %d', 'TOKEN_CHUNK_HEAD = b"%x\\r\\n:c %d',
        ),
        "values: the run's later tokens lost": (
            "Tokens(start + index, (ids[index],)",
            "Tokens(start + index, (ids[0],)",
        ),
        "values: incomplete frames accepted": ("if reader.is_incomplete:", "if False:"),
    },
    headers: {
        "grace: two numbers swapped": (
            "{self.stream_bytes} {self.total_bytes}", "{self.total_bytes} {self.stream_bytes}",
        ),
        "grace: further words ignored": ("len(words) != 4", "len(words) < 4"),
        "dispatch: standard alphabet": ("base64.urlsafe_b64encode", "base64.b64encode"),
        "dispatch: foreign characters skipped": (', b"-_", validate=True', ', b"-_"'),
        "number: length not bounded": ("text.isdecimal() and len(text) <= MAX_DIGITS", "text.isdecimal()"),
        "number: other scripts": ("text.isascii() and text.isdecimal()", "text.isdecimal()"),
        "endpoints: one too many": ("len(found) > MAX_ENDPOINTS", "len(found) > MAX_ENDPOINTS + 1"),
        "endpoints: twice the same": ("if len(set(found)) < len(found):", "if False:"),
        "endpoints: not looked at": ("if not _ENDPOINT(endpoint):", "if False:"),
        "request: longer than allowed": ("{1,64}", "{1,65}"),
        "request: a line break at its end": ('{1,64}").fullmatch', '{1,64}$").match'),
    },
    resumption: {
        "ids big-endian": ('f"<{len(ids)}I"', 'f">{len(ids)}I"'),
        "notes before ids": ("[*tails, *notes]", "[*notes, *tails]"),
        "notes not counted": ("sum(ID_BYTES * ids + note for", "sum(ID_BYTES * ids for"),
        "place not moved on": ("at += ID_BYTES * ids", "at += 0"),
        "second note from the first's place": ("at += note", "at += 0"),
        "a short body accepted": ("if size > len(body):", "if False:"),
        "any mode": ("mode = MODES.get(name)", "mode = name"),
    },
    reports: {
        "length counts its own bytes": (
            "HEADER.pack(len(payload)) + payload",
            "HEADER.pack(len(payload) + 4) + payload",
        ),
        "big-endian": ('struct.Struct("<I")', 'struct.Struct(">I")'),
        "a frame complete one byte early": ("if len(buffer) < end:", "if len(buffer) + 1 < end:"),
        "handed on twice": ("del buffer[:at]", "pass"),
        "earlier payloads lost before an absurd length": (
            "if payloads:\n                    break",
            "if False:\n                    break",
        ),
        "bound off by one": ("length > MAX_FRAME_BYTES", "length >= MAX_FRAME_BYTES"),
        "a decoder's own error": (
            "except UNREADABLE",
            "except KeyError",
        ),
        "an empty map accepted": ("if message is None:", "if False:"),
    },
    notices: {
        "epoch and incarnation swapped": (
            "DeathNotice(int(numbers[0]), int(numbers[1]))",
            "DeathNotice(int(numbers[1]), int(numbers[0]))",
        ),
        "the rest of a line lost": ("self._rest + data", "data"),
        "anybody's greeting": ("elif line == self._hello:", "elif line:"),
        "greeting twice": ("if self.greeted:", "if self.greeted and line != self._hello:"),
        "further words ignored": ("len(numbers) != 2", "len(numbers) < 2"),
        "epochs without bound": ("notice.epoch > MAX_NUMBER or ", ""),
        "incarnations without bound": (" or notice.incarnation > MAX_NUMBER", ""),
        "whole lines without bound": ("if len(line) > MAX_LINE_BYTES:", "if False:"),
        "a line without end": ("if len(self._rest) > MAX_LINE_BYTES:", "if False:"),
    },
    envelope: {
        "body cut at its last line": ('data.partition(b"\\n")', 'data.rpartition(b"\\n")'),
        "id and path swapped": ('"path": self.path, "id": self.id', '"path": self.id, "id": self.path'),
        "length of the old body": ('b"%d" % len(self.body)', 'b"0"'),
        "line breaks for heads of HTTP": ("if not all(map(_is_text", "if False and not all(map(_is_text"),
        "no line end needed": ("if not newline or", "if"),
        "origin left out": ("if self.origin:", "if not self.origin:"),
        "line breaks in an origin": ("envelope.created, envelope.origin)", "envelope.created)"),
    },
    stream_origin: {
        "log not looked at": ("if not _LOG_ID(log):", "if False:"),
        "a decoder's own error": ("except LogError as error:", "except KeyError as error:"),
        "any event is an arrival": ("type(arrival) is not RequestArrived or", ""),
        "a stream that cannot resume has an origin": (" or not arrival.resumable", ""),
        "log and record swapped": ('f"{self.log} {encode_record', 'f"{self.log}{encode_record'),
    },
    worker_calls: {
        "request not looked at": ("parse_request(call.request)", "pass"),
        "endpoints not looked at": ("isinstance(call, Retarget | OriginRequest)", "False"),
        "endpoints of an origin not looked at": ("Retarget | OriginRequest)", "Retarget)"),
        "a decoder's own error": ("except (HeaderError, *UNREADABLE)", "except HeaderError"),
    },
    kv_messages: {
        "header without bound": ("if len(header) > MAX_HEADER_BYTES:", "if False:"),
        "a decoder's own error": ("except UNREADABLE", "except KeyError"),
        "chunk not compared": ("!= chunk_bytes:", "> chunk_bytes:"),
        "pieces not looked at": ("        check_piece(piece)\n", "        pass\n"),
        "piece beyond its image": (
            "piece.offset <= piece.total - piece.length",
            "piece.offset <= piece.total",
        ),
        "too many pieces": ("0 < len(put.pieces) <= MAX_PIECES", "0 < len(put.pieces)"),
        "negative attempt": ("and piece.attempt >= 0", "and piece.attempt >= -1"),
    },
    local_frames: {
        "length off by one": ("FRAME.pack(len(header), ", "FRAME.pack(len(header) + 1, "),
        "place and offset swapped": (
            "chunk_bytes, place, offset) + header",
            "chunk_bytes, place, place) + header",
        ),
        "unknown place": (" or place > STAGED", ""),
        "chunk without bound": (" or chunk_bytes > MAX_CHUNK_BYTES", ""),
    },
}  # fmt: skip


def with_bug(codec: ModuleType, before: str, after: str) -> ModuleType:
    """A copy of the module in which `after` stands for `before`."""
    source = Path(codec.__file__ or "").read_text()
    assert before in source, f"{before!r} is not in {codec.__name__} any more"
    changed = ModuleType(f"{codec.__name__}_with_bug")
    changed.__file__ = codec.__file__
    sys.modules[changed.__name__] = changed  # msgspec looks annotations up there
    exec(
        compile(source.replace(before, after), f"{codec.__name__} with a bug", "exec"),
        changed.__dict__,
    )
    return changed


@pytest.mark.parametrize(
    ("codec", "before", "after"),
    [
        pytest.param(codec, *edit, id=f"{codec.__name__.rpartition('.')[2]}: {name}")
        for codec, bugs in BUGS.items()
        for name, edit in bugs.items()
    ],
)
def test_a_planted_bug_is_found(
    codec: ModuleType, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{codec.__name__}_with_bug"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    changed = with_bug(codec, before, after)
    monkeypatch.setattr(frame_codec, "some_examples", always_tried)
    monkeypatch.setattr(message_codecs, "some_examples", always_tried)
    assert any(is_broken(holds, changed) for holds in PROPERTIES[codec]), "no property noticed"


def is_broken(holds: Callable[[Any], None], codec: ModuleType) -> bool:
    """Whether the property finds something wrong with the codec, whatever it raises."""
    try:
        holds(codec)
    except SkipTest:
        raise AssertionError(f"{holds.__name__} has no example that is always tried") from None
    except (Exception, pytest.fail.Exception):
        return True
    return False


@pytest.mark.parametrize("codec", list(BUGS), ids=lambda codec: codec.__name__.rpartition(".")[2])
def test_without_a_bug_the_copy_keeps_every_property(
    codec: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds the bugs is the bug, not the copying."""
    name = f"{codec.__name__}_with_bug"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    copy = with_bug(codec, "from __future__", "from __future__")
    monkeypatch.setattr(frame_codec, "some_examples", always_tried)
    monkeypatch.setattr(message_codecs, "some_examples", always_tried)
    for holds in PROPERTIES[codec]:
        holds(copy)
