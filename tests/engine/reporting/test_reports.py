"""What a live engine tells its agent, and what it does when the agent is gone."""

from __future__ import annotations

import base64
import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relume.engine_shim.canary_prompts import COUNT, PROMPTS
from relume.engine_shim.engine.progress import Progress
from relume.events.vocabulary import (
    EngineFinished,
    EngineStep,
    FirstToken,
    KvBlocksFilled,
    PrefillChunkDone,
    RequestAdmitted,
    RequestPreempted,
    RequestQueued,
)
from relume.events.wire.reports import Hello
from relume.events.wire.worker_calls import CANARY_PATH
from relume.policies.state.fleet import Worker
from tests.engine import client
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until
from tests.policies.story import Story
from tests.signals import stepped, stop

pytestmark = pytest.mark.full

COMPLETIONS = "/v1/completions"
STREAM = {"stream": True}
LONG_PROMPT = "The log holds every decision. " * 120
ORPHANED_EXIT = 70
SOON_S = 15.0
"""About a second, on a machine that has time."""


def steps_of(engine: Engine) -> list[EngineStep]:
    engine.wait_idle()
    return list(engine.agent.steps)


def test_ready_tells_what_the_agent_must_know(primary: Engine) -> None:
    ready = primary.agent.ready
    assert ready is not None
    assert ready.port == primary.port
    assert ready.max_model_len == 2048
    assert ready.block_size == 32
    assert ready.kv_blocks > 64
    assert ready.model == "tiny"
    assert ready.vllm.startswith("0.32.")
    assert ready.exact["greedy"] is True
    roles = [hello.role for hello in primary.agent.hellos]
    assert roles in (["core"], ["api", "core", "worker"])
    assert primary.agent.hellos[0] == Hello(primary.pid, roles[0], 1)


def test_steps_of_a_request_sum_up(primary: Engine) -> None:
    dispatch = b"\x00\x01 the encoded decision \xff"
    body = {"model": "tiny", "prompt": LONG_PROMPT, "max_tokens": 20, "temperature": 0}
    encoded = base64.urlsafe_b64encode(dispatch).decode().rstrip("=")
    framed = client.ask(
        primary.port, COMPLETIONS, body, request="sums", attempt=3, dispatch=encoded
    )
    assert len(framed.ids) == 20
    steps = steps_of(primary)
    first = next(i for i, s in enumerate(steps) if any(c.request == "sums" for c in s.changes))
    steps = steps[first:]
    changes = primary.agent.changes("sums")
    assert all(c.attempt == 3 for c in changes)

    queued, admitted = changes[0], changes[1]
    assert isinstance(queued, RequestQueued) and queued.dispatch == dispatch
    assert isinstance(admitted, RequestAdmitted)
    assert admitted.blocks > 0

    chunks = [c for c in changes if isinstance(c, PrefillChunkDone)]
    assert len(chunks) >= 2, "a prompt longer than the batch is computed in chunks"
    assert admitted.cached_tokens + sum(c.tokens for c in chunks) == queued.prompt_tokens
    assert chunks[-1].computed == queued.prompt_tokens
    assert sum(isinstance(c, FirstToken) for c in changes) == 1

    filled = [c.blocks for c in changes if isinstance(c, KvBlocksFilled)]
    assert filled == sorted(set(filled))
    assert filled[-1] == (queued.prompt_tokens + 19) // 32

    end = changes[-1]
    assert isinstance(end, EngineFinished)
    assert (end.reason, end.output_tokens) == ("length", 20)

    real = [s for s in steps if s.duration_us]
    assert sum(s.batch for s in real) == 19, "every token but the first is decoded"
    assert sum(s.prefill_tokens for s in real) == sum(c.tokens for c in chunks)
    assert [s.step for s in real] == list(range(real[0].step, real[0].step + len(real)))
    assert real[-1].kv_used == 0
    assert real[0].gap_us == 0, "the engine was idle"
    assert all(0 < s.gap_us < 1_000_000 for s in real[1:]), "steps do not overlap on CPUs"
    assert all(s.incarnation == 1 and s.lost == 0 for s in steps)


