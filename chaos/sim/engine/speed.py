"""Steps that last longer, begin later, or give more tokens than by the formula: slow hosts,
speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from relume.chaos.sim.engine.step_cost import StepCost


class SlowedStepCost(StepCost):
    """`factor` times what `cost` says."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        super().__init__(cost.formula)
        self._cost = cost
        self._factor = factor
        self.width, self.given = cost.width, cost.given

    def decode(self, sequences: int, context: int) -> tuple[int, int]:
        """See StepCost.decode."""
        first, more = self._cost.decode(sequences, context)
        return round(first * self._factor), round(more * self._factor)

    def step(self, chunks: Sequence[tuple[int, int]], sequences: int, context: int) -> int:
        """See StepCost.step."""
        return round(self._cost.step(chunks, sequences, context) * self._factor)


class PausedStepCost(StepCost):
    """As `cost`, with a pause of `pause_ns` before each step."""

    def __init__(self, cost: StepCost, pause_ns: int) -> None:
        super().__init__(cost.formula)
        self._cost = cost
        self.pause_ns = pause_ns
        self.width, self.given = cost.width, cost.given

    def decode(self, sequences: int, context: int) -> tuple[int, int]:
        """See StepCost.decode: without the pause."""
        return self._cost.decode(sequences, context)

    def step(self, chunks: Sequence[tuple[int, int]], sequences: int, context: int) -> int:
        """See StepCost.step: without the pause."""
        return self._cost.step(chunks, sequences, context)


class Speculative(StepCost):
    """Draft-assisted decoding, on average. Each of `drafts` proposed tokens is accepted with
    probability `acceptance` if those before it were, so a step gives (1 - a^(k+1)) / (1 - a)
    tokens (LUMEN Eq. 3). The step verifies k + 1 tokens per sequence, and the draft model needs
    `draft_share` of a decode step of one token per proposal. A step here is the time of one token
    of a sequence."""

    def __init__(
        self, cost: StepCost, acceptance: float, drafts: int, draft_share: float = 0.05
    ) -> None:
        super().__init__(cost.formula)
        self._cost = cost
        self._drafts = drafts
        self._draft_share = draft_share
        powers = [acceptance**n for n in range(drafts + 1)]
        self.gain = sum(powers)
        """Tokens per step."""

    def decode(self, sequences: int, context: int) -> tuple[int, int]:
        """See StepCost.decode."""
        first, more = self._cost.decode(sequences, context)
        # Verification adds a step of prompt chunks of k + 1 tokens after the context.
        k = self._drafts + 1
        plain, _ = self._cost.decode(sequences, 0)
        wide, _ = self._cost.decode(sequences * k, 0)
        step = first + max(wide - plain, 0) + self._drafts * self._draft_share * first
        return round(step / self.gain), round(more / self.gain)

    def step(self, chunks: Sequence[tuple[int, int]], sequences: int, context: int) -> int:
        """See StepCost.step: with prompts in it, a step gives each sequence one token."""
        return self._cost.step(chunks, sequences, context)


class Drafts(Struct, frozen=True, kw_only=True):
    """Each of `count` proposed tokens is accepted with probability `acceptance` if those before it
    were. The draft model needs `share` of a decode step of one token per proposal; proposals and
    results travel in `exchange_us`. `sparing`: drafts only in steps without prompts, and only if
    they give a token sooner."""

    acceptance: float
    count: int
    share: float = 0.05
    exchange_us: int = 0
    sparing: bool = False


class AssistedStepCost(Speculative):
    """The same with drafts from another host; steps with prompts also verify: k + 1 tokens of each
    sequence, after the drafts."""

    def __init__(self, cost: StepCost, drafts: Drafts) -> None:
        super().__init__(cost, drafts.acceptance, drafts.count, drafts.share)
        self._exchange_ns = 1000 * drafts.exchange_us
        self._sparing = drafts.sparing
        if not drafts.sparing:
            self.width, self.given = drafts.count + 1, self.gain

    def decode(self, sequences: int, context: int) -> tuple[int, int]:
        """See StepCost.decode."""
        first, more = super().decode(sequences, context)
        first += round(self._exchange_ns / self.gain)
        if not self._sparing:
            return first, more
        return min((first, more), self._cost.decode(sequences, context))

    def step(self, chunks: Sequence[tuple[int, int]], sequences: int, context: int) -> int:
        """See StepCost.step."""
        if not sequences or self._sparing:
            return self._cost.step(chunks, sequences, context)
        verified = [*chunks, *[(self._drafts, 0)] * sequences]
        plain, _ = self._cost.decode(sequences, context)
        drafting = self._drafts * self._draft_share * plain + self._exchange_ns
        return self._cost.step(verified, sequences, context) + round(drafting)
