"""Run `relume` in this process, off the loop that serves its admin API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from relume.controlplane.cli.relume_command import main
from tests.admin.scene import ADMIN, Scene

Relume = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def relume(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Relume:
    """`await relume(scene, "workers", ...)` gives (exit code, stdout, stderr)."""
    monkeypatch.delenv("RELUME_ADMIN", raising=False)
    monkeypatch.setenv("RELUME_ADMIN_TOKEN", ADMIN)

    async def run(scene: Scene | None, *argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        where = ("--admin", scene.admin.url) if scene else ()
        code = await asyncio.to_thread(main, [*argv, *where])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
