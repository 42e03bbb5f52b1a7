"""`relume replay --ui`: the page over a stored log, on this machine only."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from relume.controlplane.cli.relume_command import main
from relume.controlplane.replay.recorded_log import from_file
from relume.controlplane.ui.moment import Moment
from relume.controlplane.ui.recorded_fleet import RecordedFleet
from relume.controlplane.ui.recording_server import RecordingServer
from tests.replay.frozen import FOLDER

KILLED = FOLDER / "engine-killed.rlog"


class Caller:
    def __init__(self, server: RecordingServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self._session = session
        self._base = server.url.removesuffix("/ui/")

    async def __call__(self, path: str, **headers: str) -> tuple[int, Any]:
        url = self._base + (path if path.startswith("/") else f"/admin/v1/{path}")
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            body = await answer.read()
            kind = answer.content_type
            return answer.status, msgspec.json.decode(body) if kind == "application/json" else body


@asynccontextmanager
async def serving(name: str = "engine-killed") -> AsyncIterator[Caller]:
    recorded = RecordedFleet(from_file(FOLDER / f"{name}.rlog"))
    async with RecordingServer(recorded) as server, aiohttp.ClientSession() as session:
        yield Caller(server, session)


async def test_the_page_says_that_it_shows_a_recording():
    async with serving() as call:
        status, document = await call("/ui/")
        assert status == 200 and b'name="relume-source" content="recording"' in document
        assert (await call("/ui"))[0] == 307
        for name in ("main.js", "scrubber.js", "page.css"):
            assert (await call(f"/ui/{name}"))[0] == 200
        status, recording = await call("recording")
        assert recording["origin"] == str(KILLED) and recording["places"] > 300
        assert len(recording["incidents"]) == 1


async def test_a_moment_is_found_by_place_revision_and_decision():
    async with serving() as call:
        _, recording = await call("recording")
        _, last = await call(f"moment?place={recording['places']}")
        assert msgspec.convert(last, Moment).head.revision == recording["last_revision"]
        _, same = await call(f"moment?revision={recording['last_revision']}")
        assert same == last
        _, start = await call("moment?place=0")
        assert start["lanes"] == [] and start["head"]["recorded"]["place"] == 0
        _, first = await call("moment?place=0&step=next")
        assert first["head"]["recorded"]["decision"] == 1
        _, back = await call(f"moment?place={first['head']['recorded']['place']}&step=previous")
        assert back["head"]["recorded"]["place"] == 0
        _, beyond = await call("moment?place=99999999")
        assert beyond == last
        for wrong in ("place=x", "place=-1", "revision=x", "place=1&step=sideways"):
            status, refused = await call(f"moment?{wrong}")
            assert status == 400 and refused["error"]["code"] == "bad_request", wrong


async def test_requests_events_and_details_are_those_of_the_log():
    async with serving() as call:
        _, recording = await call("recording")
        end = recording["places"]
        _, requests = await call(f"requests?place={end}&limit=5")
        assert len(requests["requests"]) == 5
        name = requests["requests"][-1]["request"]
        _, one = await call(f"requests?place={end}&search={name}")
        assert [r["request"] for r in one["requests"]] == [name]
        assert (await call("requests?place=0"))[1]["requests"] == []
        status, story = await call(f"requests/{name}/why?place=3")
        assert status == 200 and story["complete"] and story["steps"]
        assert (await call("requests/none/why"))[0] == 404
        mark = recording["incidents"][0]
        status, incident = await call(f"incidents/{mark['id']}")
        assert status == 200 and incident["summary"] == mark["summary"]
        assert (await call("incidents/none"))[0] == 404
        _, events = await call(f"events?place={mark['place']}&type=worker_suspected&limit=3")
        assert events["events"] and "is suspected" in events["events"][-1]["text"]
        _, before = await call(f"events?place={mark['place'] - 1}&type=worker_suspected")
        assert before["events"] == []
        assert (await call("events?type=engin_died"))[0] == 400


async def test_web_pages_elsewhere_cannot_read_it():
    async with serving() as call:
        assert call.server.url.startswith("http://127.0.0.1:")
        assert (await call("recording", Host="evil.example"))[0] == 403
        assert (await call("moment", Origin="https://evil.example"))[0] == 403
        assert (await call("moment", Origin="http://127.0.0.1:9"))[0] == 200


def test_the_command_serves_until_it_is_interrupted():
    command = [
        sys.executable,
        "-m",
        "relume.controlplane.cli",
        "replay",
        "--ui",
        str(KILLED),
        "--at",
        "5",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        assert lines[0] == f"reading {KILLED}"
        address = lines[1].removeprefix("open ")
        assert address.endswith("/ui/#revision=5")
        url = address.partition("/ui/")[0] + "/admin/v1/recording"
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert json.load(answer)["places"] > 300
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_shown_is_said(tmp_path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", "--ui", str(tmp_path / "none.rlog")]) == 1
    assert "none.rlog" in capsys.readouterr().err
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["replay", "--ui", "--log", str(KILLED), "--port", port]) == 2
        assert "--port" in capsys.readouterr().err
