"""Every failpoint: its name, the processes that pass it, the facts that a rule can ask for.

A new failpoint is a member of `Failpoint`, a row of `PLACES`, and a call of
`failpoint_client.reach` (or `reach_async`) behind `if failpoint_client.active`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Failpoint(enum.StrEnum):
    """Names of failpoints, as rules and listings write them."""

    ENGINE_DECODE = "engine.decode"
    ENGINE_PREFILL = "engine.prefill"
    ENGINE_STEP = "engine.step"
    ENGINE_COMPUTE = "engine.compute"
    ENGINE_FRAME = "engine.frame"
    RESTORE_FETCH = "restore.fetch"
    CHECKPOINT_STORE = "checkpoint.store"
    ENGINE_REQUEST = "engine.request"
    AGENT_REPORT = "agent.report"
    AGENT_CHECK = "agent.check"
    LOG_APPEND = "log.append"
    LOG_LANDED = "log.landed"
    STREAM_EFFECT = "stream.effect"


class Action(enum.StrEnum):
    """What happens to a process that reaches a failpoint.

    `pause`: the thread waits until the rule is released (in `reach_async`: the task). `spin`: the
    same, but it computes meanwhile. `delay`: it waits for a time. `stretch`: so long that what it just
    did takes a multiple of its time, at places of `TIMED`. `fail`: the call raises, as it would for a
    fault of that place. `exit`: the process dies at once, as by kill -9.
    """

    PAUSE = "pause"
    SPIN = "spin"
    DELAY = "delay"
    STRETCH = "stretch"
    FAIL = "fail"
    EXIT = "exit"


class Place(NamedTuple):
    """`process`: kind of process that passes the failpoint; its name is this kind and the name of
    the worker or replica, for example "engine w0". `facts`: what the failpoint knows when passed."""

    process: str
    facts: tuple[str, ...]
    meaning: str


TIMED = frozenset({Failpoint.ENGINE_COMPUTE})
"""Places that say how long what just happened took."""
PLACES: dict[Failpoint, Place] = {
    Failpoint.ENGINE_DECODE: Place(
        "engine",
        ("request", "tokens"),
        "the engine has sampled output token number `tokens` of `request` and not yet sent it",
    ),
    Failpoint.ENGINE_PREFILL: Place(
        "engine",
        ("request", "tokens"),
        "the engine has computed a prefill chunk of `request`, up to prompt token `tokens`",
    ),
    Failpoint.ENGINE_STEP: Place(
        "engine",
        ("step",),
        "the engine has requests and is about to schedule step number `step`",
    ),
    Failpoint.ENGINE_COMPUTE: Place(
        "engine",
        ("rank",),
        "rank `rank` of the engine has computed a step, in the process that computes; says how long its "
        "step takes so far",
    ),
    Failpoint.ENGINE_REQUEST: Place(
        "engine",
        ("request",),
        "the engine's server has read the headers of `request` and not yet passed it to vLLM",
    ),
    Failpoint.ENGINE_FRAME: Place(
        "engine",
        ("request", "tokens"),
        "an engine's HTTP server is about to send a frame of `request`, whose handler has taken "
        "`tokens` output tokens so far",
    ),
    Failpoint.RESTORE_FETCH: Place(
        "engine",
        ("request", "first", "blocks"),
        "a rank is about to fetch `blocks` KV blocks of `request`, from block `first` on",
    ),
    Failpoint.CHECKPOINT_STORE: Place(
        "daemon",
        ("worker", "request", "block"),
        "a state daemon is about to store block `block` of `request` from `worker`",
    ),
    Failpoint.AGENT_REPORT: Place(
        "agent",
        ("bytes",),
        "an agent has read records of its engine and not yet journalled them",
    ),
    Failpoint.AGENT_CHECK: Place(
        "agent",
        ("pid", "bytes"),
        "an agent is about to check a record that process `pid` of its engine reports; after `fail` it "
        "journals the record unchecked",
    ),
    Failpoint.LOG_APPEND: Place(
        "agent or replica",
        ("stream", "seq"),
        "a writer is about to send segment `seq` of `stream` to etcd",
    ),
    Failpoint.LOG_LANDED: Place(
        "agent or replica",
        ("stream", "seq"),
        "etcd has confirmed segment `seq` of `stream`, and the writer has not yet noted it",
    ),
    Failpoint.STREAM_EFFECT: Place(
        "replica",
        ("request", "effect"),
        "a replica is about to carry out the stream machine's `effect` for `request`",
    ),
}
