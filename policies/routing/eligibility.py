"""Which workers may get a request: every reason against one, and the only place that asks.

Some reasons exclude a worker whatever the others are like: its engine does not serve the model, it
drains, it is suspected, or it cannot do what the request needs. WorkerHealth is never traded. A spare is
excluded while another worker is open (`held_back`), so no request waits or fails beside it. The others
are limits: requests that fail there before the leader has decided, no room for the prompt's KV,
silence while it has work, a first token later than the tier's objective, a failure of this very
request there, a queue at the limit of the admission queue.
A worker within its limits comes first; if there is none, the best one beyond them takes the request
(`relume.policies.routing.selection`).

A feature that keeps requests from workers is a reason here and a condition in one of the functions.
Used by routing, admission, recovery plans, migration, the choice of holders, and requests that wait
for a worker.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, Struct, UnsetType

from relume.events.settings.recorded import number_in
from relume.events.vocabulary.enums import EnginePhase, Exclusion, HealthState, Tier
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.agreement import known_to_all
from relume.policies.degradation import effects
from relume.policies.health.health_life import EXCLUDED
from relume.policies.health.health_state import WorkerHealth
from relume.policies.routing.route_query import RouteQuery
from relume.policies.routing.worker_estimate import LATE, WorkerEstimate
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View
from relume.policies.state.unreadable import has_unacknowledged

_ENGINE = {
    EnginePhase.NONE: Exclusion.ENGINE_NONE,
    EnginePhase.STARTING: Exclusion.ENGINE_STARTING,
    EnginePhase.DEAD: Exclusion.ENGINE_DEAD,
}
# members of an enum are slow to look up, and these are on the path of each decision
NONE, WITHOUT_PLUGIN = Exclusion.NONE, Exclusion.WITHOUT_PLUGIN
FAILED_BEFORE, SUSPECTED = Exclusion.FAILED_BEFORE, Exclusion.SUSPECTED
FAILING = Exclusion.FAILING
SPARE = Exclusion.SPARE
READY = EnginePhase.READY
BATCH = Tier.BATCH
NO_NAMES: frozenset[str] = frozenset()
UNJUDGED = "health.unjudged"
"""Setting: failed requests on a worker after which others are preferred."""
UNANSWERED = "health.unanswered"
"""Setting: requests without a first token, from which others are preferred to a worker whose last request
failed."""
_BY_HEALTH = {
    HealthState.UNHEALTHY: Exclusion.UNHEALTHY,
    HealthState.QUARANTINED: Exclusion.QUARANTINED,
}
Check = Callable[[View, Worker, bool], Exclusion]
"""Why a worker, suspected or not, gets no request of one model."""


def excluded(view: View, worker: Worker, model: str, suspected: bool) -> Exclusion:
    """Why `worker` gets no request for `model`; empty if it may get one."""
    if worker.engine != READY:
        return _ENGINE[worker.engine]
    if worker.model != model:
        return Exclusion.OTHER_MODEL
    if not worker.present:
        return Exclusion.LOST
    if worker.drains:
        return Exclusion.DRAINING
    return excluded_open(view, worker, suspected)


def excluded_open(view: View, worker: Worker, suspected: bool) -> Exclusion:
    """Why a worker that serves a model gets no request of it, besides that it drains."""
    if view.fleet.unreadable is not UNSET and has_unacknowledged(view.fleet, worker.name):
        return Exclusion.UNREADABLE
    if (health := worker.health) is not UNSET:
        if by_health := _BY_HEALTH.get(health.state):
            return by_health
        if health.state == HealthState.PROBING and not _may_probe(view, worker, health):
            return Exclusion.PROBING
    if suspected:
        return SUSPECTED
    if view.fleet.spares is not UNSET and _is_held_back(view, worker):
        return SPARE
    return NONE


def held_back(view: View, model: str) -> frozenset[str]:
    """The spares of `model` that get no requests of it, because other workers are open."""
    if view.fleet.spares is UNSET or (known := view.fleet.spares.get(model)) is None:
        return NO_NAMES
    workers = (view.fleet.workers.get(name) for name in known.workers)
    return frozenset(w.name for w in workers if w is not None and _is_held_back(view, w))


def _is_held_back(view: View, worker: Worker) -> bool:
    """Whether it is a spare, and another worker can take what it could."""
    spares = view.fleet.spares
    if spares is UNSET or (known := spares.get(worker.model)) is None:
        return False
    if worker.name not in known.workers:
        return False
    return any(
        other.model == worker.model
        and other.name not in known.workers
        and (worker.plain or not other.plain)
        and not excluded_at(view, other)
        and not is_failing(view, other)
        for other in view.fleet.workers.values()
    )


def _may_probe(view: View, worker: Worker, health: WorkerHealth) -> bool:
    """Whether this replica may send the worker a probe now."""
    if view.replica != health.prober:
        return False
    return len(health.probes) + view.unfolded(worker) < health.most_probes


def check_of(model: str, spares: bool = False) -> Check:
    """`excluded` for one model, as indexes of workers use it. `spares`: for requests that a spare
    takes."""

    def check(view: View, worker: Worker, suspected: bool) -> Exclusion:
        reason = excluded(view, worker, model, suspected)
        return NONE if spares and reason is SPARE else reason

    return check


def takes_spares(view: View, tier: str, lost: int = 0) -> bool:
    """Whether a request may go to a spare: it is of tier batch, or it was `lost` on a worker."""
    return view.fleet.spares is not UNSET and (lost > 0 or tier == BATCH)


def excluded_at(view: View, worker: Worker, model: str = "") -> Exclusion:
    """The same as the view has it; by default of requests for the model that it serves."""
    suspected = view.suspect(worker.name) == worker.incarnation
    return excluded(view, worker, model or worker.model, suspected)


def excluded_for(worker: Worker, query: RouteQuery) -> Exclusion:
    """Why the worker does not get this one request: it cannot do what the request needs, or the
    request failed on its engine."""
    if worker.plain and query.delivered:
        return WITHOUT_PLUGIN
    if query.avoid and f"{worker.name}:{worker.incarnation}" in query.avoid:
        return FAILED_BEFORE
    return NONE


def excluded_as_holder(worker: Worker | None) -> Exclusion:
    """Why checkpoints do not stay with the worker's host; empty if they may."""
    if worker is None or not worker.present:
        return Exclusion.LOST
    return Exclusion.DRAINING if worker.drains else Exclusion.NONE


