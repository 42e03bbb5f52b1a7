"""How many machines of a pipeline compute prompts and how many tokens (DéjàVu Appendix D).

A model is cut into pipeline stages, one per machine. With one pipeline for both, a prompt
(`prompt_us` a stage) holds up the token steps (`token_us` a stage) of the microbatches after it;
with two, each does one kind of work, and the slower one decides. Times are those of a stage when
all `machines` share the model; a pipeline of d machines takes machines / d as long. Streaming the
prompt's KV cache slows prompts by a factor `overhead` (m, at least 1).

Whole numbers and exact fractions; inverse throughputs are microseconds a microbatch.
"""

from __future__ import annotations

from fractions import Fraction

from msgspec import Struct


class Work(Struct, frozen=True):
    """A microbatch: microseconds a stage of its prompt and of a token step when all machines
    share the model, and tokens it generates. `overhead`: m."""

    prompt_us: int
    token_us: int
    tokens: int
    overhead: Fraction = Fraction(1)


class Footprint(Struct, frozen=True, kw_only=True):
    """Bytes: a machine's memory; of one layer its weights, and of one microbatch the prompt's
    KV cache and that of the generated tokens."""

    memory: int
    layers: int
    weights: int
    prompt_kv: int
    token_kv: int


class Split(Struct, frozen=True):
    """A choice: machines for prompts and for tokens (0 and all: one pipeline for both), and its
    inverse throughput."""

    prompt: int
    token: int
    inverse_us: Fraction


class DoesNotFit(ValueError):
    """No number of machines holds the model and its microbatches."""


def prompt_machines_at_least(size: Footprint) -> int:
    """Eq. 2: layers (weights + prompt KV) / memory."""
    return -(-size.layers * (size.weights + size.prompt_kv) // size.memory)


def token_machines_at_least(size: Footprint) -> int:
    """Eq. 3: each of d stages holds a share of the layers and of d microbatches' KV, so the
    latter does not shrink with d. Raises DoesNotFit when it alone fills a machine."""
    left = size.memory - size.layers * (size.prompt_kv + size.token_kv)
    if left <= 0:
        raise DoesNotFit("the KV cache of one microbatch fills a machine at any depth")
    return max(1, -(-size.layers * size.weights // left))


def together_us(machines: int, work: Work) -> Fraction:
    """Eq. 4: one pipeline for both, all microbatches starting and ending together."""
    bubble = Fraction((machines - 1) * (work.prompt_us - work.token_us), machines)
    return bubble + work.prompt_us + work.tokens * work.token_us


def prompts_us(machines: int, prompt: int, work: Work) -> Fraction:
    """I_p: prompts alone on `prompt` of `machines` machines."""
    return work.overhead * work.prompt_us * machines / prompt


def tokens_us(machines: int, token: int, work: Work) -> Fraction:
    """I_t: token steps alone on `token` of `machines` machines."""
    return Fraction(work.tokens * work.token_us * machines, token)


def token_share(machines: int, work: Work) -> Fraction:
    """Eq. 1 and 6: machines for tokens, not rounded; the others compute prompts (Eq. 7)."""
    generated = work.tokens * work.token_us
    return machines * generated / (work.overhead * work.prompt_us + generated)


def pays(machines: int, work: Work) -> bool:
    """Eq. 5: whether two pipelines beat one, could machines be divided. The published form
    divides by D (2 - m) - 1, so it needs m < 2 - 1 / D, not only m < 2."""
    scale = machines * (2 - work.overhead) - 1
    return work.prompt_us * scale > (machines - 1) * work.token_us


def choose(machines: int, work: Work, prompt_least: int = 1, token_least: int = 1) -> Split:
    """The division into whole machines with the highest throughput; one pipeline where that is
    as good, or where the least numbers (Eq. 2 and 3) leave no division."""
    best = Split(0, machines, together_us(machines, work))
    for prompt in range(max(prompt_least, 1), machines - max(token_least, 1) + 1):
        token = machines - prompt
        slower = max(prompts_us(machines, prompt, work), tokens_us(machines, token, work))
        if slower < best.inverse_us:
            best = Split(prompt, token, slower)
    return best
