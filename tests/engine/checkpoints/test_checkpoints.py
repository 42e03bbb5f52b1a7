"""A request killed on one engine goes on another from its checkpointed blocks, token for
token; and computes what it cannot trust. Real engines, real state daemons."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relume.engine_shim.checkpoints.link.block_stream import BlockOut, scatter
from relume.events.vocabulary import (
    FirstToken,
    RequestQueued,
    RestoreDone,
    RestoreFailed,
    RestoreStarted,
)
from relume.events.wire import frames
from relume.events.wire.kv import kv_messages as m
from tests.engine import client
from tests.engine.checkpoints.restored_requests import (
    BLOCK,
    LONG,
    PATH,
    PROMPT,
    TOKENS,
    body_for,
    connector,
    endpoint,
    flip,
    forget_prefixes,
    full_blocks,
    held_blocks,
    outcome,
    resumed,
    run_until_killed,
    whole,
)
from tests.engine.fleet import Engine, StockServe, Zygote, engine_of, wait_until
from tests.signals import let_run, slowed, stepped, stop
from tests.state_daemon.daemon import Cache, Daemon, daemon_in, hello, local, peer_of, stats
from tests.suite.outcomes import inconclusive

pytestmark = pytest.mark.full
HANDOVER = "/relume/handover"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon_in(tmp_path_factory.mktemp("state"), budget_bytes=256 << 20) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def second(zygote: Zygote) -> Iterator[Engine]:
    with engine_of(zygote.fork(*connector(), VLLM_SERVER_DEV_MODE="1")) as engine:
        yield engine


@pytest.mark.parametrize("tokens", (1, 47, 100))
def test_a_killed_request_continues_from_its_blocks_token_for_token(
    zygote: Zygote, second: Engine, daemon: Daemon, tokens: int
) -> None:
    name = f"killed{tokens}"
    with engine_of(zygote.fork(*connector())) as first:
        expected = whole(first, f"{name}-plain")
        assert len(set(expected.ids)) > 30, "a degenerate output would prove nothing"
        ids = run_until_killed(first, daemon, name, tokens)
    assert ids == expected.ids[:tokens]
    possible = full_blocks(second, tokens)
    assert held_blocks(daemon, name) >= possible
    forget_prefixes(second)
    created = client.created_of(expected.payload)
    rest = resumed(second, daemon, name, ids, created)
    assert rest.ids == expected.ids[tokens:]
    assert isinstance(rest.last, frames.End)
    started, done = outcome(second, name)
    assert isinstance(started, RestoreStarted) and isinstance(done, RestoreDone), done
    assert done.tokens == started.tokens == possible * BLOCK
    admitted = [c for c in second.agent.changes(name) if type(c).__name__ == "RequestAdmitted"]
    assert admitted[0].cached_tokens == done.tokens, "no more is computed than was missing"


def test_a_corrupt_block_is_computed_and_never_used(
    zygote: Zygote, second: Engine, tmp_path: Path
) -> None:
    with daemon_in(tmp_path, budget_bytes=64 << 20) as daemon:
        with engine_of(zygote.fork(*connector())) as first:
            expected = whole(first, "corrupt-plain")
            ids = run_until_killed(first, daemon, "corrupt", 60)
        possible = full_blocks(second, 60)
        flip(daemon, 3)
        forget_prefixes(second)
        rest = resumed(second, daemon, "corrupt", ids, client.created_of(expected.payload))
        assert rest.ids == expected.ids[60:]
        started, failed = outcome(second, "corrupt")
        assert isinstance(failed, RestoreFailed) and "corrupt" in failed.reason
        assert failed.tokens == 3 * BLOCK < started.tokens == possible * BLOCK
        assert stats(daemon)["corrupt"] == 1


def test_a_holder_that_is_gone_or_empty_costs_a_computation_only(
    second: Engine, daemon: Daemon, tmp_path: Path
) -> None:
    expected = whole(second, "gone-plain")
    created = client.created_of(expected.payload)
    with daemon_in(tmp_path) as empty:
        rest = resumed(second, empty, "gone-a", expected.ids[:40], created)
        assert rest.ids == expected.ids[40:]
        empty.kill()
        began = time.monotonic()
        rest = resumed(second, empty, "gone-b", expected.ids[:40], created)
        assert rest.ids == expected.ids[40:]
        assert time.monotonic() - began < 10
        empty.start()
    (failed,) = [e for e in second.agent.events if e.request.startswith("gone")]
    assert isinstance(failed, RestoreFailed) and (failed.request, failed.tokens) == ("gone-b", 0)


def test_blocks_of_another_build_are_not_used(second: Engine, daemon: Daemon) -> None:
    """Blocks as another engine would have written them, under the same request."""
    expected = whole(second, "alien-plain")
    with peer_of(local(daemon.socket), hello=hello(worker="alien")) as writer:
        blocks = [
            BlockOut(
                request="alien",
                child=0,
                rank=0,
                index=i,
                attempt=1,
                block_id=i,
                tokens=tuple(range(4)),
            )
            for i in range(6)
        ]
        assert scatter(Cache(6), blocks, writer) == 6 and writer.drained(5)
    created = client.created_of(expected.payload)
    rest = resumed(second, daemon, "alien", expected.ids[:40], created)
    assert rest.ids == expected.ids[40:]
    assert not [e for e in second.agent.events if e.request == "alien"]


def test_checkpoints_cost_no_tokens_and_end_with_their_request(
    second: Engine, daemon: Daemon
) -> None:
    plain = whole(second, "costs-plain")
    before = stats(daemon)
    run = client.ask(second.port, PATH, body_for(), request="costs", checkpoint=endpoint(daemon))
    assert run.ids == plain.ids
    wait_until(lambda: stats(daemon)["dropped"] > before["dropped"], "dropped")
    after = stats(daemon)
    assert after["taken"] > before["taken"]
    assert held_blocks(daemon, "costs") == 0
    second.wait_idle()


def test_a_holder_stopped_in_the_restore_costs_its_time_limit_only(
    zygote: Zygote, second: Engine, tmp_path: Path
) -> None:
    """Stopped, it accepts nothing and refuses nothing; killed, it is gone at once."""
    with daemon_in(tmp_path, budget_bytes=64 << 20) as holder:
        with engine_of(zygote.fork(*connector())) as first:
            expected = whole(first, "stopped-plain")
            ids = run_until_killed(first, holder, "stopped", 60)
        assert holder.process is not None
        created = client.created_of(expected.payload)
        stop(holder.process.pid)
        forget_prefixes(second)
        rest = resumed(second, holder, "stopped", ids, created)
        assert rest.ids == expected.ids[60:]
        os.kill(holder.process.pid, signal.SIGCONT)
        rest = resumed(second, holder, "stopped", ids, created)
        assert rest.ids == expected.ids[60:]


def test_many_at_once_are_saved_and_restored(
    zygote: Zygote, second: Engine, daemon: Daemon
) -> None:
    names = [f"many{i}" for i in range(6)]
    bodies = [body_for(prompt=f"{i} says: {PROMPT}", max_tokens=600) for i in range(6)]
    with engine_of(zygote.fork(*connector())) as first:
        expected = [
            client.ask(first.port, PATH, body, request=f"{name}-plain")
            for name, body in zip(names, bodies, strict=True)
        ]
        opened = []
        least = full_blocks(first, 40)
        with slowed(first.pid):  # or they may have ended by then
            for name, body in zip(names, bodies, strict=True):
                headers = client.headers_for(request=name, checkpoint=endpoint(daemon))
                opened.append(client.open_stream(first.port, PATH, body, headers))
            wait_until(lambda: min(held_blocks(daemon, n) for n in names) >= least, "held")
            os.kill(first.pid, signal.SIGKILL)
        for connection, _ in opened:
            connection.close()
    forget_prefixes(second)
    opened = []
    for i, (name, body, plain) in enumerate(zip(names, bodies, expected, strict=True)):
        tail = plain.ids[: 10 + 6 * i]
        headers = client.headers_for(
            request=name, attempt=2, resume=("continue", tail), restore=endpoint(daemon),
            checkpoint=endpoint(daemon), created=client.created_of(plain.payload),
        )  # fmt: skip
        opened.append((tail, client.open_stream(second.port, PATH, body, headers, tail)))
    for plain, (tail, (connection, response)) in zip(expected, opened, strict=True):
        rest = client.sort_frames(response.read())
        connection.close()
        assert rest.ids == plain.ids[len(tail) :]
    for name in names:
        assert any(isinstance(e, RestoreDone) for e in outcome(second, name))
    second.wait_idle()


def test_a_running_request_gets_another_holder(
    second: Engine, daemon: Daemon, tmp_path: Path
) -> None:
    """The new one has all of it from the first block on; the old one lets go when it has, and
    may be a holder of the same attempt again; both hear of its end."""
    path = "/relume/checkpoint"
    expected = whole(second, "moves-plain")
    with daemon_in(tmp_path, budget_bytes=64 << 20) as other:
        headers = client.headers_for(request="moves", checkpoint=endpoint(daemon))
        asked = {"request": "moves", "attempt": 1, "incarnation": 1, "holders": [endpoint(other)]}
        prompt = full_blocks(second, 1)
        with slowed(second.pid):  # or it may have ended by then
            connection, response = client.open_stream(second.port, PATH, body_for(), headers)
            wait_until(lambda: held_blocks(daemon, "moves") > 0, "held where it was")
            assert client.post(second.port, path, asked).status == 200
            wait_until(lambda: held_blocks(other, "moves") >= prompt > 0, "moved")
            wait_until(lambda: held_blocks(daemon, "moves") == 0, "let go")
            back = {**asked, "holders": [endpoint(daemon)]}
            assert client.post(second.port, path, back).status == 200
            wait_until(lambda: held_blocks(daemon, "moves") > 0, "held again")
        rest = client.sort_frames(response.read())
        connection.close()
        assert rest.ids == expected.ids
        for holder in (daemon, other):
            wait_until(lambda h=holder: held_blocks(h, "moves") == 0, "dropped")
    assert client.post(second.port, path, asked).status == 404, "it is over"
    assert client.post(second.port, path, {**asked, "incarnation": 9}).status == 409
    assert client.post(second.port, path, {**asked, "holders": ["http://x"]}).status == 400
    assert client.post(second.port, path, {"request": 1}).status == 400


def handed_over(engine: Engine, daemon: Daemon, request: str, after: int, **options: Any) -> Any:
    """A stream that is handed over once `after` of its blocks are held: its frames."""
    headers = client.headers_for(request=request, checkpoint=endpoint(daemon))
    connection, response = client.open_stream(engine.port, PATH, body_for(**options), headers)
    wait_until(lambda: held_blocks(daemon, request) >= after, "held")
    asked = {"request": request, "attempt": 1, "incarnation": 1}
    assert client.post(engine.port, HANDOVER, {**asked, "unbegun": True}).status == 409
    assert client.post(engine.port, HANDOVER, asked).status == 200
    first = client.sort_frames(response.read())
    connection.close()
    assert first.last == frames.Failure("moved", "handed over to another engine")
    assert client.post(engine.port, HANDOVER, asked).status == 404, "it is gone"
    return first


def test_a_request_handed_over_continues_elsewhere_from_its_blocks(
    zygote: Zygote, second: Engine, daemon: Daemon
) -> None:
    """Nothing it made is lost, its blocks stay, and the rest is what it would have been."""
    expected = whole(second, "handed-plain")
    with engine_of(zygote.fork(*connector())) as source:
        began = full_blocks(second, 1)
        with slowed(source.pid):  # or it may have ended by then
            first = handed_over(source, daemon, "handed", began + 2)
        source.wait_idle()
        assert first.ids == expected.ids[: len(first.ids)] and len(first.ids) < TOKENS
        assert held_blocks(daemon, "handed") >= began + 2, "an end would have dropped them"
        forget_prefixes(second)
        rest = resumed(second, daemon, "handed", first.ids, client.created_of(first.payload))
        assert rest.ids == expected.ids[len(first.ids) :]
        assert isinstance(outcome(second, "handed")[-1], RestoreDone)
        with slowed(source.pid):
            several = handed_over(source, daemon, "handed-n", began, n=2, temperature=0.8, seed=5)
        assert b'"abort"' not in several.payload
        assert several.ids_of(0) and several.ids_of(1)
        with slowed(source.pid):
            silent = handed_over(source, daemon, "handed-whole", began, stream=False)
        assert silent.whole is None and silent.ids == expected.ids[: len(silent.ids)]
        source.wait_idle()
        asked = {"request": "nobody", "attempt": 1, "incarnation": 1}
        for body, status in ((asked, 404), ({**asked, "incarnation": 2}, 409), ({}, 400)):
            assert client.post(source.port, HANDOVER, body).status == status


def test_choices_are_kept_apart(second: Engine, daemon: Daemon) -> None:
    """Children of n>1 share an identity and no blocks behind the prompt."""
    body = body_for(n=3, temperature=0.8, seed=5, max_tokens=400)
    headers = client.headers_for(request="choices", checkpoint=endpoint(daemon))
    prompt, seen = full_blocks(second, 1), set[tuple[int, int]]()

    def three() -> bool:
        with peer_of(local(daemon.socket), hello=hello("control")) as control:
            told, _ = control.ask(m.Changes(0, 0), 5.0)
        seen.update((c.child, c.blocks) for c in told.changes if c.request == "choices")
        return {child for child, blocks in seen if blocks > prompt} == {0, 1, 2}

    with slowed(second.pid):  # or it may have ended by then
        connection, response = client.open_stream(second.port, PATH, body, headers)
        assert response.status == 200
        wait_until(three, "all choices are held")
    response.read()
    connection.close()
    second.wait_idle()


def assert_choices_have_their_numbers(engine: Engine, daemon: Daemon) -> None:
    """Two choices of a short and of a long prompt; those of the long one fill most blocks, in
    whatever order the core met them."""
    body = body_for(prompt=["short", PROMPT], n=2, temperature=0.8, seed=5, **LONG)
    prompt = full_blocks(engine, 1)
    headers = client.headers_for(request="numbers", checkpoint=endpoint(daemon))
    most: dict[int, int] = {}

    def held() -> bool:
        with peer_of(local(daemon.socket), hello=hello("control")) as control:
            told, _ = control.ask(m.Changes(0, 0), 5.0)
        for change in told.changes:
            if change.request == "numbers":
                most[change.child] = max(change.blocks, most.get(change.child, 0))
        return len(most) == 4 and sum(blocks >= prompt for blocks in most.values()) >= 2

    with (
        ThreadPoolExecutor(1) as pool,
        stepped(engine.core) as until,
    ):
        asked = pool.submit(client.open_stream, engine.port, PATH, body, headers)
        until(held, "all choices are held")
        until(asked.done, "the answer has begun")
    assert set(sorted(most, key=lambda child: most[child])[2:]) == {2, 3}
    asked.result()[0].close()


def test_a_clients_transfer_parameters_do_not_reach_the_core(second: Engine) -> None:
    """Not even with a request that is refused: vLLM tells its connector of those."""
    second.wait_idle()
    wanted = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "other"}
    before = len(second.agent.steps)
    for refused in ({"model": "nobody"}, {"max_tokens": -1}):
        body = {**body_for(stream=False), **refused, "kv_transfer_params": wanted}
        assert client.post(second.port, PATH, body).status in (400, 404)
    queued = [
        change.request
        for step in second.agent.steps[before:]
        for change in step.changes
        if isinstance(change, RequestQueued)
    ]
    assert queued == []


def test_it_works_inside_multi_connector(
    zygote: Zygote, second: Engine, daemon: Daemon, tmp_path: Path
) -> None:
    inner = json.loads(connector()[1])
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [inner]},
    }
    arguments = ["--kv-transfer-config", json.dumps(config)]
    with engine_of(zygote.fork(*arguments)) as first:
        expected = whole(first, "multi-plain")
        ids = run_until_killed(first, daemon, "multi", 60)
    with engine_of(zygote.fork(*arguments)) as third:
        assert third.state()["exact"]["restore"] is True
        rest = resumed(third, daemon, "multi", ids, client.created_of(expected.payload))
        assert rest.ids == expected.ids[60:]
        assert isinstance(outcome(third, "multi")[-1], RestoreDone)
        with daemon_in(tmp_path, budget_bytes=64 << 20) as other:
            headers = client.headers_for(request="multi-moves", checkpoint=endpoint(daemon))
            asked = {"request": "multi-moves", "attempt": 1, "incarnation": 1}
            to = {"holders": [endpoint(other)]}
            with slowed(third.pid):  # or it may have ended by then
                connection, response = client.open_stream(third.port, PATH, body_for(), headers)
                assert client.post(third.port, "/relume/checkpoint", {**asked, **to}).status == 200
                wait_until(lambda: held_blocks(other, "multi-moves") > 0, "moved")
            assert client.sort_frames(response.read()).ids == expected.ids
            connection.close()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_stock_vllm_serve_restores_what_another_wrote(
    zygote: Zygote, tmp_path: Path, tiny_model: Path, daemon: Daemon
) -> None:
    """Three processes: scheduler and rank are not in one, and metadata travels."""
    stock = StockServe(tmp_path, tiny_model).start(*connector())
    with engine_of(stock):
        with engine_of(zygote.fork(*connector())) as first:
            body = body_for(**LONG)
            expected = client.ask(first.port, PATH, body, request="stock-plain")
            ids = run_until_killed(first, daemon, "stock", 60)
        stock.wait_ready()
        assert stock.state()["exact"]["restore"] is True
        created = client.created_of(expected.payload)
        rest = resumed(stock, daemon, "stock", ids, created)
        assert rest.ids == expected.ids[60:TOKENS]
        assert isinstance(outcome(stock, "stock")[-1], RestoreDone)
        assert_choices_have_their_numbers(stock, daemon)
        with daemon_in(tmp_path / "other", budget_bytes=64 << 20) as other:
            headers = client.headers_for(request="stock-saves", checkpoint=endpoint(other))
            asked = {"request": "stock-saves", "attempt": 1, "incarnation": 1}
            to = {**asked, "holders": [endpoint(daemon)]}
            with ThreadPoolExecutor(1) as pool, stepped(stock.core) as until:
                opened = pool.submit(client.open_stream, stock.port, PATH, body, headers)
                until(lambda: held_blocks(other, "stock-saves") > 0, "held where it was")
                until(opened.done, "the answer has begun")
                moved = pool.submit(client.post, stock.port, "/relume/checkpoint", to)
                until(moved.done, "it is answered")
                assert moved.result().status == 200
                until(lambda: held_blocks(daemon, "stock-saves") > 0, "moved")
            connection, response = opened.result()
            assert client.sort_frames(response.read()).ids == expected.ids
            connection.close()
        began = full_blocks(stock, 1)
        with ThreadPoolExecutor(1) as pool, stepped(stock.core) as until:
            handing = pool.submit(handed_over, stock, daemon, "stock-hands", began + 2, **LONG)
            until(handing.done, "handed over")
        first = handing.result()
        assert first.ids == expected.ids[: len(first.ids)] and len(first.ids) < len(expected.ids)
        assert held_blocks(daemon, "stock-hands") >= began + 2
    assert stats(daemon)["dropped"] > 0


def test_an_endpoint_that_is_none_is_refused(second: Engine) -> None:
    for header in ("http://x", "unix:relative", "tcp://h:1,tcp://h:1", ",".join(
        f"tcp://h:{i}" for i in range(9)
    )):  # fmt: skip
        headers = client.headers_for(checkpoint=header)
        assert client.post(second.port, PATH, body_for(), headers=headers).status == 400


def test_a_prefill_leaves_blocks_behind_before_it_is_over(
    zygote: Zygote, second: Engine, tmp_path: Path
) -> None:
    """Chunk by chunk; the engine runs a moment at a time and is killed before the first token.
    What is there is not computed again.

    The engine computes a chunk whether or not the blocks of the one before are sent: small
    chunks give its writer more turns, and the pauses reach the holder.
    """
    prompt = " ".join(f"Early {i} of the lease is held by worker {i * 7 % 13}." for i in range(70))
    body = body_for(prompt=prompt, max_tokens=40)
    with daemon_in(tmp_path, budget_bytes=64 << 20) as holder:
        arguments = connector(bound_bytes=64 << 20)
        with engine_of(zygote.fork(*arguments, "--max-num-batched-tokens", "32")) as first:
            headers = client.headers_for(request="early", checkpoint=endpoint(holder))
            stop(first.pid)
            connection = client.connect(first.port)
            connection.request("POST", PATH, json.dumps(body).encode(), headers)

            pause_s = 0.02  # what it sent reaches a holder that may have to wait for a processor
            while held_blocks(holder, "early") < 8:
                let_run(first.pid)
                time.sleep(pause_s)
                pause_s = min(1.0, pause_s * 1.1)
                if any(isinstance(c, FirstToken) for c in first.agent.changes("early")):
                    wait_until(lambda: held_blocks(holder, "early") >= 8, "it was sent", 10.0)
                    inconclusive("the prefill ended before the holder had what was sent")
            os.kill(first.pid, signal.SIGKILL)
            wait_until(lambda: not first.alive(), "killed")
            connection.close()
        forget_prefixes(second)
        expected = client.ask(second.port, PATH, body, request="early-plain")
        forget_prefixes(second)
        again = client.ask(
            second.port, PATH, body, attempt=2, request="early", restore=endpoint(holder)
        )
        assert again.ids == expected.ids
        done = outcome(second, "early")[-1]
        assert isinstance(done, RestoreDone) and done.tokens >= 8 * BLOCK


def test_what_the_engine_makes_of_the_model_is_in_the_fingerprint(
    zygote: Zygote, second: Engine
) -> None:
    """The same files, computed otherwise: its blocks are another model's."""
    overrides = ("--hf-overrides", json.dumps({"rms_norm_eps": 1e-3}))
    with engine_of(zygote.fork(*connector(), *overrides)) as other:
        mine, theirs = second.agent.layout, other.agent.layout
        assert mine is not None and theirs is not None and mine.family != theirs.family
        assert mine.block_bytes == theirs.block_bytes
