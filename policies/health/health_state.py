"""What the fold knows of a worker's health. Data only, as all of `relume.policies.state.fleet`."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from relume.events.vocabulary import WeightsCompared
from relume.events.vocabulary.enums import FailureClass, HealthState, WeightsOutcome


class DroppedReports(Struct, kw_only=True):
    """What the agent dropped of the engine's reports, within the window: how many (`count`) by tick,
    and why the last. `is_muted`: one of its processes is not read any more."""

    count: dict[int, int] = field(default_factory=dict)
    reason: str = ""
    is_muted: bool = False


class WorkerHealth(Struct, kw_only=True):
    """The health of a worker (`relume.policies.health`): what the leader decided, and the evidence.

    `state` to `price_percent` are those of the last `HealthDecided`, folded after the tick of
    `since_unix_ms`; since tick `opened` it gets no or few requests. `owed`: (state, failure,
    prober) of the last decision that the leader was found to owe. Evidence, of `incarnation`:
    `failures` are the ticks at which requests failed there within the window, `earlier` those before
    it, if no request succeeded since, `forgiven` those of requests that were themselves at fault;
    `hung_for`: replicas that judged it hung, and when; `doubt`: why replicas suspect it.
    `succeeded`: tick of the last request that ended well there while failures counted. `trips`
    counts how often its breaker opened in a row. Of a breaker that is half
    open: `probes` under way, `passes`, whether one `failed`, and the decisions of each replica when
    its turn began. `dropped`: reports that nobody could read. `slow`: see
    `relume.policies.health.pace`. Of a quarantine: `condemned` is the incarnation that it was decided
    about, `quarantined` the last one that is wrong by the values in force, `unproven` one whose class
    has no golden values but its own answers, `released_by` the operator who ended it, `weights` the
    last comparison of its model files, `weights_owed` what makes the one that the leader was found to owe.
    """

    state: HealthState = HealthState.HEALTHY
    failure: FailureClass = FailureClass.NONE
    evidence: str = ""
    since: int = 0
    since_unix_ms: int = 0
    opened: int = -1
    until: int = -1
    prober: str = ""
    most_probes: int = 0
    price_percent: int = 100
    owed: tuple[HealthState, FailureClass, str] = (HealthState.HEALTHY, FailureClass.NONE, "")
    incarnation: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    forgiven: dict[str, int] = field(default_factory=dict)
    hung_for: dict[str, int] = field(default_factory=dict)
    doubt: FailureClass = FailureClass.NONE
    trips: int = 0
    probes: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    failed: bool = False
    decided_by: dict[str, int] = field(default_factory=dict)
    slow: tuple[int, int, int] | UnsetType = UNSET  # not in older states
    condemned: int | UnsetType = UNSET
    quarantined: int | UnsetType = UNSET
    released_by: str | UnsetType = UNSET
    unproven: int | UnsetType = UNSET
    earlier: dict[str, int] | UnsetType = UNSET
    succeeded: int | UnsetType = UNSET
    dropped: DroppedReports | UnsetType = UNSET
    weights: WeightsCompared | UnsetType = UNSET  # not before version 13 of `health`
    weights_owed: tuple[int, WeightsOutcome, str, str] | UnsetType = UNSET


class DecodeSteps(Struct, kw_only=True):
    """Decode steps of a worker since it was measured last (`relume.policies.health.pace`), without those
    that computed prompts: how many; their microseconds, with the gaps before them and without waits for
    a CPU, and those of the longest; the sums of their batches and contexts. Where steps are not reported
    one by one, records count. `last`: the last measure, which is mean microseconds, mean batch and mean
    context, the last two scaled as in `step_times`; zeros: none."""

    steps: int = 0
    us: int = 0
    longest_us: int = 0
    requests: int = 0
    context: int = 0
    last: tuple[float, float, float] = (0.0, 0.0, 0.0)


class StepPace(Struct, kw_only=True):
    """The same before version 15 of `health` (`relume.policies.health.pace_v14`): how
    many, their time with the gaps before them, the sums of their batches and contexts. They are
    counted by reports, without those that computed prompts: the present one began after `step`, when
    the worker had computed `prompts`, and its first step took `first_us`. Time for which the engine
    waited for a CPU is left out; the present report has `wait_us` of it. Where steps are not reported
    one by one, their records count: the present report has so many `records` (-1: steps count, as in
    version 2 of `health`). `share`: the time of a step when it was measured, in thousandths of what
    its class takes; 0: it was not."""

    step: int
    prompts: int
    first_us: int = 0
    wait_us: int = 0
    records: int = -1
    steps: int = 0
    us: int = 0
    requests: int = 0
    context: int = 0
    share: int = 0
