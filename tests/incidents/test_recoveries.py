"""How a failed worker's capacity came back: TFS, TTP, and what of its state was used."""

from __future__ import annotations

import msgspec
import pytest

from relume.controlplane.incidents import recoveries
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.sentences import lines, whole
from relume.controlplane.incidents.trace import trace
from relume.controlplane.telemetry import state_families
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RecoveryTier
from tests.incidents.failure_log import FailureLog, live
from tests.policies.story import engine_step

MIB = 1 << 20


class RecoveryLog(FailureLog):
    """w0's engine is killed, and the next one generates tokens."""

    def loaded(self, read_mib: int, inc: int = 2) -> None:
        event = v.WeightsLoaded(
            worker="w0", incarnation=inc, ranks=2, bytes=10 * MIB, read_bytes=read_mib * MIB, took_ms=9
        )  # fmt: skip
        self.tell("w.w0", event)

    def steps(self, batch: int, inc: int = 2) -> None:
        """A step of so many tokens."""
        self.tell("w.w0", msgspec.structs.replace(engine_step(incarnation=inc), batch=batch))

    def checked(self) -> Incident:
        """The one incident, which is the same as a replica has it."""
        record = self.one()
        assert live(self.groups) == [record]
        return record


def failed() -> RecoveryLog:
    log = RecoveryLog()
    log.dies()
    log.after(400).restarts()
    return log


@pytest.mark.parametrize(
    ("read_mib", "tier"),
    [
        (0, RecoveryTier.SOFTWARE_CRASH),
        (5, RecoveryTier.DEVICE_LOST),
        (10, RecoveryTier.COLD),
    ],
)
def test_where_the_weights_came_from_names_the_tier(read_mib: int, tier: RecoveryTier) -> None:
    log = failed()
    assert (log.checked().tier, log.checked().reused_bytes) == (RecoveryTier.UNKNOWN, -1)
    log.loaded(read_mib)
    record = log.checked()
    assert (record.tier, record.reloaded_bytes) == (tier, read_mib * MIB)
    assert record.reused_bytes == (10 - read_mib) * MIB
    shown = "\n".join(lines(record))
    assert f"{read_mib}.0 MiB of 10.0 MiB reloaded ({tier.replace('_', ' ')}" in shown


def test_first_success_and_peak_are_those_of_the_engine_that_follows() -> None:
    log = failed()
    log.after(300).steps(4, inc=1)  # a late record of the dead one
    log.after(300).steps(2)
    log.after(1000).steps(5)
    log.after(1000).steps(9)
    log.after(1000).steps(10)
    log.after(56_000).steps(10)
    record = log.checked()
    assert (record.first_token_ms - record.began_ms, record.peak_ms) == (3000, -1)
    log.after(2000).ticks(1)
    record = log.checked()
    assert record.peak_ms - record.first_token_ms == 2000, "9 tokens are 90 % of 10"
    log.after(1000).steps(99)
    assert log.checked() == record, "the minute is over"
    shown = "\n".join(lines(record))
    assert "first token            +3.00 s" in shown and "at its peak            +5.00 s" in shown
    names = {span["name"] for span in trace(record)["resourceSpans"][0]["scopeSpans"][0]["spans"]}
    assert {"first token", "reach peak"} <= names


def test_a_step_after_the_minute_ends_it_as_a_tick_does() -> None:
    log = failed()
    log.steps(3)
    log.after(recoveries.PEAK_S * 1000).steps(50)
    record = log.checked()
    assert record.peak_ms == record.first_token_ms >= 0


def test_an_engine_that_dies_again_has_no_peak() -> None:
    log = failed()
    log.loaded(10)
    log.steps(3)
    log.after(5000).dies(inc=2)
    log.after(100_000).ticks(1)
    first, second = log.incidents()
    assert (first.peak_ms, second.first_token_ms) == (-1, -1)
    assert second.tier == RecoveryTier.UNKNOWN and first.tier == RecoveryTier.COLD


def test_an_engine_without_requests_has_no_times() -> None:
    log = failed()
    log.after(60_000).ticks(1)
    log.steps(5)
    assert (log.checked().first_token_ms, log.checked().peak_ms) == (-1, -1)


def test_engines_that_follow_no_failure_have_no_recovery() -> None:
    log = RecoveryLog()
    log.loaded(10, inc=1)
    log.steps(8, inc=1)
    log.after(90_000).ticks(1)
    assert log.incidents() == []
    log.dies("stopped")
    log.restarts()
    log.loaded(10)
    assert log.incidents() == []


def test_blocks_restored_for_its_streams_are_counted_and_tokens_once_for_all_ranks() -> None:
    log = RecoveryLog()
    log.stream("a", "w0")
    log.breaks("a")
    log.dies()
    for attempt, child, tokens in ((1, 0, 32), (2, 0, 32), (2, 0, 32), (2, 1, 64), (2, 1, 32)):
        done = v.RestoreDone(
            incarnation=1, request="a", child=child, attempt=attempt, holder="w2", tokens=tokens,
            bytes=3 * MIB, duration_us=10,
        )  # fmt: skip
        log.tell("w.w1", done)
    record = log.checked()
    assert record.moved_bytes == 12 * MIB
    assert record.touched[0].restored == 64
    assert "KV blocks restored     12.0 MiB" in "\n".join(lines(record))


def test_metrics_have_the_latest_recovery_of_each_worker() -> None:
    log = failed()
    log.loaded(5)
    log.steps(3)
    log.after(60_000).ticks(1)
    families = state_families.recoveries(log.fleet, [whole(r) for r in log.incidents()])
    values = {tuple(s.labels.values()): s.value for f in families for s in f.samples}
    assert values == {
        ("w0", "ready"): 2.4,
        ("w0", "first_token"): 2.4,
        ("w0", "peak"): 2.4,
        ("w0", "reloaded"): 5 * MIB,
        ("w0", "reused"): 5 * MIB,
        ("w0", "moved"): 0,
    }
    log.fleet.workers.pop("w0")
    families = state_families.recoveries(log.fleet, log.incidents())
    assert not [s for f in families for s in f.samples]
