"""The frozen logs: what each is, byte for byte, and what it must hold.

Run as `python -m tests.replay.frozen` it reads them all, takes every decision again, explains
requests, and prints what came out as JSON: equal in every environment.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from relume.controlplane.replay.divergence import Verdict
from relume.controlplane.replay.recorded_log import History, from_file
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet, dump, load, state_hash
from relume.policies.state.fold import apply_group

FOLDER = Path(__file__).parent / "logs"
MOST_EXPLAINED = 320
"""Maximum number of requests of a log that are explained."""

FROZEN: dict[str, tuple[str, tuple[type, ...]]] = {
    "admission-deadlines": (
        "2c6ad2d5eecf8920276187fceac30f39188aec3a2451313464bc1d88ca71a765",
        (v.RequestHeld, v.RequestShed, v.ConfigChanged),
    ),
    "admission-steady": (
        "46931f10fb25a4490d41abe23a2a630c30a6f680333488d211459c889288dd08",
        (v.RequestHeld, v.RequestShed),
    ),
    "admission": (
        "8748d0ac15fe1e05256fa87fb80db701491e6384979555ce56201bb00604eb10",
        (v.RequestHeld, v.RequestShed, v.ConfigChanged),
    ),
    "batch-passes": (
        "c00962d2653709e2594cc9ac3166f0bf93b6120596309458c043721541481e57",
        (v.RequestHeld, v.SparesDecided),
    ),
    "batch-spares": (
        "a410c82146227a22d610395b4133a72a6e133a5f4689d53ea210ea95daea8be2",
        (v.RequestHeld, v.SparesDecided),
    ),
    "breaker": (
        "d278ad021ca5eab2449c2f390121dc1a7ed5a50f5d84b0851e0b9c0e50ee116c",
        (v.HealthDecided, v.TransportObserved),
    ),
    "churn": (
        "b33ab8f25aac88954073d2c9b184360e0d0ef5dc75906e2d476b949a569de33e",
        (v.WorkerRegistered, v.WorkerDeregistered, v.WorkerLost),
    ),
    "cross-checks": (
        "08fc7868d70bb67c39a0d20ec0295d4b2fe6f9ea5a8f96fca4d2baaf332f8896",
        (
            v.CrossCheckDecided,
            v.CrossChecked,
            v.CanaryReported,
            v.CanaryValuesDecided,
            v.HealthDecided,
            v.EffectsDecided,
        ),
    ),
    "degradation": (
        "470f8cc14d9f1949c0139fccac8325ac44ac5099a9eee66dd74bde6f02c29ce3",
        (v.DegradationDecided, v.RequestShed, v.ConfigChanged),
    ),
    "detached-moves": (
        "e4e0e417a6849edadbe63b32c02b20d3ceb70116aff63dfa629b5586c4fbfcee",
        (v.MigrationPlanned, v.MigrationAbandoned, v.ClientReturned, v.RestoreDone),
    ),
    "engine-killed": (
        "d289e02673db0f71a0c05eb0d9a2bdaa7a69d7179bdf2da2dc49a7faae1ba632",
        (v.RecoveryPlanned, v.RestoreDone, v.EngineDied, v.HolderChosen),
    ),
    "forgetting": (
        "7c24269d8edd0a8c56cf9f104d3647e69cdfc0cc4d9d52d79090fbf7bb96b8b5",
        (v.WorkerForgotten, v.WorkerDeregistered),
    ),
    "gateway-restarted": (
        "b69b043e1b0199d8561fd1cad6e1cfad237ab9ffb172a1fe386e7199537577e4",
        (v.ReplicaStarted, v.RequestEnded),
    ),
    "hangs": (
        "d4a7ab7cdda6095e4c93c84f17ab8f88d20a4ffdc0124438947677b3518cdb2e",
        (v.EngineHung, v.EngineRecovered, v.StallJudged, v.StreamJudged, v.HealthDecided),
    ),
    "late-command": (
        "5c5fd5bb9c5c3e93e426ad2e506760a0d41130e7a887a5388a4a591770bb9f55",
        (v.AdminCommanded, v.ConfigChanged, v.EffectsDecided, v.StreamResumed),
    ),
    "leader": (
        "1145d3a7fc5112ce7a6c22ac1e2eb19f09aa176962f1b7b6d33d9f4fc0ff10dc",
        (
            v.EffectsDecided,
            v.EffectApplied,
            v.LeaderResigned,
            v.ReplicaLost,
            v.AdminCommanded,
            v.EngineDied,
        ),
    ),
    "migration": (
        "4c83e5fd69a16d9e7832569287d484d3b1da85b3ff29c29a7de205256d1a5b0d",
        (v.MigrationPlanned, v.TransportObserved, v.RestoreDone, v.ConfigChanged),
    ),
    "one-estimate": (
        "6f04993204902230866c106bb7ee9bc7ecbdf852f5dba6ba26075893699c9c24",
        (v.RouteDecided, v.EngineDied, v.TransportObserved),
    ),
    "out-of-reach": (
        "d812cf339fdb8c2a0c3389c474d8f6abd0e6349b5aea9a6a90ebf8fba81782d9",
        (v.StreamJudged, v.TransportObserved, v.HealthDecided, v.WorkerCleared),
    ),
    "outage": (
        "aa814455256ef4b65628bcbd10d5a52480098639a100ea9caf84c085e3ab776f",
        (v.StreamResumed, v.EngineDied),
    ),
    "plain": (
        "4f707fe4a0c7e50b4544369c08340d9a8e4ba4983f424dba70013eff777abd58",
        (v.EngineReady, v.EngineDied, v.WorkerDeregistered),
    ),
    "pressure": (
        "74795b4a3fbc7c3d50fa54696214780f18e1077c827f855d2cfd35645480ec5d",
        (v.SnapshotTaken, v.DetailDecided, v.RestoreDone),
    ),
    "log-begun": (
        "af1f1a64a590b74238805bd0966b747e790fdcebf53fdcaab9292411f3f870f0",
        (v.ClientReturned, v.CheckpointsAcknowledged, v.RestoreDone, v.EngineDied),
    ),
    "rare-failures": (
        "ff073e9856313abf6086f48ea4b72a5e4d6a71b61b574ef6f75ab04e43b7d38e",
        (v.HealthDecided, v.TransportObserved),
    ),
    "recoveries": (
        "47c9b73af0294efcb3a8a737d194ff1e43c9e06930064ac48a7550b781708e95",
        (v.RecoveryPlanned, v.RestoreDone, v.ConfigChanged),
    ),
    "regenerated": (
        "ddef4e19bdb3463f7a5c158ea90c407babd47c6c229f23fae636ec39c9574e49",
        (v.ClientReturned, v.ReplicaLost, v.ReplicaStopped, v.RecoveryPlanned),
    ),
    "restores": (
        "a4819189346b5df88b395b9fe2dde4efae1df4c481a3fe86fa0eed96be7ff3ea",
        (v.RestoreDone, v.RestoreFailed, v.StateDaemonLost, v.RecoveryPlanned),
    ),
    "resumable": (
        "c8adcc6ef4523a1843564db5ed04effb7d79170fa00bc070a1761fd6f6713207",
        (v.ClientReturned, v.ReplicaLost, v.TimerFired, v.EngineDied),
    ),
    "routing": (
        "4416ded8db4c24ce74e1999268cf0baf7baf8ed602695650b130f2a86d6d0014",
        (v.RouteDecided, v.GroupsReceived, v.PrefixBlocksChanged),
    ),
    "saved-checks": (
        "a41b0921407acf0efbe5525fb66c05759c43e00ae4c48f5518e89491e2f24dd1",
        (v.CrossCheckDecided, v.CrossChecked, v.CanaryReported),
    ),
    "settings": (
        "8f8f2f7d2e2ac5b9fbc8e41b968cf2fc3d98a063e67edee786690a0a368417b5",
        (v.ConfigChanged, v.AdminCommanded, v.RecoveryPlanned),
    ),
    "stall-spared": (
        "325863376a3f052a93f3595f696f91e1b535392cc8d03030fa402b7dfbf01812",
        (v.StallJudged, v.WorkerSuspected, v.WorkerCleared),
    ),
    "stall": (
        "f3d0b61a419539afb1883bb7cf371e35aa827516d430d8374449c55fed8cb898",
        (v.StallJudged, v.WorkerSuspected, v.WorkerCleared, v.TimerFired),
    ),
    "damaged-weights": (
        "9e28ba48b13d018e80e76e0c509c944f771a8ebfb52b52e3dfd5682df1065199",
        (v.HealthDecided, v.CanaryValuesDecided, v.EngineDied),
    ),
    "damaged-files": (
        "6961389f08e30f65749d7f2fdfda6718b410af243c4dc5d4f3ab7624e52b6526",
        (v.WeightsReadStarted, v.WeightsDigested, v.WeightsCompared, v.HealthDecided),
    ),
    "quarantined-as-it-left": (
        "8183ab7cf2660bc4b963a0493e7d89762cfdf6502a0973930db3ff4b8509cc3b",
        (v.HealthDecided, v.CanaryValuesDecided, v.WorkerDeregistered),
    ),
    "rollout-host-lost": (
        "7347a4cb98d1d41429df3b3d7099f45fd335d7be24ffa178db0c94cdf31f5656",
        (v.RolloutDecided, v.WorkerLost, v.StreamResumed),
    ),
    "rollout-step-given-up": (
        "af525e0a53769bd59c3a3c976542a63c66161a28044ba4185e275ccf4b1bdcfe",
        (v.RolloutDecided, v.EngineDied),
    ),
    "only-worker": (
        "f04dc07dbba16da9d60ec80106fcf4aa8060fbd8c92a9934e364a0f7e644dd09",
        (v.HealthDecided, v.TransportObserved),
    ),
    "slow-canaries": (
        "25fdeb225944f5acd2b1723e0b15ad166481a5b6801ff9115816f685393545e2",
        (v.HealthDecided, v.CanaryReported),
    ),
    "slow-steps": (
        "a5345cc294f80554b2556fe8365f6e07efe8f9ece6762b978630f129b2ae84f2",
        (v.HealthDecided, v.EngineStep),
    ),
    "who-probes": (
        "392cd78709b210d5e1f9abfdaddb2b1f6f8c22ec329b8a7415db8ebf3d42655c",
        (v.HealthDecided,),
    ),
    "wrong-beside-errors": (
        "f252a0b7817ba6021d7c7e2aecb1cb874acadd3d733c00ad2b0334e5044ee50f",
        (v.HealthDecided, v.VerdictsWithheld, v.CanaryReported, v.TransportObserved),
    ),
    "unhealthy-drained": (
        "b38ab08ce6c05c1f0258227859fa8791be2a6c2a39e943bb2d8671f79b4b5abd",
        (v.MigrationPlanned, v.HealthDecided, v.EngineDied, v.TransportObserved),
    ),
    "unreadable-reports": (
        "59aa7f9575b240c425b03f08f79da56d975d88882dac8392701131f5b4fa8c45",
        (v.ReportsDropped, v.HealthDecided),
    ),
}
"""By name: SHA-256 of the file, and kinds of events without which it would miss its point. An
entry is added with a new log; none is ever changed or removed."""


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.rlog"


def digest_of(name: str) -> str:
    return sha256(path_of(name).read_bytes()).hexdigest()


def read(name: str) -> History:
    """The log, whose records are decoded once however often they are read."""
    history = from_file(path_of(name))
    groups = []
    for group in history.groups:
        segments = [
            msgspec.structs.replace(s, records=codec.CachedRecords(s.records))
            for s in group.segments
        ]
        groups.append(RevisionGroup(group.revision, tuple(segments), group.owners))
    history.groups = groups
    return history


def events_of(history: History) -> Iterator[Any]:
    for group in history.groups:
        for segment in group.segments:
            yield from codec.decode_all(segment.records)


def verdict_of(history: History, limit: int = 20) -> Verdict:
    """Every decision taken again, and the end of the log held to its footer."""
    assert history.footer is not None
    return verify(history.groups, history.base, limit, history.footer.end)


def folded(history: History) -> Fleet:
    fleet = load(dump(history.base)) if history.base is not None else Fleet()
    for group in history.groups:
        apply_group(fleet, group)
    return fleet


def explained(history: History) -> dict[str, str]:
    """What `relume why` says of each request that arrived, or of `MOST_EXPLAINED` of them, from the
    first to the last: each reads the whole log."""
    names = [e.request for e in events_of(history) if type(e) is v.RequestArrived]
    found = {}
    for name in names[:: math.ceil(len(names) / MOST_EXPLAINED)]:
        course = why(history.groups, name)
        assert course is not None, f"{name} is not known"
        found[name] = "\n".join(lines_of(course))
    return found


def retold(name: str) -> dict[str, Any]:
    """All that this build makes of the log."""
    history = read(name)
    texts = explained(history)
    return {
        "verdict": msgspec.to_builtins(verdict_of(history)),
        "state": state_hash(folded(history)).hex(),
        "kinds": Counter(type(event).__name__ for event in events_of(history)),
        "explained": len(texts),
        "why": sha256("\0".join(texts.values()).encode()).hexdigest(),
    }


if __name__ == "__main__":
    json.dump({name: retold(name) for name in sys.argv[1:] or FROZEN}, sys.stdout, indent=1)
