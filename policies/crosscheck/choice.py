"""Which finished request is answered again, and by which engine. Pure: a function of the view.

A request is one of the share by its name, so every replica and every replay draws alike. The engine
must be of the worker's class, idle, healthy and within its budget (`check_budget`); of several, the one
that has saved longest. A worker in doubt, because an answer of it differed before, is compared beyond share and
budget: all its requests are answered again, and it answers those of others.

In a dispute the worker itself answers first: if it now agrees with the other one, that was no lasting
fault. Then others follow.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from relume.events.vocabulary.enums import CheckCause, EnginePhase, HealthState
from relume.policies.crosscheck import check_budget
from relume.policies.crosscheck.check_settings import config_of, is_drawn
from relume.policies.crosscheck.check_state import Dispute
from relume.policies.crosscheck.disputes import has_differed, record_of
from relume.policies.routing.eligibility import excluded_at
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View


class FinishedRequest(Struct, frozen=True, kw_only=True):
    """A request whose client has the whole answer: `tokens` tokens of digest `answer`, all given by
    one engine."""

    request: str
    worker: str
    incarnation: int
    tokens: int
    answer: bytes


class CheckChoice(Struct, frozen=True):
    """The engine that answers it again, and why it does."""

    by: str
    incarnation: int
    cause: CheckCause


def cause_of(view: View, finished: FinishedRequest) -> CheckCause | None:
    """Why it is answered again; None: it is not."""
    config = config_of(view)
    if not config.share_ppm or finished.tokens > config.tokens:
        return None
    fleet = view.fleet
    if dispute_of(view, finished.request) is not None:
        return CheckCause.DISPUTE
    served = fleet.workers.get(finished.worker)
    if served is None or served.incarnation != finished.incarnation:
        return None  # that engine is gone, and so is what was wrong with it
    if fleet.disputes is not UNSET and any(
        has_differed(worker, fleet.tick) and _is_alike(worker, served)
        for worker in fleet.workers.values()
    ):
        return CheckCause.DOUBT
    return CheckCause.SHARE if is_drawn(finished.request, config.share_ppm) else None


def choose(view: View, finished: FinishedRequest, by_savings: bool = True) -> CheckChoice | None:
    """The engine that answers it again now; None: no engine can at present. `by_savings`: as since
    version 2 of `cross_check`."""
    cause, fleet = cause_of(view, finished), view.fleet
    served = fleet.workers.get(finished.worker)
    if cause is None or served is None:
        return None
    dispute = dispute_of(view, finished.request)
    if dispute is not None and dispute.again is None:
        is_same = served.name == dispute.worker and served.incarnation == dispute.incarnation
        if not is_same or not _is_there(served) or not _is_idle(view, served):
            return None
        return CheckChoice(served.name, served.incarnation, cause)
    heard = dispute.others if dispute is not None else {}
    idle = [
        worker
        for worker in fleet.workers.values()
        if worker.name != served.name
        and worker.name not in heard
        and _is_alike(worker, served)
        and _is_idle(view, worker)
        and not excluded_at(view, worker)
    ]
    saves = by_savings and check_budget.engines_save(fleet)
    cause, fitting = _fitting(view, finished, served, idle, cause, saves)
    found = min(
        fitting, key=lambda w: (has_differed(w, fleet.tick), _rest_ms(w), w.name), default=None
    )
    return CheckChoice(found.name, found.incarnation, cause) if found is not None else None


def _fitting(
    view: View,
    finished: FinishedRequest,
    served: Worker,
    idle: list[Worker],
    cause: CheckCause,
    saves: bool,
) -> tuple[CheckCause, list[Worker]]:
    """Those of the idle engines that may answer it, and for which cause: in doubt, a request of the share
    whose engines are in no doubt is one of the share. `saves`: engines save for it (`check_budget`)."""
    fleet, tick, config = view.fleet, view.fleet.tick, config_of(view)
    trusted = [worker for worker in idle if _is_trusted(worker)]
    if cause == CheckCause.DISPUTE:
        return cause, trusted
    if cause == CheckCause.DOUBT:
        if has_differed(served, tick):
            return cause, trusted
        if doubted := [worker for worker in idle if has_differed(worker, tick)]:
            return cause, doubted
        if not is_drawn(finished.request, config.share_ppm):
            return cause, []
    if not saves:
        return cause, [worker for worker in trusted if _rest_ms(worker) <= fleet.tick_unix_ms]
    name, tokens = finished.request, finished.tokens
    able = [w for w in trusted if check_budget.has_saved(fleet, w, name, tokens, config)]
    return CheckCause.SHARE, able


def dispute_of(view: View, request: str) -> Dispute | None:
    """The dispute about the request's answer, while it is open."""
    disputes = view.fleet.disputes
    return None if isinstance(disputes, UnsetType) else disputes.get(request)


def _is_alike(worker: Worker, served: Worker) -> bool:
    """Whether both compute the same: model, build, hardware and, where known, weights."""
    if worker.plain or worker.steps_like != served.steps_like or worker.model != served.model:
        return False
    one, other = worker.canary, served.canary
    if isinstance(one, UnsetType) or isinstance(other, UnsetType):
        return True
    return one.kind == other.kind


def _is_idle(view: View, worker: Worker) -> bool:
    record = record_of(worker)
    if record is not None and view.fleet.tick <= record.busy_until:
        return False
    return view.load(worker)[1] == 0


def _is_there(worker: Worker) -> bool:
    return worker.present and worker.engine == EnginePhase.READY and not worker.drains


def _is_trusted(worker: Worker) -> bool:
    """Whether its answer counts: nothing is held against it, or only that one of two engines must be
    wrong. Where one engine is wrong, every other one is soon in a dispute with it."""
    health, record = worker.health, record_of(worker)
    if health is UNSET or health.state == HealthState.HEALTHY:
        return True
    in_dispute = record is not None and bool(record.disputed) and not record.outvoted
    return in_dispute and health.state == HealthState.SUSPECT


def _rest_ms(worker: Worker) -> int:
    """Time of the leader's clock up to which it rests, or what it saved is spent."""
    record = record_of(worker)
    return record.rests_until_ms if record is not None else 0
