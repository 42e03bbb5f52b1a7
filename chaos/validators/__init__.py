"""The promises, checked by program from the log and the clients' own records.

One module per promise, named after it; each has
`check(groups, clients, ...) -> list[Violation]`. `check_all` runs them, with further facts of the
run (`RecordedFacts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct

from relume.chaos.validators.corrupt_engines import CorruptSince
from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.promises.decisions import (
    i18_sound_dispatch,
    i23_covered_restores,
    i24_fair_ties,
)
from relume.chaos.validators.promises.health import i9_breakers
from relume.chaos.validators.promises.log import (
    i5_fencing_no_gap,
    i6_hash_chain,
    i7_replay,
    i13_durable,
    i16_admin_logged,
    i21_fold_is_true,
)
from relume.chaos.validators.promises.requests import (
    i1_one_terminal_event,
    i2_identical_stream,
    i3_indices,
    i4_one_live_epoch,
    i10_recovery_bound,
    i22_needless_failure,
    i25_told_truth,
)
from relume.chaos.validators.promises.service import i11_degradation, i26_lost_speed
from relume.chaos.validators.promises.workers import (
    i8_budget,
    i12_drained,
    i14_no_bad_block,
    i15_effects_once,
    i17_living_owners,
    i19_engine_stops,
    i20_ends_of_processes,
    i27_rolling_restart,
)
from relume.chaos.validators.records import ClientRecord, Log, Violation, log_of
from relume.chaos.validators.service_limits import ServiceLimits
from relume.chaos.validators.strikes import Slowed, Strike
from relume.controlplane.replay.verify import no_cyclic_garbage as untracked
from relume.events.log.interface import LandedSegment, RevisionGroup

Check = Callable[[Sequence[RevisionGroup], Sequence[ClientRecord]], list[Violation]]

CHECKS: Mapping[str, Check] = {
    "I1": i1_one_terminal_event.check,
    "I2": i2_identical_stream.check,
    "I3": i3_indices.check,
    "I4": i4_one_live_epoch.check,
    "I5": i5_fencing_no_gap.check,
    "I6": i6_hash_chain.check,
    "I7": i7_replay.check,
    "I8": i8_budget.check,
    "I9": i9_breakers.check,
    "I10": i10_recovery_bound.check,
    "I11": i11_degradation.check,
    "I12": i12_drained.check,
    "I13": i13_durable.check,
    "I14": i14_no_bad_block.check,
    "I15": i15_effects_once.check,
    "I16": i16_admin_logged.check,
    "I17": i17_living_owners.check,
    "I18": i18_sound_dispatch.check,
    "I19": i19_engine_stops.check,
    "I20": i20_ends_of_processes.check,
    "I21": i21_fold_is_true.check,
    "I22": i22_needless_failure.check,
    "I23": i23_covered_restores.check,
    "I24": i24_fair_ties.check,
    "I25": i25_told_truth.check,
    "I26": i26_lost_speed.check,
    "I27": i27_rolling_restart.check,
}

__all__ = [
    "CHECKS",
    "ClientRecord",
    "RecordedFacts",
    "Violation",
    "check_all",
    "untracked",
    "violations",
]


class RecordedFacts(Struct, frozen=True, kw_only=True):
    """Recorded facts in addition to log and clients' records. `given_bytes`: each host's budget for
    checkpoints (None: unknown); `stopped`: streams of stopped replicas, and the duration in ms;
    `killed`: streams of killed replicas, and the time (ms, as in `Segment.at_ms`); `unserved_ms`:
    time without a reachable worker; `shared`: number of tokens that a client's prompt shares with
    others from its start; `landed`: appends acknowledged to writers as durable; `commands`: (id,
    principal) of acknowledged admin changes; `corrupt`: workers whose engines began to compute wrong
    results, and the time (ms); `unkept`: requests, by their client's id, whose prompts may not be
    kept; `truth`: what a simulated fleet really was; `began_ms`: wall time of the run's start; `away`:
    workers that a fault kept from gateways for a while; `cut_off`: streams whose owners could not keep
    their lease, from when to when (ms; None: unknown); `strikes`: what each fault struck (None: unknown);
    `limits`: those of the run's settings; `late_ms`: streams whose writer is late, and by how much at most;
    `report_ms`: by worker, how late its engine's reports come at most; `slowed`: workers and links that
    faults slowed down."""

    given_bytes: int | None = None
    stopped: Sequence[tuple[str, int]] = ()
    killed: Sequence[tuple[str, int]] = ()
    unserved_ms: int = 0
    shared: Mapping[str, int] = {}
    landed: Sequence[LandedSegment] = ()
    commands: Sequence[tuple[str, str]] = ()
    corrupt: Sequence[CorruptSince] = ()
    unkept: Collection[str] = ()
    truth: GroundTruth | None = None
    began_ms: int = 0
    away: Collection[str] = ()
    cut_off: Sequence[tuple[str, int, int]] | None = None
    strikes: Sequence[Strike] | None = None
    limits: ServiceLimits | None = None
    late_ms: Mapping[str, int] = {}
    report_ms: Mapping[str, int] = {}
    slowed: Slowed = Slowed()


def violations(
    log: Log, clients: Sequence[ClientRecord], promises: Sequence[str], known: RecordedFacts
) -> Iterator[Violation]:
    """Violations of each promise in turn."""
    checks: dict[str, Check] = {
        **CHECKS,
        "I1": partial(i1_one_terminal_event.check, truth=known.truth),
        "I2": partial(
            i2_identical_stream.check,
            corrupt=known.corrupt,
            truth=known.truth,
            began_ms=known.began_ms,
        ),
        "I5": partial(i5_fencing_no_gap.check, truth=known.truth),
        "I8": partial(i8_budget.check, given=known.given_bytes),
        "I9": partial(i9_breakers.check, unkept=known.unkept),
        "I10": partial(
            i10_recovery_bound.check,
            stopped=known.stopped,
            killed=known.killed,
            unserved_ms=known.unserved_ms,
            cut_off=known.cut_off or (),
            slowed=known.slowed,
        ),
        "I13": partial(i13_durable.check, landed=known.landed),
        "I14": partial(
            i14_no_bad_block.check,
            shared=known.shared,
            corrupt=known.corrupt,
            truth=known.truth,
            began_ms=known.began_ms,
            strikes=known.strikes or (),
        ),
        "I16": partial(i16_admin_logged.check, sent=known.commands),
        "I22": partial(
            i22_needless_failure.check,
            truth=known.truth,
            began_ms=known.began_ms,
            away=known.away,
            strikes=known.strikes or (),
            limits=known.limits,
            report_ms=known.report_ms,
        ),
        "I19": partial(
            i19_engine_stops.check,
            truth=known.truth,
            strikes=known.strikes or (),
            began_ms=known.began_ms,
        ),
        "I20": partial(i20_ends_of_processes.check, strikes=known.strikes, truth=known.truth),
        "I26": partial(
            i26_lost_speed.check,
            strikes=known.strikes if known.truth is not None else None,
            late_ms=known.late_ms,
        ),
        "I25": partial(i25_told_truth.check, truth=known.truth),
        "I17": partial(i17_living_owners.check, cut_off=known.cut_off),
    }
    if "I21" in promises:
        watch = i21_fold_is_true.begin(log, known.truth)
        checks["I21"] = lambda log, clients: i21_fold_is_true.judge(log_of(log), watch)
    for name in promises:
        yield from checks[name](log, clients)


def check_all(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    promises: Sequence[str] = tuple(CHECKS),
    known: RecordedFacts | None = None,
) -> list[Violation]:
    """All violations of `promises`. The log must be whole and the fleet drained (I12)."""
    with untracked():
        return list(violations(log_of(groups), clients, promises, known or RecordedFacts()))
