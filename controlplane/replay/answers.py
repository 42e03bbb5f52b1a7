"""What a decision answers, as text: what is done, and line by line what was weighed. The same
choice is the same text."""

from __future__ import annotations

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RecoveryKind
from relume.policies.liveness.overdue import Judgement, Silence

Answer = tuple[str, tuple[str, ...]]
"""What was chosen, and all that was weighed."""


def answer_text(about: str, answer: Answer) -> str:
    """On one line."""
    chosen, weighed = answer
    return f"{about}: {chosen} of [{'; '.join(weighed)}]"


def routed(
    worker: str,
    incarnation: int,
    candidates: tuple[v.Candidate, ...],
    others: tuple[tuple[str, int], ...] = (),
) -> Answer:
    """A route, the workers that it compared, and how many it does not name."""
    chosen = f"{worker}:{incarnation}" if worker else "no worker"
    more = tuple(f"{count} more: {why or 'open'}" for why, count in others)
    return chosen, (*map(_candidate, candidates), *more)


def _candidate(c: v.Candidate) -> str:
    refused = f", not eligible: {c.excluded}" if c.excluded else ""
    expected = f", first token after {c.ttft_us} us, {c.hit_tokens} held" if c.ttft_us >= 0 else ""
    return (
        f"{c.worker}:{c.incarnation} costs {c.cost} ({c.prefill_tokens} prompt tokens, "
        f"{c.requests} requests{expected}){refused}"
    )


def placed(
    policy: str,
    wanted: int,
    holders: tuple[str, ...],
    reason: str,
    size: int,
    candidates: tuple[v.HolderCandidate, ...],
) -> Answer:
    """Holders, and those that placement compared."""
    question = f"{policy}: {wanted} wanted for {size} bytes{f', {reason}' if reason else ''}"
    return ", ".join(holders) or "no holder", (question, *map(_site, candidates))


def _site(c: v.HolderCandidate) -> str:
    refused = f", not eligible: {c.excluded}" if c.excluded else ""
    return f"{c.worker} has a recovery load of {c.load}, {c.free_bytes} bytes free{refused}"


def planned(policy: str, choice: v.RecoveryChoice | None) -> Answer:
    """How an interrupted request continues, and the options compared."""
    if choice is None:
        return "no plan", (policy,)
    options = tuple(map(_option, choice.options))
    return _chosen(choice) or "no worker", (policy, *options)


def moved(cause: str, choice: v.MigrationChoice | None) -> Answer:
    """Whether and how a running request moves, and the ways compared."""
    if choice is None:
        return "it stays", (cause,)
    times = f"{choice.go_us} us there, {choice.stay_us} us here {choice.reason}".rstrip()
    options = tuple(map(_option, choice.options))
    return _chosen(choice) or "it stays", (f"{cause}: {times}", *options)


def _chosen(choice: v.RecoveryChoice | v.MigrationChoice) -> str:
    return _way(choice.options[choice.chosen]) if choice.chosen >= 0 else ""


def _option(o: v.RecoveryOption) -> str:
    parts = f"wait {o.wait_us}, move {o.move_us}, compute {o.compute_us}"
    refused = f", not possible: {o.excluded}" if o.excluded else ""
    return f"{_way(o)}: {o.done_us} us ({parts}){refused}"


def _way(option: v.RecoveryOption) -> str:
    if option.kind == RecoveryKind.RESTORE:
        return f"restore {option.restored} tokens of {option.holder} on {option.worker}"
    return f"compute all on {option.worker}"


def judged(hung: bool, silent_us: int, bound_us: int) -> Answer:
    """A judgement of silence."""
    return "hung" if hung else "not hung", (f"silent {silent_us} us of {bound_us} us allowed",)


def stream_judged(seen: Silence, found: Judgement) -> Answer:
    """A judgement of one stream's silence."""
    decodes = "finished" if found.finished else "decoded" if found.decodes else "not decoded"
    held = "" if seen.held < 0 else f", {seen.held} requests there"
    return "stuck" if found.stuck else "not stuck", (
        f"silent {seen.silent_us} us of {found.bound_us} us allowed",
        f"{found.steps} steps since step {seen.from_step}, {decodes}, probe {seen.probe}{held}",
    )
