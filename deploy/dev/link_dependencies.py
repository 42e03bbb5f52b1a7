#!/usr/bin/env python3
"""Fill a directory with links to exactly the distributions that relume[EXTRA] declares.

    link_dependencies.py base|control|chaos DIRECTORY

Run by the environment's Python. On `sys.path`, DIRECTORY shows a fresh environment what
`pip install relume[EXTRA]` would have brought, and nothing else of what happens to be installed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from requirements import applying, own_requirements


def linked_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """The entries a distribution has in site-packages: its packages, modules and metadata."""
    files = distribution.files or []
    return {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}


def main(extra: str, directory: Path) -> None:
    directory.mkdir(parents=True)
    waiting = own_requirements(None if extra == "base" else extra)
    seen = set()
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name, tuple(sorted(requirement.extras)))
        if key in seen:
            continue
        seen.add(key)
        distribution = importlib.metadata.distribution(requirement.name)
        for name in linked_names(distribution):
            source = Path(str(distribution.locate_file(name)))
            link = directory / name
            if source.exists() and not link.is_symlink():
                link.symlink_to(source)
        waiting.extend(applying(distribution.requires or [], requirement.extras))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
