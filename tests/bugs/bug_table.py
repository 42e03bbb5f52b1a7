"""The table of seeded bugs, `bugs.toml`: small changes of the product, each of which makes it wrong.

An entry names a part of the product, says what is wrong, and gives a text that stands once in a file
and the text that replaces it. `units` are the tests that look at that place. `seed`: fuzz found the bug
at that seed before, and tries it first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("bugs.toml")


class Bug(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry."""

    name: str
    part: str
    what: str
    file: str
    old: str
    new: str
    units: tuple[str, ...] = ()
    seed: int = -1

    def changed(self, root: Path = ROOT) -> str:
        """The file of `root` with the bug in it. Raises ValueError if the old text does not stand in
        it exactly once: the code has moved on, and so must the entry."""
        source = (root / self.file).read_text()
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text stands {count} times in {self.file}")
        return source.replace(self.old, self.new)


class _Table(Struct):
    bug: tuple[Bug, ...]


def bugs(table: Path = TABLE) -> dict[str, Bug]:
    """All, by name."""
    found = msgspec.convert(tomllib.loads(table.read_text()), _Table)
    return {bug.name: bug for bug in found.bug}


def remember(seeds: Mapping[str, int], table: Path = TABLE) -> None:
    """Write into the table at which seeds fuzz found bugs."""
    entries = table.read_text().split("[[bug]]")
    for at, entry in enumerate(entries[1:], 1):
        (name,) = re.findall(r'^name = "(.*)"$', entry, re.MULTILINE)
        if name in seeds:
            entry = re.sub(r"^seed = .*\n", "", entry, flags=re.MULTILINE)
            line = f"seed = {seeds[name]}\n"
            entries[at] = re.sub(r"^(?=file = )", line, entry, count=1, flags=re.MULTILINE)
    table.write_text("[[bug]]".join(entries))
