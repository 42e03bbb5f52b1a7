"""What the documents name exists, and their links work on the site too (`make lint` builds it)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from deploy.docs import site

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(CHECKOUT / name for name in site.root_pages()),
    *sorted((CHECKOUT / "docs").rglob("*.md")),
    CHECKOUT / "deploy" / "README.md",
]
# Documents that speak of the past: what they name may be gone.
HISTORY = {"CHANGELOG.md"}
FOLDERS = ("events", "policies", "controlplane", "engine_shim", "chaos", "deploy", "docs", "tests")
# A path from the repository's root, in code marks: `policies/state/fold.py`, `chaos/validators/`,
# `relume.events.wire.prefix`. A `{a,b}` or `*` in it stands for several.
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"^(?:{'|'.join(FOLDERS)})/[\w./*{{}},-]*$")
# A name in a file: `policies/routing/choose_worker.py:decide`, `controlplane/replica/scheduler.py:Scheduler.assign`.
_SYMBOL = re.compile(rf"^((?:{'|'.join(FOLDERS)})/[\w./-]+\.py):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)$")
_MODULE = re.compile(rf"^(?:python -m )?relume\.((?:{'|'.join(FOLDERS[:5])})(?:\.\w+)*)$")


def expanded(path: str) -> list[str]:
    """`a/{b,c}/d` as `a/b/d` and `a/c/d`."""
    found = re.search(r"\{([^{}]*)\}", path)
    if not found:
        return [path]
    return [
        one
        for part in found[1].split(",")
        for one in expanded(path[: found.start()] + part.strip() + path[found.end() :])
    ]


def missing_paths(text: str, root: Path = CHECKOUT) -> list[str]:
    """What `text` names in code marks and `root` does not have."""
    missing = []
    for code in _CODE.findall(text):
        if _PATH.match(code):
            missing += [one for one in expanded(code) if not any(root.glob(one.rstrip("/")))]
        elif symbol := _SYMBOL.match(code):
            if not _defines(root / symbol[1], symbol[2]):
                missing.append(code)
        elif (module := _MODULE.match(code)) and not _exists(module[1], root):
            missing.append(code)
    return missing


def _defines(file: Path, name: str) -> bool:
    """Whether `file` defines `name`: a function, a class, a variable, or `Class.method`."""
    if not file.is_file():
        return False
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in body if part in _names(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _names(node: ast.stmt) -> set[str]:
    """What a statement of a module or class defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _exists(dotted: str, root: Path) -> bool:
    """A module, a package, or a name that a module defines."""
    parts = dotted.split(".")
    path = root.joinpath(*parts)
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    *folders, name = parts
    owner = root.joinpath(*folders).with_suffix(".py")
    return owner.is_file() and re.search(rf"\b{re.escape(name)}\b", owner.read_text()) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    if document.name in HISTORY:
        pytest.skip("a document of the past")
    assert missing_paths(document.read_text(encoding="utf-8")) == []


def test_a_path_that_does_not_exist_is_found() -> None:
    text = "`policies/state/fold.py`, `policies/state/no_such.py`, `relume.events.no_such`, `chaos/{sim,gone}/`"
    assert missing_paths(text) == [
        "policies/state/no_such.py",
        "relume.events.no_such",
        "chaos/gone/",
    ]


def test_a_name_that_a_file_does_not_define_is_found() -> None:
    there = (
        "`policies/state/fold.py:apply_group`, `controlplane/replica/scheduler.py:Scheduler.assign`"
    )
    assert missing_paths(there) == []
    gone = "`policies/state/fold.py:no_such`, `controlplane/replica/scheduler.py:Scheduler.gone`, `policies/a.py:b`"
    assert missing_paths(gone) == [
        "policies/state/fold.py:no_such",
        "controlplane/replica/scheduler.py:Scheduler.gone",
        "policies/a.py:b",
    ]


@pytest.mark.parametrize(
    ("path", "markdown", "expected"),
    [
        ("README.md", "[d](docs/testing/index.md#layers)", "[d](testing/index.md#layers)"),
        ("docs/testing/index.md", "[a](../../ARCHITECTURE.md)", "[a](../ARCHITECTURE.md)"),
        ("ARCHITECTURE.md", "[r](README.md)", "[r](index.md)"),
        ("README.md", "[fold](policies/state/fold.py)", "fold (`policies/state/fold.py`)"),
        (
            "README.md",
            "`[a](docs/x.md)` and [h](https://h.org)",
            "`[a](docs/x.md)` and [h](https://h.org)",
        ),
    ],
)
def test_links_work_in_the_repository_and_on_the_site(
    path: str, markdown: str, expected: str
) -> None:
    assert site.site_links(markdown, path) == expected