def test_blocks_of_a_canary_are_told_to_be_free_again(primary: Engine) -> None:
    """A canary that outlives the last request was in the record that told of its end."""
    body = {"model": "tiny", "prompt": "Short", "max_tokens": 2, "temperature": 0}
    canary = {"canary": COUNT - 1, "prompts": PROMPTS, "incarnation": 1}
    beside = 0
    with ThreadPoolExecutor(2) as pool:
        for number in range(10):
            answer = pool.submit(client.post, primary.port, CANARY_PATH, canary)
            client.ask(primary.port, COMPLETIONS, body, request=f"beside-{number}")
            assert answer.result().status == 200
            steps = steps_of(primary)
            ends = [s for s in steps if any(type(c) is EngineFinished for c in s.changes)]
            beside += ends[-1].kv_used > 0
            assert steps[-1].kv_used == 0
    assert beside, "no request ended while a canary had blocks"


def test_arrival_is_reported_while_a_step_runs(primary: Engine) -> None:
    """A queued request is told at once, before the step that admits it ends."""
    body = {"model": "tiny", "prompt": "Short", "max_tokens": 4, "temperature": 0}
    client.ask(primary.port, COMPLETIONS, body, request="prompt-arrival")
    steps = steps_of(primary)
    first = next(s for s in steps if any(c.request == "prompt-arrival" for c in s.changes))
    assert first.duration_us == 0
    assert [type(c) for c in first.changes] == [RequestQueued]


def test_continued_request_reports_its_longer_prompt(primary: Engine, standby: Engine) -> None:
    body = {"model": "tiny", "prompt": "Continue me", "max_tokens": 30, "temperature": 0}
    whole = client.ask(primary.port, COMPLETIONS, body, request="longer")
    client.ask(
        standby.port, COMPLETIONS, body, request="longer", attempt=2,
        resume=("continue", whole.ids[:10]),
    )  # fmt: skip
    standby.wait_idle()
    first = primary.agent.changes("longer")[0]
    second = standby.agent.changes("longer")
    assert isinstance(first, RequestQueued) and isinstance(second[0], RequestQueued)
    assert second[0].prompt_tokens == first.prompt_tokens + 10
    assert isinstance(second[-1], EngineFinished) and second[-1].output_tokens == 20


def test_children_of_one_request_are_distinguished(primary: Engine) -> None:
    body = {"model": "tiny", "prompt": "Many", "max_tokens": 6, "n": 3, "temperature": 0.9}
    client.ask(primary.port, COMPLETIONS, body, request="many")

    def names() -> set[str]:
        ends = [c for c in primary.agent.changes() if isinstance(c, EngineFinished)]
        return {c.request for c in ends if c.request.startswith("many")}

    wait_until(lambda: len(names()) >= 3, "three ends are told")
    assert names() == {"many", "many#1", "many#2"}


def test_preemption_is_reported_and_output_stays_the_same(zygote: Zygote) -> None:
    """A pool too small for all: requests lose their blocks and are computed again."""
    small = ("--num-gpu-blocks-override", "24", "--max-model-len", "512")
    with engine_of(zygote.fork(*small)) as engine:
        body = {"model": "tiny", "max_tokens": 300, "temperature": 0, "stream": True}
        bodies = [body | {"prompt": f"Request number {i} says"} for i in range(6)]
        alone = [client.ask(engine.port, COMPLETIONS, b).ids for b in bodies]
        engine.wait_idle()
        opened = [
            client.open_stream(engine.port, COMPLETIONS, b, client.headers_for(request=f"p{i}"))
            for i, b in enumerate(bodies)
        ]
        together = [client.sort_frames(response.read()).ids for _, response in opened]
        for connection, _ in opened:
            connection.close()
        engine.wait_idle()
        changes = [c for c in engine.agent.changes() if c.request.startswith("p")]
        preempted = [c for c in changes if isinstance(c, RequestPreempted)]
        admitted = [c for c in changes if isinstance(c, RequestAdmitted)]
        assert preempted
        assert len(admitted) == 6 + len(preempted)
        assert sum(isinstance(c, FirstToken) for c in changes) == 6
        assert all(c.tokens > c.generated for c in preempted)
        assert any(c.generated for c in preempted)
        assert together == alone
        state = engine.state()
        assert [state[what] for what in ("uncomputed", "decoding", "context")] == [0, 0, 0]
        account = folded(engine)
        assert (account.preemptions, account.prefill_left) == (len(preempted), 0)
        assert (account.prefilling, account.decoding, account.context) == (0, 0, 0)


