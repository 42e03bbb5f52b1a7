"""The health of a worker as a table: states, what is found, and what follows.

Theory of operation. Each state is one of the circuit breaker's too: UNHEALTHY is OPEN, PROBING is
HALF_OPEN, every other is CLOSED (an engine that drains or is dead is excluded by its own state).
Seed 004 has HEALTHY, SUSPICIOUS, UNHEALTHY, DRAINING and DEAD, and no way from UNHEALTHY back; here
every state has one:

    HEALTHY <-> SUSPECT -> UNHEALTHY -> PROBING -> HEALTHY
                               |  ^________|
                               `-> HEALTHY, if the cause itself is gone

DRAINING, DEAD and QUARANTINED are entered from every state. A worker that died begins anew: its
evidence belongs to an earlier incarnation. A quarantine outlives a restart; the way out of it leads
through PROBING.
"""

from __future__ import annotations

from enum import Enum

from msgspec import UNSET

from relume.events.vocabulary.enums import BreakerState, HealthState
from relume.policies.state.fleet import Worker


class Finding(Enum):
    """What the evidence about a worker amounts to, the first that holds."""

    UNTRUSTED = "what it computes is wrong"
    GONE = "no engine serves there"
    LEAVING = "requests are to leave it"
    FAILING = "it fails"
    HELD = "its breaker was opened, and holds"
    RESTED = "its breaker was opened, and has held for its time"
    TRIED = "it is probed"
    PASSED = "enough probes succeeded"
    DOUBTFUL = "something failed there, or it is slow"
    RELEASED = "its quarantine is over"
    FINE = "nothing is known against it"


H, S, U, P, D, X, Q = (
    HealthState.HEALTHY,
    HealthState.SUSPECT,
    HealthState.UNHEALTHY,
    HealthState.PROBING,
    HealthState.DRAINING,
    HealthState.DEAD,
    HealthState.QUARANTINED,
)
STATES = (H, S, U, P, D, X, Q)

_ROWS: dict[Finding, tuple[HealthState, ...]] = {
    # found:             H  S  U  P  D  X  Q     <- the state so far
    Finding.UNTRUSTED:  (Q, Q, Q, Q, Q, Q, Q),
    Finding.GONE:       (X, X, X, X, X, X, Q),
    Finding.LEAVING:    (D, D, D, D, D, D, Q),
    Finding.FAILING:    (U, U, U, U, U, U, Q),
    Finding.HELD:       (H, S, U, P, U, H, Q),
    Finding.RESTED:     (H, S, P, P, P, H, Q),
    Finding.TRIED:      (H, S, P, P, P, H, Q),
    Finding.PASSED:     (H, S, H, H, H, H, Q),
    Finding.DOUBTFUL:   (S, S, S, S, S, S, Q),
    Finding.RELEASED:   (H, S, U, P, D, X, P),
    Finding.FINE:       (H, H, H, H, H, H, Q),
}  # fmt: skip

LIFE: dict[Finding, dict[HealthState, HealthState]] = {
    finding: dict(zip(STATES, row, strict=True)) for finding, row in _ROWS.items()
}
"""The table: finding -> state so far -> state."""

BREAKER: dict[HealthState, BreakerState] = {
    U: BreakerState.OPEN,
    Q: BreakerState.OPEN,
    P: BreakerState.HALF_OPEN,
}
"""The breaker of each state; closed where none is named."""


EXCLUDED = frozenset(BREAKER)
"""States that a verdict leads to, in which a worker gets no or few requests."""


def breaker_of(state: HealthState) -> BreakerState:
    """The state of the breaker of a worker in `state`."""
    return BREAKER.get(state, BreakerState.CLOSED)


def is_quarantined(worker: Worker | None) -> bool:
    """Whether the leader quarantined the worker, and its quarantine is not over."""
    health = worker.health if worker is not None else UNSET
    return health is not UNSET and health.state == HealthState.QUARANTINED
