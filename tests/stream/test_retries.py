"""What uses up the tries of a request, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.retry_budget import RetryBudget
from relume.events.vocabulary.enums import TransportKind
from tests.stream.test_owed_tokens import HEAD, TOKEN, begun, machine, to

LIMITS = GatewayConfig()


def test_a_client_that_returns_many_times_uses_up_no_attempt() -> None:
    made = machine(resumable=True)
    returned: list[Any] = [e.ClientGone(), e.ClientReturned((1, 0)), e.Connected(()), HEAD]
    for event in (*begun(made), to(1, "new"), e.Connected(()), HEAD, TOKEN):
        made.handle(event, 0.0)
    for event in returned * (LIMITS.max_attempts + 1):
        made.handle(event, 1.0)
    effects = made.handle(e.ConnectionLost(TransportKind.RESET, "", False), 9.0)
    assert [effect for effect in effects if isinstance(effect, do.Assign)], "another worker"


def test_workers_that_die_long_after_one_another_do_not_end_a_stream() -> None:
    budget = RetryBudget()
    for delivered in range(1, 4 * LIMITS.max_deaths):
        assert budget.failed(TransportKind.ENGINE_DEAD, 0, delivered, LIMITS) == (0, "")
    for _ in range(LIMITS.max_deaths - 2):
        assert budget.failed(TransportKind.ENGINE_DEAD, 0, delivered, LIMITS) == (0, "")
    assert budget.failed(TransportKind.ENGINE_DEAD, 0, delivered, LIMITS)[0] == 502


@pytest.mark.parametrize(
    "kind", [TransportKind.STALL, TransportKind.RESET, TransportKind.ENGINE_ERROR]
)
def test_a_lost_attempt_ends_with_its_connection(kind: TransportKind) -> None:
    """The engine may still generate: the end of its connection stops it. A worker that declines a
    request has answered it, and its connection serves others."""
    made = machine()
    for event in (*begun(made), to(1, "new"), e.Connected(()), HEAD, TOKEN):
        made.handle(event, 0.0)
    effects = made.handle(e.EngineGivenUp(kind), 1.0)
    assert [effect for effect in effects if isinstance(effect, do.Close)] == [do.Close(reuse=False)]
    made.handle(to(2, "continue"), 1.0)
    for event in (e.Connected(()), e.Head(422, {}), e.ResponseEnded()):
        effects = made.handle(event, 1.0)
    assert [effect for effect in effects if isinstance(effect, do.Close)] == [do.Close(reuse=True)]
