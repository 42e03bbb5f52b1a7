"""What was found of each bug so far, in a file by which another run continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.bugs.seeding import Noticed


class _Line(msgspec.Struct, omit_defaults=True):
    noticed: Noticed | None = None
    met: dict[str, tuple[int, ...]] | None = None
    commit: str = ""
    seeds: int = 0


class OtherCommit(Exception):
    """The results are of another commit, or of another number of seeds."""


class ResultsFile:
    """JSON lines: of which commit and number of seeds, which seeds meet which bugs, and what noticed
    each bug. Without a path, nothing is written."""

    def __init__(self, path: Path | None, commit: str = "", seeds: int = 0) -> None:
        """Raises OSError, msgspec.DecodeError, OtherCommit."""
        self._path = path
        self.noticed: dict[str, Noticed] = {}
        self.met: dict[str, tuple[int, ...]] = {}
        if path is not None and path.exists():
            lines = [
                msgspec.json.decode(text, type=_Line) for text in path.read_text().splitlines()
            ]
            for line in lines:
                if line.commit and (line.commit, line.seeds) != (commit, seeds):
                    found = f"{path} is of {line.commit} with {line.seeds} seeds"
                    raise OtherCommit(f"{found}: check that out, or name another file")
                self._take(line)
        else:
            self._add(_Line(commit=commit, seeds=seeds))

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
