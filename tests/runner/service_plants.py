"""Bugs put into the product on purpose (`tests.runner.plants`): what clients get is worse than it
need be, and no decision in the log is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from relume.controlplane.gateway.client_effects import TO_CLIENT
from relume.controlplane.gateway.request_session import RequestSession
from relume.controlplane.replica.death_notices import NoticeWatch
from relume.controlplane.replica.holder_watch import HolderWatch
from relume.controlplane.replica.scheduler import Scheduler
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream.retry_budget import RetryBudget
from relume.events.vocabulary.enums import RequestOutcome
from relume.policies.admission.admission_queue import FULL, AdmissionQueue
from relume.policies.admission.fair_queue import FairQueue
from relume.policies.checkpoints import decisions

Set = Callable[[Any, str, Any], None]


def _half_full_is_full(patch: Set) -> None:
    """a queue that is half full refuses newcomers as if it were full"""
    make_room = AdmissionQueue._evict_for

    def half(self: AdmissionQueue, line: Any, entry: Any, config: Any) -> Any:
        if 2 * len(self.entries) >= config.requests:
            return FULL, ()
        return make_room(self, line, entry, config)

    patch(AdmissionQueue, "_evict_for", half)


def _one_try(patch: Set) -> None:
    """a request fails with its first attempt"""

    def at_once(self: RetryBudget, *given: Any, **more: Any) -> tuple[int, str]:
        return 502, "1 workers failed on this request"

    patch(RetryBudget, "failed", at_once)


def _failures_are_fine(patch: Set) -> None:
    """the log says status 200 of a stream that failed in its middle"""
    ended = Scheduler.ended

    def fine(
        self: Scheduler, request: str, outcome: Any, status: int, tokens: int, **more: Any
    ) -> None:
        ended(self, request, outcome, 200 if tokens > 0 else status, tokens, **more)

    patch(Scheduler, "ended", fine)


def _tokens_of_the_left(patch: Set) -> None:
    """the log says that a client that left had no token"""
    ended = Scheduler.ended

    def none(
        self: Scheduler, request: str, outcome: Any, status: int, tokens: int, **more: Any
    ) -> None:
        left = outcome == RequestOutcome.CANCELLED
        ended(self, request, outcome, status, 0 if left else tokens, **more)

    patch(Scheduler, "ended", none)


def _other_words(patch: Set) -> None:
    """the client hears another reason than the log"""
    fail = TO_CLIENT[do.Fail]

    def other(client: Any, effect: Any) -> None:
        fail(client, replace(effect, message="something went wrong"))

    patch(TO_CLIENT, do.Fail, other)


def _notices_ignored(patch: Set) -> None:
    """a replica ignores the notices of agents"""
    patch(NoticeWatch, "died", lambda self, name, notice: None)


def _blocks_not_named(patch: Set) -> None:
    """a dispatch does not say where the blocks of its stream are"""
    patch(decisions, "sources", lambda *given: ())


def _blocks_unknown(patch: Set) -> None:
    """a plan takes no holder to have any blocks"""
    patch(decisions, "stored", lambda fleet, request: ())


def _holders_stay(patch: Set) -> None:
    """a request whose holder died gets no other"""
    patch(HolderWatch, "folded", lambda self, group: None)


def _most_first(patch: Set) -> None:
    """the tenant with most waiting is always next"""

    def largest(self: FairQueue) -> Any:
        return next(iter(self.largest().entries.values()))

    patch(FairQueue, "next", largest)


def _engine_goes_on(patch: Set) -> None:
    """the engine is not told that a client left"""
    gone = RequestSession.client_gone

    def silent(self: RequestSession) -> None:
        if self.stream.stamp is None:
            self.upstream = None
        gone(self)

    patch(RequestSession, "client_gone", silent)


BUGS: tuple[tuple[str, str, Callable[[Set], None]], ...] = (
    ("I22 bound:tenant_fairness", "storm 0", _half_full_is_full),
    ("I22", "agent-killed 0", _one_try),
    ("I25", "composed 11", _failures_are_fine),
    ("I25", "clients-gone 8", _tokens_of_the_left),
    ("I25", "composed 11", _other_words),
    ("I26", "engine-killed-in-decode 17", _notices_ignored),
    ("I26", "engine-killed-in-restore 20", _blocks_not_named),
    ("I26", "engine-killed-in-restore 20", _blocks_unknown),
    ("I26", "composed 5", _holders_stay),
    ("I26", "composed 283", _most_first),
    ("I19", "clients-gone 8", _engine_goes_on),
)
"""Promises of which any finds it, scenario and seed of a run in which one did, and how to put it in."""
