"""Which workers are slow, by the time of canaries beside that of their peers.

Theory of operation. The decode steps of an idle worker are not measured (`pace`), because it has none
but those of canaries. So a canary that an engine computed alone is a measure too: its time, without
waits for a CPU, in percent of the lower median of what the same canary took last on the workers of the
class. It contains what steps do not: the way through the server, and the computation of the prompt.
A worker that is slow in SLOW_CANARIES measures in a row, of different ticks, is slow, until one in
which it is well below the limit, or none came for a while. The four canaries of an engine that just
started are one measure: whatever disturbs one of them disturbs all.

Peers alone decide. The predicted duration is learnt from the steps of the same workers, so that a slow
one of two raises it by half; and what it predicts is no part of the way through the server.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from relume.events.vocabulary import CanaryReported
from relume.policies.canary import golden_values
from relume.policies.canary.canary_state import CanaryRecord
from relume.policies.health.health_settings import HealthConfig
from relume.policies.health.pace import counted, times
from relume.policies.state.fleet import Fleet

VERSION = 11
"""The version of `health` that knows it."""
SLOW_CANARIES = 4
LASTS_WINDOWS = 10
"""Windows after its last measure for which a slow worker is slow."""


def note(fleet: Fleet, record: CanaryRecord, event: CanaryReported, config: HealthConfig) -> None:
    """An engine answered a canary."""
    if event.canary not in record.answers or not event.alone or event.took_us <= 0:
        return  # the answer was not stored, or it waited for others
    if isinstance(record.times, UnsetType):
        record.times = {}
    took = record.times[event.canary] = max(event.took_us - event.wait_us, 1)
    if not isinstance(record.slow, UnsetType) and record.slow[1] == fleet.tick:
        return
    peers = sorted(_latest(fleet, record.kind, event.canary))
    if len(peers) < 2:
        record.slow = UNSET
    else:
        percent = took * 100 // peers[(len(peers) - 1) // 2]
        record.slow = counted(record.slow, SLOW_CANARIES, percent, fleet.tick, config)


def _latest(fleet: Fleet, kind: str, canary: int) -> list[int]:
    """What the canary took last on each worker of the class."""
    records = (worker.canary for worker in golden_values.members(fleet, kind))
    return [
        record.times[canary]
        for record in records
        if not isinstance(record, UnsetType)
        and not isinstance(record.times, UnsetType)
        and canary in record.times
    ]


def has_slow_canaries(record: CanaryRecord, tick: int, config: HealthConfig) -> bool:
    """Whether the worker is slow."""
    slow = record.slow
    if isinstance(slow, UnsetType) or slow[0] < SLOW_CANARIES or config.slow_percent == 0:
        return False
    return tick - slow[1] <= LASTS_WINDOWS * config.window_ticks


def in_words(record: CanaryRecord) -> str:
    """The evidence, of a worker that is slow."""
    assert not isinstance(record.slow, UnsetType)
    return f"its canaries take {times(record.slow[2])} times those of its peers"
