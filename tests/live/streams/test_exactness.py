"""Failover as issues 2 and 3 demand it: exact wherever the verdict says so, honest elsewhere.

One fleet of three workers. Every kind of request runs at once on one of them, which is
killed when the streams stand at a chosen token; each answer is compared, field by field,
with the one of the undisturbed run. Some go through the `openai` client.

Not compared: the response's id and creation time between two runs (within one answer they
must be stable), and the last bits of log probabilities, which depend on what else was in
the batch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from relume.chaos.traffic import Stream, ask, take_event
from relume.chaos.validators.records import Course, courses
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from tests.live.cases import (
    CHAT,
    Case,
    Truth,
    exact_cases,
    other_cases,
    plain_cases,
    stateful_cases,
)
from tests.live.conftest import HANG_S, Scene, scene_of
from tests.signals import stop
from tests.suite.outcomes import inconclusive

EARLY, MIDDLE, LATE = 4, 55, 90
WHERE = {"early": EARLY, "middle": MIDDLE, "late": LATE}
CUT = v.TransportObserved
LOGPROB_TOLERANCE = 1e-3
THROUGH_OPENAI = ("text-stream", "text-whole", "chat-stream", "chat-whole", "choices-stream")

Act = Callable[["Round"], Awaitable[None]]


class Round:
    """All cases at once: streams by case name, and what the log says of each."""

    def __init__(self, scene: Scene, cases: list[Case], tag: str) -> None:
        self.scene = scene
        self.cases = {f"{tag}.{case.name}": case for case in cases}
        self.streams = {name: Stream(request=name, prompt="") for name in self.cases}
        self.courses: dict[str, Course] = {}

    def stream(self, case: Case) -> Stream:
        return next(self.streams[name] for name, mine in self.cases.items() if mine is case)

    @property
    def telling(self) -> dict[str, Stream]:
        """The streams that tell their tokens one by one."""
        told = [n for n, case in self.cases.items() if case.stream and case.tells_tokens]
        return {name: self.streams[name] for name in told}

    async def run(self, act: Act | None = None) -> None:
        """Send everything; `act` disturbs. Then read the log."""
        url = self.scene.url
        connector = aiohttp.TCPConnector(limit=0)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        async with aiohttp.ClientSession(connector=connector) as session, client:
            async with asyncio.TaskGroup() as tasks:
                for name, case in self.cases.items():
                    stream = self.streams[name]
                    if name.endswith(".openai"):
                        tasks.create_task(_through_openai(client, case, stream))
                    else:
                        tasks.create_task(ask(session, url + case.route, stream, case.body))
                if act is not None:
                    tasks.create_task(act(self))  # type: ignore[arg-type]
        for name, case in self.cases.items():
            asked = f"{case.name} {case.body}" if case.deterministic else ""
            self.scene.note(self.streams[name], asked, undisturbed=act is None)
        await self._read_log()

    async def _read_log(self) -> None:
        """Read until the log has the end of each request."""
        deadline = time.monotonic() + HANG_S
        while True:
            found = courses(await self.scene.log())
            self.courses = {
                course.arrived.event.client_id: course
                for course in found.values()
                if course.arrived is not None
            }
            mine = [self.courses.get(name) for name in self.cases]
            if all(course is not None and course.ends for course in mine):
                return
            assert time.monotonic() < deadline, "terminal events are missing"
            await asyncio.sleep(0.2)

    def dispatches(self, name: str) -> list[v.RouteDecided]:
        """Its attempts, in order."""
        return self.courses[name].decisions


async def _through_openai(client: openai.AsyncOpenAI, case: Case, stream: Stream) -> None:
    """The same as `ask`, but everything is parsed by the openai package."""
    own = ("model", "prompt", "messages", "stream")
    known = {name: case.body[name] for name in own if name in case.body}
    extra = {name: value for name, value in case.body.items() if name not in own}
    api = client.chat.completions if case.route == CHAT else client.completions
    options: dict[str, Any] = {
        "extra_body": extra,
        "extra_headers": {"x-request-id": stream.request},
    }
    stream.started = stream.last = time.monotonic()
    try:
        answer = await api.with_raw_response.create(**known, **options)
        stream.status = answer.status_code
        stream.verdict = answer.headers.get("x-relume-verdict", "")
        stream.reason = answer.headers.get("x-relume-reason", "")
        if case.stream:
            async for chunk in answer.parse():
                take_event(stream, chunk.model_dump())
        else:
            stream.answer = answer.parse().model_dump()
            take_event(stream, stream.answer)
        stream.done = True
    except openai.APIStatusError as error:
        stream.status, stream.error = error.status_code, str(error.body)
    except openai.APIError as error:
        stream.error = str({"message": error.message})
    stream.ended = time.monotonic()


# --- acts --------------------------------------------------------------------------


def killing(first: str, at: int, second: str = "", second_at: int = 0) -> Act:
    """Kill the engine of `first` when the streams stand at token `at` (0: before it has read
    the requests); then that of `second`."""

    async def act(round_: Round) -> None:
        scene = round_.scene
        victims = {w["name"]: w["engine_pid"] for w in await scene.fleet.workers()}
        stop(victims[first])
        await _until_held(scene, first, len(round_.cases))
        for name in victims:
            if name != first:
                await scene.drain(name, "undrain")
        await scene.paced(round_.telling, at, first, victims[first])
        if second:
            stop(victims[second])
            for name in set(victims) - {first, second}:
                await scene.drain(name)  # until `paced`: all streams go to `second`
        os.kill(victims[first], signal.SIGKILL)
        if second:
            held_at = time.monotonic()
            await _until_moved(round_, first)
            await scene.paced(round_.telling, second_at, second, victims[second])
            os.kill(victims[second], signal.SIGKILL)
            held_ms = int((time.monotonic() - held_at) * 1000)
            scene.held_ms = max(scene.held_ms, held_ms)

    return act


async def _until_moved(round_: Round, victim: str) -> None:
    """Until the log says that nobody is on `victim` any more."""
    deadline = time.monotonic() + HANG_S
    while any(
        made[-1].worker == victim for made in (await round_.scene.routes(round_.cases)).values()
    ):
        assert time.monotonic() < deadline, f"streams are still on {victim}"
        await asyncio.sleep(0.02)


async def _until_held(scene: Scene, name: str, count: int) -> None:
    """Until worker `name` has all the requests of the round."""
    deadline = time.monotonic() + HANG_S
    while (await scene.worker(name))["requests"] < count:
        assert time.monotonic() < deadline, await scene.worker(name)
        await asyncio.sleep(0.01)


async def _only(scene: Scene, name: str) -> None:
    """Every worker is up, and only `name` takes requests."""
    for worker in await scene.fleet.workers():
        await scene.until_ready(worker["name"])
    for worker in await scene.fleet.workers():
        if worker["name"] != name:
            await scene.drain(worker["name"])


# --- comparing -----------------------------------------------------------------------


def differences(calm: Stream, hit: Stream, case: Case) -> list[str]:
    """What a client could tell from the undisturbed answer; empty when nothing."""
    out = [] if hit.whole else [f"not whole: {hit.status} {hit.error}"]
    for name in (
        "text",
        "reasoning",
        "tokens",
        "finish",
        "stop_reason",
        "usage",
        "others",
        "other_tokens",
    ):
        ours, theirs = getattr(calm, name), getattr(hit, name)
        if ours != theirs:
            out.append(f"{name}: {_shown(ours)} became {_shown(theirs)}")
    if _calls(calm) != _calls(hit):
        out.append(f"calls: {_shown(calm.calls)} became {_shown(hit.calls)}")
    if not _close(calm.logprobs, hit.logprobs):
        out.append(f"logprobs: {len(calm.logprobs)}, {len(hit.logprobs)}")
    if not case.stream and _comparable(calm.answer) != _comparable(hit.answer):
        out.append(f"answer: {_shown(calm.answer)} became {_shown(hit.answer)}")
    prefix = "chatcmpl" if case.route == CHAT else "cmpl"
    if hit.response_ids != [f"{prefix}-{hit.request}"]:
        out.append(f"response ids: {hit.response_ids}")
    if len(hit.created) != 1:
        out.append(f"created: {hit.created}")
    return out


def _calls(stream: Stream) -> dict[Any, Any]:
    """Tool calls without their ids, which name the request; there is one for each."""
    ids = [call[0] for call in stream.calls.values()]
    assert len(set(ids)) == len(ids) and all(len(i) == len(ids[0]) > 0 for i in ids), ids
    return {place: call[1:] for place, call in stream.calls.items()}


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 160 else f"{text[:60]}...{text[-90:]}"


def _close(ours: Any, theirs: Any) -> bool:
    """Equal, up to the last bits of numbers."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) < LOGPROB_TOLERANCE
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_close, ours, theirs))
    return ours == theirs


