"""The tree keeps its shape: no import circle, no overfull folder, no decision that differs between
two runs.

The arrows between packages are contracts of import-linter (pyproject.toml). Imports for types only
(`TYPE_CHECKING`) and imports inside functions count as circles here: such a circle runs, but no
module of it can be understood alone.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("events", "policies", "controlplane", "engine_shim", "chaos")
MOST_FILES = 15
SHORT_NAMES = frozenset(("v", "m", "h", "e", "s", "do"))
"""Other names of modules: of the vocabulary, KV messages, headers, stream events, states, effects."""
MOST_ALIASES = 40
"""Imports of a module by another name than its own. This number may only fall."""


def imports(root: Path) -> dict[str, set[str]]:
    """Which module of the product imports which, wherever in the module the import stands."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
    }
    return {
        name: imported(path.read_text()) & files.keys() - {name} for name, path in files.items()
    }


def imported(source: str) -> set[str]:
    """Names of ours that `source` imports, absolutely: modules, and what they define."""
    found = set(re.findall(r"^ *import relume\.([\w.]+)", source, re.MULTILINE))
    for base, names in re.findall(
        r"^ *from relume\.?([\w.]*) import (\([^)]*\)|[^\n]+)", source, re.MULTILINE
    ):
        found.update([base, *(f"{base}.{name}".lstrip(".") for name in re.findall(r"\w+", names))])
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def varying(source: str) -> list[int]:
    """Lines whose result may differ between two runs: files, the order of a set, `hash`, `id`, and
    random numbers without a seed."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Call(func=ast.Name(id="hash" | "id" | "open"))
                | ast.Call(func=ast.Name(id="Random"), args=[], keywords=[])
                | ast.Import(names=[ast.alias(name="random")])
            ):
                lines.append(node.lineno)
            case ast.ImportFrom(module="random", names=names) if names[0].name != "Random":
                lines.append(node.lineno)
            case ast.For(iter=over) | ast.comprehension(iter=over):
                match over:
                    case (
                        ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset"))
                    ):
                        lines.append(over.lineno)
    return lines


def questions(source: str) -> list[str]:
    """Names of the module's functions that answer a question: `is_...`, private or not."""
    return [
        node.name.removeprefix("_")
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.removeprefix("_").startswith("is_")
    ]


def test_no_modules_import_one_another() -> None:
    assert circle(imports(CHECKOUT)) == []


@pytest.mark.parametrize("room", [*PACKAGES, "tests"])
def test_no_folder_is_overfull(room: str) -> None:
    count = Counter(path.parent for path in (CHECKOUT / room).rglob("*.py"))
    full = [str(folder) for folder, number in count.items() if number > MOST_FILES]
    assert not full, f"more than {MOST_FILES} files: divide the folder"


def test_what_replay_repeats_does_not_vary_between_processes() -> None:
    assert not [
        f"{path.relative_to(CHECKOUT)}:{line}"
        for room in ("events/log", "events/wire", "events/vocabulary", "policies")
        for path in sorted((CHECKOUT / room).rglob("*.py"))
        for line in varying(path.read_text())
    ]


def test_each_question_of_policies_has_one_definition() -> None:
    """One that changes in one place only would answer differently in another."""
    places: dict[str, list[str]] = {}
    for path in sorted((CHECKOUT / "policies").rglob("*.py")):
        for name in questions(path.read_text()):
            places.setdefault(name, []).append(str(path.relative_to(CHECKOUT)))
    assert places["is_quarantined"] == ["policies/health/health_life.py"]
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_planted_faults_are_found(tmp_path: Path) -> None:
    for name, source in {
        "events/a.py": "def late():\n    from relume.policies.b import B",
        "policies/b.py": "from relume.chaos import c",
        "chaos/c.py": "import relume.events.a",
        "chaos/d.py": "from relume.events.a import A",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    assert set(circle(imports(tmp_path))) == {"events.a", "policies.b", "chaos.c"}
    assert varying("import random\nfrom random import choice\nRandom()\nopen(p)") == [1, 2, 3, 4]
    assert not varying("from random import Random\nRandom(f'{seed}')")
    assert questions("def is_a(): ...\ndef _is_b(): ...\ndef b(): ...") == ["is_a", "is_b"]
    assert varying(
        "for x in {1, 2}: hash(x)\ny = [x for x in set(z)]\nfor x in sorted(z): pass"
    ) == [1, 1, 2]


def aliases(source: str, modules: frozenset[str]) -> list[str]:
    """Modules that `source` imports by another name."""
    if " as " not in source:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("relume."):
            base = (node.module or "").removeprefix("relume.")
            for name in node.names:
                is_module = f"{base}.{name.name}" in modules
                if is_module and name.asname not in (None, name.name, *SHORT_NAMES):
                    found.append(f"{base}.{name.name} as {name.asname}")
    return found


def test_modules_are_imported_by_their_own_names() -> None:
    """A reader who searches for a module finds each use of it."""
    modules = frozenset(imports(CHECKOUT))
    found = [
        f"{path.relative_to(CHECKOUT)}: {alias}"
        for package in PACKAGES
        for path in sorted((CHECKOUT / package).rglob("*.py"))
        for alias in aliases(path.read_text(), modules)
    ]
    assert len(found) <= MOST_ALIASES, found
    assert len(found) == MOST_ALIASES, "lower MOST_ALIASES: some are gone"


VAGUE = frozenset(("told", "kept", "asked", "said", "room"))
MOST_VAGUE = {"events": 0, "policies": 0, "controlplane": 2, "engine_shim": 1, "chaos": 9}
"""Identifiers with a word that names nothing (docs: plain names). These numbers may only fall."""


def vague(source: str) -> int:
    """How often `source` names something by such a word."""
    if not any(word in source.lower() for word in VAGUE):
        return 0
    count = 0
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                pass
            case _:
                continue
        words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_")
        count += not VAGUE.isdisjoint(words)
    return count


@pytest.mark.parametrize("package", PACKAGES)
def test_names_say_what_they_name(package: str) -> None:
    files = sorted((CHECKOUT / package).rglob("*.py"))
    found = {path: vague(path.read_text()) for path in files}
    most = sorted(found, key=lambda path: found[path])[-3:]
    total = sum(found.values())
    assert total <= MOST_VAGUE[package], f"{total}, most in {[str(path) for path in most]}"
    assert total == MOST_VAGUE[package], f"lower MOST_VAGUE: {total} are left"


def test_a_vague_name_is_seen() -> None:
    source = "def asked(room):\n    told_at = f(kept=1).said\n    return roommate\n"
    assert vague(source) == 5


def test_an_alias_is_seen() -> None:
    modules = frozenset(("policies.state.fold", "events.vocabulary"))
    source = "from relume.policies.state import fold as folding\nfrom relume.events import vocabulary as v\n"
    assert aliases(source, modules) == ["policies.state.fold as folding"]
