"""What uses up the tries of a request, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.answer import ENDS
from relume.controlplane.stream.retry_budget import RetryBudget
from relume.events.vocabulary.enums import RequestOutcome, TransportKind
from relume.events.wire.frames import encode_failure, encode_tokens
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


def test_full_workers_end_a_request_but_not_a_stream_that_has_begun() -> None:
    """It would be lost for what is over within seconds: it pauses, up to its number of attempts."""
    fresh, begun_one, wrong = RetryBudget(), RetryBudget(), RetryBudget()
    for n in range(1, LIMITS.max_attempts):
        refused = fresh.failed(TransportKind.ENGINE_ERROR, 429, 0, LIMITS)
        assert (refused[0] == 429) == (n >= LIMITS.max_engine_errors)
        assert begun_one.failed(TransportKind.ENGINE_ERROR, 429, 9, LIMITS) == (0, "")
    for status in (429, 500, 429):
        failed = wrong.failed(TransportKind.ENGINE_ERROR, status, 9, LIMITS)
    assert failed[0] == 502


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


@pytest.mark.parametrize("end", ENDS)
def test_an_engine_that_dies_after_the_last_byte_causes_no_attempt(end: bytes) -> None:
    """Its end frame is all that is missing."""
    made = machine()
    last = e.Data(encode_tokens(1, [6], b"data: b\n\n" + end))
    for event in (*begun(made), to(1, "new"), e.Connected(()), HEAD, TOKEN, last):
        made.handle(event, 0.0)
    effects = made.handle(e.ConnectionLost(TransportKind.RESET, "", False), 1.0)
    (end,) = [effect for effect in effects if isinstance(effect, do.RecordEnd)]
    assert (end.outcome, end.tokens) == (RequestOutcome.COMPLETED, 2)
    assert not [effect for effect in effects if isinstance(effect, do.RecordFailure)]


def test_tokens_that_came_with_the_death_of_their_engine_reach_the_client() -> None:
    """Before the error, where no worker can continue."""
    made = machine(verdict="restart")
    last = e.Data(encode_tokens(1, [6], b"data: b\n\n") + encode_failure("engine", "dead"))
    for event in (*begun(made), to(1, "new"), e.Connected(()), HEAD, TOKEN):
        made.handle(event, 0.0)
    effects = made.handle(last, 1.0)
    shown = [effect for effect in effects if isinstance(effect, do.ToClient | do.Fail)]
    assert shown[0] == do.ToClient(b"data: b\n\n") and isinstance(shown[1], do.Fail)
    (end,) = [effect for effect in effects if isinstance(effect, do.RecordEnd)]
    assert end.tokens == 2


def test_a_request_that_is_woken_for_no_worker_waits_within_its_bound() -> None:
    """Others had the worker before it, again and again."""
    made = machine()
    for event in (*begun(made), e.NoWorker(5.0), e.Admitted(5.0)):
        effects = made.handle(event, 0.0)
    assert effects == [do.AwaitCapacity(5.0, again=False)]
    for now in (2.0, 4.0):
        made.handle(e.CapacityKnown(True), now)
        (timer,) = made.handle(e.NoWorker(5.0), now)
        assert isinstance(timer, do.SetTimer)
        assert made.handle(e.TimerFired(), now) == [do.AwaitCapacity(5.0 - now, again=True)]
    effects = made.handle(e.CapacityKnown(False), 5.0)
    assert [effect.status for effect in effects if isinstance(effect, do.Fail)] == [503]