def test_state_tells_the_load(primary: Engine) -> None:
    """What the page shows while a request runs, and what the reports come to, agree."""
    body = {"model": "tiny", "prompt": "Load", "max_tokens": 1500, "ignore_eos": True}
    headers = client.headers_for(request="load")
    with ThreadPoolExecutor(1) as pool, stepped(primary.core) as until:  # it must not end before
        begun = pool.submit(client.begin, primary.port, COMPLETIONS, body | STREAM, headers)
        until(begun.done, "the answer has begun")
        asked = pool.submit(primary.state)
        until(asked.done, "the engine tells its state")
        state = asked.result()
        assert (state["uncomputed"], state["decoding"]) == (0, 1)
        until(lambda: primary.agent.changes("load"), "the agent is told")
        queued = primary.agent.changes("load")[0]
        assert isinstance(queued, RequestQueued)
        assert state["context"] >= queued.prompt_tokens
        connection, _ = begun.result()
        connection.close()
    primary.wait_idle()

    def load() -> list[int]:
        state = primary.state()
        return [state[what] for what in ("uncomputed", "decoding", "context")]

    wait_until(lambda: load() == [0, 0, 0], "nothing is left of it")


def folded(engine: Engine) -> Worker:
    """The account that the engine's reports come to."""
    story = Story()
    worker = story.worker("w0", engine.incarnation)
    story.tell("w.w0", *engine.agent.steps)
    return worker


def test_records_not_read_are_counted(zygote: Zygote) -> None:
    with engine_of(zygote.fork()) as engine:
        engine.agent.paused.set()
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "temperature": 0}
        big = base64.urlsafe_b64encode(bytes(40_000)).decode()
        for _ in range(40):
            client.ask(engine.port, COMPLETIONS, body, dispatch=big)
        engine.agent.paused.clear()
        numbers = itertools.count()

        def reports_go_on() -> bool:
            client.ask(engine.port, COMPLETIONS, body, request=f"after-{next(numbers)}")
            return any(c.request.startswith("after") for c in engine.agent.changes())

        wait_until(reports_go_on, "reports go on")
        assert sum(s.lost for s in engine.agent.steps) > 0


def test_death_of_the_agent_ends_the_engine_within_a_second(zygote: Zygote) -> None:
    engine = zygote.fork()
    with engine_of(engine):
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1900, "ignore_eos": True}
        connection, response = client.open_stream(
            engine.port, COMPLETIONS, body | {"stream": True}, client.headers_for()
        )
        assert response.read(64)
        engine.agent.close()
        closed_at = time.monotonic()
        wait_until(lambda: not engine.alive(), "orphan exits", SOON_S)
        print(f"gone after {time.monotonic() - closed_at:.3f} s")
        connection.close()


def test_stopped_orphan_exits_when_it_continues(zygote: Zygote) -> None:
    engine = zygote.fork()
    with engine_of(engine):
        stop(engine.pid)
        engine.agent.close()
        assert engine.alive()
        os.kill(engine.pid, signal.SIGCONT)
        wait_until(lambda: not engine.alive(), "orphan exits", SOON_S)


def test_engine_without_its_agent_does_not_start(zygote: Zygote, tiny_model) -> None:
    log = zygote.socket.parent / "unwatched.log"
    answer = zygote.ask(
        {
            "cmd": "fork",
            "env": {"RELUME_INCARNATION": "1", "RELUME_AGENT_SOCKET": "/nonexistent/socket"},
            "argv": ["--model", str(tiny_model), "--port", "1"],
            "log": str(log),
        }
    )
    wait_until(lambda: not os.path.exists(f"/proc/{answer['pid']}"), "it gives up")
    assert "AgentUnreachable" in log.read_text()


def test_a_limited_batch_runs_so_many_requests_at_once_and_serves_all(
    zygote: Zygote, tmp_path: Path
) -> None:
    """A quarter of `--max-num-seqs 16` is 4; those that ran before the limit run on."""
    page = Progress(str(tmp_path / "progress"))
    body = {"model": "tiny", "prompt": "The log", "max_tokens": 60, "temperature": 0}
    with engine_of(zygote.fork(RELUME_PROGRESS=str(tmp_path / "progress"))) as engine:
        whole = client.ask(engine.port, COMPLETIONS, body).ids

        def largest_batch(count: int) -> int:
            before = len(steps_of(engine))
            with ThreadPoolExecutor(count) as clients:
                answers = [
                    clients.submit(client.ask, engine.port, COMPLETIONS, body) for _ in range(count)
                ]
                assert all(answer.result().ids == whole for answer in answers)
            return max(step.batch for step in steps_of(engine)[before:])

        assert largest_batch(12) > 4
        page.limit_batch(25)
        assert largest_batch(12) == 4
        page.limit_batch(100)
        assert largest_batch(12) > 4
