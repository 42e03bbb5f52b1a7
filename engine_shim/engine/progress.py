"""Step counts of an engine, where its HTTP server can read them at any moment.

A shared page: the scheduler writes, `/relume/state` reads, in one process or two. Each
field is one aligned 8-byte store; a reader may see fields of neighbouring steps, which
is good enough to distinguish a slow engine from a hung one.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

from relume.engine_shim.engine.cpu_clocks import ThreadClock

SIZE = 192
_FIELDS = struct.Struct("<13q")
_NUMBER = struct.Struct("<q")
_STATEMENTS_AT, _RESETS_AT, _LIMIT_AT = 104, 112, 120
"""Written by the agent; the other fields are the engine's."""
_COMPUTED_AT = 128
"""Written by the process that computes, where that is not the scheduler's own."""
_COMPUTED = struct.Struct("<3q")
_LOADING_AT = 152
_LOADING = struct.Struct("<2q")
_BEGAN_AT = 8

_LOAD = ("uncomputed", "decoding", "context", "arrived")


class Progress:
    """`steps` finished, when the running one began (0 when idle) and how long it is expected to take,
    `turns` of the engine's loop that looked for work, queue lengths, and the load: prompt tokens not
    computed yet, requests that decode and their tokens, and the prompt tokens that ever came."""

    def __init__(self, path: str = "") -> None:
        """Maps `path` (created when missing); an anonymous page without a path.

        Raises OSError.
        """
        if not path:
            self._page = mmap.mmap(-1, SIZE)
            self._clock = ThreadClock()
            return
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, SIZE)  # a page the disk has no room for would be fatal
            self._page = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
        self._clock = ThreadClock()

    def write(
        self,
        steps: int,
        began_ns: int,
        running: int,
        waiting: int,
        kv_used: int,
        uncomputed: int = 0,
        decoding: int = 0,
        context: int = 0,
        arrived: int = 0,
        expected_us: int = -1,
        turns: int = 0,
    ) -> None:
        """`began_ns` is CLOCK_MONOTONIC at the start of the step in progress, 0 for none;
        `expected_us` -1 if unknown."""
        me = threading.get_native_id()
        _FIELDS.pack_into(
            self._page, 0, steps, began_ns, running, waiting, kv_used, os.getpid(), me,
            uncomputed, decoding, context, arrived, expected_us, turns,
        )  # fmt: skip

    def read(self) -> dict[str, int]:
        """Fields by name; `step_age_us` is 0 when no step is in progress."""
        fields = _FIELDS.unpack_from(self._page, 0)
        steps, began_ns, running, waiting, kv_used, pid, thread, *load, expected_us, turns = fields
        age_us = max(0, time.monotonic_ns() - began_ns) // 1000 if began_ns else 0
        cpu, wait = self._clock.read(pid, thread) if pid else (-1, -1)
        return {
            "steps": steps,
            "turns": turns,
            "step_age_us": age_us,
            "expected_us": expected_us if pid else -1,
            "running": running,
            "waiting": waiting,
            "kv_used": kv_used,
            "cpu_us": cpu,
            "wait_us": wait,
            **dict(zip(_LOAD, load, strict=True)),
        }

    def write_computed(self, took_us: int, waited_us: int, late_us: int) -> None:
        """Sums over the model steps so far, in the process that computes them: how long they took, for how
        much of that it waited for a CPU, and for how long it did before it began them."""
        _COMPUTED.pack_into(self._page, _COMPUTED_AT, took_us, waited_us, late_us)

    def computed(self) -> tuple[int, int, int]:
        """The same; zeros where the scheduler's own process computes."""
        return _COMPUTED.unpack_from(self._page, _COMPUTED_AT)

    def began_ns(self) -> int:
        """When the scheduler began the oldest step that has not ended, by CLOCK_MONOTONIC; 0: there is
        none."""
        return int(_NUMBER.unpack_from(self._page, _BEGAN_AT)[0])

    def write_loading(self, size: int, read: int) -> None:
        """The files of the model have `size` bytes, of which the first rank has read `read`."""
        _LOADING.pack_into(self._page, _LOADING_AT, size, read)

    def loading(self) -> tuple[int, int]:
        """The same; zeros if no file is read."""
        return _LOADING.unpack_from(self._page, _LOADING_AT)

    def limit_batch(self, percent: int) -> None:
        """The engine is to run at most this share of its maximum number of requests at once."""
        _NUMBER.pack_into(self._page, _LIMIT_AT, percent)

    def batch_percent(self) -> int:
        """That share; 100: there is no limit."""
        return _NUMBER.unpack_from(self._page, _LIMIT_AT)[0] or 100

    def reset_prefix_cache(self) -> None:
        """What the engine's prefix cache holds now is to be read by no further request."""
        _NUMBER.pack_into(self._page, _RESETS_AT, self.prefix_resets() + 1)

    def prefix_resets(self) -> int:
        """How often that was said."""
        return int(_NUMBER.unpack_from(self._page, _RESETS_AT)[0])

    def request_statement(self) -> None:
        """The engine is to report all requests that it has: another log begins."""
        _NUMBER.pack_into(self._page, _STATEMENTS_AT, self.statements() + 1)

    def statements(self) -> int:
        """How often that was requested."""
        return int(_NUMBER.unpack_from(self._page, _STATEMENTS_AT)[0])

    def load(self) -> tuple[int, int, int, int]:
        """Prompt tokens not computed yet, requests that decode, their tokens in all; prompt tokens
        that came since the engine started."""
        return _FIELDS.unpack_from(self._page, 0)[7:11]
