"""The life of a request in the fold, as a table.

Theory of operation. Two streams report a request: its gateway's replica (arrival, decisions, end)
and its worker's (the engine has it). The total order may bring either first. A replica may die and
leave requests without a gateway, and a gateway that died may never have written of a request that
its engine already has. So a request is in one of these states:

- *absent*: the fold knows nothing of it, or it ended.
- *live*: it arrived, and its gateway is there.
- *orphaned*: its gateway is gone. It cannot be resumed, so the leader ends it.
- *in grace*: its gateway is gone. Its client may come back until a tick finds it due.
- *expired*: its grace is over, once and for all. The leader ends it.
- *unacknowledged*: only its engine reported it. Its gateway's record is on its way, or never comes.
- *abandoned*: its gateway's record will not come. The leader ends it.
- *ended first*: the leader ended it unacknowledged. If its arrival comes after all, it is over at
  once; this is why the end is remembered until that gateway's life is over.

A record of a gateway that does not own the request any more is *foreign* and changes nothing: the
client came back through another replica.
"""

from __future__ import annotations

from enum import Enum

from relume.policies.state.fleet import Fleet


class _Key(Enum):
    """A key of the table. Members are hashed by identity, as they are compared: Enum's own hash is
    a Python function, and the table is read twice a request."""

    __hash__ = object.__hash__


class State(_Key):
    """The state of a request."""

    ABSENT = "absent"
    LIVE = "live"
    ORPHANED = "orphaned"
    IN_GRACE = "in grace"
    EXPIRED = "expired"
    UNACKNOWLEDGED = "unacknowledged"
    ABANDONED = "abandoned"
    ENDED_FIRST = "ended first"


class Input(_Key):
    """What happens to a request."""

    ARRIVED = "its gateway told of it"
    QUEUED = "an engine told of its first attempt"
    RETURNED = "its client came back"
    GATEWAY_GONE = "its gateway is gone; it cannot be resumed"
    GATEWAY_GONE_GRACE = "its gateway is gone; it can be resumed"
    GRACE_OVER = "a tick found its grace over"
    NO_WORD_COMES = "a tick found that its gateway will not tell of it"
    ENDED = "its terminal event"
    ENDED_FOREIGN = "a terminal event of a gateway that does not own it"
    LIFE_OVER = "its gateway's next life began"


ABSENT, LIVE, ORPHANED, IN_GRACE, EXPIRED, UNACKNOWLEDGED, ABANDONED, ENDED_FIRST = State
IGNORED = None

Row = tuple[
    State | None, State | None, State | None, State | None,
    State | None, State | None, State | None, State | None,
]  # fmt: skip

_ROWS: dict[Input, Row] = {
    # in each state: absent, live, orphaned, in grace, expired,
    #                unacknowledged, abandoned, ended first
    Input.ARRIVED:            (LIVE,           LIVE,     LIVE,     LIVE,     LIVE,
                               LIVE,           LIVE,     ABSENT),
    Input.QUEUED:             (UNACKNOWLEDGED, IGNORED,  IGNORED,  IGNORED,  IGNORED,
                               IGNORED,        IGNORED,  IGNORED),
    Input.RETURNED:           (IGNORED,        LIVE,     LIVE,     LIVE,     IGNORED,
                               IGNORED,        IGNORED,  IGNORED),
    Input.GATEWAY_GONE:       (IGNORED,        ORPHANED, ORPHANED, IGNORED,  IGNORED,
                               IGNORED,        IGNORED,  IGNORED),
    Input.GATEWAY_GONE_GRACE: (IGNORED,        IN_GRACE, IGNORED,  IN_GRACE, EXPIRED,
                               IGNORED,        IGNORED,  IGNORED),
    Input.GRACE_OVER:         (IGNORED,        IGNORED,  IGNORED,  EXPIRED,  IGNORED,
                               IGNORED,        IGNORED,  IGNORED),
    Input.NO_WORD_COMES:      (IGNORED,        IGNORED,  IGNORED,  IGNORED,  IGNORED,
                               ABANDONED,      IGNORED,  IGNORED),
    Input.ENDED:              (ABSENT,         ABSENT,   ABSENT,   ABSENT,   ABSENT,
                               ENDED_FIRST,    ENDED_FIRST, ENDED_FIRST),
    Input.ENDED_FOREIGN:      (IGNORED,        IGNORED,  IGNORED,  IGNORED,  IGNORED,
                               IGNORED,        IGNORED,  IGNORED),
    Input.LIFE_OVER:          (IGNORED,        IGNORED,  IGNORED,  IGNORED,  IGNORED,
                               IGNORED,        IGNORED,  ABSENT),
}  # fmt: skip

LIFE: dict[Input, dict[State, State | None]] = {
    event: dict(zip(State, row, strict=True)) for event, row in _ROWS.items()
}
"""The table. `None`: what happens is ignored in that state."""


def state_of(fleet: Fleet, request: str) -> State:
    """The state of `request`."""
    known = fleet.requests.get(request)
    if known is not None:
        if known.expired:
            return EXPIRED
        if known.due:
            return IN_GRACE
        return ORPHANED if known.orphaned else LIVE
    event = fleet.unacknowledged.get(request)
    if event is None:
        return ABSENT
    if event.ended:
        return ENDED_FIRST
    return ABANDONED if event.due else UNACKNOWLEDGED


def follows(fleet: Fleet, request: str, event: Input) -> State | None:
    """The next state of `request`; None if the record is ignored."""
    return LIFE[event][state_of(fleet, request)]
