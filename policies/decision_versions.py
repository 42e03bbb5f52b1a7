"""Versions of what a log was written with: each kind of decision, and the state that is hashed.

Each replica writes the versions of its decisions into the log when it starts, with its settings;
they hold for what it writes from there on. A log that names none has version 1 of everything.
Verification takes a decision again if this build has the version of its writer. It counts and
names the others, and they are no divergence.

Raise a version with any change after which an equal question may get another answer, or the fold
another state. Add a log of the new version to `tests/replay/logs`; the old logs stay. Prefer a
recorded setting where the old way can stay: then old decisions can still be repeated.
"""

from __future__ import annotations

from typing import Any

from relume.events import vocabulary as v
from relume.policies.routing.routing_settings import POLICIES
from relume.policies.state.fleet import Fleet
from relume.policies.state.overlay.view import View

DECISION_VERSIONS: dict[str, int] = {
    **{f"route.{policy}": 1 for policy in (*POLICIES, "planned")},
    "route.least_load": 2,
    "route.round_robin": 2,
    "route.planned": 2,
    "first_token": 2,
    "mode": 2,
    "admission": 3,
    "placement": 2,
    "recovery": 1,
    "migration": 1,
    "stall": 3,
    "overdue": 5,
    "leader": 3,
    "detail": 1,
    "health": 16,
    "cross_check": 2,
    "degradation": 1,
    "spares": 2,
    "rollout": 3,
}
"""`route.P`: the worker that policy P chooses. `first_token`: the time predicted for it.
`mode`: how the attempt continues what the client has.
`admission`: which requests wait, which is next, which are refused. `leader`: the leader's
duties. `cross_check`: which finished requests another engine answers again, and which engine.
`degradation`: the level of each model; which arrivals are refused by it.
`spares`: which workers are spares. `rollout`: the steps of a rolling restart."""

RETAKEN: dict[str, dict[int, str]] = {
    "route.least_load": {
        1: "forgets failures that the fold has, in fleets of more than 16 workers"
    },
    "route.round_robin": {1: "gives a suspect as many turns as the others"},
    "route.planned": {1: "a stream may return to a draining worker that fails requests"},
    "first_token": {1: "not the estimate that the worker was chosen by (`routing.first_token_v1`)"},
    "mode": {1: "knows no streams with tokens of a corrupt worker"},
    "admission": {1: "knows no spares", 2: "an arrival uses a spare only if no request waits"},
    "placement": {1: "its own placements count that another replica's of a later attempt replaced"},
    "stall": dict.fromkeys((1, 2), "see `liveness.stall.HUNG`"),
    "overdue": dict.fromkeys((1, 2, 3, 4), "waits for an engine that answers no probe"),
    "leader": {
        1: "ends requests of a gateway's new life if their engine reports them before it begins in the log; "
        "releases no blocks of a request whose choice of a holder was lost",
        2: "carries out commands that waited for the log; releases blocks of streams that arrived in a former "
        "log and run; the fold does not learn where such a stream runs when its client returns; a new leader "
        "repeats the restarts of a rolling restart that it cancels",
    },
    "health": {
        1: "slow workers are found by the factor that predictions learn",
        2: "their pace counts steps, not records; a worker that is probed keeps its overhead, and a probe "
        "that ended early stays open",
        3: "knows no canaries",
        4: "knows no cross-checks, and the overhead of an idle worker does not fade",
        5: "forgets each failure with its window",
        6: "other workers' failures withhold a quarantine",
        7: "does not judge by unreadable reports",
        8: "no replica takes over probes of one whose requests all wait; an engine's answers that no "
        "other one confirms end its quarantine",
        9: "the same if they are those of an earlier engine of the worker",
        10: "does not judge by the time of canaries; prefix caches keep blocks of a corrupt worker",
        11: "holds of a breaker double also while no other worker can serve",
        12: "does not compare model files before right answers end a quarantine",
        13: "an engine that dies before its quarantine is in the log ends it",
        14: "a slow worker is found by step times that contain waits for a CPU and its own steps",
    },
    "cross_check": {1: "engines rest after a check, and save nothing before one"},
    "spares": {1: "decides again what is written and not yet folded"},
    "rollout": {
        1: "goes on past workers whose host is lost",
        2: "restarts what has drained, whatever failed meanwhile; one wrong canary holds up no step",
    },
}
"""Older versions of which this build still has the rule, and in what each differs from the next."""

STATE_SHAPE = 1
"""The state that `state_hash` is of: its fields, and what the fold makes of an event."""

PREFIX = "version."
"""Of the settings that record versions."""

_KINDS: dict[type, str] = {
    v.RequestHeld: "admission",
    v.RequestShed: "admission",
    v.HolderChosen: "placement",
    v.RecoveryPlanned: "recovery",
    v.MigrationPlanned: "migration",
    v.StallJudged: "stall",
    v.StreamJudged: "overdue",
    v.CrossCheckDecided: "cross_check",
}
_OLD_SHAPES = {"": 1, "35fc4648": 1}
"""How shapes were named before they had numbers."""


def settings() -> tuple[tuple[str, str], ...]:
    """The versions of this build's decisions, as a replica records them when it starts."""
    return tuple((PREFIX + kind, str(version)) for kind, version in DECISION_VERSIONS.items())


def kind_of(event: Any) -> str:
    """The kind of a recorded decision. Raises KeyError for an event that is none."""
    return f"route.{event.policy}" if type(event) is v.RouteDecided else _KINDS[type(event)]


def missing(view: View, kind: str) -> str:
    """What this build lacks to take a decision of the view's replica again, such as
    `stall version 2`; empty when it has the version."""
    return _compared(kind, view.setting(PREFIX + kind, ""))


def missing_of_leader(fleet: Fleet, kind: str) -> str:
    """The same for what the leader decides."""
    leader = fleet.replicas.get(fleet.leader)
    return _compared(kind, leader.settings.get(PREFIX + kind, "") if leader is not None else "")


def version_of(view: View, kind: str) -> int:
    """The version of a decision of the view's replica. Raises ValueError where `missing` names
    something."""
    return int(view.setting(PREFIX + kind, "") or 1)


def _compared(kind: str, recorded: str) -> str:
    if kind in DECISION_VERSIONS:
        known = (DECISION_VERSIONS[kind], *RETAKEN.get(kind, ()))
        lacking = (recorded or "1") not in map(str, known)
    else:  # a kind that its writer gives no version is as old as versions are, or made up
        lacking = bool(recorded)
    return f"{kind} version {recorded or 1}" if lacking else ""


def shape_name() -> str:
    """The shape of the state as `StateHashed` and files name it."""
    return str(STATE_SHAPE)


def missing_shape(recorded: str) -> str:
    """The shape of a recorded state if it is not this build's; else empty."""
    name = str(_OLD_SHAPES.get(recorded, recorded))
    return "" if name == shape_name() else name
