"""Short ways to tell a log of failures, with times."""

from __future__ import annotations

from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.incident_fold import IncidentObserver, incidents_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import (
    DeathReason,
    Guarantee,
    ProbeResult,
    RequestOutcome,
    TransportKind,
)
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import decided, engine_step, ready, started

BEGIN_MS = 1_700_000_000_000


class FailureLog(LedFleet):
    """A led fleet of three workers whose log has times: `after(ms)` lets time pass."""

    def __init__(self, replicas: int = 1) -> None:
        self.at_ms = BEGIN_MS
        super().__init__(workers=3, replicas=replicas)
        self.at_ms = BEGIN_MS

    def after(self, ms: int) -> FailureLog:
        self.at_ms += ms
        return self

    def incidents(self) -> list[Incident]:
        return incidents_of(self.groups)

    def one(self) -> Incident:
        (incident,) = self.incidents()
        return incident

    # --- streams ---------------------------------------------------------------------------

    def stream(self, name: str, worker: str = "w0", replica: str = "r0") -> None:
        """A stream that `worker` serves."""
        self.request(worker, replica, name)
        self.first_token(name, worker)

    def first_token(self, name: str, worker: str, attempt: int = 1) -> None:
        incarnation = self.fleet.workers[worker].incarnation
        self.tell(
            f"w.{worker}",
            engine_step(v.FirstToken(request=name, attempt=attempt), incarnation=incarnation),
        )

    def breaks(self, name: str, kind: str = "reset", worker: str = "w0", inc: int = 1) -> None:
        self.tell(
            "r.r0",
            v.TransportObserved(
                request=name, attempt=1, worker=worker, incarnation=inc,
                kind=TransportKind(kind), delivered=5, status=500 if kind == "engine_error" else 0,
            ),
        )  # fmt: skip

    def goes_on(self, name: str, worker: str, gap_us: int = 180_000) -> None:
        """Its second attempt has a token on `worker` after 80 ms, and it completes."""
        incarnation = self.fleet.workers[worker].incarnation
        self.tell("r.r0", decided(name, 2, worker, incarnation, delivered=5))
        self.after(80).first_token(name, worker, 2)
        self.after(500).ended(name, gap_us)

    def ended(self, name: str, gap_us: int = 180_000, outcome: str = "completed") -> None:
        self.tell(
            "r.r0",
            v.RequestEnded(
                request=name, outcome=RequestOutcome(outcome), status=200, tokens=9, finish="stop",
                attempts=2, verdict=Guarantee.EXACT, ttft_us=30_000, longest_gap_us=gap_us,
            ),
        )  # fmt: skip

    # --- engines ---------------------------------------------------------------------------

    def dies(self, reason: str = "killed", worker: str = "w0", inc: int = 1) -> None:
        self.tell(f"w.{worker}", v.EngineDied(worker, inc, DeathReason(reason)))

    def restarts(self, worker: str = "w0", inc: int = 2) -> None:
        self.tell(f"w.{worker}", v.EngineRestartScheduled(worker, inc, 0), started(worker, inc))
        self.after(2000).tell(f"w.{worker}", ready(worker, inc))

    def hung(self, worker: str = "w0", inc: int = 1) -> None:
        """Its agent finds the engine hung."""
        self.tell(
            f"w.{worker}",
            v.EngineHung(
                worker=worker, incarnation=inc, silent_us=2_500_000, looks=3, steps=9,
                step_age_us=2_500_000, expected_us=9_000, cpu_us=0, wait_us=0, running=2, waiting=0,
                process_state="T",
            ),
        )  # fmt: skip

    def judges(self, replica: str = "r0", worker: str = "w0", inc: int = 1) -> None:
        """`replica` judges the engine hung."""
        self.tell(
            f"r.{replica}",
            v.StallJudged(
                decision=f"{replica}-stall", basis=v.Basis(0, 0), worker=worker, incarnation=inc,
                silent_us=1_000_000, probe=ProbeResult.SILENT, probe_steps=-1, step_age_us=0,
                bound_us=1_000_000, hung=True,
            ),
            v.WorkerSuspected(worker, inc, "silent, probe silent"),
        )  # fmt: skip


def live(groups: list[RevisionGroup]) -> list[Incident]:
    """The incidents as a replica that follows the log has them."""
    observer, fleet = IncidentObserver(), Fleet()
    for group in groups:
        apply_group(fleet, group, observer.seen)
        observer.folded(group)
    return observer.incidents
