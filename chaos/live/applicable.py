"""Which faults of the catalogue strike real processes, and why the others do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from relume.chaos.live.processes.etcd_members import etcdctl
from relume.chaos.live.processes.settings_flags import without_flag
from relume.chaos.scenario.catalogue import FAULTS, applicable
from relume.chaos.scenario.language import Commands, Disorder, Limits, Scenario


def _strace() -> str:
    return "" if shutil.which("strace") else "needs strace, which delays the member's fsync calls"


def _etcdctl() -> str:
    return "" if etcdctl() else "needs etcdctl, which saves and restores backups"


def _tcp() -> str:
    return "needs an engine that does so: TCP delivers each byte once and in order"


def _replicas() -> str:
    return "needs a link from each replica to each worker: a worker's relay takes all of them"


def _engine() -> str:
    return "needs an engine that does so: a real one has no such switch"


def _prompts() -> str:
    return "needs a weight that requests use and no canary does: a bit of a real one changes both"


def _copies() -> str:
    return "needs a copy of the model for each worker: a test of real engines does so"


def _failpoint() -> str:
    return "needs a failpoint that holds one stream: a test of the core does so (engine.frame)"


def _watches() -> str:
    return "needs an etcd that does so: a real one has no such switch"


_WHY: Mapping[str, Callable[[], str]] = {
    "disk-slow": _strace,
    "disk-hangs": _strace,
    "etcd-restored": _etcdctl,
    "frame-lost": _tcp,
    "frame-repeated": _tcp,
    "cut-from-half": _replicas,
    "dispatch-refused": _engine,
    "answer-broken": _engine,
    "stream-stuck": _failpoint,
    "weights-flipped-unseen": _prompts,
    "model-file-damaged": _copies,
    "watch-silent": _watches,
}
"""Further needs of a fault on real processes."""


MOST_REQUESTS = 2_000


def why_not(what: str) -> str:
    """Empty where fault `what` is applicable to real processes here, else the reason."""
    if not applicable(what):
        return f"needs {FAULTS[what].needs}, which does not exist"
    return _WHY[what]() if what in _WHY else ""


def obstacles(scenario: Scenario) -> tuple[str, ...]:
    """Why `scenario` cannot run live; empty when it can."""
    found = [(fault.what, why_not(fault.what)) for fault in scenario.faults]
    more = []
    if (scenario.traffic.requests or 0) > MOST_REQUESTS:
        more.append(f"more than {MOST_REQUESTS} requests, which take real engines too long here")
    traffic = scenario.traffic
    if traffic.whole or traffic.resumable or traffic.unusual:
        more.append("clients other than streaming ones, which are simulated only")
    fleet = scenario.fleet
    if (fleet.disorder, fleet.limits, fleet.operator) != (Disorder(), Limits(), Commands()):
        more.append("a fleet with disorder, limits or operator, which are simulated only")
    if fleet.others:
        more.append("several models, which are simulated only")
    if settings := [*without_flag(fleet.settings)]:
        more.append(f"settings without a flag of `relume serve`: {', '.join(settings)}")
    return (*(f"{what}: {why}" for what, why in found if why), *more)


def listed() -> list[str]:
    """Every fault of the catalogue with its applicability, for people."""
    return [f"{what:<24} {why_not(what) or 'applicable'}" for what in FAULTS]
