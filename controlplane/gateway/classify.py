"""How a cut in the middle of a request can be survived, judged from its fields alone.

Verdicts, best first (ports.Arrival):

- `exact`: greedy text; another worker continues from the delivered tokens, identically.
- `replay`: deterministic, but the engine keeps state along the output that a continuation
  would not have (penalties, a seeded generator, a grammar, logprobs): generated again from
  the start and compared.
- `sampled`: unseeded sampling without such state; continued validly, not identically.
- `restart`: neither; started anew while the client has nothing, else failed honestly.

Each field of vLLM 0.32's completion and chat requests stands in `FIELDS` with what a
value of it does to the verdict. A field that is not there may hold state, so it counts as
`state`; a field whose value is its neutral one counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# What one field's value does: nothing, adds state along the output, several outputs.
NONE, STATE, MULTI = "", "state", "multi"

Effect = Callable[[Any], str]


def _nothing(_value: Any) -> str:
    return NONE


def _state_unless(*neutral: Any) -> Effect:
    """State unless the value is one of `neutral` (null always is neutral)."""
    return lambda value: NONE if value in neutral else STATE


def _state_if_filled(value: Any) -> str:
    return STATE if value else NONE


def _always_state(_value: Any) -> str:
    return STATE


def _several(value: Any) -> str:
    return NONE if value == 1 else MULTI


def _multi_if_true(value: Any) -> str:
    return MULTI if value else NONE


def _format(value: Any) -> str:
    """`{"type": "text"}` is the default format; every other one is a grammar."""
    return NONE if isinstance(value, dict) and value.get("type") == "text" else STATE


# Fields that do not touch what is generated, or do so from the prompt alone.
_HARMLESS = (
    "model prompt messages stream stream_options user metadata store service_tier "
    "safety_identifier prompt_cache_key request_id session_id priority cache_salt "
    "max_tokens max_completion_tokens min_tokens stop stop_token_ids include_stop_str_in_output "
    "ignore_eos skip_special_tokens "
    "spaces_between_special_tokens detokenize truncate_prompt_tokens truncation_side "
    "add_special_tokens add_generation_prompt continue_final_message chat_template "
    "chat_template_kwargs documents reasoning_effort include_reasoning parallel_tool_calls "
    "length_penalty return_tokens_as_token_ids return_token_ids stream_interval "
    # judged together with others below
    "temperature seed top_p top_k min_p tools tool_choice functions function_call"
).split()

FIELDS: Mapping[str, Effect] = {
    **dict.fromkeys(_HARMLESS, _nothing),
    "n": _several,
    "best_of": _several,
    "use_beam_search": _multi_if_true,
    "presence_penalty": _state_unless(0),
    "frequency_penalty": _state_unless(0),
    "repetition_penalty": _state_unless(1),
    # completions: 0 asks for the sampled token's; chat: true, with top_logprobs beside it
    "logprobs": lambda value: NONE if value is False else STATE,
    "top_logprobs": _state_unless(0),
    "prompt_logprobs": _always_state,
    "logprob_token_ids": _state_if_filled,
    "logit_bias": _state_if_filled,
    "allowed_token_ids": _state_if_filled,
    "bad_words": _state_if_filled,
    "echo": _state_if_filled,
    "suffix": _state_if_filled,
    "response_format": _format,
    "structured_outputs": _state_if_filled,
    "guided_json": _always_state,
    "guided_regex": _always_state,
    "guided_choice": _always_state,
    "guided_grammar": _always_state,
    "thinking_token_budget": _always_state,
    "repetition_detection": _always_state,
    "watermarking": _state_if_filled,
    "vllm_xargs": _state_if_filled,
}


def classify(body: Mapping[str, Any]) -> tuple[str, str]:
    """(verdict, reason) of a decoded body; `reason` is empty for `exact`.

    `prompt` and `messages` stand in `body` as `body.Prompts` puts them: a number of
    prompts under "prompts" and a flag "multimodal"; both may be absent.
    """
    if body.get("prompts", 1) != 1:
        return "restart", "several prompts"
    tools = _tools(body)
    if tools:
        return "restart", tools
    stateful = "multimodal input" if body.get("multimodal") else ""
    for name, value in body.items():
        if value is None or name in ("prompts", "multimodal"):
            continue
        effect = FIELDS.get(name, _always_state)(value)
        if effect is MULTI:
            return "restart", f"{name}={value!r:.20}"
        if effect is STATE and not stateful:
            stateful = name if name in FIELDS else f"unknown field {name!r:.40}"
    temperature = body.get("temperature")
    if temperature == 0:
        return ("replay", stateful) if stateful else ("exact", "")
    if body.get("seed") is not None:
        return "replay", stateful or "seeded sampling"
    sampled = "temperature not set" if temperature is None else "unseeded sampling"
    if stateful:
        return "restart", f"{sampled} with {stateful}"
    return "sampled", sampled


def _tools(body: Mapping[str, Any]) -> str:
    """Why tool parsing may run, or empty: call ids are random and deltas merge by timing."""
    choice = body.get("tool_choice")
    if choice == "none":
        return ""
    if choice not in (None, "auto"):
        return "tool_choice"
    if body.get("tools"):
        return "tools"
    return "functions" if body.get("functions") or body.get("function_call") else ""