def _comparable(answer: dict[str, Any]) -> Any:
    """An answer without what differs between any two runs; logprobs and calls are compared
    apart."""
    kept = {name: value for name, value in answer.items() if name not in ("id", "created")}
    kept["choices"] = [{**c, "logprobs": None} for c in kept.get("choices", [])]
    for choice in kept["choices"]:
        if choice.get("message"):
            choice["message"] = {**choice["message"], "tool_calls": None}
    return kept


def judged(calm: Round, hit: Round) -> list[str]:
    """All that is wrong with a disturbed round."""
    out = []
    for (_, case), (name, _) in zip(calm.cases.items(), hit.cases.items(), strict=True):
        undisturbed, stream = calm.stream(case), hit.streams[name]
        out += [f"{name}: {text}" for text in _verdict(hit, name, case)]
        if case.verdict == "restart" and case.stream and not stream.whole:
            out += [f"{name}: {text}" for text in _honest(hit, name, case, undisturbed)]
        elif case.deterministic:
            out += [f"{name}: {text}" for text in differences(undisturbed, stream, case)]
        elif not (stream.whole and len(stream.tokens) == case.body["max_tokens"]):
            out.append(f"{name}: {stream.finish} after {len(stream.tokens)}: {stream.error}")
    return out


def _verdict(round_: Round, name: str, case: Case) -> list[str]:
    """Header and log must say how a cut would be survived, and why not better."""
    stream, arrived = round_.streams[name], round_.courses[name].arrived.event
    said = (stream.verdict, stream.reason), (arrived.verdict, arrived.reason)
    if said[0] != said[1] or arrived.verdict != case.verdict or case.reason not in arrived.reason:
        return [f"verdict {said}, expected {case.verdict} ({case.reason})"]
    modes = [d.mode for d in round_.dispatches(name)[1:] if d.delivered]
    wanted = {"exact": "continue", "sampled": "continue", "replay": "replay"}.get(case.verdict, "")
    return [f"went on by {modes}"] if any(mode != wanted for mode in modes) else []


