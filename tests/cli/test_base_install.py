"""The wheel alone, without its extras, relume-chaos and vLLM: commands say what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relume.controlplane.cli.relume_command import COMMANDS

ABSENT = (
    "aiohttp", "httptools", "jinja2", "openai", "opentelemetry", "prometheus_client", "rich",
    "relume.chaos", "structlog", "tokenizers", "torch", "uvloop", "vllm", "yaml",
)  # fmt: skip
"""What a base install lacks."""
RUN = """
import sys
sys.modules |= dict.fromkeys({absent}, None)
from {module} import main
sys.exit(main(sys.argv[1:]))
"""
COMMAND = "relume.controlplane.cli.relume_command"
AGENT = "relume.engine_shim.agent.__main__"
ARGUMENTS = {
    "why": ("q1",), "drain": ("w0",), "undrain": ("w0",), "restart": ("w0",), "trust": ("w0",),
    "disable-restart": ("w0",), "enable-restart": ("w0",), "config": ("get",),
    "doctor": ("--etcd", "127.0.0.1:1"),
}  # fmt: skip
CONTROL = ("up", "why", "replay", "serve")
"""Commands that need the extra `control`."""


def run(
    where: Path, *argv: str, module: str = COMMAND, absent: tuple[str, ...] = ABSENT
) -> subprocess.CompletedProcess[str]:
    code = RUN.format(absent=absent, module=module)
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=where)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "worker"])
def test_no_command_ends_in_a_traceback(command: str, tmp_path: Path) -> None:
    ran = run(tmp_path, command, *ARGUMENTS.get(command, ()))
    assert ran.returncode in (1, 2, 3) and "Traceback" not in ran.stderr, ran.stderr
    if command in CONTROL:
        assert ran.returncode == 2 and ran.stderr.count("\n") == 1
        assert f"relume {command}: needs the package" in ran.stderr
        assert "pip install 'relume[control]'" in ran.stderr


def test_a_stored_log_and_a_demo_name_what_they_need(tmp_path: Path) -> None:
    ran = run(tmp_path, "incidents", "--log", "x.rlog")
    assert ran.returncode == 2 and "relume[control]" in ran.stderr
    ran = run(tmp_path, "demo")
    assert ran.returncode == 2 and "relume-chaos" in ran.stderr


def test_a_fleet_on_this_machine_names_vllm(tmp_path: Path) -> None:
    ran = run(tmp_path, "up", absent=("vllm",))
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "need vLLM" in ran.stderr


@pytest.mark.parametrize(
    ("more", "needs"),
    [((), "vLLM"), (("--host-kind", "plain", "--backend", "http://127.0.0.1:1"), "relume[plain]")],
)
def test_a_worker_names_what_it_needs(more: tuple[str, ...], needs: str, tmp_path: Path) -> None:
    given = ("--worker", "w0", "--etcd", "127.0.0.1:1", "--model", "m", "--run-dir", str(tmp_path))
    ran = run(tmp_path, *given, *more, module=AGENT)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and needs in ran.stderr


def test_a_module_of_ours_that_is_missing_is_no_package_to_install(tmp_path: Path) -> None:
    ran = run(tmp_path, "status", absent=("relume.controlplane.cli.fleet_commands",))
    assert ran.returncode == 1 and "Traceback" in ran.stderr
