"""The rules of seed 004 for moving requests, with its figures where it has some
(docs/concepts/migration.md has the table)."""

from __future__ import annotations

import pytest

from relume.events.vocabulary import RecoveryChoice, RecoveryOption
from relume.policies.recovery.plan import plan
from relume.policies.recovery.recovery_options import (
    InterruptedRequest,
    Links,
    StoredBlocks,
    Target,
)

BYTES_PER_TOKEN = 40 << 10
"""Of Llama 70B on one of eight ranks: 40 MB for 1,024 tokens."""
PREFILL_NS = 200_000
"""5,000 tokens a second."""
RULES = ("completion", "least_delay", "least_total")
GONE = Target(
    worker="w0", load=0, wait_us=0, prefill_ns_per_token=PREFILL_NS, excluded="lost"
)  # fmt: skip


def target(name: str, **more: object) -> Target:
    options: dict = {"load": 0, "wait_us": 0, "prefill_ns_per_token": PREFILL_NS, **more}
    return Target(worker=name, **options)


def held(name: str, tokens: int, holder: str = "w0", missing: int = 16) -> InterruptedRequest:
    """A request of which `holder` has all but the last `missing` tokens."""
    stored = StoredBlocks(holder, tokens - missing, (tokens - missing) * BYTES_PER_TOKEN)
    return InterruptedRequest(request=name, attempt=1, tokens=tokens, stored=(stored,))


def way(choice: RecoveryChoice) -> RecoveryOption:
    assert choice.chosen >= 0
    return choice.options[choice.chosen]


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize(
    ("gb_s", "kind"),
    [
        (900, "restore"), (600, "restore"), (50, "restore"), (28, "restore"), (10, "restore"),
        (0.1, "recompute"),
    ],
)  # fmt: skip
def test_no_length_turns_restoring_into_computing_again(
    policy: str, gb_s: float, kind: str
) -> None:
    """The text has a crossover at 168K tokens for 28 GB/s. Its costs do not give one."""
    links = Links(1, int(gb_s * 1e6))
    for tokens in (256, 4096, 65_536, 131_072, 168_000, 500_000, 2_000_000):
        (choice,) = plan([held("q", tokens)], [GONE, target("w1")], links, policy=policy)
        assert way(choice).kind == kind, f"{tokens} tokens"
