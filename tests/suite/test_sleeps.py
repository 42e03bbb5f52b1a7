"""No test sleeps for a fixed time in its body: it waits for a fact, with a bound.

A sleep inside a `while` loop polls and is no fixed sleep. Where time itself is the subject, the
test says so with a name of `tests/pace.py`: the pace of a load, a limit that a real process has to
outlast.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def fixed_sleeps(source: str) -> list[int]:
    """Lines of test functions that sleep for a constant time outside of a `while` loop."""
    lines: list[int] = []
    if "sleep(" not in source:
        return lines

    def search(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.While | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.Call) and ast.unparse(child.func).endswith("sleep"):
                first = child.args[0] if child.args else None
                if isinstance(first, ast.Constant) and first.value > 0:
                    lines.append(child.lineno)
            search(child)

    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            if function.name.startswith("test_"):
                search(function)
    return sorted(set(lines))


def test_no_fixed_sleep_stands_in_a_test() -> None:
    found = {
        path.relative_to(TESTS).as_posix(): lines
        for path in TESTS.rglob("test_*.py")
        if (lines := fixed_sleeps(path.read_text()))
    }
    assert not found, f"wait for a fact instead (tests/suite/test_sleeps.py): {found}"


def test_a_fixed_sleep_is_found_and_a_poll_is_not() -> None:
    source = """
async def test_it():
    await asyncio.sleep(0.5)
    await asyncio.sleep(0)
    for _ in range(3):
        time.sleep(1)
    while not ready():
        time.sleep(0.01)

def helper():
    time.sleep(1)
"""
    assert fixed_sleeps(source) == [3, 6]
