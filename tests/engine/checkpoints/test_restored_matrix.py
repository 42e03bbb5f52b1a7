"""Every kind of request, killed and taken up from its checkpointed blocks, on real vLLM.

The rows run together on one engine, which is killed when a real state daemon holds blocks of
each beyond what was delivered. Another engine, which has computed none of it, takes each up
at several cuts with the blocks: what the client has in the end is compared with the whole
answer field by field. The same comparison is shown to find blocks of wrong bytes that have
the right tokens and a digest that fits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relume.events.vocabulary import RestoreDone, RestoreStarted
from relume.events.wire import frames
from relume.events.wire.kv import kv_messages as m
from tests.engine import client, matrix
from tests.engine.checkpoints.restored_requests import (
    BLOCK,
    PROMPT,
    connector,
    endpoint,
    forget_prefixes,
    full_blocks,
)
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until
from tests.engine.matrix import CHAT, COMPLETIONS
from tests.engine.streams.test_exactness_matrix import GRAMMAR, PENALTIES, SEEDED
from tests.state_daemon.daemon import Daemon, daemon_in, hello, local, peer_of, stats

pytestmark = pytest.mark.full

TOKENS = 80
"""Of an answer that is compared; those of the engine that is killed would be longer."""
LONG = 1000

REGEX = {"structured_outputs": {"regex": r"[a-z]{3,9}( [a-z]{2,9}){900}\."}}
FORMAT = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 3000}},
    "required": ["name"],
    "additionalProperties": False,
}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": FORMAT}}}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {}),
    "seeded": (COMPLETIONS, SEEDED | {"top_p": 0.9, "top_k": 40}),
    "penalties": (CHAT, PENALTIES | {"repetition_penalty": 1.1}),
    "seeded-penalties": (CHAT, SEEDED | PENALTIES),
    "bias-min-tokens": (
        COMPLETIONS,
        {"logit_bias": {"400": 2.0}, "min_tokens": TOKENS, "stop_token_ids": list(range(4, 900))},
    ),
    "regex-seeded": (COMPLETIONS, REGEX | SEEDED),
    "grammar": (COMPLETIONS, GRAMMAR | SEEDED),
    "json-seeded": (CHAT, JSON | SEEDED),
    "logprobs": (COMPLETIONS, {"logprobs": 2} | SEEDED),
    "logprobs-chat": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "choices": (COMPLETIONS, {"n": 2} | SEEDED),
}


REPLAYED = {"prompt-logprobs": (COMPLETIONS, {"echo": True, "logprobs": 1})}
"""Generated again from the start, since the prompt's own are not in any block: whoever
names blocks for it all the same gets none of them used."""
ROWS |= REPLAYED


def body_of(row: str, tokens: int = TOKENS) -> dict[str, Any]:
    path, options = ROWS[row]
    if "min_tokens" in options:
        options = options | {"min_tokens": tokens}
    told = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {}
    return {
        "model": "tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
        **(told or {"prompt": PROMPT}), **options,
    }  # fmt: skip


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon_in(tmp_path_factory.mktemp("matrix"), budget_bytes=512 << 20) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def second(zygote: Zygote) -> Iterator[Engine]:
    with engine_of(zygote.fork(*connector(), VLLM_SERVER_DEV_MODE="1")) as engine:
        yield engine


def held(daemon: Daemon, request: str) -> dict[int, int]:
    """Blocks held of each child of the request."""
    with peer_of(local(daemon.socket), hello=hello("control")) as control:
        answer, _ = control.ask(m.Ask(0, (request,)), 5.0)
        return {p.child: p.blocks for p in answer.positions}


def killed(engine: Engine, daemon: Daemon, names: dict[str, str]) -> None:
    """Runs the rows (by request name) together, and kills the engine when the daemon has
    the blocks of `TOKENS` tokens of each."""
    opened = []
    for name, row in names.items():
        headers = client.headers_for(request=name, checkpoint=endpoint(daemon))
        opened.append(client.open_stream(engine.port, ROWS[row][0], body_of(row, LONG), headers))
    blocks = full_blocks(engine, TOKENS)

    def there() -> bool:
        found = [(held(daemon, name), names[name]) for name in names]
        return all(
            len(by_child) == body_of(row).get("n", 1) and min(by_child.values()) >= blocks
            for by_child, row in found
        )

    wait_until(there, "blocks of every row are held")
    os.kill(engine.pid, signal.SIGKILL)
    for connection, _ in opened:
        connection.close()
    wait_until(lambda: not engine.alive(), "killed")


def taken_up(
    engine: Engine, daemon: Daemon, name: str, row: str, had: list[frames.Tokens], created: bytes
) -> client.Framed:
    forget_prefixes(engine)
    body, source = body_of(row), endpoint(daemon)
    mode = "replay" if row in REPLAYED else "continue"
    return matrix.continued(engine, ROWS[row][0], body, name, had, created, mode, restore=source)


def restored(engine: Engine, name: str) -> int:
    """Tokens brought from blocks so far, of all attempts and children of the request."""
    mine = [e for e in engine.agent.events if e.request == name]
    assert all(isinstance(e, RestoreStarted | RestoreDone) for e in mine), mine
    return sum(e.tokens for e in mine if isinstance(e, RestoreDone))


def test_every_kind_continues_from_its_blocks_identically(
    zygote: Zygote, second: Engine, daemon: Daemon
) -> None:
    names = {f"row-{row}": row for row in ROWS}
    with engine_of(zygote.fork(*connector())) as first:
        killed(first, daemon, names)
    wrong = []
    for name, row in names.items():
        path = ROWS[row][0]
        forget_prefixes(second)
        whole = matrix.run(second, path, body_of(row), f"{name}-whole")
        expected = matrix.seen(whole)
        choices = list(expected.choices.values())
        assert all(len(set(c.ids)) > 30 for c in choices), f"{row} would prove little"
        created = client.created_of(whole.payload)
        edge = -expected.usage["prompt_tokens"] % BLOCK or BLOCK
        width = len(choices)
        for cut in (0, 1, edge * width, (edge + 5) * width, len(whole.tokens) - 1):
            had, before = whole.tokens[:cut], restored(second, name)
            joined = taken_up(second, daemon, name, row, had, created)
            if row in REPLAYED:
                assert restored(second, name) == 0
            else:
                wait_until(lambda n=name, b=before: restored(second, n) > b, "restored")
            found = matrix.differences(expected, matrix.seen(joined))
            wrong += [f"{row}, cut at {cut}: {text[:300]}" for text in found]
    assert not wrong, "\n".join(wrong)


def test_blocks_of_wrong_bytes_are_found_by_the_comparison(
    zygote: Zygote, second: Engine, daemon: Daemon
) -> None:
    """Without that the rows above would prove nothing of the blocks."""
    rows = ("greedy", "seeded", "json-seeded", "choices")
    names = {f"wrong-{row}": row for row in rows}
    broken = connector(named="WrongBlocks", module="tests.engine.broken_connector")
    with engine_of(zygote.fork(*broken)) as first:
        killed(first, daemon, names)
    for name, row in names.items():
        forget_prefixes(second)
        whole = matrix.run(second, ROWS[row][0], body_of(row), f"{name}-whole")
        half = whole.tokens[: len(whole.tokens) // 2]
        joined = taken_up(second, daemon, name, row, half, client.created_of(whole.payload))
        assert restored(second, name) > 0, "they are taken: tokens and digest fit"
        found = matrix.differences(matrix.seen(whole), matrix.seen(joined))
        assert any("ids" in text for text in found), f"{row}: not noticed"
    forget_prefixes(second)


def test_prefix_hits_are_checkpointed_too_and_stored_once(second: Engine, tmp_path: Path) -> None:
    """The second request computes nothing of its prompt, and its blocks are all there."""
    with daemon_in(tmp_path, budget_bytes=64 << 20) as holder:
        body = body_of("greedy", LONG)
        opened = []
        for name in ("hit-a", "hit-b"):
            headers = client.headers_for(request=name, checkpoint=endpoint(holder))
            opened.append(client.open_stream(second.port, COMPLETIONS, body, headers))
            least = full_blocks(second, 1)
            wait_until(lambda n=name, b=least: held(holder, n).get(0, 0) >= b > 5, "held")
        admitted = {
            name: next(
                c for c in second.agent.changes(name) if type(c).__name__ == "RequestAdmitted"
            ).cached_tokens
            for name in ("hit-a", "hit-b")
        }
        assert admitted["hit-b"] >= (least - 1) * BLOCK
        figures = stats(holder)
        assert figures["shared"] >= least - 1
        assert figures["contents"] <= figures["blocks"] - (least - 1), "each is stored once"
        for connection, _ in opened:
            connection.close()
    second.wait_idle()


def test_a_weightier_request_takes_the_room_of_a_longer_one(second: Engine, tmp_path: Path) -> None:
    """The client's weight goes all the way into what a holder evicts."""
    with daemon_in(tmp_path, budget_bytes=1 << 20) as holder:
        for name, weight in (("light", 1), ("less", 1), ("heavy", 50)):
            body = body_of("greedy", LONG) | {"prompt": f"{name}: {PROMPT}"}
            headers = client.headers_for(request=name, checkpoint=endpoint(holder))
            headers["x-relume-priority"] = str(weight)
            refused = stats(holder)["refused"]
            connection, _ = client.open_stream(second.port, COMPLETIONS, body, headers)
            wait_until(
                lambda r=refused: stats(holder)["refused"] > r or stats(holder)["evicted"] > 0,
                f"{name} fills what it may",
            )
            connection.close()
            second.wait_idle()
            if name != "heavy":
                assert stats(holder)["evicted"] == 0, "of equal weight the shorter one waits"
        assert held(holder, "heavy").get(0, 0) > 0
