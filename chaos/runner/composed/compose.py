"""A scenario drawn from a seed: fleet, traffic and faults in combinations that no one designed.

It draws only faults whose feature exists, and gives the fleet what each fault needs. Such a
scenario has few bounds: the promises must hold in every run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from msgspec.structs import replace

from relume.chaos.runner.composed.compose_disorder import (
    late_records,
    paths_to_etcd,
    rolled,
    small_limits,
)
from relume.chaos.runner.composed.compose_faults import (
    ABSURD,
    ANSWERS,
    DAMAGED,
    ERRORS,
    FEWEST_PLANES,
    FRAMES,
    GARBLED,
    HALF,
    SLOW,
    STRAY,
    STUCK,
    TERMINATE,
    UNREADABLE,
    absurd,
    at_effects,
    cut_from_half,
    damaged,
    drawn_fault,
    four_replicas,
    garbled,
    nobody_left,
    of_answers,
    of_errors,
    of_frames,
    slow_link,
    stray,
    stuck_streams,
    terminated,
    unreadable,
)
from relume.chaos.runner.composed.compose_models import one_of_second, two_models
from relume.chaos.runner.composed.compose_operator import operated
from relume.chaos.runner.composed.compose_settings import other_settings, with_part, without_part
from relume.chaos.scenario.catalogue import FAULTS, applicable
from relume.chaos.scenario.checks import HOLDERS
from relume.chaos.scenario.language import (
    Arrivals,
    Bound,
    Burst,
    Closed,
    Disorder,
    Fault,
    Fixed,
    Fleet,
    Poisson,
    Prefixes,
    Sampling,
    Scenario,
    Tenant,
    Tier,
    Traffic,
    Uniform,
    When,
)  # fmt: skip
from relume.chaos.validators.former_log import RENEWAL
from relume.policies.degradation.degradation_settings import ON

COMPOSED = "composed"
"""Name of such a scenario in commands."""

_LATER = ("cpu-limit", "gateway-cpu-limit", "disk-full", "holder-stop", "clock-back")
"""Drawn separately, like `SLOW`: they do not change the rest of a seed's scenario."""

_FLIPPED = "weights-flipped"
"""Drawn separately too, with canaries, which find it."""

_FILES = "model-file-damaged"
"""Drawn separately too, beside flipped weights of the same worker: it is to leave quarantine."""

_UNSEEN = "weights-flipped-unseen"
"""Drawn separately too, with cross-checks of all requests, which find it."""

_PATHS = (
    "replica-cut", "replica-calls-lost", "replica-answers-lost", "replica-spool-torn",
    "replica-clock-jump", "replica-clock-back", "replica-clock-drift", "disk-hangs", "etcd-cut",
    "watch-silent", "etcd-clock-jump", "etcd-clock-drift", "clock-drift", "agent-spool-torn", "etcd-defragment",
    "etcd-replace", "replica-spool-corrupt", "agent-spool-corrupt",
)  # fmt: skip
"""Drawn by `paths_to_etcd`."""

NOT_DRAWN = (RENEWAL,)
"""A log that ends is no part of any composed scenario: a run is judged by one log, whatever strikes it."""

_APART = (
    SLOW, *_LATER, *FRAMES, *ANSWERS, ERRORS, STUCK, _FLIPPED, _FILES, _UNSEEN, UNREADABLE, GARBLED,
    TERMINATE, DAMAGED, STRAY, ABSURD, HALF, *_PATHS, *NOT_DRAWN,
)  # fmt: skip

_IN_RECOVERY = (
    ("engine-kill", "restore", "subject"), ("engine-kill", "restore", "subject"),
    ("engine-kill", "recovery", "subject"), ("engine-kill", "engine-start", "subject"),
    ("engine-kill", "checkpoint", "subject"), ("agent-kill", "restore", "subject"),
    ("agent-kill", "engine-start", "subject"), ("holder-kill", "restore", "any"),
    ("gateway-kill", "recovery", "leader"), ("gateway-kill", "restore", "any"),
)  # fmt: skip
"""Fault, phase of a recovery in whose middle it strikes, and target."""


