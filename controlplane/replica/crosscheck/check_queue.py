"""Finished requests of one replica that are to be answered again, for comparison.

The gateway offers each request whose client has the whole answer. Its prompt is in memory until its
check (`check_watch`) is over, and for `PATIENCE_S` at most before that: then it is dropped, also
while etcd is away.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque

import msgspec
from msgspec import Struct

from relume.controlplane.replica.live_requests import LiveRequest
from relume.events.vocabulary.enums import Guarantee
from relume.events.wire.token_digest import digest_of
from relume.policies.crosscheck import choice
from relume.policies.crosscheck.choice import FinishedRequest
from relume.policies.health.cross_check_evidence import VERSION
from relume.policies.health.worker_reviews import all_know
from relume.policies.state.overlay.view import View

MOST_WAITING = 8
"""Finished requests that wait for an idle engine; later ones are not checked."""
MOST_BYTES = 256 << 10
"""Maximum size of a body that is kept."""
PATIENCE_S = 20.0


class Offer(Struct, kw_only=True, eq=False):
    """A finished request, as its client sent it to `path`, and the tokens that it got. Both are empty
    when its time is over."""

    finished: FinishedRequest
    path: str
    body: bytes
    tokens: array[int]
    tries: int = 0
    timer: asyncio.TimerHandle | None = None


class CrossCheckQueue:
    """Finished requests of one replica that are to be answered again."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.offers: deque[Offer] = deque()
        self._filled = asyncio.Event()

    async def until_filled(self) -> None:
        """Wait until there is a request."""
        while not self.offers:
            self._filled.clear()
            await self._filled.wait()

    def offer(self, live: LiveRequest, path: str, body: bytes, tokens: array[int]) -> None:
        """The client of `live` has the whole answer, which consists of `tokens`."""
        arrival = live.arrival
        if not arrival.may_keep or arrival.verdict != Guarantee.EXACT or live.attempt != 1:
            return
        if not tokens or not body or len(body) > MOST_BYTES or len(self.offers) >= MOST_WAITING:
            return
        finished = FinishedRequest(
            request=arrival.request,
            worker=live.worker,
            incarnation=live.incarnation,
            tokens=len(tokens),
            answer=b"",
        )
        if choice.cause_of(self._view, finished) is None or not all_know(self._view.fleet, VERSION):
            return
        finished = msgspec.structs.replace(finished, answer=digest_of(tokens))
        offer = Offer(finished=finished, path=path, body=body, tokens=tokens[:])
        self.limit(offer, PATIENCE_S)
        self.offers.append(offer)
        self._filled.set()

    def limit(self, offer: Offer, seconds: float) -> None:
        """The offer is forgotten after so many seconds from now, wherever it is."""
        if offer.timer is not None:
            offer.timer.cancel()
        offer.timer = asyncio.get_running_loop().call_later(seconds, self._forget, offer)

    def _forget(self, offer: Offer) -> None:
        offer.body, offer.tokens = b"", offer.tokens[:0]
        if offer in self.offers:
            self.offers.remove(offer)
