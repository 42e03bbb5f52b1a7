"""No text of a client, an engine or an operator controls a terminal or forges a line."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unicodedata import category

import msgspec
import pytest
import structlog

from relume.chaos.runner.judge import judge
from relume.chaos.runner.report.report_command import report_command
from relume.controlplane.cli.output import print_table
from relume.controlplane.replay.store import save
from relume.controlplane.stream.arrival import Arrival
from relume.controlplane.telemetry.logs import setup_logging
from relume.controlplane.telemetry.visible_text import visible, visible_data
from relume.events import vocabulary as v
from tests.admin.scene import Scene
from tests.runner.recorded import outcome

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\r\nFORGED line\u2028\u0085\x00\x7f\u200b\ufeff\U000e0041"
"""Title and screen of a terminal, C1, order of writing, line breaks, and what nobody sees."""
LANGUAGES = "größe 模型 モデル　 نموذج 🚀"


def shows_escapes(output: str) -> None:
    """Nothing but text and the line breaks of the command itself; HOSTILE is there."""
    found = {c for c in output if not c.isprintable() and c != "\n" and category(c) != "Zs"}
    assert not found, (found, output)
    assert not any(line.startswith("FORGED") for line in output.splitlines()), output


@asynccontextmanager
async def hostile() -> AsyncIterator[Scene]:
    async with Scene() as scene:
        writer = await scene.worker("w0", model=f"m{HOSTILE}")
        await scene.worker("w1", model=f"m{HOSTILE}")
        scheduler = scene.replica.scheduler
        for number, outcome in enumerate(("completed", "failed")):
            request = f"q{number}{HOSTILE}"
            arrival = Arrival(
                request=request,
                model=f"m{HOSTILE}",
                route=f"chat{HOSTILE}",
                stream=True,
                prompt_tokens=5,
                max_tokens=16,
                verdict="exact",
                reason=HOSTILE,
                tenant=f"t{HOSTILE}",
                client_id=f"mine{HOSTILE}",
            )
            scheduler.arrived(arrival)
            assert scheduler.assign(request, "arrival", 0) is not None
            scheduler.ended(request, outcome, 200, 7, HOSTILE, 12_000, 3_000)
            await scene.until(lambda request=request: request not in scene.replica.fleet.requests)
        writer.append(
            v.EngineDied("w0", 1, f"exit{HOSTILE}"),
            v.EngineRestartScheduled("w0", 2, 250),
            v.WorkerRegistered(
                worker="w0", domain=f"d{HOSTILE}", agent_pid=1, agent_url=f"http://{HOSTILE}"
            ),
        )
        await scene.until(lambda: scene.replica.fleet.workers["w0"].deaths)
        yield scene


COMMANDS = (
    ("status",),
    ("workers",),
    ("requests",),
    ("requests", f"q1{HOSTILE}"),
    ("events", "--since", "1", "--limit", "100"),
    ("incidents",),
    ("incidents", "show", "w0"),
    ("degradation",),
    ("rollout", "status"),
    ("leader",),
    ("config", "get"),
    ("restart", f"w0{HOSTILE}"),
    ("drain", "w0", "--force", "--reason", HOSTILE),
    ("workers",),
)


async def test_commands_of_a_fleet_escape_what_others_wrote(relume) -> None:
    async with hostile() as scene:
        outputs = []
        for argv in COMMANDS:
            _, out, err = await relume(scene, *argv)
            shows_escapes(out)
            shows_escapes(err)
            outputs.append(out + err)
            code, out, err = await relume(scene, *argv, "--json")
            if code == 0:
                for line in out.splitlines() if argv[0] == "events" else [out]:
                    json.loads(line)
    text = "".join(outputs)
    assert r"\x1b]0;owned\x07" in text and r"\x9b31m\u202eevil\u2066\r\nFORGED" in text
    for name in ("status", "workers", "requests", "events"):
        assert r"\x1b" in outputs[[argv[0] for argv in COMMANDS].index(name)], name


async def test_json_has_the_texts_as_they_are(relume) -> None:
    async with hostile() as scene:
        _, out, _ = await relume(scene, "requests", "--json")
        known = {request["model"] for request in json.loads(out)["requests"]}
    assert known == {f"m{HOSTILE}"}


async def test_commands_of_a_stored_log_escape_it(relume, tmp_path: Path) -> None:
    async with hostile() as scene:
        groups = list(scene.log.groups)
    path = str(tmp_path / "hostile.rlog")
    save(path, groups, origin=f"etcd{HOSTILE}", note=HOSTILE)
    request = f"q1{HOSTILE}"
    for argv, hostile_too in (
        (("why", request), True),
        (("why", f"none{HOSTILE}"), True),
        (("replay",), True),
        (("replay", "--verify"), False),
        (("replay", "--what-if", "policy=round_robin"), False),
        (("replay", "--do", "state", "--do", "next", "--do", "incidents"), False),
        (("replay", "--do", f"requests {request}"), True),
        (("replay", "--do", "continue type request_arrived"), True),
        (("incidents",), False),
        (("incidents", "show", "w0"), True),
        (("degradation",), False),
    ):
        _, out, err = await relume(None, *argv, "--log", path)
        shows_escapes(out)
        shows_escapes(err)
        assert (r"\x1b" in out + err) or not hostile_too, (argv, out, err)


def test_a_report_of_a_run_escapes_it(capsys: pytest.CaptureFixture) -> None:
    run: Any = SimpleNamespace(commit=f"c{HOSTILE}", dirty=True, command=f"run it{HOSTILE}")
    verdict = judge(outcome())
    text = msgspec.structs.replace(
        verdict, scenario=f"s{HOSTILE}", why=(f"why{HOSTILE}",), unknown=2
    )
    report_command(outcome(), run, text, False)
    out = capsys.readouterr().out
    shows_escapes(out)
    assert r"why\x1b" in out and r"s\x1b" in out


def test_text_of_any_language_stays() -> None:
    assert visible(LANGUAGES) == LANGUAGES
    assert visible("a\ud800b") == r"a\ud800b"
    assert visible_data({HOSTILE: [HOSTILE, 3, None, ("\n",)]}) == {
        visible(HOSTILE): [visible(HOSTILE), 3, None, [r"\n"]]
    }


def test_a_table_has_a_line_a_row(capsys: pytest.CaptureFixture) -> None:
    print_table(("name", "what"), [(HOSTILE, "x"), ("b", 3)], "")
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 4 and lines[2].split() == ["b", "3"]
    assert lines[0].index("WHAT") == lines[2].index("3")


def test_commands_print_through_one_place() -> None:
    """`print` itself is for JSON, and for lines without data of others."""
    allowed = {"json.dumps(", "msgspec.json.encode(", "print()"}
    found = []
    for path in ROOT.glob("controlplane/**/*.py"):
        if path.name in ("output.py",):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                text = ast.unparse(node)
                if not any(part in text for part in allowed):
                    found.append(f"{path.relative_to(ROOT)}: {text}")
    assert found == []


@pytest.mark.parametrize("form", ["console", "json"])
def test_log_lines_show_escapes(form: str) -> None:
    out = io.StringIO()
    before = structlog.get_config()
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        setup_logging("info", form, out)
        log = structlog.get_logger("relume.test")
        log.info(f"seen{HOSTILE}", request=f"q{HOSTILE}", models=[HOSTILE], language="größe 模型")
        logging.getLogger("a library").warning("%s", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            log.exception("failed")
    finally:
        structlog.configure(**before)
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)
    text = out.getvalue()
    shows_escapes(text)
    assert "größe 模型" in text and "evil" in text
    if form == "json":
        first, second, third = map(json.loads, text.splitlines())
        assert first["event"] == f"seen{HOSTILE}" and first["models"] == [HOSTILE]
        assert second["event"] == HOSTILE
        assert third["exception"][0]["exc_value"] == HOSTILE
    else:
        assert "Traceback" in text and "ValueError" in text
