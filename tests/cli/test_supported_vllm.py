"""Versions of vLLM that the plugin does not know: none starts in a fleet, and others are left alone."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from relume.controlplane.cli import doctor
from relume.engine_shim.engine import plugin
from relume.engine_shim.supported_vllm import UnsupportedVllm, is_supported


def test_versions_by_their_minor() -> None:
    assert is_supported("0.32.0") and is_supported("0.32.1.dev4+gabc")
    for other in ("0.3.2", "0.33.0", "0.320.1", "1.0.32", ""):
        assert not is_supported(other)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.99, whose private parts cannot be imported."""
    monkeypatch.setattr(plugin, "_registered_pid", 0)
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.99.0")
    monkeypatch.setitem(sys.modules, "relume.engine_shim.engine.vllm_private", None)


@pytest.mark.usefixtures("newer")
def test_an_engine_of_a_fleet_does_not_start_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELUME_AGENT_SOCKET", "/nowhere")
    with pytest.raises(
        UnsupportedVllm, match=r"0\.99\.0 is installed.*0\.32\.x.*--host-kind plain"
    ):
        plugin.register()


@pytest.mark.usefixtures("newer")
def test_outside_a_fleet_it_runs_as_without_the_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RELUME_AGENT_SOCKET", raising=False)
    with caplog.at_level(logging.WARNING, "relume"):
        plugin.register()
    (record,) = caplog.records
    assert "0.99.0 is installed" in record.message and "does nothing here" in record.message


def test_the_doctor_fails_where_the_plugin_cannot_work(tmp_path: Path) -> None:
    """An engine's Python that says of itself what one with vLLM 0.99 would."""
    python = tmp_path / "python"
    answer = {"vllm": True, "torch": True, "version": "0.99.0", "plugin": True}
    answer |= {"supported": False, "minors": ["0.32"]}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    found = doctor.check_engine(str(python))
    assert (
        found.level == "fail" and "0.99.0 is not supported" in found.text and "0.32.x" in found.text
    )
    assert "--host-kind plain" in found.remedy
