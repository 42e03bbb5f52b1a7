"""What was found of each bug so far, in a file by which another run continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.bugs.seeding import Noticed


class _Line(msgspec.Struct, omit_defaults=True):
    noticed: Noticed | None = None
    met: dict[str, tuple[int, ...]] | None = None


class ResultsFile:
    """JSON lines: which seeds meet which bugs, and what noticed each bug. Without a path, nothing is
    written. It is of one commit and one number of seeds: delete it when they change."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError, msgspec.DecodeError."""
        self._path = path
        self.noticed: dict[str, Noticed] = {}
        self.met: dict[str, tuple[int, ...]] = {}
        if path is not None and path.exists():
            for text in path.read_text().splitlines():
                self._take(msgspec.json.decode(text, type=_Line))

    def _take(self, line: _Line) -> None:
        if line.noticed is not None:
            self.noticed[line.noticed.bug] = line.noticed
        self.met.update(line.met or {})

    def _add(self, line: _Line) -> None:
        self._take(line)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")

    def add_met(self, met: Mapping[str, Sequence[int]]) -> None:
        """These seeds meet these bugs."""
        self._add(_Line(met={name: tuple(seeds) for name, seeds in met.items()}))

    def add(self, noticed: Noticed) -> None:
        """This was tried."""
        self._add(_Line(noticed=noticed))
