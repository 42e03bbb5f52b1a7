"""Private parts of vLLM's outputs that we touch, for 0.32.x: the queue of one request, and
log probabilities in the form the processor takes and the one it gives."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from relume.engine_shim.engine.streams import token_notes
from relume.engine_shim.generation import ReplayMismatch
from relume.events.wire.resumption import DeliveredChoice

MERGE_AFTER = 64
"""Outputs a slow reader may leave unread before further ones are merged into the last."""
MERGED_TOKENS = 32
"""Maximum number of tokens in a merged output: it is rendered in one piece, and the server serves
no other request meanwhile (a thousand tokens with their log probabilities take seconds)."""


class OrderedCollector(RequestOutputCollector):
    """Hands outputs over one by one, in order, instead of merging what waits.

    Outputs that bring tokens the client already has are never merged with later ones: those
    of a continued request are sealed, and in replay mode as many as bring the expected
    tokens are held back, and compared, until all of them came again.
    """

    def __init__(
        self, output_kind: RequestOutputKind, request_id: str, expected: tuple[int, ...] = ()
    ) -> None:
        """`expected`: what a replay must bring first."""
        super().__init__(output_kind, request_id)
        self._items: deque[RequestOutput | Exception] = deque()
        self._expected = expected
        self._held: list[RequestOutput] = []
        self._compared = 0
        self._sealed = 0

    def put(self, output: Any) -> None:
        if self._expected and isinstance(output, RequestOutput):
            self._compare(output)
        elif isinstance(output, RequestOutput) and (waiting := self._mergeable(output)):
            waiting.add(output, aggregate=self.aggregate)
        else:
            self._items.append(output)
        if self._items:
            self.ready.set()

    def seal(self) -> None:
        """Nothing is merged into what waits now."""
        self._sealed = len(self._items)

    def _mergeable(self, output: RequestOutput) -> RequestOutput | None:
        """The waiting output that can absorb `output`: only the latest of cumulative outputs
        counts, and a slow reader's queue has an end. Choices are kept apart."""
        unsealed = len(self._items) - self._sealed
        if unsealed < (MERGE_AFTER if self.aggregate else 1):
            return None
        (fresh,) = output.outputs
        for waiting in islice(reversed(self._items), unsealed):
            if not isinstance(waiting, RequestOutput):
                return None
            (choice,) = waiting.outputs
            if choice.index == fresh.index:
                full = self.aggregate and len(choice.token_ids) >= MERGED_TOKENS
                return None if full or output.finished > waiting.finished else waiting
        return None

    def _compare(self, output: RequestOutput) -> None:
        """Holds `output` back until all expected tokens came again."""
        (choice,) = output.outputs
        fresh = choice.token_ids if self.aggregate else choice.token_ids[self._compared :]
        for index, actual in enumerate(fresh):
            if self._compared == len(self._expected):
                if self.aggregate:
                    # One output brings tokens on both sides of the cut; its text is one.
                    self._mismatch(None, fresh[index])
                    return
                break
            if actual != self._expected[self._compared]:
                self._mismatch(self._expected[self._compared], actual)
                return
            self._compared += 1
        self._held.append(output)
        if self._compared == len(self._expected):
            self._items.extend(self._held if self.aggregate else self._held[-1:])
            self._sealed = len(self._items) if self.aggregate else 0
            self._settle()
        elif output.finished:
            self._mismatch(self._expected[self._compared], None)

    def _mismatch(self, expected: int | None, actual: int | None) -> None:
        self._items.append(ReplayMismatch(self._compared, expected, actual))
        self._settle()

    def _settle(self) -> None:
        self._expected = ()
        self._held = []

    async def get(self) -> Any:
        while not self._items:
            await self.ready.wait()
        return self._pop()

    def get_nowait(self) -> Any:
        return self._pop() if self._items else None

    def _pop(self) -> Any:
        item = self._items.popleft()
        self._sealed = max(0, self._sealed - 1)
        if not self._items:
            self.ready.clear()
        if isinstance(item, Exception):
            raise item
        return item


def record_of(entry: dict[int, Any], ranks: int) -> token_notes.TokenRecord:
    """vLLM's log probabilities at one token: the sampled one first, then the best `ranks`
    (-1: all), the sampled one perhaps among them."""
    token, sampled = next(iter(entry.items()))
    best = [(e.rank, t, e.logprob) for t, e in entry.items() if e.rank <= ranks or ranks < 0]
    others = tuple((t, logprob) for _, t, logprob in sorted(best))
    return token_notes.TokenRecord(token, sampled.logprob, sampled.rank, others)


def logprobs_of(params: SamplingParams, held: DeliveredChoice, whole: bool) -> LogprobsLists | None:
    """The log probabilities of the delivered tokens, if requested. In a stream the client has them;
    only the tokens matter, for the text before others. Raises MalformedNote."""
    if params.logprobs is None:
        return None
    if whole:
        rows = token_notes.decode(held.note, held.ids)
    else:
        rows = [token_notes.TokenRecord(token, 0.0, 1, ()) for token in held.ids]
    return LogprobsLists(
        np.array([[r.id, *(token for token, _ in r.others)] for r in rows]),
        np.array([[r.logprob, *(logprob for _, logprob in r.others)] for r in rows], np.float32),
        np.array([r.rank for r in rows]),
    )
