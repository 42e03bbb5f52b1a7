"""Steps that take more, or give more, than the formula says: slow hosts, speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from chaos.sim.cost import StepCost


class Slowed(StepCost):
    """`factor` times what `cost` says."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        super().__init__(cost.formula)
        self._cost = cost
        self._factor = factor
        self.width, self.gain = cost.width, cost.gain

    def decode(self, sequences: int, context: int) -> tuple[int, int]:
        """See StepCost.decode."""
        first, more = self._cost.decode(sequences, context)
        return round(first * self._factor), round(more * self._factor)

    def step(self, chunks: Sequence[tuple[int, int]], sequences: int, context: int) -> int:
        """See StepCost.step."""
        return round(self._cost.step(chunks, sequences, context) * self._factor)


class Drafts(Struct, frozen=True):
    """Of `count` proposed tokens each is accepted with probability `acceptance` if those before
    it were. The draft model takes `share` of a decode step of one token for each it proposes;
    proposals and what became of them go to and fro in `exchange_us`. `sparing`: drafts only in
    steps without prompts, and only where they give a token sooner."""

    acceptance: float
    count: int
    share: float = 0.05
    exchange_us: int = 0
    sparing: bool = False


class Speculative(StepCost):
    """Draft-assisted decoding, as it is on average. A step gives (1 - a^(k+1)) / (1 - a) tokens
    (LUMEN Eq. 3) and verifies k + 1 of each sequence, also beside prompts; it begins when its
    drafts are there. A decode step here is what one token of a sequence takes."""

    def __init__(self, cost: StepCost, drafts: Drafts) -> None:
        super().__init__(cost.formula)
        self._cost = cost
        self._drafts = drafts
        self.tokens = sum(drafts.acceptance**n for n in range(drafts.count + 1))
        """A step gives a sequence so many."""
        if not drafts.sparing:
            self.width, self.gain = drafts.count + 1, self.tokens

    def _drafting(self, plain_ns: int) -> float:
        return self._drafts.count * self._drafts.share * plain_ns + 1000 * self._drafts.exchange_us

    def decode(self, sequences: int, context: int) -> tuple[int, int]:
        """See StepCost.decode."""
        first, more = self._cost.decode(sequences, context)
        plain, _ = self._cost.decode(sequences, 0)
        wide, _ = self._cost.decode(sequences * (self._drafts.count + 1), 0)
        step = first + max(wide - plain, 0) + self._drafting(first)
        if self._drafts.sparing and step >= first * self.tokens:
            return first, more
        return round(step / self.tokens), round(more / self.tokens)

    def step(self, chunks: Sequence[tuple[int, int]], sequences: int, context: int) -> int:
        """See StepCost.step."""
        if not sequences or self._drafts.sparing:
            return self._cost.step(chunks, sequences, context)
        verified = [*chunks, *[(self._drafts.count, 0)] * sequences]
        drafting = self._drafting(self._cost.decode(sequences, context)[0])
        return self._cost.step(verified, sequences, context) + round(drafting)
