"""Outputs reach the handler in order, unmerged, and replays are compared (no engine)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from relume.engine_shim.engine.streams import token_notes
from relume.engine_shim.engine.streams.framing import FramedResponse
from relume.engine_shim.generation import Generation, ReplayMismatch
from relume.events.wire.resumption import Resume

# Importing vLLM takes seconds, and every process of a run collects this module: tests import it.
if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from relume.engine_shim.engine.vllm_private.outputs import OrderedCollector

pytestmark = pytest.mark.full


def output(*ids: int, finished: bool = False) -> RequestOutput:
    from vllm.outputs import CompletionOutput, RequestOutput

    choice = CompletionOutput(
        index=0,
        text="".join(f"<{i}>" for i in ids),
        token_ids=list(ids),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length" if finished else None,
    )
    return RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[choice],
        finished=finished,
    )


def delta(*expected: int) -> OrderedCollector:
    return _collector("DELTA", expected)


def cumulative(*expected: int) -> OrderedCollector:
    return _collector("CUMULATIVE", expected)


def _collector(kind: str, expected: tuple[int, ...]) -> OrderedCollector:
    from vllm.sampling_params import RequestOutputKind

    from relume.engine_shim.engine.vllm_private.outputs import OrderedCollector

    return OrderedCollector(RequestOutputKind[kind], "r", expected)


async def taken(collector: OrderedCollector) -> list[list[int]]:
    """Token ids of all outputs that wait."""
    pulled = []
    while (item := collector.get_nowait()) is not None:
        pulled.append(item.outputs[0].token_ids)
    return pulled


async def test_outputs_that_wait_are_not_merged() -> None:
    collector = delta()
    for i in range(5):
        collector.put(output(i))
    assert (await collector.get()).outputs[0].token_ids == [0]
    assert await taken(collector) == [[1], [2], [3], [4]]


async def test_slow_reader_bounds_the_queue_and_loses_nothing() -> None:
    from relume.engine_shim.engine.vllm_private.outputs import MERGE_AFTER, MERGED_TOKENS

    collector = delta()
    collector.put(output(100, 101, 102))
    collector.seal()
    for i in range(3 * MERGE_AFTER):
        collector.put(output(i))
    pulled = await taken(collector)
    assert len(pulled) <= 2 + MERGE_AFTER + 2 * MERGE_AFTER // MERGED_TOKENS
    assert max(map(len, pulled)) <= MERGED_TOKENS, "each is rendered in one go"
    assert pulled[0] == [100, 101, 102], "delivered tokens stay alone"
    assert [i for ids in pulled[1:] for i in ids] == list(range(3 * MERGE_AFTER))


async def test_cumulative_outputs_keep_the_latest_only() -> None:
    collector = cumulative()
    collector.put(output(1))
    collector.put(output(1, 2))
    assert await taken(collector) == [[1, 2]]


async def test_error_comes_after_the_outputs_before_it() -> None:
    collector = delta()
    collector.put(output(1))
    collector.put(RuntimeError("engine"))
    assert (await collector.get()).outputs[0].token_ids == [1]
    with pytest.raises(RuntimeError):
        await collector.get()


async def test_replay_holds_until_all_expected_tokens_came() -> None:
    collector = delta(1, 2, 3)
    collector.put(output(1))
    collector.put(output(2))
    assert collector.get_nowait() is None
    collector.put(output(3))
    collector.put(output(4))
    assert await taken(collector) == [[1], [2], [3], [4]], "parsers see what they saw before"


async def test_long_replay_is_not_merged_with_what_follows() -> None:
    from relume.engine_shim.engine.vllm_private.outputs import MERGE_AFTER

    tail = tuple(range(2 * MERGE_AFTER))
    collector = delta(*tail)
    for i in range(3 * MERGE_AFTER):
        collector.put(output(i))
    pulled = await taken(collector)
    assert pulled == [[i] for i in range(3 * MERGE_AFTER)]


@pytest.mark.parametrize(
    ("ids", "index"), (([1, 9], 1), ([9], 0), ([1, 2, 9], 2)), ids=("second", "first", "third")
)
async def test_replay_mismatch_names_the_token(ids: list[int], index: int) -> None:
    collector = delta(1, 2, 3)
    for i in ids:
        collector.put(output(i))
    with pytest.raises(ReplayMismatch) as raised:
        await collector.get()
    assert raised.value.index == index


async def test_replay_that_ends_early_is_a_mismatch() -> None:
    collector = delta(1, 2, 3)
    collector.put(output(1, 2, finished=True))
    with pytest.raises(ReplayMismatch):
        await collector.get()


async def test_replay_across_the_cut_is_refused_not_split() -> None:
    collector = delta(1, 2, 3)
    collector.put(output(1, 2, 3, 4))
    with pytest.raises(ReplayMismatch):
        await collector.get()


async def test_cumulative_replay_compares_what_is_new() -> None:
    collector = cumulative(1, 2, 3)
    for ids in ((1,), (1, 2), (1, 2, 3, 4)):
        collector.put(output(*ids))
    assert await taken(collector) == [[1, 2, 3, 4]]


@pytest.mark.parametrize("ranks", (None, 0))
async def test_of_an_answer_in_one_piece_only_what_is_new_is_framed(ranks: int | None) -> None:
    """Though all of it comes in one output, because its reader was late."""
    from vllm.logprobs import Logprob

    from relume.engine_shim.engine.vllm_private.api_server import _take_whole

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    generation = Generation("q", 2, resume=Resume.of("replay", (5, 6)))
    framed = FramedResponse(generation, send, "")
    await framed.send({"type": "http.response.start", "status": 200, "headers": []})
    merged = output(5, 6, 7, 8, finished=True)
    if ranks is not None:
        merged.outputs[0].logprobs = [
            {token: Logprob(-float(token), 1, "")} for token in (5, 6, 7, 8)
        ]
    _take_whole(generation, 0, merged, {}, ranks)
    await framed.flush()
    (frame,) = filter(None, sent)
    head, _, note = frame.partition(b"\n")
    assert head.split()[:2] == [b":r", b"2"] and head.split()[3:] == [b"7", b"8"]
    if ranks is not None:
        told = token_notes.decode(note, (7, 8))
        assert [(r.id, r.logprob) for r in told] == [(7, -7.0), (8, -8.0)]
