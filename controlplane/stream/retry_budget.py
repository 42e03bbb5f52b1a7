"""How often one request was tried, what became of it, and when that is enough."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct, field

from relume.events.vocabulary.enums import TransportKind
from relume.policies.liveness.suspicious import OVERLOADED, WRONG

DEATHS = frozenset((TransportKind.RESET, TransportKind.EOF, TransportKind.ENGINE_DEAD))
AT_FAULT = 2
"""Number of idle workers that must fail alike before the request is taken to be at fault."""
YOUNG_S = 1.0
"""An engine that is given up or dies this soon after an attempt came to it had failed before: a
gateway that is cut from many engines, or whose rack dies, tries one after the other within
milliseconds."""
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # before asking again where asking failed; doubled


class BudgetLimits(Protocol):
    """See `gateway.config.GatewayConfig`."""

    @property
    def max_engine_errors(self) -> int: ...
    @property
    def max_deaths(self) -> int: ...


class RetryBudget(Struct, kw_only=True):
    """Of one request. `moves`: of the tries, those that are no failures, because they ended by a
    handover or on an engine that was hung before; `engine_errors`: wrong answers and stuck streams;
    `answers`: their statuses, 0 for one without; `deaths`: in a row, with nothing delivered between
    them; `failed_on`: (worker, incarnation); `failed_alone`: by what was answered, workers on which
    nothing else ran and no other request had failed."""

    tries: int = 0
    moves: int = 0
    engine_errors: int = 0
    answers: set[int] = field(default_factory=set)
    deaths: int = 0
    delivered_at_death: int = 0
    failed_on: set[tuple[str, int]] = field(default_factory=set)
    failed_alone: dict[str, set[str]] = field(default_factory=dict)
    pause_s: float = PAUSE_S

    def failures(self) -> int:
        """Attempts that failed, or are under way."""
        return self.tries - self.moves

    def found_hung(self, young_s: float) -> None:
        """The engine was found hung `young_s` after the attempt came to it."""
        if young_s < YOUNG_S:
            self.moves += 1

    def found_corrupt(self) -> None:
        """The engine was quarantined: that is no failure of the request."""
        self.moves += 1

    def must_pause(self, young_s: float) -> bool:
        """Whether to pause before the next try. Engines that die one after another as soon as the
        request comes to them were dead before: many died at once, and not all of it is known
        yet. The first one is left at once."""
        return self.deaths > 1 and young_s < YOUNG_S

    def next_pause(self) -> float:
        """Seconds to pause before asking again."""
        pause, self.pause_s = self.pause_s, min(self.pause_s * 2, LONGEST_PAUSE_S)
        return pause

    def failed(
        self,
        kind: TransportKind,
        status: int,
        delivered: int,
        limits: BudgetLimits,
        answer: str = "",
        alone_on: str = "",
    ) -> tuple[int, str]:
        """Another attempt failed in this way, with `delivered` tokens in all: the status and the
        message that the request ends with, (0, "") while it may be tried again. `alone_on`: the
        worker, if the attempt was alone there."""
        if kind in WRONG:
            self.engine_errors += 1
            self.answers.add(status)
            if kind == TransportKind.STUCK:  # elsewhere it may have got stuck at another token
                answer = f"{answer} after {delivered} tokens"
            if alone_on and status not in OVERLOADED:
                workers = self.failed_alone.setdefault(answer, set())
                workers.add(alone_on)
                if len(workers) >= AT_FAULT:
                    return (
                        400,
                        f"{len(workers)} idle workers failed on this request alike ({answer})",
                    )
            begun_and_full = delivered and self.answers <= OVERLOADED  # full is soon over: pause
            if self.engine_errors >= limits.max_engine_errors and not begun_and_full:
                return self._errors()
        if kind in DEATHS and self._died(delivered) >= limits.max_deaths:
            return 502, f"{self.deaths} workers died on this request, one after another"
        return 0, ""

    def _errors(self) -> tuple[int, str]:
        """Workers that were all merely full are a reason to come again, not an error."""
        if self.answers <= OVERLOADED:
            status = 503 if 503 in self.answers else 429
            return status, "the workers are overloaded now; try again"
        return 502, f"{self.engine_errors} workers failed on this request"

    def _died(self, delivered: int) -> int:
        """Deaths in a row without progress: this request may be what kills engines."""
        if delivered > self.delivered_at_death:
            self.deaths = 0
        self.delivered_at_death = delivered
        self.deaths += 1
        return self.deaths
