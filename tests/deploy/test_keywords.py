"""Structs of more than four fields are keyword-only, and no call passes eight positional
arguments: a reader can check such a call against nothing, and a field put between two others
would corrupt it in silence."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = ("events", "policies", "controlplane", "engine_shim", "chaos", "deploy", "tests")
FIELDS, ARGUMENTS = 4, 7
# What takes any number of arguments: command lines, calls made later, fields of a packed page.
VARIADIC = {
    "call_at", "command", "create_subprocess_exec", "frames", "one_of", "openssl", "pack_into", "post",
    "run", "spawn", "to_thread",
}  # fmt: skip


@pytest.fixture(scope="module")
def every() -> list[tuple[str, ast.Module]]:
    """All modules, parsed once."""
    paths = [path for room in ROOMS for path in sorted((CHECKOUT / room).rglob("*.py"))]
    gc.disable()  # millions of nodes, all of them kept
    try:
        return [(str(p.relative_to(CHECKOUT)), ast.parse(p.read_text())) for p in paths]
    finally:
        gc.enable()


def crowded(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls with more positional arguments than anybody can count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > ARGUMENTS:
            target = node.func
            name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
            if name not in VARIADIC:
                yield node


def struct_names(trees: list[ast.Module]) -> set[str]:
    """Names of all classes that derive from `msgspec.Struct`."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"Struct"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def positional_records(tree: ast.Module, structs: set[str]) -> Iterator[str]:
    """Structs and dataclasses that take more than four fields by position."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
        fields = [x for x in fields if "ClassVar" not in ast.unparse(x.annotation)]
        if len(fields) <= FIELDS:
            continue
        if {ast.unparse(base).rpartition(".")[2] for base in node.bases} & structs:
            if "kw_only" not in {k.arg for k in node.keywords}:
                yield node.name
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            given = decorator.keywords if isinstance(decorator, ast.Call) else []
            if ast.unparse(called).rpartition(".")[2] == "dataclass":
                if "kw_only" not in {k.arg for k in given}:
                    yield node.name


def test_records_of_more_than_four_fields_are_keyword_only(
    every: list[tuple[str, ast.Module]],
) -> None:
    structs = struct_names([tree for _, tree in every])
    assert len(structs) > 300
    assert not [
        f"{where}: {name}" for where, tree in every for name in positional_records(tree, structs)
    ]


def test_no_call_has_eight_positional_arguments(every: list[tuple[str, ast.Module]]) -> None:
    assert not [
        f"{where}:{node.lineno}: {ast.unparse(node.func)}"
        for where, tree in every
        for node in crowded(tree)
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("f(1, 2, 3, 4, 5, 6, 7, 8)", 1),
        ("f(1, 2, 3, 4, 5, 6, 7)", 0),
        ("f(1, 2, 3, 4, 5, 6, 7, n=8)", 0),
        ("loop.call_at(1, 2, 3, 4, 5, 6, 7, 8)", 0),
    ],
)
def test_a_crowded_call_is_found(source: str, found: int) -> None:
    assert len(list(crowded(ast.parse(source)))) == found


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("class A(Struct, frozen=True):", ["A"]),
        ("class A(Struct, frozen=True, kw_only=True):", []),
        ("class A(v.Event):", ["A"]),
        ("@dataclass\nclass A:", ["A"]),
        ("@dataclass(kw_only=True)\nclass A:", []),
        ("class A:", []),
    ],
)
def test_a_positional_record_is_found(head: str, found: list[str]) -> None:
    tree = ast.parse(
        f"class Event(Struct): ...\n{head}\n a: int\n b: int\n c: int\n d: int\n e: int"
    )
    assert list(positional_records(tree, struct_names([tree]))) == found
