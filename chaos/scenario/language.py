"""The scenario language as types. Field names are the YAML keys; times are in seconds."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=100_000)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]

# `checks` has the limits of these: msgspec 0.22 crashes on a union of a number with
# limits and a tuple of fixed length.
Span = float | tuple[float, float]
"""A time, or the bounds between which the seed draws one."""

Nth = int | tuple[int, int]
"""A count from 1, or the bounds between which the seed draws one."""


class _Part(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Disorder(_Part, frozen=True, kw_only=True):
    """What comes late, twice or not at all between an engine and the log; simulated only. Reports of
    engines reach their agents `report_delay_ms` late, also after the engine's death. Of more than
    `kept_reports` that wait at once the others are dropped (0: the usual limit). With
    `notices_repeated` each notice of a death comes twice, and so does the one before it. What the
    worker or replica `late_writer` sends to etcd arrives `late_writer_ms` late, up to twice that,
    also after its death. `lost_ends`: share of answers to resumable clients whose last bytes are
    lost with the connection, when the gateway has sent them all."""

    report_delay_ms: Annotated[int, Meta(ge=0, le=5000)] = 0
    kept_reports: Annotated[int, Meta(ge=0, le=4096)] = 0
    notices_repeated: bool = False
    late_writer: str = ""
    late_writer_ms: Annotated[int, Meta(ge=0, le=5000)] = 0
    lost_ends: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Limits(_Part, frozen=True, kw_only=True):
    """Limits that are reached with little load; simulated only. 0: the usual limit. `checkpoint_kb`:
    budget of each state daemon, instead of `checkpoint_mb`. `unwritten_kb`: of what a writer keeps
    in memory while etcd is away; the rest is in its spool alone. `segment_bytes`: size from
    which a writer sends a segment at once. `running`: requests that an engine computes at once.
    `kv_blocks`: of an engine's KV cache."""

    checkpoint_kb: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    unwritten_kb: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    segment_bytes: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    running: Annotated[int, Meta(ge=0, le=4096)] = 0
    kv_blocks: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class Commands(_Part, frozen=True, kw_only=True):
    """What an operator commands while there is traffic; simulated only. `each` worker gets these in
    turn, a group at once, then the next worker, `every_s` between two groups; `at_once`: all workers get
    a group at the same moment. `most` groups in all (0: no limit). `drain` is forced, `drain-unforced` may
    be refused. `trust` is given only to workers whose engines compute right results. Afterwards no worker
    stays held or drained."""

    each: tuple[tuple[str, ...], ...] = ()
    every_s: Annotated[float, Meta(gt=0, le=3600)] = 0.4
    most: Annotated[int, Meta(ge=0, le=10_000)] = 0
    at_once: bool = False


class Fleet(_Part, frozen=True, kw_only=True):
    """Workers `w0`.. lie in domains `d0`.. in turn, and serve `model`; the last of them serve `others`
    instead, further models with their numbers of workers (simulated only), of the same `hardware`, to
    which the same share of the requests goes. Control planes are `r0`.., members of etcd
    `e0`... `checkpoint_mb` is the budget of each host's state daemon; 0: no checkpoints.
    `checkpoint_file_mb` of files take blocks beyond that budget, regardless of their age.
    `canary_s`: time between two canaries to a worker; 0: none. `settings`: recorded settings of
    decisions that differ from the defaults, by the names that `relume config` lists.
    `disorder`, `limits`, `operator`: see there."""

    workers: Count
    model: str = "tiny"
    others: dict[Name, Count] = {}
    hardware: str = "cpu"
    domains: Count = 1
    control_planes: Annotated[int, Meta(ge=1, le=9)] = 1
    etcd: Annotated[int, Meta(ge=1, le=9)] = 1
    checkpoint_mb: Annotated[int, Meta(ge=0)] = 0
    checkpoint_file_mb: Annotated[int, Meta(ge=0)] = 0
    canary_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    settings: dict[str, int | str] = {}
    disorder: Disorder = Disorder()
    limits: Limits = Limits()
    operator: Commands = Commands()

    @property
    def models(self) -> dict[str, int]:
        """Number of workers by model, in the order of the workers."""
        return {self.model: self.workers - sum(self.others.values()), **self.others}

    @property
    def checkpoint_bytes(self) -> int:
        """Budget of each state daemon's memory; 0: there are none."""
        small_kb = self.limits.checkpoint_kb if self.checkpoint_mb else 0
        return small_kb << 10 or self.checkpoint_mb << 20

    def settings_of(self, part: str) -> dict[str, Any]:
        """The settings of one part, such as `waiting`, by their names without it."""
        return {
            name.partition(".")[2]: value
            for name, value in self.settings.items()
            if name.partition(".")[0] == part
        }


