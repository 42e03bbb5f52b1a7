"""A cache that is read and written by copies: it saves what was computed and loads what was saved.

In host memory, side streams are threads that a test can delay. With a GPU, the same tests run on it.
"""

from __future__ import annotations

import pytest

from relume.engine_shim.checkpoints.link.block_stream import BlockIn
from relume.engine_shim.checkpoints.staging.copies import Way
from relume.engine_shim.checkpoints.staging.staged_cache import LOADS, SAVES
from tests.kv_stream import layouts
from tests.kv_stream.layouts import image
from tests.kv_stream.staging.delayed_copies import LAYOUT, ROW, Held, free, show, staged

# --- out ---------------------------------------------------------------------------


@pytest.mark.parametrize("overtaken", (False, True), ids=("waits", "overtakes"))
def test_a_block_is_saved_as_it_was_though_the_next_step_overwrites_it(
    device: str, overtaken: bool
) -> None:
    """And where the engine does not wait for the copy, another's bytes are saved: the wait is
    what keeps them apart."""
    held = Held(Way.READ, overtaken=overtaken)
    cache, tensors = staged(device, held)
    buffer = cache.take()
    assert buffer is not None and [buffer.place(b) for b in (3, 6)] == [0, 1]
    cache.begin([buffer])
    for tensor in tensors.values():
        tensor.fill_(7)  # the next step
    held.open()
    buffer.wait()
    found = [b"".join(map(bytes, buffer.pieces(row))) for row in (0, 1)]
    assert (found == [image(LAYOUT, 3), image(LAYOUT, 6)]) is not overtaken
    cache.close()


def test_what_is_still_being_computed_is_waited_for(device: str) -> None:
    held = Held()
    cache, tensors = staged(device, held)
    wanted = image(LAYOUT, 2)
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()

    def step() -> None:
        for name, tensor in tensors.items():
            tensor.copy_(values[name])

    held.computes(device, step)
    buffer = cache.take()
    assert buffer is not None
    buffer.place(2)
    cache.begin([buffer])
    buffer.wait()
    assert b"".join(map(bytes, buffer.pieces(0))) == wanted
    cache.close()


def test_the_engine_does_not_wait_for_what_goes_to_the_host() -> None:
    """Nor for more staging memory: there is none, and that is said."""
    held = Held(Way.OUT)
    cache, _ = staged("cpu", held, rows=1)
    taken = []
    for block in range(SAVES):
        buffer = cache.take()
        assert buffer is not None and buffer.place(block) == 0 and buffer.place(block) == -1
        cache.begin([buffer])
        taken.append(buffer)
    assert cache.take() is None
    held.open()
    for block, buffer in enumerate(taken):
        buffer.wait()
        assert b"".join(map(bytes, buffer.pieces(0))) == image(LAYOUT, block)
        cache.give(buffer)
    assert free(cache) == SAVES
    cache.close()


# --- in ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", (*layouts.HEADS_FIRST, *layouts.TOKENS_FIRST, layouts.SPLIT))
def test_loaded_blocks_are_where_they_belong_and_nothing_else_changes(
    device: str, layout: str
) -> None:
    cache, tensors = staged(device, Held(), rows=2, layout=layout)
    before = show(tensors)
    loading = cache.loading()()
    given = [bytes([40 + n]) * ROW for n in range(2 * LOADS + 1)]
    into = (6, 0, 3, 1, 7)
    for index, (block_id, data) in enumerate(zip(into, given, strict=True)):
        at = 0
        for piece in loading.pieces(block_id):
            piece[:] = data[at : at + len(piece)]
            at += len(piece)
        loading.landed(BlockIn(index, block_id, ()))
    loading.pieces(5)[0][:] = b"\xff" * len(loading.pieces(5)[0])  # one that fails the check
    loading.finish()
    after = show(tensors)
    assert [after[block_id] for block_id in into] == given
    assert [after[block_id] for block_id in (2, 4, 5)] == [before[n] for n in (2, 4, 5)]
    cache.close()


def test_a_load_overtakes_no_step_that_still_writes_to_its_blocks(device: str) -> None:
    """Of the request that had them: a step that was under way when they were freed."""
    held = Held()
    cache, tensors = staged(device, held)

    def step() -> None:
        for tensor in tensors.values():
            tensor[4].fill_(9)

    held.computes(device, step)
    begin = cache.loading()
    loading = begin()
    for piece in loading.pieces(4):
        piece[:] = b"\x11" * len(piece)
    loading.landed(BlockIn(0, 4, ()))
    loading.finish()
    held.wait(device)
    assert show(tensors)[4] == b"\x11" * ROW
    cache.close()
