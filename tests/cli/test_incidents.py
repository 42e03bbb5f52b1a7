"""`relume incidents`, of a fleet and of a stored log."""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tests.admin.scene import Scene
from tests.admin.test_incidents import killed

LOGS = Path(__file__).parents[1] / "replay" / "logs"
KILLED = str(LOGS / "engine-killed.rlog")
SENTENCE = "w0's engine was killed; 14 streams continued on w1, w2 and w3; longest gap 0.36 s."


async def test_a_running_fleet_tells_its_incidents(relume):
    async with Scene() as scene:
        code, out, _ = await relume(scene, "incidents")
        assert (code, out) == (0, "no incident since revision 1\n")
        await killed(scene)
        code, out, _ = await relume(scene, "incidents")
        assert code == 0 and "w0's engine was killed; no stream was touched." in out
        assert out.splitlines()[0].split() == ["ID", "BEGAN", "STATE", "CLASS", "WHAT"]
        code, out, _ = await relume(scene, "incidents", "--open", "--json")
        assert [i["name"] for i in json.loads(out)["incidents"]] == ["w1"]
        code, out, _ = await relume(scene, "incidents", "show", "w0")
        assert code == 0 and out.startswith("w0's engine was killed")
        assert "capacity back" in out and "the engine w0:1 died (killed)" in out
        code, _, err = await relume(scene, "incidents", "show", "w9")
        assert code == 4 and "no incident 'w9'" in err


async def test_a_worker_with_an_unreadable_record_waits_for_the_trust(relume):
    async with Scene() as scene:
        writer = await scene.worker("w1")
        writer.append(b"\x92\xabtelepathy/9\x01")
        await scene.until(lambda: scene.replica.incidents.incidents)
        code, out, _ = await relume(scene, "incidents", "--open", "--worker", "w1")
        assert code == 0 and "w1 wrote a record that cannot be read (unknown event" in out
        assert "; it gets no requests until an operator trusts it again." in out
        assert (await relume(scene, "trust", "w1"))[0] == 0
        await scene.until(lambda: not scene.replica.incidents.incidents[0].open)
        code, out, _ = await relume(scene, "incidents", "show", "stream:w1")
        sentence, _, rest = out.partition("\n")
        assert code == 0 and sentence.endswith("; ada trusted it again after 0 s.")
        assert "reports of stream w1" in rest and "ada: trust w1" in rest
        assert (await relume(scene, "incidents", "--open"))[1] == "no incident since revision 1\n"


async def test_a_stored_log_tells_the_same(relume):
    code, out, _ = await relume(None, "incidents", "--log", KILLED)
    assert code == 0 and SENTENCE in out
    code, out, _ = await relume(None, "incidents", "show", "w0:1", "--log", KILLED)
    assert code == 0 and out.splitlines()[0] == SENTENCE
    code, out, _ = await relume(None, "incidents", "show", "243.1", "--log", KILLED, "--json")
    shown = json.loads(out)
    assert shown["summary"] == SENTENCE and len(shown["touched"]) == 14
    code, out, _ = await relume(None, "incidents", "--log", KILLED, "--worker", "w1", "--json")
    assert json.loads(out)["incidents"] == []


async def test_wrong_usage_says_what_would_be_right(relume, tmp_path):
    code, _, err = await relume(None, "incidents", "show", "--log", KILLED)
    assert code == 2 and "show needs an ID" in err
    code, _, err = await relume(None, "incidents", "--log", KILLED, "--trace", "x")
    assert code == 2 and "show ID" in err
    code, _, err = await relume(None, "incidents", "show", "w7", "--log", KILLED)
    assert code == 1 and "243.1 (w0:1)" in err
    code, _, err = await relume(None, "incidents", "--log", str(tmp_path / "none.rlog"))
    assert code == 1 and err.count("\n") == 1


async def test_an_incident_is_one_opentelemetry_trace(relume, tmp_path):
    file = tmp_path / "incident.json"
    argv = ("incidents", "show", "w0", "--log", KILLED, "--trace", str(file))
    code, out, _ = await relume(None, *argv)
    assert code == 0 and out.startswith(SENTENCE)
    data = json.loads(file.read_text())
    (found,) = data["resourceSpans"]
    spans = found["scopeSpans"][0]["spans"]
    root, *others = spans
    assert root["name"] == SENTENCE and "parentSpanId" not in root
    ids = {span["spanId"] for span in spans}
    assert len(ids) == len(spans) and {span["traceId"] for span in spans} == {root["traceId"]}
    assert all(span["parentSpanId"] in ids for span in others)
    names = [span["name"] for span in spans]
    for phase in ("notice", "decide", "continue streams", "restore capacity"):
        assert names.count(phase) == 1
    assert sum(name.startswith("stream ") for name in names) == 14
    for span in spans:
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    assert any(event["name"] == "engine_died" for event in root["events"])
    await relume(None, *argv)
    assert json.loads(file.read_text()) == data, "exported twice, it is one trace"


async def test_a_collector_understands_the_trace(relume, tmp_path):
    file = tmp_path / "incident.json"
    log = str(LOGS / "restores.rlog")
    await relume(None, "incidents", "show", "daemon:w1", "--log", log, "--trace", str(file))
    text = file.read_text()
    for span in (s for r in json.loads(text)["resourceSpans"] for s in r["scopeSpans"][0]["spans"]):
        assert len(bytes.fromhex(span["traceId"])) == 16 and len(bytes.fromhex(span["spanId"])) == 8
    parsed = json_format.Parse(text, TracesData())
    assert parsed.resource_spans[0].scope_spans[0].spans[0].status.message == "crash"
