"""The zygote: forks, answers, reaps, and goes with its parent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.engine import client
from tests.engine.fleet import Zygote, engine_of, wait_until

pytestmark = pytest.mark.full


def test_engine_serves_within_seconds_and_names_its_start(zygote: Zygote) -> None:
    began = time.monotonic()
    with engine_of(zygote.fork(incarnation=5)) as engine:
        assert time.monotonic() - began < 15
        assert client.get(engine.port, "/health").status == 200
        assert engine.state()["incarnation"] == 5
        comm = Path(f"/proc/{engine.pid}/comm").read_text()
        assert comm.startswith("relume-engine")


def test_children_are_reaped(zygote: Zygote) -> None:
    engine = zygote.fork()
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{engine.pid}").exists(), "no zombie stays")
    engine.agent.close()


@pytest.mark.parametrize("request_", ({"cmd": "dance"}, {}, [1], {"cmd": "fork", "env": 3}))
def test_bad_request_is_answered(zygote: Zygote, request_: object) -> None:
    assert "error" in zygote.ask(request_)


def test_zygote_goes_when_its_parent_does_and_engines_stay(
    tmp_path: Path, tiny_model: Path
) -> None:
    with Zygote(tmp_path, tiny_model) as zygote:
        engine = zygote.fork()
        with engine_of(engine):
            zygote.close_lifeline()
            zygote.process.wait(5)
            assert engine.alive()
            assert client.get(engine.port, "/health").status == 200
            engine.stop()


def test_bad_arguments_end_the_engine_with_a_reason(zygote: Zygote, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    answer = zygote.ask({"cmd": "fork", "env": {}, "argv": ["--no-such-flag"], "log": str(log)})
    wait_until(lambda: not Path(f"/proc/{answer['pid']}").exists(), "it gives up")
    assert "no-such-flag" in log.read_text()
