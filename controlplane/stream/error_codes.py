"""`error.code` of each error that says why a request cannot be served now: one code for each message,
and for each reason to refuse. `gateway.http.replies` looks messages up here. Errors without a code of
their own have their HTTP status as the code."""

from __future__ import annotations

from relume.events.vocabulary.enums import ShedReason
from relume.events.wire.headers import TIER

NO_WORKER = "no worker can take the request now; try again"
NO_WORKER_READY = "no worker can serve requests now"
DEGRADED = (
    f"the workers of this model cannot serve all that arrives, and requests of this {TIER} are "
    "refused until they can; try again later, or with a higher tier"
)
NO_LOG = "the control plane cannot accept requests now: its event log is not writable"
NO_DECISIONS = "the control plane cannot take decisions now: its event log is not writable"
NO_RESUMPTION = "the control plane cannot resume streams now: its event log is not writable"
NO_NEWS = "this replica has heard nothing from the log for some seconds; return again"
LOG_LATE = "the log has not taken this return in time: return again"
SOUGHT = "this stream began before the present log and is being looked up: return again"
NOT_KNOWN = (NO_NEWS, LOG_LATE, SOUGHT)
"""Answers to a client that returns to a stream of which this replica cannot say whether it is over."""
STOPPING = "the control plane is stopping; try again"
STOPPING_UNBEGUN = "this gateway is stopping and the request had not begun; try again"
DRAINING = "draining"
NOT_COMPARED = (
    "a worker that computes wrong results generated a part of this answer, and it cannot be "
    "generated again for comparison: do not use what you received, send the request again"
)
CORRUPTED = (
    "a worker that computes wrong results generated a part of this answer, and generated again it "
    "differs: do not use what you received, send the request again"
)
TOO_MANY_CLIENTS = "too many connections"
TOO_MANY_BYTES = "too many bytes of requests are under way; try again"

OF_MESSAGES: dict[str, str] = {
    NO_WORKER: "no_worker",
    NO_WORKER_READY: "no_worker",
    NO_LOG: "log_unavailable",
    NO_DECISIONS: "log_unavailable",
    NO_RESUMPTION: "log_unavailable",
    NO_NEWS: "log_behind",
    LOG_LATE: "log_behind",
    SOUGHT: "log_behind",
    STOPPING: "stopping",
    STOPPING_UNBEGUN: "stopping",
    DRAINING: "stopping",
    TOO_MANY_CLIENTS: "overloaded",
    TOO_MANY_BYTES: "overloaded",
    NOT_COMPARED: "corrupt_answer",
    CORRUPTED: "corrupt_answer",
    DEGRADED: "capacity_short",
}

OF_REASONS: dict[ShedReason, str] = {
    ShedReason.DEADLINE: "deadline_unreachable",
    ShedReason.EXPIRED: "deadline_exceeded",
    ShedReason.TOO_LONG: "overloaded",
    ShedReason.QUEUE_FULL: "overloaded",
    ShedReason.DISPLACED: "overloaded",
    ShedReason.TENANT_SHARE: "tenant_limit",
    ShedReason.NO_WORKER: OF_MESSAGES[NO_WORKER],
    ShedReason.STOPPING: OF_MESSAGES[STOPPING_UNBEGUN],
    ShedReason.DEGRADED: OF_MESSAGES[DEGRADED],
}
"""Of refusals by the admission queue; most of their messages contain figures."""
