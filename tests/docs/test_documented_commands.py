"""Commands in the documents exist, with the flags that the documents give them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relume.chaos import cli
from relume.chaos.bench.__main__ import BENCHES
from relume.controlplane.cli.relume_command import COMMANDS
from tests.docs.test_site import CHECKOUT, DOCUMENTS, HISTORY

# To the end of the line, the code mark, a comment or the next command.
_COMMAND = re.compile(r"(?:^|[`(] ?)(relume|relume-chaos) ([a-z-]+)([^`#|\n]*)", re.MULTILINE)
_FLAG = re.compile(r"(?<!\S)--[a-z][a-z0-9-]*")
# Where the flags of a command are: declared, or made from the fields of settings.
PLACES = {
    "relume": ("controlplane", "engine_shim/agent", "events/settings", "chaos/demo.py"),
    "relume-chaos": ("chaos",),
}


def sources(program: str) -> str:
    files: list[Path] = []
    for place in PLACES[program]:
        path = CHECKOUT / place
        files += path.rglob("*.py") if path.is_dir() else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def wrong(text: str) -> list[str]:
    """Commands of `text` that do not exist, and flags that none of their sources has."""
    found = []
    for program, command, rest in _COMMAND.findall(text):
        known = COMMANDS if program == "relume" else cli._COMMANDS
        if command not in known:
            found.append(f"{program} {command}")
            continue
        words = rest.split()
        if command == "bench" and words and words[0][0] != "-" and words[0].islower():
            if words[0] not in BENCHES:
                found.append(f"{program} bench {words[0]}")
        code = sources(program)
        for flag in _FLAG.findall(rest.partition(" -- ")[0]):
            field = flag[2:].replace("-", "_")
            if f'"{flag}"' not in code and not re.search(rf"^    {field}: ", code, re.MULTILINE):
                found.append(f"{program} {command} {flag}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_every_command_of_a_document_exists(document: Path) -> None:
    if document.name in HISTORY:
        pytest.skip("it names former commands")
    assert wrong(document.read_text(encoding="utf-8")) == []


def test_a_command_that_does_not_exist_is_found() -> None:
    assert wrong("`relume up --workers 2`, `relume-chaos bench relay --only-ours`") == []
    text = "`relume upp`, `relume serve --no-such`, `relume-chaos bench gone`"
    assert wrong(text) == ["relume upp", "relume serve --no-such", "relume-chaos bench gone"]
