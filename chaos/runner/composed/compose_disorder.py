"""Histories in which records come late, limits that are reached, and ways to etcd that fail, for
composed scenarios.

Each kind makes what certain guards of the product wait for (`guards.toml`): rare as chance, and
common in a fleet that is large or old enough. Each seed draws them from its own random numbers, so that
they do not change the rest of its scenario.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random

from msgspec.structs import replace

from relume.chaos.scenario.language import (
    Closed,
    Commands,
    Fault,
    Fixed,
    Fleet,
    Limits,
    Prefixes,
    Traffic,
    Uniform,
    When,
)

Composed = tuple[Fleet, Traffic, tuple[Fault, ...]]

FEW_BLOCKS, BLOCK_TOKENS = 64, 32
"""KV blocks of an engine with little room, and tokens of a block (the simulated hosts' own)."""
FEWEST_AT_ONCE = 3
"""Number of the longest requests for which such an engine must have room."""


def late_records(
    seed: int, fleet: Fleet, traffic: Traffic, without: Collection[str], is_stuck: bool
) -> Composed:
    """In one of four seeds, one of `_KINDS`. Whether an engine has finished a stream that got stuck is
    known by its reports alone: then they come."""
    rng = Random(f"compose-late-records:{seed}")
    kind = rng.choice(_KINDS)
    if rng.random() >= 0.25 or (is_stuck and kind is _engine_dies):
        return fleet, traffic, ()
    fleet_of, traffic_of, faults = kind(rng, fleet, traffic)
    if {fault.what for fault in faults} & {*without}:
        return fleet, traffic, ()
    return fleet_of, traffic_of, faults


def paths_to_etcd(seed: int, fleet: Fleet, traffic: Traffic, without: Collection[str]) -> Composed:
    """In two of five seeds, a way to etcd fails, a member of etcd does, a clock is wrong, or a spool is
    torn."""
    rng = Random(f"compose-paths-to-etcd:{seed}")
    if rng.random() >= 0.4:
        return fleet, traffic, ()
    fleet_of, traffic_of, faults = rng.choice(_PATHS)(rng, fleet, traffic)
    if {fault.what for fault in faults} & {*without}:
        return fleet, traffic, ()
    return fleet_of, traffic_of, faults


def rolled(
    seed: int, fleet: Fleet, traffic: Traffic, faults: Sequence[Fault], without: Collection[str]
) -> Composed:
    """In one of six seeds without other commands, an operator restarts the engines one after the
    other, perhaps twice, and canaries check them or not. In half of these a worker answers with errors
    meanwhile, or wrongly if canaries can tell: the steps must wait for it."""
    rng = Random(f"compose-rolled:{seed}")
    commands = Commands(
        each=(("rollout",),), every_s=round(rng.uniform(0.5, 4), 2), most=rng.choice((1, 2))
    )
    canary_s = rng.choice((0.0, 1.0, 2.0))
    waits_for_effects = any(fault.when.during == "effect" for fault in faults)
    if rng.random() >= 1 / 6 or fleet.workers < 3 or fleet.operator.each or waits_for_effects:
        return fleet, traffic, ()
    rolled = replace(fleet, operator=commands, canary_s=fleet.canary_s or canary_s)
    what = "weights-flipped" if rolled.canary_s and rng.random() < 0.5 else "engine-errors"
    fault = _at(rng, what, 0.5, 6)
    if what == "engine-errors":
        fault = replace(fault, for_s=round(rng.uniform(1, 6), 3), amount=rng.choice((0.3, 1.0)))
    has_fault = rng.random() < 0.5 and what not in without
    if what in {fault.what for fault in faults}:
        has_fault = False
    return rolled, _steady(fleet, traffic), (fault,) if has_fault else ()


def small_limits(
    seed: int, fleet: Fleet, traffic: Traffic, faults: Sequence[Fault], needs_blocks: bool
) -> Fleet:
    """In one of four seeds, some limits are small: state daemons have room for a few requests, writers
    for a few segments, engines for a few requests, or for so little context that they preempt some:
    not where all engines die at once, or `FEWEST_AT_ONCE` of the longest requests have no room, since
    that is too little for what recovers then.
    `needs_blocks`: a fault waits for blocks that are held."""
    rng = Random(f"compose-limits:{seed}")
    limits = Limits(
        checkpoint_kb=rng.choice((0, 400, 1000, 2500)),
        unwritten_kb=rng.choice((0, 8, 64)),
        segment_bytes=rng.choice((0, 0, 0, 1024)),
        running=rng.choice((0, 8, 16)),
    )
    if rng.random() >= 0.25:
        return fleet
    do_fit = FEWEST_AT_ONCE * _longest(traffic) <= FEW_BLOCKS * BLOCK_TOKENS
    if do_fit and ("engine-kill", "all") not in {(fault.what, fault.target) for fault in faults}:
        limits = replace(limits, kv_blocks=rng.choice((0, FEW_BLOCKS)))
    if needs_blocks or not fleet.checkpoint_mb:
        limits = replace(limits, checkpoint_kb=0)
    return replace(fleet, limits=limits)


def _longest(traffic: Traffic) -> int:
    """Maximum number of tokens of a request."""
    lengths = traffic.lengths
    match lengths:
        case Fixed():
            return lengths.prompt + lengths.output
        case Uniform():
            return lengths.prompt[1] + lengths.output[1]
    return lengths.prompt_most + lengths.output_most


def _engine_dies(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """Reports of engines are under way while these die, also of what their prefix caches gain."""
    delay_ms = rng.choice((150, 500, 2000, 4000))
    disorder = replace(fleet.disorder, report_delay_ms=delay_ms, kept_reports=0)
    traffic = _steady(fleet, traffic)
    traffic = replace(traffic, prefixes=Prefixes(rng.choice((4, 16)), rng.choice((64, 128))))
    faults = tuple(_at(rng, "engine-kill", 0.5, 6) for _ in range(rng.randint(1, 3)))
    return replace(fleet, disorder=disorder), traffic, faults


def _writer_is_late(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """What one process writes is under way for long, also when it dies."""
    planes = max(fleet.control_planes, 2)
    is_agent = rng.random() < 0.5
    name = f"w{rng.randrange(fleet.workers)}" if is_agent else f"r{rng.randrange(planes)}"
    kills = ("engine-kill", "agent-kill") if is_agent else ("gateway-kill",)
    faults = [replace(_at(rng, rng.choice(kills), 0.5, 8), target=name)]
    late_ms = rng.choice((20, 200, 500, 900))
    disorder = replace(fleet.disorder, late_writer=name, late_writer_ms=late_ms)
    if rng.random() < 0.5:
        faults = []
    return replace(fleet, control_planes=planes, disorder=disorder), traffic, tuple(faults)


def _ends_are_lost(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """Clients lose their connections when all bytes are on their way, and return to another replica;
    of one replica the log hears late."""
    disorder = replace(
        fleet.disorder, lost_ends=rng.choice((0.2, 0.5)), late_writer="r0",
        late_writer_ms=rng.choice((0, 100, 600, 900)),
    )  # fmt: skip
    fleet = replace(fleet, control_planes=max(fleet.control_planes, 2), disorder=disorder)
    traffic = replace(_steady(fleet, traffic), whole=0.0, resumable=0.9)
    return fleet, traffic, ()


def _replica_stands_still(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """It has dispatched what it has not written yet, and stands still until the leader has ended
    that."""
    disorder = replace(fleet.disorder, late_writer="r0", late_writer_ms=rng.choice((100, 600)))
    fleet = replace(fleet, control_planes=max(fleet.control_planes, 2), disorder=disorder)
    stop = replace(_at(rng, "leader-stop", 1, 4), target="r0", for_s=round(rng.uniform(78, 90), 2))
    resumable = rng.choice((0.0, 0.5))
    return fleet, replace(_steady(fleet, traffic), whole=0.0, resumable=resumable), (stop,)


def _leaders_take_turns(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """The leader stands still; so does the next one, and the first continues when the stream of
    leaders has no owner."""
    fleet = replace(fleet, control_planes=2)
    at_s = round(rng.uniform(1, 3), 3)
    first = Fault(what="leader-stop", when=When(at_s=at_s), target="r0", for_s=30.0)
    second_s = round(at_s + 30 - rng.uniform(8, 11), 3)
    second = Fault(what="leader-stop", when=When(at_s=second_s), target="r1", for_s=14.0)
    return fleet, _steady(fleet, traffic), (first, second)


def _worker_is_away(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """A worker is declared lost while its daemon takes blocks, and then writes of them."""
    fleet = replace(fleet, checkpoint_mb=max(fleet.checkpoint_mb, 64))
    cut = replace(_at(rng, "cut", 0.5, 3), peer="etcd", for_s=round(rng.uniform(14, 25), 2))
    return fleet, _steady(fleet, traffic), (cut,)


def _operator_is_hasty(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """An operator restarts workers that are held, or that have just restarted; of one the log hears
    late."""
    groups = rng.choice(
        (
            (("restart",), ("restart",), ("hold", "restart"), ("release",)),
            (("hold",), ("restart", "drain"), ("undrain", "release"), ("restart",)),
            (("drain", "restart"), ("restart",), ("undrain", "resign")),
        )
    )
    every_s, late_ms = rng.choice((0.2, 0.5, 1.0)), rng.choice((0, 200, 400))
    commands = Commands(each=groups, every_s=every_s, most=len(groups) * rng.randint(1, 3))
    disorder = fleet.disorder
    if late_ms:
        disorder = replace(disorder, late_writer="w0", late_writer_ms=late_ms)
    return replace(fleet, operator=commands, disorder=disorder), _steady(fleet, traffic), ()


def _replica_is_cut_off(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """A replica loses etcd in one direction or both, for less or more than its lease."""
    what = rng.choice(("replica-cut", "replica-calls-lost", "replica-answers-lost"))
    target, for_s = rng.choice(("any", "leader")), round(rng.uniform(1, 20), 2)
    fleet = replace(fleet, control_planes=max(fleet.control_planes, 2))
    cut = replace(_at(rng, what, 0.5, 6), target=target, for_s=for_s)
    return fleet, _steady(fleet, traffic), (cut,)


def _member_fails(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """A member of etcd loses its peers, its disk or its watches; another one may lose them later. Or
    members defragment, one after the other, or one is replaced."""
    fleet = replace(fleet, etcd=3)
    upkeep_of = rng.choice(((), (), ("etcd-defragment",) * 3, ("etcd-replace",)))
    if upkeep_of:
        upkeep = [replace(_at(rng, what, 0.5, 9), target="any") for what in upkeep_of]
        return fleet, _steady(fleet, traffic), tuple(upkeep)
    faults = [
        replace(
            _at(rng, rng.choice(("etcd-cut", "disk-hangs", "watch-silent")), first_s, first_s + 4),
            target=rng.choice(("any", "leader", "follower")),
            for_s=round(rng.uniform(1, 18), 2),
        )
        for first_s in rng.choice(((0.5,), (0.5, 3.0), (0.5, 8.0)))
    ]
    return fleet, _steady(fleet, traffic), tuple(faults)


def _clocks_differ(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """Wall clocks of replicas and workers are wrong, or leases end early."""
    whats = rng.choice(
        (
            ("replica-clock-jump", "replica-clock-back"),
            ("replica-clock-drift", "clock-drift"),
            ("etcd-clock-jump", "replica-clock-jump"),
            ("etcd-clock-jump", "clock-drift"),
            ("etcd-clock-drift", "replica-clock-jump"),
            ("etcd-clock-drift", "etcd-clock-jump"),
        )
    )
    faults = []
    for what in whats:
        low, high = _AMOUNTS[what]
        fault = replace(_at(rng, what, 0.5, 6), amount=float(rng.randint(low, high)))
        if what.startswith("etcd-"):
            fault = replace(fault, target="leader")
        if what.endswith("-drift"):
            fault = replace(fault, for_s=round(rng.uniform(2, 15), 2))
        faults.append(fault)
    return fleet, _steady(fleet, traffic), tuple(faults)


def _spool_is_torn(rng: Random, fleet: Fleet, traffic: Traffic) -> Composed:
    """A process loses etcd, and dies; the end of its spool is torn or corrupt."""
    fleet = replace(fleet, control_planes=max(fleet.control_planes, 2))
    at_s, for_s = round(rng.uniform(1, 4), 3), round(rng.uniform(6, 18), 2)
    torn_s = round(at_s + rng.uniform(2.5, 5), 3)
    what, target = rng.choice(
        (
            ("replica-spool-torn", "r0"),
            ("replica-spool-corrupt", "r0"),
            ("agent-spool-torn", "w0"),
            ("agent-spool-corrupt", "w0"),
        )
    )
    cut = Fault(what="etcd-stop", when=When(at_s=at_s), target="all", for_s=for_s)
    torn = Fault(what=what, when=When(at_s=torn_s), target=target)
    return fleet, _steady(fleet, traffic), (cut, torn)


def _steady(fleet: Fleet, traffic: Traffic) -> Traffic:
    """Enough requests at all times."""
    return replace(
        traffic,
        arrivals=Closed(4 * fleet.workers, (0.0, 0.2)),
        lengths=Uniform((16, 400), (32, 160)),
        requests=max(traffic.requests or 0, 96),
    )


def _at(rng: Random, what: str, first_s: float, last_s: float) -> Fault:
    return Fault(what=what, when=When(at_s=round(rng.uniform(first_s, last_s), 3)), target="any")


_AMOUNTS = {
    "replica-clock-jump": (1, 7200), "replica-clock-back": (1, 7200), "etcd-clock-jump": (1, 20),
    "etcd-clock-drift": (100, 1_000_000),
    "replica-clock-drift": (100, 500_000), "clock-drift": (100, 500_000),
}  # fmt: skip

_PATHS: tuple[Callable[[Random, Fleet, Traffic], Composed], ...] = (
    _replica_is_cut_off,
    _member_fails,
    _clocks_differ,
    _spool_is_torn,
    _spool_is_torn,
)

_KINDS: tuple[Callable[[Random, Fleet, Traffic], Composed], ...] = (
    _engine_dies,
    _engine_dies,
    _writer_is_late,
    _ends_are_lost,
    _replica_stands_still,
    _leaders_take_turns,
    _worker_is_away,
    _operator_is_hasty,
)
