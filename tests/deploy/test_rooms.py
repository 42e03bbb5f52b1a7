"""The house has rooms: no import circle, no overfull folder, no name that tells nothing or two
things. Each check can fail, and each exception that is no longer needed fails too.

Imports for types only (`TYPE_CHECKING`) and imports inside functions count: a circle of these runs,
but no module of it can be understood alone.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("events", "policies", "controlplane", "engine_shim", "chaos")
MOST_FILES = 15

CIRCLES: set[str] = set()
"""Circles there still are, by their first module. Remove an entry when its circle is broken; add
none."""

OVERFULL: set[str] = set()
"""Folders that still have too many files. Remove an entry when its folder is divided; add none."""

SHARED_NAMES = {
    "__init__.py": "a package",
    "__main__.py": "what `python -m` runs",
    "errors.py": "the error types of its package",
    "config.py": "the configuration of its package",
}
"""Names that mean the same in every room, and what."""

AMBIGUOUS: set[str] = set()
"""Names that still stand for different things in different rooms. Remove an entry when its files
have names of their own; add none."""

Imports = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """The product's modules: dotted name, without the root package, to file."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(files: Mapping[str, Path]) -> Imports:
    """Which module imports which, wherever in the module the import stands."""
    return {name: _imported(name, path, files) - {name} for name, path in files.items()}


def _imported(name: str, path: Path, files: Mapping[str, Path]) -> set[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("relume.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").removeprefix("relume.")
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in files else base)
    return found & files.keys()


def circles(graph: Imports) -> list[list[str]]:
    """The strongly connected components with more than one module (Tarjan), each in order."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            at = stack.index(module)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return sorted(found)


def overfull(files: Mapping[str, Path], root: Path) -> set[str]:
    """Folders with more than MOST_FILES Python files of their own."""
    count: dict[str, int] = defaultdict(int)
    for path in files.values():
        count[str(path.parent.relative_to(root))] += 1
    return {folder for folder, number in count.items() if number > MOST_FILES}


def modules_of_tests(root: Path) -> dict[str, Path]:
    """The tests' modules and what they share."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in sorted((root / "tests").rglob("*.py"))
    }


def named_like_their_folder(files: Mapping[str, Path]) -> list[str]:
    """Modules whose name repeats their folder's."""
    return sorted(name for name, path in files.items() if path.stem == path.parent.name)


def ambiguous(files: Mapping[str, Path]) -> set[str]:
    """File names that stand in several folders."""
    folders: dict[str, set[Path]] = defaultdict(set)
    for path in files.values():
        folders[path.name].add(path.parent)
    return {name for name, where in folders.items() if len(where) > 1}


def test_no_import_circle() -> None:
    found = {circle[0]: circle for circle in circles(imports(modules(CHECKOUT)))}
    fresh = [circle for first, circle in found.items() if first not in CIRCLES]
    assert fresh == [], "modules that import one another"
    gone = CIRCLES - found.keys()
    assert gone == set(), "these circles are broken: remove them from CIRCLES"


@pytest.mark.parametrize("package", ["events", "policies"])
def test_no_exception_for_the_core(package: str) -> None:
    assert not [first for first in CIRCLES if first.split(".")[0] == package]
    assert not [folder for folder in OVERFULL if folder.split("/")[0] == package]


def test_no_folder_is_overfull() -> None:
    found = overfull(modules(CHECKOUT), CHECKOUT)
    assert found - OVERFULL == set(), f"more than {MOST_FILES} files: divide the folder"
    assert found >= OVERFULL, f"divided: remove {OVERFULL - found} from OVERFULL"


def test_no_folder_of_tests_is_overfull() -> None:
    files = modules_of_tests(CHECKOUT)
    assert len(files) > 250
    assert overfull(files, CHECKOUT) == set(), f"more than {MOST_FILES} files: divide the folder"


def test_no_file_is_named_like_its_folder() -> None:
    assert named_like_their_folder(modules(CHECKOUT)) == []


def test_a_file_name_stands_for_one_thing() -> None:
    found = ambiguous(modules(CHECKOUT))
    fresh = found - AMBIGUOUS - SHARED_NAMES.keys()
    assert fresh == set(), "a file of this name stands in another folder: say what it is of"
    gone = (AMBIGUOUS | SHARED_NAMES.keys()) - found
    assert gone == set(), "no longer ambiguous: remove them from the list"


# --- the checks can fail -------------------------------------------------------------------


def house(root: Path, files: Mapping[str, str]) -> dict[str, Path]:
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return modules(root)


FOR_TYPES = """from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from relume.policies.room.a import A
"""


@pytest.mark.parametrize(
    "back",
    [
        "from relume.policies.room.a import A",
        "from relume.policies.room import a",
        "import relume.policies.room.a",
        "from .a import A",
        "from . import a",
        FOR_TYPES,
        "def late():\n    from relume.policies.room import a\n",
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, back: str) -> None:
    files = house(
        tmp_path,
        {
            "policies/room/__init__.py": "",
            "policies/room/a.py": "from relume.policies.room import b",
            "policies/room/b.py": "from relume.policies.room.c import C",
            "policies/room/c.py": back,
        },
    )
    room = "policies.room"
    assert circles(imports(files)) == [[f"{room}.a", f"{room}.b", f"{room}.c"]]


def test_a_chain_is_no_circle(tmp_path: Path) -> None:
    files = house(
        tmp_path,
        {
            "events/a.py": "",
            "events/b.py": "from relume.events.a import A",
            "policies/c.py": "from relume.events import a, b",
        },
    )
    assert circles(imports(files)) == []


def test_planted_names_and_folders_are_found(tmp_path: Path) -> None:
    many = {f"chaos/room/m{number}.py": "" for number in range(MOST_FILES + 1)}
    files = house(tmp_path, {**many, "chaos/room/room.py": "", "events/m1.py": ""})
    assert overfull(files, tmp_path) == {"chaos/room"}
    (tmp_path / "tests/room").mkdir(parents=True)
    for number in range(MOST_FILES + 1):
        (tmp_path / f"tests/room/test_m{number}.py").write_text("")
    assert overfull(modules_of_tests(tmp_path), tmp_path) == {"tests/room"}
    assert named_like_their_folder(files) == ["chaos.room.room"]
    assert ambiguous(files) == {"m1.py"}