# --- limits


def is_failing(view: View, worker: Worker) -> bool:
    """Whether requests failed on the worker of which the leader has not made anything yet: its
    decision takes as long as the log does, and would not come without the log."""
    health = worker.health
    if health is UNSET:
        if not view.failed:  # as almost always
            return False
    elif health.state in EXCLUDED:
        return False
    return fails_requests(view, worker)


def fails_requests(view: View, worker: Worker) -> bool:
    """Whether requests failed on the worker, whatever the leader made of it: as many as say that others
    will, or one, with enough under way to know soon. There is no such limit while a replica of an earlier
    build, which cannot read it, lives, and for workers against which verdicts are withheld."""
    own, health = view.failed_on(worker), worker.health
    failed = own
    if health is not UNSET and health.failures:
        failed = {*own, *health.failures}
    if not failed:
        return False
    withheld = view.fleet.withheld
    if withheld is not UNSET and worker.name in withheld.get(worker.model, ()):
        return False
    if 0 < number_in(view, UNJUDGED, 0) <= len(failed):
        return known_to_all(view.fleet, UNJUDGED)
    most = number_in(view, UNANSWERED, 0)
    if not most or not (own or _failed_last(health)):
        return False
    return view.load(worker)[1] - worker.decoding >= most and known_to_all(view.fleet, UNANSWERED)


def _failed_last(health: WorkerHealth | UnsetType) -> bool:
    """Whether no request ended well on the worker since one failed there."""
    if health is UNSET or not health.failures:
        return False
    return health.succeeded is UNSET or health.succeeded < max(health.failures.values())


def check_with_failing(model: str, spares: bool = False) -> Check:
    """As `check_of`, and a worker that fails requests is excluded too: an index in which there is
    another worker needs no more."""
    sound = check_of(model, spares)

    def check(view: View, worker: Worker, suspected: bool) -> Exclusion:
        if worker.health is UNSET and not view.failed:  # as almost always
            return sound(view, worker, suspected)
        reason = sound(view, worker, suspected)
        return FAILING if reason is NONE and is_failing(view, worker) else reason

    return check


class QueueLimit(Struct, frozen=True, gc=False):
    """When a worker is saturated: `queued` requests that do not decode yet (0: no number), or
    prompts that take it beyond `ahead_us` from now (0: however many). `others`: replicas that may
    have sent as much as this one did, not reported yet."""

    queued: int = 0
    ahead_us: int = 0
    others: int = 0

    def reached(self, waiting: int, unheard: int) -> bool:
        """Whether this number saturates a worker: requests that do not decode yet, and dispatches
        of this replica among them that the fold does not have."""
        if not self.queued:
            return False
        return waiting + (self.others * unheard if unheard > 0 else 0) >= self.queued

    def late(self, free_at_us: int, now_us: int) -> bool:
        """Whether prompts that are computed at `free_at_us` do."""
        return self.ahead_us > 0 and free_at_us > now_us + self.ahead_us


def queue_limit(view: View, config: WaitingConfig) -> QueueLimit:
    """What `config` says, or less while levels of degradation act, with as many replicas as there are."""
    others = max(sum(replica.alive for replica in view.fleet.replicas.values()) - 1, 0)
    queued = effects.queued_at_worker(view, config.queued)
    return QueueLimit(queued, config.ahead_ms * 1000, others)


class Limits(Struct, frozen=True, gc=False):
    """The limits of one decision: a worker is saturated if its prompts end later than
    `latest_us`, or if it has `requests` or more and reaches `queue`."""

    queue: QueueLimit
    latest_us: int
    requests: int


def limits_of(queue: QueueLimit, query: RouteQuery) -> Limits:
    """For this request."""
    return Limits(
        queue,
        query.at_us + queue.ahead_us if queue.ahead_us else LATE,
        queue.queued // (queue.others + 1) if queue.queued else LATE,
    )


def limited(
    worker: Worker,
    estimate: WorkerEstimate,
    query: RouteQuery,
    tokens: int,
    ttft_us: int,
    limits: Limits,
) -> Exclusion:
    """The first limit that the worker would not meet with this request, of which it would compute
    `tokens`, with a first token after `ttft_us`; empty: it meets all."""
    if estimate.failing:
        return FAILING
    if tokens // estimate.block_tokens >= estimate.prompt_limit_blocks:
        return Exclusion.NO_KV_SPACE
    if query.at_us > estimate.silent_at_us:
        return Exclusion.SILENT
    if query.slo_us and ttft_us > query.slo_us:
        return Exclusion.TOO_LATE
    if estimate.free_at_us > limits.latest_us:
        return Exclusion.SATURATED
    requests = estimate.requests
    if requests >= limits.requests:
        unheard = requests - len(worker.attempts)
        if limits.queue.reached(requests - estimate.batch, unheard):
            return Exclusion.SATURATED
    return NONE
