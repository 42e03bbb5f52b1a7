"""Cross-checks as evidence about workers.

Handlers as those of `relume.policies.health.evidence`, which calls them.
"""

from __future__ import annotations

from relume.events import vocabulary as v
from relume.events.settings.recorded import number_in
from relume.policies.crosscheck import check_budget, check_settings, disputes
from relume.policies.health.judgement import LeaderSettings
from relume.policies.health.worker_reviews import all_know, decides, health_of, review_worker
from relume.policies.state.fleet import Fleet, Request, Worker

SHARE = "crosscheck.share_ppm"
VERSION = 5
"""The version of `health` that knows cross-checks: without it no replica makes any."""


def on_begun(fleet: Fleet, stream: str, epoch: int, event: v.CrossCheckDecided) -> None:
    """An engine answers a finished request again."""
    disputes.begin(fleet, event)


def on_checked(fleet: Fleet, stream: str, epoch: int, event: v.CrossChecked) -> None:
    """The answers were compared: a difference is evidence about all engines that gave one."""
    config = check_settings.config_of(LeaderSettings(fleet))
    _review(fleet, disputes.take(fleet, event, config))


def completed(fleet: Fleet, request: Request, event: v.RequestEnded) -> None:
    """A client has the whole answer: another engine may answer the request again."""
    share_ppm = number_in(LeaderSettings(fleet), SHARE, 0)
    if share_ppm and check_settings.is_drawn(request.request, share_ppm):
        check_budget.note_finished(fleet, request, event)


def canaries_due(fleet: Fleet, event: v.CrossChecked) -> tuple[str, ...]:
    """Workers whose canaries are to be sent at once, because of a new dispute."""
    if not decides(fleet) or not all_know(fleet, VERSION):
        return ()
    return disputes.just_opened(fleet, event)


def _review(fleet: Fleet, concerned: list[Worker]) -> None:
    for worker in concerned:
        if health_of(fleet, worker) is not None:
            review_worker(fleet, worker)
