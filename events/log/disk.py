"""A full disk: which errors mean it, and output that survives it. No caller waits for a log line,
so a failed write of one must end neither the process nor a request. This module opens nothing; the
caller passes the stream.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TextIO

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No room on the device, in the quota, or up to the limit of a file."""


def is_full(error: BaseException) -> bool:
    """Whether `error` says that a disk has no room."""
    return isinstance(error, OSError) and error.errno in FULL


class SteadyOutput:
    """Lines to `stream`; one that cannot be written is counted instead of raised.

    `describe(count)` makes a line of the number of lines that could not be written. It precedes the
    first line that can be written again (the stream's own buffer may hold the others all the same).
    `stream` is None in a process that was started without one, as by `2>&-`.
    """

    def __init__(
        self, stream: TextIO | None, describe: Callable[[int], str] = lambda count: ""
    ) -> None:
        self._stream = stream
        self._describe = describe
        self.refused = 0

    def write(self, text: str) -> int:
        """Write and flush. Raises nothing that a disk, a closed pipe or a closed stream could cause."""
        if self._stream is None:
            self.refused += 1
            return len(text)
        try:
            if self.refused and (note := self._describe(self.refused)):
                self._stream.write(note)
                self._stream.flush()
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed, or cannot encode the text
            self.refused += 1
        else:
            self.refused = 0
        return len(text)

    def flush(self) -> None:
        """Everything was flushed when it was written."""

    def isatty(self) -> bool:
        """Whether people read it as it comes."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()
