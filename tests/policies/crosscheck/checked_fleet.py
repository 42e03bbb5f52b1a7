"""A led fleet whose replica r0 has finished requests answered again."""

from __future__ import annotations

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import CheckCause, Guarantee, RequestOutcome
from relume.policies.crosscheck.choice import CheckChoice, FinishedRequest, choose
from relume.policies.state.overlay.view import View
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import arrived, decided

RIGHT, WRONG, OTHER = b"right...", b"wrong...", b"other..."
ALL = 1_000_000


class CheckedFleet(LedFleet):
    """Every request is of the share, and checks have no budget, unless others are set."""

    def __init__(
        self, workers: int = 3, share_ppm: int = ALL, budget_ppm: int = ALL, **more: int
    ) -> None:
        super().__init__(workers, **more)
        self.set("share_ppm", share_ppm)
        self.set("budget_ppm", budget_ppm)
        self._checks = 0

    def set(self, key: str, value: int) -> None:
        """Change a setting of cross-checks."""
        self.tell("fleet", v.ConfigChanged(f"crosscheck.{key}", str(value)))

    def finished(self, worker: str = "w0", name: str = "q", tokens: int = 8) -> FinishedRequest:
        """A request that the worker's engine answered."""
        incarnation = self.fleet.workers[worker].incarnation
        return FinishedRequest(
            request=name, worker=worker, incarnation=incarnation, tokens=tokens, answer=RIGHT
        )

    def served(
        self, worker: str = "w0", name: str = "q", prompt: int = 40, tokens: int = 8
    ) -> FinishedRequest:
        """The same, in the log."""
        incarnation = self.fleet.workers[worker].incarnation
        chosen = decided(name, worker=worker, incarnation=incarnation)
        self.tell("r.r0", arrived(name, prompt), chosen)
        end = v.RequestEnded(
            request=name, outcome=RequestOutcome.COMPLETED, status=200, tokens=tokens,
            finish="length", attempts=1, verdict=Guarantee.EXACT,
        )  # fmt: skip
        self.tell("r.r0", end)
        return self.finished(worker, name, tokens)

    def choice(self, finished: FinishedRequest) -> CheckChoice | None:
        """By the view of r0."""
        return choose(View("r.r0", self.fleet), finished)

    def begin(
        self, finished: FinishedRequest, by: str, cause: CheckCause = CheckCause.SHARE
    ) -> v.CrossCheckDecided:
        """`by` is to answer it again."""
        self._checks += 1
        event = v.CrossCheckDecided(
            decision=f"r0.b.{self._checks}",
            basis=v.Basis(self.fleet.revision, 0),
            request=finished.request,
            worker=finished.worker,
            incarnation=finished.incarnation,
            by=by,
            by_incarnation=self.fleet.workers[by].incarnation,
            cause=cause,
            tokens=finished.tokens,
            answer=finished.answer,
        )
        self.tell("r.r0", event)
        return event

    def end(
        self,
        begun: v.CrossCheckDecided,
        answer: bytes = RIGHT,
        error: str = "",
        took_us: int = 1000,
    ) -> v.CrossChecked:
        """It gave this answer."""
        event = v.CrossChecked(
            decision=begun.decision,
            request=begun.request,
            worker=begun.worker,
            incarnation=begun.incarnation,
            by=begun.by,
            by_incarnation=begun.by_incarnation,
            took_us=took_us,
            answer=b"" if error else answer,
            differs=-1 if error or answer == begun.answer else 3,
            error=error,
        )
        self.tell("r.r0", event)
        return event

    def checks(self, finished: FinishedRequest, by: str, answer: bytes = RIGHT) -> v.CrossChecked:
        """`by` answered it again, like this."""
        return self.end(self.begin(finished, by), answer)
