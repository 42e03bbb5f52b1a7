"""Docstrings, comments, messages, class names and tests' names use plain words.

A word of `test_words.FORBIDDEN` does not come back into the code. Each exception names its reason,
and one that is no longer needed fails too.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from deploy.docs.site import CHECKOUT
from tests.docs.test_words import FORBIDDEN

ROOMS = ("events", "policies", "controlplane", "engine_shim")

EXCEPTIONS = {
    ("policies/migration/moves.py", "nobody"): "a reason that recorded plans have: replay compares",
}
"""File and word, and why it stays."""

LEFT_IN_CHAOS = 3
"""Forbidden words that `chaos` still has. Lower it; never raise it."""

PRONOUNS = frozenset(
    "Told Asked Held Kept Judged Taken Gone Found Heard Unheard Placed Planned Silent".split()
)
"""Participles and pronouns, which say nothing about what an object is."""

CLASSES = {
    "Held": "a message of docs/reference/kv-protocol.md",
    "Placed": "in the shape of the state, which snapshots and state hashes name",
    "Planned": "in the shape of the state, which snapshots and state hashes name",
    "Unheard": "in the shape of the state, which snapshots and state hashes name",
}
"""Class names of the product that stay, and why."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Strings and comments of a module with their lines, without parts in code marks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, _prose(node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _prose(token.string)


def _prose(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def found(room: str) -> list[tuple[str, str, int]]:
    """(file, word, line) of each forbidden word in a folder of the checkout."""
    return [
        (str(path.relative_to(CHECKOUT)), at[0].lower(), line)
        for path in sorted((CHECKOUT / room).rglob("*.py"))
        for line, text in texts(path.read_text(encoding="utf-8"))
        for at in FORBIDDEN.finditer(text)
    ]


def classes(root: Path, rooms: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(name without underscore, where) of each class."""
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node.name.lstrip("_"), f"{path.relative_to(root)}:{node.lineno}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_forbidden_word_in_the_product(room: str) -> None:
    assert [
        f"{file}:{line}: {word}"
        for file, word, line in found(room)
        if (file, word) not in EXCEPTIONS
    ] == []


def test_every_exception_is_needed() -> None:
    present = {(file, word) for room in ROOMS for file, word, _ in found(room)}
    assert set(EXCEPTIONS) - present == set()
    names = {name for name, _ in classes(CHECKOUT, ROOMS)}
    assert CLASSES.keys() - names == set()


def test_the_simulator_gets_no_more_forbidden_words() -> None:
    assert len(found("chaos")) <= LEFT_IN_CHAOS


def test_no_class_of_the_product_is_called_by_a_participle() -> None:
    assert [
        f"{where}: {name}"
        for name, where in classes(CHECKOUT, ROOMS)
        if name in PRONOUNS and name not in CLASSES
    ] == []


def test_no_forbidden_word_in_the_name_of_a_test() -> None:
    names = re.compile(
        r"def (test_\w*(?:nobody|somebody|whom|whoever|g(?:o|oes|oing)_on|went_on|so_(?:long|many)|"
        r"anew|mostly|besides|by_a_hair)(?:_\w*)?)\("
    )
    source = "def test_it_goes_on_anew():\n"
    assert names.findall(source) == ["test_it_goes_on_anew"]
    assert [
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in sorted((CHECKOUT / "tests").rglob("*.py"))
        if path != Path(__file__)
        for name in names.findall(path.read_text(encoding="utf-8"))
    ] == []


def test_a_forbidden_word_and_a_participle_are_found(tmp_path: Path) -> None:
    source = '"""Nobody reads this; `nobody` is code."""\n\n\nclass _Told:\n    ...  # it goes on\n'
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text(source)
    assert [(line, at[0]) for line, text in texts(source) for at in FORBIDDEN.finditer(text)] == [
        (1, "Nobody"),
        (5, "goes on"),
    ]
    assert [name for name, _ in classes(tmp_path, ("room",))] == ["Told"]