def compose(seed: int, without: Collection[str] = ()) -> Scenario:
    """The scenario of `seed`; faults named in `without` are left out."""
    rng = Random(f"compose:{seed}")
    kinds = [name for name in FAULTS if applicable(name) and name not in (*without, *_APART)]
    chosen = [rng.choice(kinds) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))] if kinds else []
    fleet = _fleet(rng, chosen)
    traffic = _traffic(rng)
    fleet, traffic, later = _later(seed, fleet, traffic, without)
    fleet, traffic = _with_queueing(seed, fleet, traffic)
    fleet, traffic, again = _in_recovery(seed, fleet, traffic, without)
    traffic = _clients(seed, traffic)
    if not again:  # it needs its traffic
        fleet, traffic = _short_of_capacity(seed, fleet, traffic)
    fleet, traffic = _with_spares(seed, fleet, traffic)
    fleet, traffic, while_away = _while_away(seed, fleet, traffic, without)
    fleet, flipped = _flipped(seed, fleet, without)
    fleet, unseen = _checked(seed, fleet, without)
    fleet = four_replicas(seed, fleet)
    is_stuck = bool(stuck_streams(seed, fleet, without))
    fleet = _in_disorder(seed, fleet, is_stuck)
    late: tuple[Fault, ...] = ()
    if not (later or again):  # these need their traffic
        fleet, traffic, late = late_records(seed, fleet, traffic, without, is_stuck)
    paths: tuple[Fault, ...] = ()
    if not (later or again or late or is_stuck):
        fleet, traffic, paths = paths_to_etcd(seed, fleet, traffic, without)
    faults = (
        *(drawn_fault(name, FAULTS[name], fleet, rng) for name in chosen),
        *at_effects(seed, fleet, without),
        *slow_link(seed, without),
        *later,
        *again,
        *of_frames(seed, fleet, without),
        *of_answers(seed, fleet, without),
        *of_errors(seed, fleet, without),
        *while_away,
        *nobody_left(seed, without),
        *unreadable(seed, without),
        *damaged(seed, without),
        *stray(seed, without),
        *cut_from_half(seed, fleet, without),
        *absurd(seed, without),
        *garbled(seed, fleet, without),
        *terminated(seed, without),
        *stuck_streams(seed, fleet, without),
        *flipped,
        *unseen,
        *late,
        *paths,
    )
    if not (later or again or late or is_stuck):
        fleet, traffic, meanwhile = rolled(seed, fleet, traffic, faults, without)
        faults += meanwhile
    is_free = not (later or again or late or paths or is_stuck or fleet.settings_of("waiting"))
    fleet = two_models(seed, fleet)
    for element in (one_of_second, operated) if is_free else ():
        fleet, traffic, meanwhile = element(seed, fleet, traffic, faults, without)
        faults += meanwhile
    fleet = other_settings(seed, fleet)
    fleet = small_limits(seed, fleet, traffic, faults, needs_blocks=bool(later or again))
    return Scenario(
        name=f"composed-{seed}",
        about=f"Drawn from seed {seed}.",
        fleet=fleet,
        traffic=traffic,
        faults=faults,
        expect=_expected(traffic, faults),
    )


