"""What decisions chose and weighed, line by line, for what-if: the same choice is the same text."""

from __future__ import annotations

from relume.events import vocabulary as v

Answer = tuple[str, tuple[str, ...]]
"""What was chosen, and all that was weighed."""


def named(holders: tuple[str, ...]) -> str:
    """Chosen holders."""
    return ", ".join(holders) or "nobody"


def judged(hung: bool) -> str:
    """A judgement of silence."""
    return "hung" if hung else "not hung"


def candidate(c: v.Candidate) -> str:
    """A worker that routing weighed."""
    refused = f", not taken: {c.excluded}" if c.excluded else ""
    expected = f", first token after {c.ttft_us} us, {c.hit_tokens} held" if c.ttft_us >= 0 else ""
    return (
        f"{c.worker}:{c.incarnation} costs {c.cost} ({c.prefill_tokens} prompt tokens, "
        f"{c.requests} requests{expected}){refused}"
    )


def site(c: v.HolderCandidate) -> str:
    """A holder that placement weighed."""
    refused = f", not taken: {c.excluded}" if c.excluded else ""
    return f"{c.worker} has a recovery load of {c.load}, {c.free_bytes} bytes free{refused}"


def way(choice: v.RecoveryChoice | v.MigrationChoice | None) -> Answer:
    """How an interrupted or moving request goes on, and the ways weighed."""
    if choice is None:
        return "no plan", ()
    options = tuple(
        f"{option_of(o)}: {o.done_us} us (wait {o.wait_us}, move {o.move_us}, "
        f"compute {o.compute_us})" + (f", not possible: {o.excluded}" if o.excluded else "")
        for o in choice.options
    )
    if choice.chosen >= 0:
        return option_of(choice.options[choice.chosen]), options
    return ("it stays" if type(choice) is v.MigrationChoice else "nobody"), options


def option_of(option: v.RecoveryOption) -> str:
    """One way to go on."""
    if option.kind == "restore":
        return f"restore {option.restored} tokens of {option.holder} on {option.worker}"
    return f"compute all on {option.worker}"
