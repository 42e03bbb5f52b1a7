"""`relume doctor`: what it finds, and that it changes nothing."""

from __future__ import annotations

import json
import socket

import pytest

from relume.controlplane.cli.doctor import Finding, check_folder, check_port
from relume.controlplane.cli.relume_command import main
from tests.etcd_server import EtcdServer, etcd_binary, free_port


def run(capsys, *argv: str) -> tuple[int, dict[tuple[str, str], list[str]]]:
    """(exit code, texts by (level, check))."""
    code = main(["doctor", "--json", *argv])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (code == 0)
    found: dict[tuple[str, str], list[str]] = {}
    for f in answer["findings"]:
        assert f["level"] in ("ok", "warn", "fail")
        assert (f["level"] == "ok") == (not f["remedy"])
        found.setdefault((f["level"], f["check"]), []).append(f["text"])
    return code, found


@pytest.fixture
def ports(tmp_path) -> list[str]:
    """Flags that keep the doctor off the default ports and folders."""
    return [
        "--port", str(free_port()), "--admin-port", str(free_port()),
        "--spool-dir", str(tmp_path / "spool"), "--state-dir", str(tmp_path),
    ]  # fmt: skip


def test_no_etcd_fails_with_the_remedy(capsys, ports):
    code, found = run(capsys, "--etcd", f"127.0.0.1:{free_port()}", *ports)
    assert code == 1 and ("fail", "etcd") in found
    assert ("ok", "python") in found and ("ok", "spool") in found


def test_a_bad_setting_fails_before_it_is_used(capsys, ports):
    code, found = run(capsys, "--policy", "best", *ports)
    assert code == 1 and "is not known" in found["fail", "config"][0]


@pytest.mark.etcd
@pytest.mark.skipif(etcd_binary() is None, reason="no etcd")
def test_a_healthy_etcd_passes_with_its_version_judged(capsys, ports, tmp_path):
    with EtcdServer() as server:
        before = server.endpoints[0]
        code, found = run(capsys, "--etcd", before, *ports)
        assert code == 0, found
        assert any("MiB" in text for text in found["ok", "quota"])
        text = str(found)
        assert "3.4" not in text or ("warn", "etcd") in found
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "fleet.json").write_text(json.dumps({"etcd": [before]}))
        code, found = run(capsys, *ports)
        assert code == 0, found


def test_a_taken_port_fails(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = check_port("port", "127.0.0.1", taken.getsockname()[1])
    assert found.level == "fail" and "ss -ltnp" in found.remedy
    assert check_port("port", "127.0.0.1", free_port()).level == "ok"


def test_a_spool_that_cannot_be_written_fails(tmp_path):
    assert check_folder("spool", str(tmp_path / "a" / "b"), "--spool-dir").level == "ok"
    assert not (tmp_path / "a").exists()
    file = tmp_path / "file"
    file.write_text("")
    found: Finding = check_folder("spool", str(file), "--spool-dir")
    assert found.level == "fail" and found.remedy
