"""A fleet in which every finished request is answered again, as far as the policy says."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import CheckCause
from relume.policies import decision_versions
from relume.policies.crosscheck import check_settings
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from relume.policies.crosscheck.choice import CheckChoice, FinishedRequest, choose
from relume.policies.health import health_settings
from relume.policies.health.health_settings import HealthConfig
from relume.policies.state.overlay.view import View
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import (
    arrived,
    decided,
    ended,
    engine_step,
    finished,
    queued,
    replica_started,
)

RIGHT, WRONG = b"right", b"wrong"
TOKENS = 64
ALL = CrossCheckConfig(share_ppm=1_000_000, budget_ppm=1_000_000)


class DrivenFleet(LedFleet):
    """`wrong`: workers that give wrong answers."""

    def __init__(self, workers: int, wrong: Collection[str] = ("w0",)) -> None:
        super().__init__(workers)
        self.wrong = wrong
        settings = (
            *health_settings.settings_of(HealthConfig()),
            *check_settings.settings_of(ALL),
            *decision_versions.settings(),
        )
        self.tell("r.r0", replica_started("r0", "b2", settings=settings))

    def serve(self, request: str, worker: str, verdict: str = "exact", attempts: int = 1) -> None:
        """A client gets its answer from the worker."""
        self.tell("r.r0", arrived(request, verdict=verdict), decided(request, worker=worker))
        self.tell(f"w.{worker}", engine_step(queued(request)))
        self.tell(f"w.{worker}", engine_step(finished(request)))
        self.tell("r.r0", ended(request, attempts=attempts))

    def begin(self, request: str, worker: str) -> None:
        """The worker's engine has a request."""
        self.tell("r.r0", arrived(request), decided(request, worker=worker))
        self.tell(f"w.{worker}", engine_step(queued(request)))

    def answer(self, worker: str) -> bytes:
        """What the worker answers."""
        return WRONG if worker in self.wrong else RIGHT

    def choice(self, request: str, worker: str) -> CheckChoice | None:
        """Who answers the request of the worker now."""
        done = FinishedRequest(
            request=request,
            worker=worker,
            incarnation=1,
            tokens=TOKENS,
            answer=self.answer(worker),
        )
        return choose(View("r.r0", self.fleet), done)

    def ask(self, request: str, worker: str, by: str, late: int = 0) -> v.CrossCheckDecided:
        """`by` begins to answer the request of `worker`, as decided `late` revisions ago."""
        check = v.CrossCheckDecided(
            decision=f"{request}.{by}",
            basis=v.Basis(self.fleet.revision - late, 0),
            request=request,
            worker=worker,
            incarnation=1,
            by=by,
            by_incarnation=1,
            cause=CheckCause.SHARE,
            tokens=TOKENS,
            answer=self.answer(worker),
        )
        self.tell("r.r0", check)
        return check

    def check(self, request: str, worker: str, by: str) -> None:
        """`by` answers the request of `worker` again."""
        asked = self.ask(request, worker, by)
        answer = self.answer(by)
        result: dict[str, Any] = {"answer": answer, "differs": -1 if answer == asked.answer else 2}
        self.tell(
            "r.r0",
            v.CrossChecked(
                decision=asked.decision, request=request, worker=worker, incarnation=1,
                by=by, by_incarnation=1, took_us=10, **result,
            ),
        )  # fmt: skip

    def drive(self, request: str, worker: str) -> list[str]:
        """The worker's request is answered again for as long as the policy says; by whom."""
        self.serve(request, worker)
        asked: list[str] = []
        while len(asked) < 9 and (found := self.choice(request, worker)) is not None:
            self.check(request, worker, found.by)
            asked.append(found.by)
            if not self.fleet.disputes or request not in self.fleet.disputes:
                break
        return asked
