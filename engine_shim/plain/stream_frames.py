"""The answer of a plain server as frames of the worker protocol.

Its token ids are not known, so a stream leaves as bytes without ids (`:r -1`), which cannot resume
elsewhere; events that show something count as a token each.
"""

from __future__ import annotations

import re

from relume.events.wire import frames

_FINISH = re.compile(rb'"(?:finish|stop)_reason":\s*"([a-z_]+)"')
_SHOWN = (
    *(b'"content":', b'"text":', b'"reasoning_content":', b'"arguments":'),
    *(b'"thinking":', b'"partial_json":', b'"delta":'),
)
DONE = b"data: [DONE]"
_STOPPED = re.compile(rb'"type": *"(?:message_stop|response\.(?:completed|incomplete|failed))"')
_RESPONSE_DELTA = re.compile(rb'"type": *"response\.[a-z_.]*\.delta"')
_RESPONSE = re.compile(rb'"type": *"response\.')
MAX_EVENT_BYTES = 1 << 20


class EventTooLong(ValueError):
    """A server-sent event longer than MAX_EVENT_BYTES."""


class PlainStream:
    """Cuts one event stream at the ends of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self.finish = ""
        self.done = False

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Whole events so far as one frame (empty: none yet), and how many tokens they show.

        Raises EventTooLong.
        """
        data = self._rest + data
        end = max(data.rfind(b"\n\n"), data.rfind(b"\n\r\n"))
        at = 0 if end < 0 else end + (2 if data[end + 1 : end + 2] == b"\n" else 3)
        whole, self._rest = data[:at], data[at:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        if not whole:
            return b"", 0
        tokens = 0
        for line in whole.splitlines():
            if not line.startswith(b"data:"):
                continue
            if line.startswith(DONE) or _STOPPED.search(line):
                self.done = True
                continue
            if found := _FINISH.search(line):
                self.finish = found.group(1).decode()
            tokens += _shows(line)
        return frames.encode_tokens(frames.UNKNOWN_START, (), whole), tokens

    @property
    def complete(self) -> bool:
        """Whether the stream may end here: it said so, and nothing of an event is left over."""
        return (self.done or bool(self.finish)) and not self._rest.strip()


def _shows(event: bytes) -> bool:
    """Whether the event shows text to the client."""
    if _RESPONSE.search(event) and not _RESPONSE_DELTA.search(event):
        return False  # it repeats what deltas showed
    for field in _SHOWN:
        at = event.find(field)
        if at >= 0 and not event[at + len(field) :].lstrip().startswith(
            (b'""', b"null", b"[]", b"{")
        ):
            return True
    return False