def _honest(round_: Round, name: str, case: Case, undisturbed: Stream) -> list[str]:
    """A stream that could not go on: a true beginning, no finish reason, and vLLM's end of a broken
    stream: an error, then [DONE]."""
    stream, end = round_.streams[name], round_.courses[name].end
    out = []
    if case.deterministic and not undisturbed.text.startswith(stream.text):
        out.append("what it showed before the error is not what was generated")
    for index, shown in stream.others.items():
        if not undisturbed.others[index].startswith(shown):
            out.append(f"choice {index} showed what was not generated")
    if "the worker failed" not in stream.error or stream.finish or not stream.done:
        out.append(f"finish {stream.finish!r}, error {stream.error!r}")
    if end.outcome != "failed" or end.detail not in stream.error:
        out.append(f"the log says {end.outcome}: {end.detail}")
    return out


def cut_points(round_: Round) -> dict[str, int]:
    """Tokens delivered when a request was cut first, by name; those never cut are left out."""
    cuts = {
        name: [at.event for at in round_.courses[name].events if type(at.event) is CUT]
        for name in round_.cases
    }
    return {name: events[0].delivered for name, events in cuts.items() if events}


# --- the test ------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("patient")
async def test_every_kind_of_request_survives_a_kill_as_promised(options: FleetOptions) -> None:
    args = (*options.engine_args, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    options = msgspec.structs.replace(options, workers=3, engine_args=args)
    async with scene_of(options) as scene:
        text, chat = await _truths(scene)
        await _greedy(scene, text, chat)
        await _stateful(scene)
        await _twice(scene, text, chat)
        await _others(scene)
        await scene.sound()


async def _truths(scene: Scene) -> tuple[Truth, Truth]:
    """The undisturbed answers from which stop strings and ids are chosen."""
    truths = []
    async with aiohttp.ClientSession() as session:
        for case in plain_cases()[::2]:
            truth = Truth(Stream(request=f"truth.{case.name}", prompt=""))
            await ask(session, scene.url + case.route, truth.stream, case.body, truth.on_token)
            assert truth.stream.whole, truth.stream.error
            truths.append(truth)
    return truths[0], truths[1]


def _with_openai(cases: list[Case]) -> list[Case]:
    twins = [c for c in cases if c.name in THROUGH_OPENAI]
    return cases + [msgspec.structs.replace(c, name=f"{c.name}.openai") for c in twins]


async def _greedy(scene: Scene, text: Truth, chat: Truth) -> None:
    """Each row of the table, cut early, in the middle and late."""
    for (where, at), victim in zip(WHERE.items(), ("w0", "w1", "w2"), strict=True):
        cases = _with_openai(exact_cases(text, chat, at))
        calm = Round(scene, cases, f"calm-{where}")
        await calm.run()
        await _only(scene, victim)
        hit = Round(scene, cases, where)
        await hit.run(killing(victim, at))
        assert not (wrong := judged(calm, hit)), "\n".join(wrong)
        _tell(where, hit)
        cut = cut_points(hit)
        if len(cut) < len(cases) - 12:
            inconclusive(f"only {len(cut)} of {len(cases)} requests were under way at the kill")
        across = [
            name
            for name, case in hit.cases.items()
            if case.window[0] < cut.get(name, 0) < case.window[1]
        ]
        streamed = {hit.cases[name].stream for name in across}
        if streamed != {True, False}:
            inconclusive(f"stop strings lay across the cut in {across} only")


async def _stateful(scene: Scene) -> None:
    """The same with what has state of its own: generators, penalties, grammars, parsers,
    log probabilities, several choices."""
    calm = Round(scene, cases := _with_openai(stateful_cases()), "calm-stateful")
    await calm.run()
    assert not (degenerate := _uniform(calm)), degenerate
    for (where, at), victim in zip(WHERE.items(), ("w0", "w1", "w2"), strict=True):
        await _only(scene, victim)
        hit = Round(scene, cases, f"stateful-{where}")
        await hit.run(killing(victim, at))
        assert not (wrong := judged(calm, hit)), "\n".join(wrong)
        _tell(f"stateful, {where}", hit)
        cut = cut_points(hit)
        if len(cut) < len(cases) - 12:
            inconclusive(f"only {len(cut)} of {len(cases)} requests were under way at the kill")


def _uniform(round_: Round) -> list[str]:
    """Answers whose identity would prove little."""
    told = {name: stream.tokens for name, stream in round_.streams.items() if stream.tokens}
    return [name for name, tokens in told.items() if len(set(tokens)) < 12]


async def _twice(scene: Scene, text: Truth, chat: Truth) -> None:
    """Two kills in a row: the engine that took the streams over dies as well."""
    cases = _with_openai(exact_cases(text, chat, MIDDLE))
    calm = Round(scene, cases, "calm-twice")
    await calm.run()
    await _only(scene, "w0")
    hit = Round(scene, cases, "twice")
    await hit.run(killing("w0", EARLY, "w1", MIDDLE))
    assert not (wrong := judged(calm, hit)), "\n".join(wrong)
    _tell("twice", hit)
    paths = {name: [(d.worker, d.delivered) for d in hit.dispatches(name)] for name in hit.cases}
    if (twice := sum(len(p) >= 3 for p in paths.values())) < len(cases) // 4:
        inconclusive(f"only {twice} of {len(cases)} requests were under way at the second kill")


async def _others(scene: Scene) -> None:
    """What cannot go on exactly: replayed and compared, restarted, or failed honestly."""
    cases = _with_openai([*plain_cases(), *other_cases()])
    calm = Round(scene, cases, "calm-others")
    await calm.run()
    await _only(scene, "w1")
    hit = Round(scene, cases, "others")
    await hit.run(killing("w1", MIDDLE))
    assert not (wrong := judged(calm, hit)), "\n".join(wrong)
    _tell("others", hit)
    cut = cut_points(hit)
    if len(cut) < len(cases) - 4:
        inconclusive(f"had ended before the kill: {sorted(set(hit.cases) - set(cut))}")
    streams = ("replayed-choices-stream", "sampled-unknown-stream")
    assert _failed(hit) == {f"others.{name}" for name in streams}
    await _only(scene, "w2")
    unread = Round(scene, cases, "unread")
    await unread.run(killing("w2", 0))
    assert not (wrong := judged(calm, unread)), "\n".join(wrong)
    _tell("unread", unread)
    assert len(cut_points(unread)) == len(cases)
    assert _failed(unread) == set()


def _failed(round_: Round) -> set[str]:
    ends = {name: round_.courses[name].end for name in round_.cases}
    return {name for name, end in ends.items() if end is None or end.outcome != "completed"}


def _tell(where: str, round_: Round) -> None:
    points = sorted(cut_points(round_).values())
    print(
        f"{where}: {len(round_.cases)} requests, {len(points)} cut; delivered then: "
        f"{points[0]} to {points[-1]}, median {points[len(points) // 2]}"
    )
