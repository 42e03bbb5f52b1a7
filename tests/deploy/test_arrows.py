"""The arrows and the purity of the core are enforced, and the enforcement can fail."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("events", "policies", "controlplane", "engine_shim", "chaos")

# Modules a pure part may use. What is not here is I/O, a clock, or differs between runs.
PURE = {
    "__future__", "abc", "base64", "binascii", "bisect", "collections", "copy", "dataclasses",
    "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "math", "msgspec",
    "operator", "random", "re", "string", "struct", "typing", "zlib", "relume",
}  # fmt: skip
# MemoryLog hands its followers what is appended: an Event and a Condition, no I/O and no clock.
# vLLM's block hashes are of pickled numbers: they are written, nothing is ever read.
# Errors of a disk go by number; the streams are opened by others.
BY_MODULE = {
    "events/log/disk.py": {"errno"}, "events/log/memory.py": {"asyncio"}, "events/wire/prefix.py": {"pickle"},
}  # fmt: skip
IMPURE_BUILTINS = {"open", "input", "print", "id", "hash", "exec", "eval", "__import__"}


def pure_modules() -> list[Path]:
    found = [
        path
        for room in ("events/log", "events/wire", "events/vocabulary", "policies")
        for path in CHECKOUT.glob(f"{room}/**/*.py")
    ]
    return sorted(found)


def impurities(source: str, where: str) -> list[str]:
    """What makes a module impure, as `where:line: reason`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        reason = _impurity(node, where)
        if reason:
            line = getattr(node, "lineno", None) or node.iter.lineno  # a comprehension has none
            found.append(f"{where}:{line}: {reason}")
    return found


def _impurity(node: ast.AST, where: str) -> str | None:
    allowed = PURE | BY_MODULE.get(where, set())
    match node:
        case ast.Import(names=names):
            for alias in names:
                if not _allowed(alias.name, allowed) or alias.name == "random":
                    return f"imports {alias.name}"
                if alias.name.startswith("relume.events.etcd"):
                    return "imports the log client"
        case ast.ImportFrom(module=module, names=names):
            if not _allowed(module or "", allowed):
                return f"imports {module}"
            if module == "random" and {alias.name for alias in names} != {"Random"}:
                return "uses random without a seed of its own"
            imported = {f"{module}.{alias.name}" for alias in names} | {module}
            if any(name.startswith("relume.events.etcd") for name in imported):
                return "imports the log client"
        case ast.Call(func=ast.Name(id=name)) if name in IMPURE_BUILTINS:
            return f"calls {name}()"
        case ast.Call(func=ast.Name(id="Random"), args=[], keywords=[]):
            return "Random() without a seed"
        case ast.For(iter=over) | ast.comprehension(iter=over) if _is_a_set(over):
            return "iterates over a set"
    return None


def _allowed(module: str, allowed: set[str]) -> bool:
    top, _, rest = module.partition(".")
    return top in allowed and (top != "relume" or rest.split(".")[0] in ("events", "policies"))


def _is_a_set(node: ast.AST) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
    return False


@pytest.mark.parametrize("path", pure_modules(), ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_the_core_is_pure(path):
    where = str(path.relative_to(CHECKOUT))
    assert impurities(path.read_text(), where) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from datetime import datetime",
        "import random",
        "from random import choice",
        "from random import Random\nr = Random()",
        "from relume.events.etcd import client",
        "from relume.events import etcd",
        "import relume.controlplane.gateway",
        "from relume.engine_shim import plugin",
        "from relume import chaos",
        "from events import codec",
        "import relume.events.etcd.client.connection",
        "x = open('f')",
        "for x in {1, 2}: pass",
        "y = [x for x in set(z)]",
        "def f():\n    import socket",
    ],
)
def test_impurity_is_seen(source):
    assert impurities(source, "policies/x.py")


def test_purity_is_not_seen_where_it_is():
    source = "from random import Random\nr = Random('1:2')\nfor x in sorted({1, 2}): pass"
    assert impurities(source, "policies/x.py") == []


def lint(directory: Path) -> str:
    program = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--no-logo"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "PYTHONPATH": str(directory)},
    )
    return done.stdout + done.stderr


def test_every_contract_can_be_broken(tmp_path):
    pytest.importorskip("importlinter")
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    for name in (
        "",
        *PACKAGES,
        "events/etcd",
        "controlplane/stream",
        "controlplane/gateway",
        "controlplane/replica",
    ):
        (tmp_path / "relume" / name).mkdir()
        (tmp_path / "relume" / name / "__init__.py").write_text("")
    kept = lint(tmp_path)
    assert "0 broken" in kept, kept
    contracts = kept.count(" KEPT")
    assert contracts >= 6
    plants = {
        "policies": "import relume.controlplane",
        "engine_shim": "import relume.policies",
        "events": "import relume.engine_shim",
        "controlplane": "import vllm",
        "policies/hasty": "import time",
        "controlplane/stream/hasty": "import asyncio",
    }
    for module, line in plants.items():
        path = tmp_path / "relume" / module
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).write_text(line + "\n")
    broken = lint(tmp_path)
    assert f"0 kept, {contracts} broken" in broken, broken
