"""The budget of cross-checks: what an engine saves for them, and what one is expected to take.

Theory of operation. An engine saves time for checks from its start on: of each second the part that
`crosscheck.budget_ppm` says. A check of the share may begin when `MARGIN_PERCENT` of its expected time
are saved, and takes from them what it took. So all checks of an engine together stay within the budget
at any time since its start, unless one takes longer than that margin; then the next ones wait until
that is saved, too. Of what is left after a check, more than half of its time is dropped, so that long
idleness brings no burst. Checks in doubt and in disputes need no savings and take none.

The expected time is that of the steps, by the fitted weights of the worker's class: of the prompt, and
of each token after it. The fold stores how long the prompts of finished requests were for this.

Savings are stored as a time of the leader's clock (`CheckRecord.rests_until_ms`): up to it, what the
engine saved is spent. All this is since version 2 of `cross_check`.
"""

from __future__ import annotations

from msgspec import UnsetType

from relume.events.vocabulary import RequestEnded
from relume.events.vocabulary.enums import EnginePhase, Guarantee
from relume.policies.agreement import decided_for_all
from relume.policies.crosscheck.check_settings import WHOLE_PPM, CrossCheckConfig
from relume.policies.crosscheck.check_state import CheckRecord
from relume.policies.state.fleet import Fleet, Request, Worker
from relume.policies.state.step_times import DEFAULTS, SCALES

CROSS_CHECK_VERSION = "version.cross_check"
"""The setting by which replicas record how they decide cross-checks."""
SAVES = 2
"""The version since which engines save."""
MARGIN_PERCENT = 150
"""Part of its expected time that is saved before a check begins."""
MOST_FINISHED = 256
"""Finished requests whose prompts' lengths are stored."""
STEP_TOKENS = 2048
"""Prompt tokens of a step, if the engine does not report its budget."""


def engines_save(fleet: Fleet) -> bool:
    """Whether every living replica goes by what engines save."""
    return decided_for_all(fleet, CROSS_CHECK_VERSION, SAVES)


def begin_saving(fleet: Fleet) -> None:
    """A tick: engines that are ready since the last one begin."""
    if not engines_save(fleet):
        return
    for worker in fleet.workers.values():
        if worker.engine == EnginePhase.READY and not worker.plain:
            record = worker.checks
            if isinstance(record, UnsetType) or record.incarnation != worker.incarnation:
                worker.checks = CheckRecord(
                    incarnation=worker.incarnation, rests_until_ms=fleet.tick_unix_ms
                )


def note_finished(fleet: Fleet, request: Request, event: RequestEnded) -> None:
    """A request of the share is complete: the length of its prompt is stored."""
    if request.verdict != Guarantee.EXACT or event.attempts != 1 or not engines_save(fleet):
        return
    finished = {} if isinstance(fleet.finished, UnsetType) else fleet.finished
    finished[request.request] = _prompt_tokens(request)
    while len(finished) > MOST_FINISHED:
        del finished[next(iter(finished))]
    fleet.finished = finished


def has_saved(
    fleet: Fleet, worker: Worker, request: str, tokens: int, config: CrossCheckConfig
) -> bool:
    """Whether the worker's engine has saved enough to answer the request with its `tokens` tokens
    again."""
    if config.budget_ppm >= WHOLE_PPM:
        return True
    record, prompt = worker.checks, _prompt_of(fleet, request)
    if isinstance(record, UnsetType) or record.incarnation != worker.incarnation or prompt < 0:
        return False
    needed_us = expected_us(fleet, worker, prompt, tokens) * MARGIN_PERCENT // 100
    return record.rests_until_ms + saving_ms(needed_us, config) <= fleet.tick_unix_ms


def spend(record: CheckRecord, took_us: int, now_ms: int, config: CrossCheckConfig) -> None:
    """A check took this long."""
    took_ms = saving_ms(took_us, config)
    record.rests_until_ms = max(record.rests_until_ms + took_ms, now_ms - took_ms // 2)


def saving_ms(engine_us: int, config: CrossCheckConfig) -> int:
    """Time in which an engine saves so much."""
    return engine_us * WHOLE_PPM // max(config.budget_ppm, 1) // 1000


def expected_us(fleet: Fleet, worker: Worker, prompt: int, tokens: int) -> int:
    """What an idle engine takes to compute a prompt and so many tokens."""
    model = fleet.steptimes.get(worker.steps_like)
    weights = model.routing_weights if model is not None else DEFAULTS
    base, token, work, request, context, mixed = map(float.__mul__, weights, SCALES)
    prompt_steps = -(-prompt // (worker.step_tokens or STEP_TOKENS))
    steps = max(tokens - 1, 0)
    read = steps * prompt + steps * tokens // 2
    took_us = prompt_steps * (base + mixed) + prompt * token + work * (prompt * prompt // 2)
    took_us += steps * (base + request) + context * read
    return int(took_us * worker.slowness)


def _prompt_of(fleet: Fleet, request: str) -> int:
    """Length of the request's prompt; -1: not known."""
    if (live := fleet.requests.get(request)) is not None:
        return _prompt_tokens(live)
    return -1 if isinstance(fleet.finished, UnsetType) else fleet.finished.get(request, -1)


def _prompt_tokens(request: Request) -> int:
    return (
        request.engine_prompt_tokens if request.engine_prompt_tokens > 0 else request.prompt_tokens
    )
