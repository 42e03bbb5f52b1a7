"""Which guards of the product a run reaches: the branches of `guards.toml`.

A bug in a guard that no run enters cannot be found. `count_guards` puts a counter into each guard of the
modules that are loaded, without changing their files: the function that has the guard gets the code of
a copy that counts. As in FoundationDB (code probes), a guard that no run of a nightly fuzz reached is a
failure of the tests, not of the product.
"""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import msgspec
from msgspec import Struct

TABLE = Path(__file__).with_name("guards.toml")
ROOT = Path(__file__).parents[2]
COUNTER = "__guard_reached__"
"""Global name that the changed modules call."""

_reached: set[str] = set()


class Guard(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry: `at` begins an `if` of `file`, and stands once in it. `unreached`: why no run
    reaches it, if none does."""

    name: str
    what: str
    file: str
    at: str
    when: str = ""
    unreached: str = ""

    def line(self, source: str) -> int:
        """Its line, from 1 on. Raises ValueError: the code has moved on, and so must the entry."""
        if (count := source.count(self.at)) != 1:
            raise ValueError(f"{self.name}: its text stands {count} times in {self.file}")
        return source[: source.index(self.at)].count("\n") + 1


class _Table(Struct):
    guard: tuple[Guard, ...]


def guards() -> tuple[Guard, ...]:
    """The table."""
    return msgspec.convert(tomllib.loads(TABLE.read_text()), _Table).guard


def take_reached() -> tuple[str, ...]:
    """Names of the guards reached since the last call, sorted."""
    found = tuple(sorted(_reached))
    _reached.clear()
    return found


def count_guards() -> None:
    """Count from now on, in this process and those it forks. Raises ValueError for an entry that does
    not fit the code."""
    by_file: dict[str, list[Guard]] = {}
    for guard in guards():
        by_file.setdefault(guard.file, []).append(guard)
    for file, wanted in by_file.items():
        path = ROOT / file
        source = path.read_text()
        tree = ast.parse(source)
        names = {name for guard in wanted for name in _insert(tree, source, guard)}
        ast.fix_missing_locations(tree)
        module = importlib.import_module("relume." + file.removesuffix(".py").replace("/", "."))
        vars(module)[COUNTER] = _reached.add
        flags = _future_flags(module)
        codes = dict(_codes(compile(tree, module.__file__ or file, "exec", flags, True)))
        for name in names:
            _function(module, name).__code__ = codes[name]


def _insert(tree: ast.Module, source: str, guard: Guard) -> Iterator[str]:
    """Put the counter of a guard into the tree; yields the outermost function that has it."""
    line = guard.line(source)
    for name, function in _functions(tree, ""):
        for node in ast.walk(function):
            if isinstance(node, ast.If) and node.lineno == line:
                condition = f"if {guard.when}: " if guard.when else ""
                call = ast.parse(f"{condition}{COUNTER}({guard.name!r})").body
                node.body[:0] = call
                for at in (inner for statement in call for inner in ast.walk(statement)):
                    ast.copy_location(at, node)
                yield name
                return
    raise ValueError(f"{guard.name}: no `if` of a function begins there in {guard.file}")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and methods of its classes, by qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _future_flags(module: ModuleType) -> int:
    """Those of `from __future__` in the module."""
    features = (value for value in vars(module).values() if type(value).__name__ == "_Feature")
    flags = 0
    for feature in features:
        flags |= feature.compiler_flag
    return flags


def _function(module: ModuleType, name: str) -> FunctionType:
    """The function or method; one below its decorators."""
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    while not isinstance(found, FunctionType):
        found = getattr(found, "fget", None) or found.__wrapped__
    return found
