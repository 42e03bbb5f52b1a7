"""The resume guarantee of a request (`Guarantee`), from its fields alone: how it survives a cut.

A request `needs` features of an engine to be continued (penalties, a seeded generator, a
grammar, log probabilities, parsers, several choices); the self-test of the engines shows whether
they have these (`relume.policies.recovery.resume_mode.grounded`), and `fallback` is the guarantee without them.

`FIELDS` has each field of vLLM 0.32's completion and chat requests, with the effect of its value.
An unlisted field may hold unknown state, so it counts as `state`; a field with its neutral value
has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from relume.events.vocabulary.enums import Guarantee
from relume.policies.recovery.resume_mode import UNCOMPARED

# What one field's value does: nothing, needs a feature, adds state that cannot be resumed, several
# searches at once.
NONE, STATE, SEARCH = "", "state", "search"
SEEDED, PENALTIES, LOGPROBS = "seeded", "penalties", "logprobs"
STRUCTURED, PARSERS, CHOICES = "structured", "parsers", "choices"

Effect = Callable[[Any], str]


class Classification(NamedTuple):
    """`reason`: why the guarantee is not better; empty for `exact`."""

    verdict: Guarantee
    reason: str = ""
    needs: tuple[str, ...] = ()
    fallback: Guarantee = Guarantee.NONE


def _nothing(_value: Any) -> str:
    return NONE


def _unless(effect: str, *neutral: Any) -> Effect:
    """The effect unless the value is one of `neutral` (null always is neutral)."""
    return lambda value: NONE if value in neutral else effect


def _filled(effect: str) -> Effect:
    return lambda value: effect if value else NONE


def _always_state(_value: Any) -> str:
    return STATE


def _format(value: Any) -> str:
    """`{"type": "text"}` is the default format; every other one is a grammar."""
    return NONE if isinstance(value, dict) and value.get("type") == "text" else STRUCTURED


# Fields that do not touch what is generated, or do so without a state along the output.
_HARMLESS = (
    "model prompt messages stream stream_options user metadata store service_tier "
    "safety_identifier prompt_cache_key request_id session_id priority cache_salt "
    "max_tokens max_completion_tokens min_tokens stop stop_token_ids include_stop_str_in_output "
    "ignore_eos skip_special_tokens logit_bias allowed_token_ids "
    "spaces_between_special_tokens detokenize truncate_prompt_tokens truncation_side "
    "add_special_tokens add_generation_prompt continue_final_message chat_template "
    "chat_template_kwargs documents reasoning_effort include_reasoning parallel_tool_calls "
    "length_penalty return_tokens_as_token_ids return_token_ids stream_interval "
    # judged together with others below
    "temperature seed top_p top_k min_p echo tools tool_choice functions function_call"
).split()

FIELDS: Mapping[str, Effect] = {
    **dict.fromkeys(_HARMLESS, _nothing),
    "n": _unless(CHOICES, 1),
    "best_of": _unless(SEARCH, 1),
    "use_beam_search": _filled(SEARCH),
    "presence_penalty": _unless(PENALTIES, 0),
    "frequency_penalty": _unless(PENALTIES, 0),
    "repetition_penalty": _unless(PENALTIES, 1),
    "repetition_detection": _filled(PENALTIES),
    "bad_words": _filled(PENALTIES),
    # completions: 0 asks for the sampled token's; chat: true, with top_logprobs beside it
    "logprobs": lambda value: NONE if value is False else LOGPROBS,
    "top_logprobs": _unless(LOGPROBS, 0),
    "prompt_logprobs": _always_state,
    "logprob_token_ids": _filled(STATE),
    "suffix": _filled(STATE),
    "response_format": _format,
    "structured_outputs": _filled(STRUCTURED),
    "guided_json": _always_state,
    "guided_regex": _always_state,
    "guided_choice": _always_state,
    "guided_grammar": _always_state,
    "thinking_token_budget": _always_state,
    "watermarking": _filled(STATE),
    "vllm_xargs": _filled(STATE),
}


def classify(body: Mapping[str, Any]) -> Classification:
    """Judge a decoded body.

    `body` has `prompt` and `messages` in the form of `body.Prompts`: a number of
    prompts under "prompts" and a flag "multimodal"; both may be absent.
    """
    needs: dict[str, str] = {}  # feature: the field that needs it
    stateful = "multimodal input" if body.get("multimodal") else ""
    if body.get("prompts", 1) != 1:
        needs[CHOICES] = "several prompts"
    if tools := _tools(body):
        needs[PARSERS] = tools
        if tools == "tool_choice":  # forced by a grammar
            needs[STRUCTURED] = tools
    for name, value in body.items():
        if value is None or name in ("prompts", "multimodal"):
            continue
        effect = FIELDS.get(name, _always_state)(value)
        if effect == SEARCH:
            return Classification(Guarantee.RESTART, f"{name}={value!r:.20}")
        if effect == STATE:
            stateful = stateful or (name if name in FIELDS else f"unknown field {name!r:.40}")
        elif effect:
            needs.setdefault(effect, name)
    if body.get("echo") and LOGPROBS in needs:
        stateful = stateful or "log probabilities of the prompt"
    return _judged(body, needs, stateful)


def _judged(body: Mapping[str, Any], needs: dict[str, str], stateful: str) -> Classification:
    temperature, seed = body.get("temperature"), body.get("seed")
    deterministic = temperature == 0 or seed is not None
    if deterministic and temperature != 0:
        needs[SEEDED] = "seeded sampling"
    # What has several outputs, or is shown by a parser, is not compared in a replay.
    again = Guarantee.REPLAY if deterministic and not UNCOMPARED & set(needs) else Guarantee.RESTART
    sampled = "temperature not set" if temperature is None else "unseeded sampling"
    if stateful:
        if again == Guarantee.RESTART:
            beside = needs.get(CHOICES) or needs.get(PARSERS) or sampled
            return Classification(Guarantee.RESTART, f"{beside} with {stateful}")
        return Classification(Guarantee.REPLAY, stateful)
    if deterministic:
        return Classification(Guarantee.EXACT, "", tuple(needs), again if needs else Guarantee.NONE)
    return Classification(
        Guarantee.SAMPLED, sampled, tuple(needs), Guarantee.RESTART if needs else Guarantee.NONE
    )


def _tools(body: Mapping[str, Any]) -> str:
    """Why tool parsing may run, or empty."""
    choice = body.get("tool_choice")
    if choice == "none":
        return ""
    if choice not in (None, "auto"):
        return "tool_choice"
    if body.get("tools"):
        return "tools"
    return "functions" if body.get("functions") or body.get("function_call") else ""
