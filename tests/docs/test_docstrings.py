"""Docstrings name modules and members that exist: a reader follows them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.test_site import CHECKOUT, FOLDERS

PACKAGES = FOLDERS[:5]
_PACKAGE = "|".join(PACKAGES)
# `relume.events.wire.prefix`, also with a name that the module defines behind it.
_DOTTED = re.compile(rf"\brelume\.((?:{_PACKAGE})(?:\.\w+)*)")
# A package by its bare name: `python -m chaos.sim.fit`. The import name is relume.*.
_BARE = re.compile(rf"(?<![\w./-])((?:{_PACKAGE})(?:\.[a-z]\w+)+)\b")
# One name alone in code marks, and one file at the begin of an indented line.
_NAME = re.compile(r"`((?!RELUME_|NAME_)[A-Za-z]\w*)`")
_FILE = re.compile(r"^\s+(\w+\.py)\s", re.MULTILINE)
OUTSIDE = {"PTHREAD_MUTEX_ROBUST", "finally", "fleet"}  # of glibc, of Python, a stream of the log
# Modules of features that do not exist yet; the catalogue of faults waits for them.
AWAITED = {"chaos/scenario/catalogue.py"}


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((CHECKOUT / package).rglob("*.py"))


def relative(file: Path) -> str:
    return str(file.relative_to(CHECKOUT))


@cache
def parts(file: Path) -> tuple[str, frozenset[str], frozenset[str]]:
    """Text of the docstrings of `file`; identifiers; words of its other strings."""
    texts, names, words = [], {file.stem}, set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of_docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            of_docs.add(id(node.value))
            texts.append(str(node.value.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in of_docs:
                words.update(re.findall(r"\w+", node.value))
        for field in ("id", "attr", "name", "arg"):
            if isinstance(value := getattr(node, field, None), str):
                names.update(value.split("."))
    return "\n".join(texts), frozenset(names), frozenset(words)


def module_docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def resolves(dotted: str) -> bool:
    """Whether `a.b.c` is a module, or the beginning of it is one that has the rest."""
    at = CHECKOUT
    for number, part in enumerate(names := dotted.split(".")):
        if (at / part).is_dir():
            at /= part
            continue
        file = at / f"{part}.py"
        if file.is_file():
            return set(names[number + 1 : number + 2]) <= parts(file)[1]
        return (at / "__init__.py").is_file() and part in parts(at / "__init__.py")[1]
    return True


def gone(text: str) -> list[str]:
    """Modules that `text` names and that do not exist; bare names count as gone."""
    unresolved = [f"relume.{found}" for found in _DOTTED.findall(text) if not resolves(found)]
    return unresolved + _BARE.findall(text)


def test_every_module_that_a_docstring_names_exists() -> None:
    found = {relative(f): gone(parts(f)[0]) for f in sources() if relative(f) not in AWAITED}
    assert {file: names for file, names in found.items() if names} == {}


def test_every_name_in_a_docstring_of_a_module_is_in_the_code() -> None:
    known: set[str] = {*OUTSIDE, *PACKAGES, "relume"}
    for file in sources():
        _, names, words = parts(file)
        known |= names | words | {folder.name for folder in file.parents}
    missing = {}
    for file in sources():
        text = module_docstring(file)
        there = known
        if file.name == "__init__.py":
            inside = [*file.parent.rglob("*.py")]
            there = {*OUTSIDE, *PACKAGES, "relume", *(p.name for p in file.parent.rglob("*"))}
            there = there.union(*(parts(one)[1] | parts(one)[2] for one in inside))
        names = [name for name in _NAME.findall(text) if name not in there]
        names += [name for name in _FILE.findall(text) if not (file.parent / name).is_file()]
        if names:
            missing[relative(file)] = names
    assert missing == {}


def test_a_module_that_is_gone_is_found() -> None:
    assert gone("see `relume.policies.state.fold`, relume.policies.state.fold.apply_group.") == []
    assert gone("`relume.policies.state.no_such`, relume.policies.state.fold.no_such.") == [
        "relume.policies.state.no_such",
        "relume.policies.state.fold.no_such",
    ]
    assert gone("python -m chaos.sim.fit") == ["chaos.sim.fit"]