def _expected(traffic: Traffic, faults: Sequence[Fault]) -> tuple[Bound, ...]:
    """Enough to prove something: all requests, and half of the faults. One that is drawn for a phase of
    a recovery, or for a holder that has blocks, may find none; the run is judged by what struck."""
    requests = Bound("requests", least=traffic.requests)
    return (
        (requests, Bound("faults_fired", least=(len(faults) + 1) // 2)) if faults else (requests,)
    )


def _later(
    seed: int, fleet: Fleet, traffic: Traffic, without: Collection[str]
) -> tuple[Fleet, Traffic, tuple[Fault, ...]]:
    """In one of five seeds, a fault of `_LATER`, and a fleet and traffic that it can strike."""
    rng = Random(f"compose-later:{seed}")
    what = rng.choice(_LATER)
    if rng.random() >= 0.2 or what in without:
        return fleet, traffic, ()
    if what == "disk-full":
        traffic = replace(
            traffic, arrivals=Closed(4 * fleet.workers), lengths=Uniform((200, 500), (64, 192))
        )
        fleet = replace(fleet, checkpoint_mb=1, checkpoint_file_mb=rng.choice((2, 8, 64)))
    elif what == "holder-stop" and not fleet.checkpoint_mb:
        fleet = replace(fleet, checkpoint_mb=rng.choice((8, 64)))
    return fleet, traffic, (drawn_fault(what, FAULTS[what], fleet, rng),)


def _in_recovery(
    seed: int, fleet: Fleet, traffic: Traffic, without: Collection[str]
) -> tuple[Fleet, Traffic, tuple[Fault, ...]]:
    """In one of six seeds, an engine dies, and one or two further processes die during the
    recovery. Drawn separately, as above."""
    rng = Random(f"compose-recovery:{seed}")
    steps = rng.choices(_IN_RECOVERY, k=rng.choice((1, 1, 2)))
    if rng.random() >= 1 / 6 or {"engine-kill", *(what for what, _, _ in steps)} & {*without}:
        return fleet, traffic, ()
    held = When(event="CheckpointsAcknowledged", nth=rng.randint(12, 48))
    faults = [Fault(what="engine-kill", when=held, target="subject")]
    for what, phase, target in steps:
        faults.append(Fault(what=what, when=When(during=phase), target=target))
    # Enough that something is restored.
    traffic = replace(
        traffic, arrivals=Closed(4 * fleet.workers), lengths=Uniform((100, 400), (192, 320))
    )
    fleet = replace(fleet, checkpoint_mb=max(fleet.checkpoint_mb, 64))
    fleet = without_part(fleet, "waiting")
    if any(what == "gateway-kill" for what, _, _ in steps):
        fleet = replace(fleet, control_planes=max(fleet.control_planes, 2))
    return fleet, traffic, tuple(faults)


def _with_queueing(seed: int, fleet: Fleet, traffic: Traffic) -> tuple[Fleet, Traffic]:
    """In one of eight seeds, workers reach their limit with few requests, so that arrivals queue,
    by tier and tenant. Drawn separately, as above."""
    rng = Random(f"compose-room:{seed}")
    if rng.random() >= 0.125:
        return fleet, traffic
    waiting = {"queued": rng.choice((1, 1, 2, 4)), "requests": rng.choice((4, 32, 4096))}
    if rng.random() < 0.3:
        waiting["ahead_ms"] = rng.choice((5, 50, 500))
    if rng.random() < 0.5:
        waiting |= {"age_ms": rng.choice((0, 500)), "most_ms": rng.choice((500, 5_000))}
    tiers = (Tier("interactive", 0.25), Tier("standard", 0.25), Tier("batch", 0.5))
    tenants = (Tenant("many", 0.75), Tenant("few", 0.25))
    arrivals = rng.choice((traffic.arrivals, Burst(rng.choice((32, 96)), 4.0)))
    traffic = replace(traffic, tiers=tiers, tenants=tenants, arrivals=arrivals)
    return with_part(fleet, "waiting", waiting), traffic


def _clients(seed: int, traffic: Traffic) -> Traffic:
    """In one of five seeds, some clients do not stream, or return to their streams. In one of four,
    some of the others send unusual requests. Drawn separately, as above."""
    rng = Random(f"compose-clients:{seed}")
    whole, resumable = rng.choice((0.0, 0.2, 0.4)), rng.choice((0.2, 0.5))
    if rng.random() < 0.2:
        traffic = replace(traffic, whole=whole, resumable=resumable)
    rng = Random(f"compose-unusual:{seed}")
    unusual = rng.choice((0.2, 0.5, 1.0))
    return replace(traffic, unusual=unusual) if rng.random() < 0.25 else traffic


def _short_of_capacity(seed: int, fleet: Fleet, traffic: Traffic) -> tuple[Fleet, Traffic]:
    """In one of twelve seeds, so little of the capacity counts that the fleet degrades soon, and the
    traffic lasts for it. Drawn separately, as above."""
    rng = Random(f"compose-degraded:{seed}")
    limits: dict[str, int | str] = {
        "mode": ON, "window_ticks": rng.randint(2, 5), "rise_ticks": rng.randint(1, 3),
        "fall_ticks": rng.randint(1, 4), "usable_percent": rng.choice((1, 1, 2, 4, 8)),
    }  # fmt: skip
    per_s = round(rng.uniform(2, 5), 2)
    if rng.random() >= 1 / 12:
        return fleet, traffic
    limits["batch_percent"] = rng.choice((100, 75, 60))
    tiers = (Tier("interactive", 0.25), Tier("standard", 0.25), Tier("batch", 0.5))
    traffic = replace(
        traffic,
        arrivals=Poisson(per_s),
        lengths=Uniform((16, 200), (16, 96)),  # the engines are not really short
        requests=int(per_s * 30),
        tiers=tiers,
    )
    return with_part(fleet, "degradation", limits), traffic


def _with_spares(seed: int, fleet: Fleet, traffic: Traffic) -> tuple[Fleet, Traffic]:
    """In one of six seeds, fleets of four workers or more have spares, which replace one another soon. In
    half of these, requests of all tiers arrive at workers that few of them fill. Drawn separately, as above."""
    rng = Random(f"compose-spares:{seed}")
    spares = {"share_percent": rng.choice((5, 10, 30, 50)), "dwell_ticks": rng.choice((1, 2, 5))}
    if rng.random() >= 1 / 6 or fleet.workers < 4:
        return fleet, traffic
    fleet = with_part(fleet, "spares", spares)
    limited = fleet.settings_of("waiting") or fleet.settings_of("degradation")
    if rng.random() < 0.5 or limited:
        return fleet, traffic
    tiers = (Tier("interactive", 0.25), Tier("standard", 0.25), Tier("batch", 0.5))
    waiting = {"queued": rng.choice((1, 2, 4)), "requests": rng.choice((32, 4096))}
    return with_part(fleet, "waiting", waiting), replace(traffic, tiers=tiers)


def _while_away(
    seed: int, fleet: Fleet, traffic: Traffic, without: Collection[str]
) -> tuple[Fleet, Traffic, tuple[Fault, ...]]:
    """In one of six seeds, nearly all clients return to their streams. Meanwhile an operator's
    drains move the streams, and gateways, engines and holders die. Drawn separately, as above."""
    rng = Random(f"compose-while-away:{seed}")
    more = rng.choices(("gateway-kill", "engine-kill", "holder-kill"), k=rng.choice((1, 2, 3)))
    nth, times = rng.randint(4, 16), [round(rng.uniform(1, 12), 3) for _ in more]
    every, greedy = rng.random() < 0.3, rng.choice((0.25, 0.75))
    if rng.random() >= 1 / 6 or {"agent-kill", *more} & {*without}:
        return fleet, traffic, ()
    faults = [Fault(what="agent-kill", when=When(during="effect", nth=nth), target="subject")]
    for what, at_s in zip(more, times, strict=True):
        target = "all" if every and what == "holder-kill" else "any"
        faults.append(Fault(what=what, when=When(at_s=at_s), target=target))
    fleet = replace(
        fleet,
        control_planes=max(fleet.control_planes, 2),
        checkpoint_mb=max(fleet.checkpoint_mb, 64),
    )
    traffic = replace(
        traffic,
        lengths=Uniform((16, 200), (128, 320)),
        sampling=(
            Sampling(share=greedy),
            Sampling(share=1 - greedy, temperature=1.0, seeded=False),
        ),
        whole=0.0,
        resumable=0.9,
    )
    return fleet, traffic, tuple(faults)


def _flipped(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fleet, tuple[Fault, ...]]:
    """In one of ten seeds, a worker's weights are damaged, and agents send canaries. In half of these its
    model files are damaged too. Drawn separately, as above."""
    rng = Random(f"compose-flipped:{seed}")
    at_s, canary_s = round(rng.uniform(0.5, 6), 3), round(rng.uniform(1, 3), 2)
    if rng.random() >= 0.1 or _FLIPPED in without:
        return fleet, ()
    fleet = replace(fleet, canary_s=canary_s)
    files = Random(f"compose-files:{seed}")
    if _FILES in without or files.random() >= 0.5:
        return fleet, (Fault(what=_FLIPPED, when=When(at_s=at_s), target="any"),)
    target, before_s = f"w{files.randrange(fleet.workers)}", round(files.uniform(0, at_s), 3)
    return fleet, (
        Fault(what=_FILES, when=When(at_s=before_s), target=target),
        Fault(what=_FLIPPED, when=When(at_s=at_s), target=target),
    )


def _checked(seed: int, fleet: Fleet, without: Collection[str]) -> tuple[Fleet, tuple[Fault, ...]]:
    """In one of six seeds, idle engines answer each finished request again. In half of these a worker's
    weights are damaged where no canary touches them. Drawn separately, as above."""
    rng = Random(f"compose-checked:{seed}")
    at_s, canary_s = round(rng.uniform(0.5, 4), 3), round(rng.uniform(1, 3), 2)
    is_damaged, budget_ppm = rng.random() < 0.5, rng.choice((2_000, 1_000_000))
    if rng.random() >= 1 / 6:
        return fleet, ()
    checks = {"share_ppm": 1_000_000, "budget_ppm": budget_ppm}
    fleet = with_part(fleet, "crosscheck", checks)
    if not is_damaged or _UNSEEN in without:
        return fleet, ()
    fault = Fault(what=_UNSEEN, when=When(at_s=at_s), target="any")
    return replace(fleet, canary_s=fleet.canary_s or canary_s), (fault,)


def _in_disorder(seed: int, fleet: Fleet, is_stuck: bool) -> Fleet:
    """In one of four seeds, reports of engines are late or dropped, and notices of deaths come twice.
    Drawn separately, as above. Whether an engine has finished a stream that got stuck is known by its
    reports alone: then they come."""
    rng = Random(f"compose-disorder:{seed}")
    delay_ms, report_limit = rng.choice((0, 20, 200, 1500, 3000)), rng.choice((0, 0, 2, 16))
    repeated = rng.random() < 0.5
    if rng.random() >= 0.25:
        return fleet
    if is_stuck:
        delay_ms, report_limit = min(delay_ms, 200), 0
    return replace(
        fleet,
        disorder=Disorder(
            report_delay_ms=delay_ms, kept_reports=report_limit, notices_repeated=repeated
        ),
    )


def _fleet(rng: Random, faults: Collection[str]) -> Fleet:
    workers = rng.choice((2, 3, 4, 4, 6, 8, 12))
    held = bool(HOLDERS.intersection(faults)) or rng.random() < 0.7
    control_planes = max([rng.choice((1, 2, 2, 3)), *(FEWEST_PLANES.get(f, 1) for f in faults)])
    return Fleet(
        workers=workers,
        domains=rng.randint(2, workers),
        control_planes=control_planes,
        etcd=rng.choice((1, 3)),
        checkpoint_mb=rng.choice((8, 64, 256)) if held else 0,
    )


def _traffic(rng: Random) -> Traffic:
    arrivals: Arrivals = rng.choice(
        (
            Closed(rng.choice((2, 8, 16, 24)), (0.0, round(rng.uniform(0, 1), 2))),
            Poisson(round(rng.uniform(1, 12), 2)),
            Burst(rng.choice((4, 16, 32)), round(rng.uniform(1, 8), 2)),
        )
    )
    prompt, output = rng.choice((16, 64, 300, 900)), rng.choice((8, 64, 192))
    lengths = rng.choice(
        (Fixed(prompt, output), Uniform((4, prompt), (2, output)), Uniform((16, 400), (64, 192)))
    )
    tiers: tuple[Tier, ...] = (Tier("default"),)
    if rng.random() < 0.3:
        tiers = (Tier("gold", 0.25, -5), Tier("free", 0.75, 5))
    sampling: tuple[Sampling, ...] = (Sampling(),)
    if rng.random() < 0.4:
        sampling = (
            Sampling(share=0.5),
            Sampling(share=0.25, temperature=0.8, top_p=0.95),
            Sampling(share=0.25, temperature=1.0, seeded=False),
        )
    prefixes = None
    if rng.random() < 0.3:
        prefixes = Prefixes(rng.choice((1, 4)), rng.choice((16, 64)))
    return Traffic(
        arrivals=arrivals,
        lengths=lengths,
        requests=rng.choice((24, 48, 96, 160)),
        for_s=None,
        tiers=tiers,
        sampling=sampling,
        prefixes=prefixes,
    )