class Poisson(_Part, frozen=True, tag_field="kind", tag="poisson"):
    """Independent arrivals, on average `per_s` per second."""

    per_s: Positive


class Trace(_Part, frozen=True, tag_field="kind", tag="trace"):
    """Arrivals of a trace file (`traces.read`), `speed` times as fast."""

    file: str
    speed: Positive = 1.0


class Closed(_Part, frozen=True, tag_field="kind", tag="closed"):
    """`clients` that each send their next request `think_s` after an answer."""

    clients: Count
    think_s: Span = 0.0


class Burst(_Part, frozen=True, tag_field="kind", tag="burst"):
    """`size` requests at once, every `every_s`."""

    size: Count
    every_s: Positive


Arrivals = Poisson | Trace | Closed | Burst


class Fixed(_Part, frozen=True, tag_field="kind", tag="fixed"):
    """The same lengths for all, in tokens."""

    prompt: Count
    output: Count


class Uniform(_Part, frozen=True, tag_field="kind", tag="uniform"):
    """Lengths between bounds in tokens, inclusive."""

    prompt: tuple[Count, Count]
    output: tuple[Count, Count]


class FromTrace(_Part, frozen=True, tag_field="kind", tag="trace"):
    """Lengths of a trace file, drawn by the seed; with the arrivals of the same file, row by
    row. Longer ones are cut to the bounds, in tokens."""

    file: str
    prompt_most: Count = 100_000
    output_most: Count = 100_000


Lengths = Fixed | Uniform | FromTrace


class Tier(_Part, frozen=True):
    """A class of clients: its share of the requests and their priority (vLLM's: lower first). Names
    that are tiers of routing go into header `TIER`."""

    name: Name
    share: Share = 1.0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0


class Tenant(_Part, frozen=True):
    """A tenant that sends a share of the requests (`x-tenant-id`)."""

    name: Name
    share: Share = 1.0


class Sampling(_Part, frozen=True, kw_only=True):
    """Sampling parameters of a share of the requests. `seeded`: each gets a seed."""

    share: Share = 1.0
    temperature: NotNegative = 0.0
    top_p: Share = 1.0
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    seeded: bool = True


class Prefixes(_Part, frozen=True):
    """Shared prompts: each request begins with the first `tokens` of one of `groups` texts."""

    groups: Count
    tokens: Count


class Traffic(_Part, frozen=True, kw_only=True):
    """Ends after `requests`, or with arrivals at `for_s`, whichever comes first. `whole`: the share of
    requests that do not stream; `resumable`: the share whose clients lose their connections and
    return to their streams; `unusual`: the share of the others that is of `schedule.UNUSUAL`."""

    arrivals: Arrivals
    lengths: Lengths
    requests: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    for_s: Positive | None = None
    tiers: tuple[Tier, ...] = (Tier("default"),)
    sampling: tuple[Sampling, ...] = (Sampling(),)
    prefixes: Prefixes | None = None
    tenants: tuple[Tenant, ...] = ()
    whole: Annotated[float, Meta(ge=0, le=1)] = 0.0
    resumable: Annotated[float, Meta(ge=0, le=1)] = 0.0
    unusual: Annotated[float, Meta(ge=0, le=1)] = 0.0


class When(_Part, frozen=True, kw_only=True):
    """One of: a time; the `nth` event of a type whose fields match `where`; in the middle of the
    `nth` phase (`catalogue.PHASES`). `nth` may be bounds between which the seed draws. `after_s`:
    delay after an event."""

    at_s: Span | None = None
    event: str | None = None
    during: str | None = None
    where: dict[str, str | int | bool] = {}
    nth: Nth = 1
    after_s: Span = 0.0


class Fault(_Part, frozen=True, kw_only=True):
    """`what` is of `catalogue.FAULTS`. `target` is a name of the fleet, `any` (the seed chooses),
    `all`, `subject` (the target that the event names) or a role that the fault allows. `peer` is
    the other end of a link, `amount` the strength in the fault's own unit. `pause_ms`: of a slow
    worker, the time before each step in which its engine does nothing."""

    what: str
    when: When
    target: str = "any"
    peer: str | None = None
    for_s: Span | None = None
    amount: Positive | None = None
    pause_ms: Positive | None = None


class Bound(_Part, frozen=True):
    """Bounds of a figure of `catalogue.FIGURES`."""

    figure: str
    least: float | None = None
    most: float | None = None


class Scenario(_Part, frozen=True, kw_only=True):
    """A fleet, its traffic, its faults, and its bounds. `promises`: the promises to judge; None:
    all that have validators."""

    name: Name
    about: Annotated[str, Meta(min_length=10)]
    fleet: Fleet
    traffic: Traffic
    faults: tuple[Fault, ...] = ()
    expect: tuple[Bound, ...] = ()
    promises: tuple[str, ...] | None = None
