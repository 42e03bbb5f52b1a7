"""What holders have for a request that is to be restored: its own blocks, or the same prefix
of another request.

Another request's blocks serve where they are more than its own: computed from the same
tokens from the first on, on an engine of the same fingerprint, in the same scope
(`kv_stream.prefix`), as vLLM's prefix cache would take them.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct

from relume.engine_shim.checkpoints.checkpoint_spec import Key, Lender
from relume.engine_shim.checkpoints.daemon_links import Links
from relume.engine_shim.checkpoints.link.block_stream import reason_of
from relume.engine_shim.checkpoints.link.image import pack_tokens
from relume.events.vocabulary.enums import RestoreFailure
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv import token_chain
from relume.events.wire.kv.kv_errors import KvStreamError

ASK_POLL_S = 0.005
OTHERS_S = 0.05
"""Maximum wait for other holders once one has something."""


class LookupResult(Struct, frozen=True):
    """`blocks` may be had at `endpoint`, of `lender` if that is another request."""

    endpoint: str = ""
    blocks: int = 0
    lender: Lender | None = None


def scope_of(request: Any) -> bytes:
    """The scope of vLLM's `request`: of what its block hashes count beside tokens, the salt.
    Empty where they count anything else (adapters, images, embedded prompts)."""
    other = request.lora_request or request.mm_features or request.prompt_embeds is not None
    return b"" if other else token_chain.scope(request.cache_salt or "")


class Lookup:
    """Asks all holders in parallel what they have of a request; the answer is there or not yet. If
    many requests are pending and a holder is silent, some are given up before they are sent."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        links: Links,
        key: Key,
        sources: tuple[str, ...],
        ranks: int,
        timeout_s: float,
        scope: bytes = b"",
        tokens: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """`tokens` of the full blocks, and `scope`, where others' blocks may serve."""
        self.done = threading.Event()
        self.found = LookupResult()
        """What most blocks are to be had by, so far."""
        self.unanswered = dict.fromkeys(sources, RestoreFailure.BUSY)
        """Holders whose answer is not there, and why: BUSY if none was sent a question, since other
        lookups took all the time."""
        self.deadline_s = time.monotonic() + timeout_s
        self._arguments = (links, key, sources, ranks)
        self._shared = scope, tokens
        pool.submit(self._run)

    @property
    def ready(self) -> bool:
        return self.done.is_set() or time.monotonic() > self.deadline_s

    def _run(self) -> None:
        links, key, sources, _ = self._arguments
        requests: dict[tuple[int, str], tuple[Any, list[Any]]] = {}
        try:
            questions: list[m.Ask | m.Match] = [m.Ask(0, (key.request,)), *self._match(links)]
            for order, endpoint in enumerate(() if self.ready else sources):
                self.unanswered[endpoint] = RestoreFailure.UNREACHABLE
                try:
                    peer = links.peer(endpoint)
                    requests[-order, endpoint] = peer, [peer.request(q) for q in questions]
                except KvStreamError as error:
                    self.unanswered[endpoint] = RestoreFailure(reason_of(error))
            best, until_s = (0, True, 0), self.deadline_s
            while requests and (left_s := until_s - time.monotonic()) > 0:
                _, first = next(iter(requests.values()))
                first[-1].done.wait(min(left_s, ASK_POLL_S) if len(requests) > 1 else left_s)
                answered = [w for w, (_, all_) in requests.items() if all_[-1].done.is_set()]
                for who in answered:
                    _, mine = requests.pop(who)
                    answers = [question.answer for question in mine]
                    found = self._better(who[1], answers)
                    # Its own blocks on a tie, and the first named.
                    rank = found.blocks, found.lender is None, who[0]
                    if found.blocks and rank > best:
                        best, self.found = rank, found
                    if isinstance(answers[0], m.Held):
                        del self.unanswered[who[1]]
                if self.found.blocks:
                    until_s = min(until_s, time.monotonic() + OTHERS_S)
            for peer, mine in requests.values():
                for question in mine:
                    peer.forget(question)
        finally:
            self.done.set()

    def _match(self, links: Links) -> list[m.Match]:
        """The question for others' blocks, if any may serve."""
        scope, tokens = self._shared
        if not scope or not tokens or links.fingerprint is None:
            return []
        self.chains = token_chain.chains(
            token_chain.root(links.fingerprint, scope),
            map(pack_tokens, tokens[: token_chain.MAX_CHAINS]),
        )
        return [m.Match(0, b"".join(self.chains))]

    def _better(self, endpoint: str, answers: list[Any]) -> LookupResult:
        """What one holder's answers come to."""
        _, key, _, ranks = self._arguments
        own = held(answers[0], key, ranks)
        other = answers[1] if len(answers) > 1 else None
        if isinstance(other, m.MatchAnswer) and own < other.blocks <= len(self.chains):
            lender = Lender(other.request, other.child, tuple(self.chains[: other.blocks]))
            return LookupResult(endpoint, other.blocks, lender)
        return LookupResult(endpoint, own)


def held(answer: Any, key: Key, ranks: int) -> int:
    """Blocks all ranks can have of what was answered; none without an answer, or when they
    were written for another engine."""
    if not isinstance(answer, m.Held):
        return 0
    by_rank = {
        p.rank: p.blocks
        for p, fit in zip(answer.positions, answer.usable, strict=False)
        if p.request == key.request and p.child == key.child and fit == "same"
    }
    return min((by_rank.get(rank, 0) for rank in range(ranks)), default=0)
