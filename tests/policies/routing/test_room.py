"""Which worker has room for the KV blocks of a request."""

from __future__ import annotations

from relume.events.vocabulary.enums import Exclusion
from tests.policies.routing.test_failing_workers import few
from tests.policies.story import engine_step, queued


def test_prompts_that_a_worker_is_yet_to_compute_take_its_room() -> None:
    """Their blocks are not in use yet; two such requests would preempt one another."""
    replica = few(workers=2)
    room_blocks = 2
    tokens = 16 * (512 - 8 - room_blocks)
    replica.fleet.tell("w.w0", engine_step(queued("large", prompt=tokens)))
    replica.view.landed()
    assert replica.asked().prompt_tokens > 16 * room_blocks
    assert replica.reasons()["w0"] == Exclusion.NO_KV_SPACE
    assert replica.chooses().worker == "w1"
