"""`error.code` of what clients are told when a request cannot be served: one code for each message
and for each reason to refuse. Errors without an own code have their HTTP status as the code."""

from __future__ import annotations

from relume.events.vocabulary.enums import ShedReason

NO_WORKER = "no worker can take the request now; try again"
NO_LOG = "the control plane cannot accept requests now: its event log is not writable"
NO_DECISIONS = "the control plane cannot take decisions now: its event log is not writable"
STOPPING = "the control plane is stopping; try again"
STOPPING_UNBEGUN = "this gateway is stopping and the request had not begun; try again"

OF_MESSAGES: dict[str, str] = {
    NO_WORKER: "no_worker",
    NO_LOG: "log_unavailable",
    NO_DECISIONS: "log_unavailable",
    STOPPING: "stopping",
    STOPPING_UNBEGUN: "stopping",
}

OF_REASONS: dict[ShedReason, str] = {
    ShedReason.DEADLINE: "deadline_unreachable",
    ShedReason.EXPIRED: "deadline_exceeded",
    ShedReason.TOO_LONG: "overloaded",
    ShedReason.ROOM_FULL: "overloaded",
    ShedReason.DISPLACED: "overloaded",
    ShedReason.TENANT_SHARE: "tenant_limit",
    ShedReason.NO_WORKER: OF_MESSAGES[NO_WORKER],
    ShedReason.STOPPING: OF_MESSAGES[STOPPING_UNBEGUN],
}
"""Of refusals by the admission queue, whose messages have figures in them."""
