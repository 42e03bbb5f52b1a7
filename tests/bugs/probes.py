"""Where a run meets the seeded bugs: probes in place of the bugs, all of them in one tree.

A run is a function of scenario and seed, so a run that does not meet a bug ends as it does without the
bug. One sweep with probes therefore says for each bug which seeds need not be tried with it. A bug is
met by a run that reaches the first statement that it changes. If it changes no more than an expression
without side effects, both are computed there, and it is met by a run in which they differ.

`insert` changes the source; the changed source calls `reached` and `differs`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.bugs.bug_table import Bug

ALWAYS = "a part outside of functions, which every run meets"
PURE = {"abs", "all", "any", "bool", "dict", "int", "isinstance", "len", "list", "max", "min"}
PURE |= {"set", "sorted", "sum", "tuple", "type"}
PLAIN = (bool, int, float, str, bytes, type(None))

_met: set[str] = set()


def take_met() -> tuple[str, ...]:
    """Names of the bugs met since the last call."""
    found = tuple(sorted(_met))
    _met.clear()
    return found


def reached(name: str) -> None:
    """The first statement that the bug changes is about to run."""
    _met.add(name)


def differs(name: str, old: Callable[[], Any], new: Callable[[], Any], is_test: bool) -> None:
    """The expression that the bug changes is about to be computed."""
    if name in _met:
        return
    try:
        before, after = old(), new()
        if is_test:
            before, after = bool(before), bool(after)
        same = type(before) is type(after) and isinstance(before, PLAIN) and before == after
    except Exception:
        same = False
    if not same:
        _met.add(name)


def insert(source: str, bugs: list[Bug]) -> tuple[str, set[str]]:
    """The source with a probe for each of its bugs, and the names of those that every run meets."""
    tree = ast.parse(source)
    probes: list[tuple[list[ast.stmt], int, ast.stmt]] = []
    everywhere = set()
    for bug in bugs:
        place = _first(*_parts(tree, source, bug), inside=False)
        if isinstance(place, str):
            everywhere.add(bug.name)
        elif place is not None:
            probes.append((place[0], place[1], _probe(bug.name, *place[2:])))
    for body, at, probe in sorted(probes, key=lambda found: -found[1]):
        body.insert(at, probe)
    start = next(
        at
        for at, node in enumerate(tree.body)
        if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    )
    tree.body[start:start] = ast.parse("import tests.bugs.probes as _seeded_bugs").body
    return ast.unparse(ast.fix_missing_locations(tree)), everywhere


def _parts(tree: ast.Module, source: str, bug: Bug) -> tuple[ast.Module, ast.Module]:
    """The class or function at the top that the bug changes, without it and with it; else all."""
    changed = source.replace(bug.old, bug.new)
    first = source[: source.index(bug.old)].count("\n") + 1
    last = first + bug.old.rstrip("\n").count("\n")
    for node in tree.body:
        begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        if begin <= first and last <= (node.end_lineno or 0):
            end = (node.end_lineno or 0) + bug.new.count("\n") - bug.old.count("\n")
            lines = changed.splitlines(keepends=True)[begin - 1 : end]
            return ast.Module([node], []), ast.parse("".join(lines))
    return tree, ast.parse(changed)


BODIES = ("body", "orelse", "finalbody", "handlers", "cases")

Place = tuple[list[ast.stmt], int, ast.stmt | None, ast.stmt | None]
"""A body, an index in it, and the one statement there that differs, if there is one."""


def _first(old: ast.AST, new: ast.AST, inside: bool) -> Place | str | None:
    """The first statement of a function that differs. ALWAYS: something else does. None: nothing."""
    for name in BODIES:
        before, after = getattr(old, name, None), getattr(new, name, None)
        if not isinstance(before, list) or not isinstance(after, list) or _same(before, after):
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if not _same(a, b)),
            min(len(before), len(after)),
        )
        alone = len(before) == len(after) and _same(before[at + 1 :], after[at + 1 :])
        if alone and _only_inside(before[at], after[at]):
            function = isinstance(before[at], ast.FunctionDef | ast.AsyncFunctionDef)
            return _first(before[at], after[at], inside or function)
        if not inside or name in ("handlers", "cases"):
            return ALWAYS
        return (before, at, before[at], after[at]) if alone else (before, at, None, None)
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return ast.dump(one) == ast.dump(other)


def _only_inside(old: ast.AST, new: ast.AST) -> bool:
    """Whether two compound statements differ in one of their bodies alone."""
    if type(old) is not type(new):
        return False
    differing = [
        name
        for name in old._fields
        if _text(getattr(old, name, None)) != _text(getattr(new, name, None))
    ]
    return len(differing) == 1 and differing[0] in BODIES


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(one) for one in value]
    return ast.dump(value) if isinstance(value, ast.AST) else value


def _probe(name: str, old: ast.stmt | None, new: ast.stmt | None) -> ast.stmt:
    """A call of `differs` where both can be computed, else of `reached`."""
    if type(old) is type(new) and isinstance(old, ast.If | ast.Return | ast.Assign):
        test = isinstance(old, ast.If)
        field = "test" if test else "value"
        ours, theirs = getattr(old, field), getattr(new, field)
        others = [f for f in old._fields if f not in (field, "lineno")]
        same = all(_text(getattr(old, f)) == _text(getattr(new, f)) for f in others)
        if same and ours is not None and theirs is not None and all(map(_is_pure, (ours, theirs))):
            text = (
                f"_seeded_bugs.differs({name!r}, lambda: {ast.unparse(ours)}, "
                f"lambda: {ast.unparse(theirs)}, {test})"
            )
            return ast.parse(text).body[0]
    return ast.parse(f"_seeded_bugs.reached({name!r})").body[0]


def _is_pure(node: ast.expr) -> bool:
    return all(map(_is_harmless, ast.walk(node)))


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in PURE
    return not isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.Lambda)


def by_file(bugs: Sequence[Bug]) -> Iterator[tuple[str, list[Bug]]]:
    """Bugs of each file."""
    for file in dict.fromkeys(bug.file for bug in bugs):
        yield file, [bug for bug in bugs if bug.file == file]
