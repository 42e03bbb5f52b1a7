"""The outcome of a scenario's run, simulated or live: the input of judging and reports."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from relume.chaos.scenario.language import Scenario
from relume.chaos.scenario.schedule import Schedule
from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import ClientRecord
from relume.events.log.interface import LandedSegment, RevisionGroup

Kind = Literal["sim", "live"]


class FiredFault(Struct, frozen=True, kw_only=True):
    """A fault that struck. `name` is that of the schedule's `PlannedFault`; `target` is the process
    that it struck, with roles resolved. Times are in ns from the start of the run; `until_ns`
    None: the fault was over at once, or lasted to the end. Of simulated runs alone: `holder`, the worker
    whose state daemon it killed too; `incarnations`, by worker, the engines whose weights it changed."""

    name: str
    what: str
    target: str
    at_ns: int
    until_ns: int | None = None
    detail: str = ""
    holder: str = ""
    incarnations: dict[str, int] = {}


class History(Struct, frozen=True, kw_only=True):
    """One request as its client saw it. `request` is its name in the schedule. Times are in ns
    from the start of the run; None: that never happened."""

    request: str
    record: ClientRecord
    sent_ns: int
    first_ns: int | None = None
    last_ns: int | None = None


class Outcome(Struct, frozen=True, kw_only=True):
    """A run. `groups` is the whole log; `began_ms` is the wall time (as in `Segment.at_ms`)
    of its start, `ended_ns` its length. `drained`: the fleet had come to rest before the log
    was read, which I12 needs. `error` says why the run itself failed (stuck, out of time);
    empty otherwise. `landed` has the appends that etcd acknowledged to writers, `commands` the
    (id, principal) of acknowledged admin changes, as far as the run recorded them (I13, I16).
    `truth`: what a simulated fleet really was (I21). `former`: the log that ended in the middle of the run;
    `groups` is the one that began in its place."""

    kind: Kind
    scenario: Scenario
    schedule: Schedule
    groups: tuple[RevisionGroup, ...]
    histories: tuple[History, ...]
    fired: tuple[FiredFault, ...]
    began_ms: int
    ended_ns: int
    drained: bool
    error: str = ""
    landed: tuple[LandedSegment, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    truth: GroundTruth | None = None
    former: tuple[RevisionGroup, ...] = ()
