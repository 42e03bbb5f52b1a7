"""When a worker is full: what the waiting room holds arrivals back for, and what no policy is to
send a request to while another worker is open. One rule, applied by `estimate_index` to the
workers it keeps in order, by `saturation` of a few, by `selection` of each it looks at.
"""

from __future__ import annotations

from msgspec import Struct

from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.state.overlay.view import View


class Bound(Struct, frozen=True, gc=False):
    """`queued` requests that do not decode yet fill a worker (0: no number does), as do prompts
    that take it beyond `ahead_us` from now (0: however many). `others`: replicas that may have sent
    as much as this one did, not reported yet."""

    queued: int = 0
    ahead_us: int = 0
    others: int = 0

    def full(self, waiting: int, unheard: int) -> bool:
        """Whether this number fills a worker: requests that do not decode yet, and dispatches of
        this replica among them that the fold does not have."""
        if not self.queued:
            return False
        return waiting + (self.others * unheard if unheard > 0 else 0) >= self.queued

    def late(self, free_at_us: int, now_us: int) -> bool:
        """Whether prompts that are through at `free_at_us` do."""
        return self.ahead_us > 0 and free_at_us > now_us + self.ahead_us


def bound(view: View, config: WaitingConfig) -> Bound:
    """What `config` says, as many replicas as there are."""
    others = max(sum(replica.alive for replica in view.fleet.replicas.values()) - 1, 0)
    return Bound(config.queued, config.ahead_ms * 1000, others)
