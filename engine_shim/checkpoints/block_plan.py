"""The scheduler's part of checkpointing: which blocks go where, and which come back.

No vLLM types beyond the attributes of a request; `connector` feeds it. One thread: the
engine core's, except lookups, which ask holders in the background.

Saving. Each scheduled step fills blocks; all full ones of a request, prefix hits included,
are offered to its holders in order, so that what a holder has is a prefix. The rank
answers how many it could hand over; what was shed is offered again in a later step, from
the cache, where it stays as long as the request does. A holder that lost everything starts over.

Restoring. A request that names holders is looked up before it is admitted; what they have
without a gap, block by block, of it or of another one that begins alike, is loaded between
steps while others run. It is offered once: what fails to load is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relume.engine_shim.checkpoints.checkpoint_spec import DropJob, Key, LoadJob, SaveJob
from relume.engine_shim.checkpoints.daemon_links import Links
from relume.engine_shim.checkpoints.lookup import Lookup, LookupResult, scope_of
from relume.engine_shim.generation import IDENTITY_KEY, UNREPORTED
from relume.events.vocabulary.enums import RestoreFailure

LOOKUPS_AT_ONCE = 8
BLOCKS_A_STEP = 64
"""Of one request to one holder; a long prefix hit is spread over several steps."""


class _Track:
    """One request the scheduler holds, as far as checkpoints go."""

    __slots__ = (
        "due",
        "first",
        "key",
        "leaving",
        "load",
        "lookup",
        "next",
        "priority",
        "request",
        "scope",
        "targets",
    )

    def __init__(self, request: Any, key: Key, targets: tuple[str, ...], priority: int) -> None:
        self.request = request
        self.key = key
        self.targets = targets
        self.priority = priority
        self.next = dict.fromkeys(targets, 0)
        self.leaving = -1  # tokens after which former holders release their blocks; -1: never
        self.lookup: Lookup | None = None
        self.load: LookupResult | None = None
        self.scope = b""
        self.first = 0
        self.due = 0


class CheckpointPlan:
    """Scheduler-side state. `ranks`: tensor-parallel ranks of this worker. `share`: whether
    requests may have each other's blocks. `unrestored` is called with (request, holder, reason) of a
    request that is computed because a holder did not say what it has."""

    def __init__(
        self,
        links: Links,
        block_size: int,
        ranks: int,
        lookup_timeout_s: float,
        share: bool = False,
        unrestored: Callable[[Key, str, RestoreFailure], None] = lambda key, holder, reason: None,
    ) -> None:
        self._share = share
        self._unrestored = unrestored
        self._links = links
        self._block_size = block_size
        self._ranks = ranks
        self._lookup_timeout_s = lookup_timeout_s
        self._pool = ThreadPoolExecutor(LOOKUPS_AT_ONCE, "relume-kv-lookup")
        self._tracks: dict[str, _Track] = {}
        self._live: dict[tuple[str, int], int] = {}
        self._loads: list[LoadJob] = []
        self._drops: list[DropJob] = []

    # --- requests come and go ----------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A new request of the engine; those without a gateway's mark are not ours."""
        params = request.sampling_params
        mark = (params.extra_args or {}).get(IDENTITY_KEY) if params is not None else None
        if not mark or mark["r"] == UNREPORTED:
            return
        targets, sources = tuple(mark.get("to", ())), tuple(mark.get("from", ()))
        root = mark["r"], mark["a"]
        self._live[root] = self._live.get(root, 0) + 1
        key = Key(*root, mark.get("c", 0))
        track = _Track(request, key, targets, mark.get("p", 1))
        self._tracks[request.request_id] = track
        if self._share:
            track.scope = scope_of(request)
        if sources:
            full = (request.num_tokens - 1) // self._block_size if track.scope else 0
            tokens = tuple(self._tokens(track, index) for index in range(full))
            track.lookup = Lookup(
                pool=self._pool,
                links=self._links,
                key=key,
                sources=sources,
                ranks=self._ranks,
                timeout_s=self._lookup_timeout_s,
                scope=track.scope,
                tokens=tokens,
            )

    def finished(self, engine_id: str, ended: bool) -> None:
        """`ended`: with a normal finish (stop, length), so it will not be resumed. An aborted
        request may be, elsewhere: its blocks stay until they expire or are dropped."""
        track = self._tracks.pop(engine_id, None)
        if track is None:
            return
        root = track.key.request, track.key.attempt
        self._live[root] -= 1
        if self._live[root]:
            return
        del self._live[root]
        if ended:
            self._drops += [DropJob(endpoint, *root) for endpoint in track.targets]

    def retarget(self, request: str, attempt: int, targets: tuple[str, ...]) -> bool:
        """Other holders for a running attempt; False when it is not here. What it has goes to
        new ones from the first block on; former ones keep theirs until the new ones have had
        all of it for a block's time."""
        root = request, attempt
        found = [t for t in self._tracks.values() if (t.key.request, t.key.attempt) == root]
        for track in found:
            track.next = {endpoint: track.next.get(endpoint, 0) for endpoint in targets}
            track.targets = tuple(dict.fromkeys((*track.targets, *targets)))
            track.due = 0
            track.leaving = 0
        return bool(found)

    # --- restoring ---------------------------------------------------------------------

    def match(self, engine_id: str, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: not known yet. Leaves
        at least one token to compute."""
        track = self._tracks.get(engine_id)
        if track is None or track.lookup is None:
            return 0
        if not track.lookup.ready:
            return None
        size = self._block_size
        found = track.lookup.found
        usable = min(found.blocks, (track.request.num_tokens - 1) // size) * size
        if usable <= computed_tokens:
            unanswered = [] if found.blocks else list(track.lookup.unanswered.items())
            if unanswered:
                self._unrestored(track.key, *unanswered[0])
                track.lookup = None
            return 0
        track.load = found
        track.first = computed_tokens // size
        return usable - computed_tokens

    def allocated(self, engine_id: str, block_ids: list[int], external_tokens: int) -> None:
        """Blocks are allocated for what is to be loaded, after those of the local prefix hit."""
        track = self._tracks.get(engine_id)
        if track is None or not track.load or not external_tokens:
            return
        found, track.load, track.lookup = track.load, None, None
        first, count = track.first, external_tokens // self._block_size
        self._loads.append(
            LoadJob(
                engine_id=engine_id,
                endpoint=found.endpoint,
                key=track.key,
                first=first,
                block_ids=tuple(block_ids[first : first + count]),
                tokens=tuple(self._tokens(track, index) for index in range(first, first + count)),
                lender=found.lender,
            )
        )

    # --- a step ------------------------------------------------------------------------

    def saves(
        self, engine_id: str, computed_tokens: int, block_ids: Callable[[str], list[int]]
    ) -> list[SaveJob]:
        """What fills in a step after which `computed_tokens` of the request are computed."""
        track = self._tracks.get(engine_id)
        if track is None or not track.next or computed_tokens < track.due:
            return []
        size = self._block_size
        full = min(computed_tokens, len(track.request.all_token_ids)) // size
        jobs = []
        for endpoint, first in track.next.items():
            last = min(full, first + BLOCKS_A_STEP)
            if first < last:
                ids = block_ids(engine_id)[first:last]
                tokens = tuple(self._tokens(track, index) for index in range(first, last))
                job = SaveJob(
                    endpoint=endpoint,
                    key=track.key,
                    first=first,
                    block_ids=tuple(ids),
                    tokens=tokens,
                    priority=track.priority,
                    scope=track.scope,
                )
                jobs.append(job)
                track.next[endpoint] = last
        had = min(track.next.values())
        track.due = (had + 1) * size
        if track.leaving >= 0 and had == full:
            self._let_go(track, full * size)
        return jobs

    def _let_go(self, track: _Track, tokens: int) -> None:
        """The holders there are now were handed all `tokens`. What they got a block earlier
        they have: then the former ones drop theirs. A drop is of all choices of a request, so
        of several they keep theirs to the end."""
        key = track.key
        if self._live[key.request, key.attempt] > 1:
            track.leaving = -1
        elif not track.leaving:
            track.leaving = tokens + 1
        elif tokens >= track.leaving:
            former = [e for e in track.targets if e not in track.next]
            self._drops += [DropJob(e, key.request, key.attempt, True) for e in former]
            track.targets, track.leaving = tuple(track.next), -1

    def _tokens(self, track: _Track, index: int) -> tuple[int, ...]:
        at = index * self._block_size
        return tuple(track.request.all_token_ids[at : at + self._block_size])

    def take_loads(self) -> list[LoadJob]:
        loads, self._loads = self._loads, []
        return loads

    def take_drops(self) -> list[DropJob]:
        drops, self._drops = self._drops, []
        return drops

    def record_progress(self, reached: dict[tuple[str, int, int, str], int]) -> None:
        """What the ranks handed over: (request, attempt, child, endpoint) to the next block that
        the endpoint needs. -1: the holder refused the attempt for good."""
        if not reached:
            return
        for track in self._tracks.values():
            key = track.key
            for endpoint in track.targets:
                index = reached.get((key.request, key.attempt, key.child, endpoint))
                if index is None or endpoint not in track.next:
                    continue
                if index < 0:
                    del track.next[endpoint]
                else:
                    track.next[endpoint] = min(track.next[endpoint], index)
                track.due = 0

    def holder_lost(self, endpoints: tuple[str, ...]) -> None:
        """They hold nothing any more: everything is offered again."""
        for track in self._tracks.values():
            for endpoint in endpoints:
                if endpoint in track.next:
                    track.next[endpoint] = track.due = 0
