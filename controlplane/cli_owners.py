"""Whether our top-level names are ours alone: `events` and `policies` are common words.

The first place on `sys.path` wins an import, silently. Another distribution's `events`
before ours would replace the vocabulary; behind ours, it would be broken by us.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

NAMES = ("events", "policies", "controlplane", "engine_shim", "chaos")


class Owners(NamedTuple):
    """Where `name` is found, in the order of import; `ours` says which of them are Relume's."""

    name: str
    places: tuple[Path, ...]
    ours: tuple[bool, ...]

    @property
    def foreign(self) -> tuple[Path, ...]:
        """Places that belong to somebody else."""
        return tuple(p for p, mine in zip(self.places, self.ours, strict=True) if not mine)


def owners(path: Iterable[str] | None = None) -> list[Owners]:
    """All places of our names on `path` (default: sys.path)."""
    entries = list(sys.path if path is None else path)
    found = []
    for name in NAMES:
        places: dict[Path, bool] = {}
        for entry in entries:
            for candidate in (Path(entry or ".") / name, Path(entry or ".") / f"{name}.py"):
                if candidate.suffix == ".py" or (candidate / "__init__.py").is_file():
                    if candidate.exists():
                        places.setdefault(candidate.resolve(), _is_relume(candidate))
        found.append(Owners(name, tuple(places), tuple(places.values())))
    return found


def conflicts(path: Iterable[str] | None = None) -> list[Owners]:
    """Names that somebody else owns too."""
    return [o for o in owners(path) if o.foreign]


def _is_relume(place: Path) -> bool:
    """A package of ours has its siblings beside it."""
    beside = place.resolve().parent
    return place.suffix != ".py" and (
        (beside / "events" / "segment.py").is_file() and (beside / "controlplane").is_dir()
    )
