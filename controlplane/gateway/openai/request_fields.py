"""What the fields of requests do to their continuation, by API of vLLM 0.32.

Each table has every field of a route's request, with the effect of its value. A field with its
neutral value has no effect; one that is not in the table may hold unknown state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# What one field's value does: nothing, needs a feature, adds state that cannot be resumed, several
# searches at once.
NONE, STATE, SEARCH = "", "state", "search"
SEEDED, PENALTIES, LOGPROBS = "seeded", "penalties", "logprobs"
STRUCTURED, PARSERS, CHOICES = "structured", "parsers", "choices"

Effect = Callable[[Any], str]


def _nothing(_value: Any) -> str:
    return NONE


def _unless(effect: str, *neutral: Any) -> Effect:
    """The effect unless the value is one of `neutral` (null always is neutral)."""
    return lambda value: NONE if value in neutral else effect


def _filled(effect: str) -> Effect:
    return lambda value: effect if value else NONE


def always_state(_value: Any) -> str:
    """Of a field that is not known."""
    return STATE


def _format(value: Any) -> str:
    """`{"type": "text"}` is the default format; every other one is a grammar."""
    return NONE if isinstance(value, dict) and value.get("type") == "text" else STRUCTURED


def _inner_format(value: Any) -> str:
    """A format among other settings of the output."""
    if not isinstance(value, dict):
        return STATE
    given = value.get("format")
    return NONE if given is None else _format(given)


def _thinking(value: Any) -> str:
    """A budget of thinking is counted along the output, and its count is not carried over."""
    free = isinstance(value, dict) and value.get("type") in ("disabled", "adaptive")
    return NONE if free else STATE


def _included(value: Any) -> str:
    """Log probabilities come again with the end of each item, also those of delivered tokens."""
    return STATE if not isinstance(value, list) or "message.output_text.logprobs" in value else NONE


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
    # judged together with others
    "temperature seed top_p top_k min_p echo tools tool_choice functions function_call"
).split()

# Shared by several APIs.
_PENALTIES: Mapping[str, Effect] = {
    "presence_penalty": _unless(PENALTIES, 0),
    "frequency_penalty": _unless(PENALTIES, 0),
    "repetition_penalty": _unless(PENALTIES, 1),
}

OPENAI: Mapping[str, Effect] = {
    **dict.fromkeys(_HARMLESS, _nothing),
    **_PENALTIES,
    "n": _unless(CHOICES, 1),
    "best_of": _unless(SEARCH, 1),
    "use_beam_search": _filled(SEARCH),
    "repetition_detection": _filled(PENALTIES),
    "bad_words": _filled(PENALTIES),
    # completions: 0 asks for the sampled token's; chat: true, with top_logprobs beside it
    "logprobs": lambda value: NONE if value is False else LOGPROBS,
    "top_logprobs": _unless(LOGPROBS, 0),
    "prompt_logprobs": always_state,
    "logprob_token_ids": _filled(STATE),
    "suffix": _filled(STATE),
    "response_format": _format,
    "structured_outputs": _filled(STRUCTURED),
    "guided_json": always_state,
    "guided_regex": always_state,
    "guided_choice": always_state,
    "guided_grammar": always_state,
    "thinking_token_budget": always_state,
    "watermarking": _filled(STATE),
    "vllm_xargs": _filled(STATE),
}
"""Completions and chat completions."""

# The second half are fields of Anthropic's API that vLLM ignores. There is no seed.
_HARMLESS_IN_MESSAGES = (
    "model messages max_tokens metadata stop_sequences stream system temperature top_k top_p tools "
    "tool_choice mm_payload return_mm_kwargs cache_salt chat_template_kwargs "
    "cache_control container context_management inference_geo mcp_servers service_tier speed"
).split()

MESSAGES: Mapping[str, Effect] = {
    **dict.fromkeys(_HARMLESS_IN_MESSAGES, _nothing),
    "output_config": _inner_format,
    "thinking": _thinking,
    "watermarking": _filled(STATE),
    "vllm_xargs": _filled(STATE),
}
"""Anthropic's Messages."""

# The last line is of fields of OpenAI's API that vLLM ignores.
_HARMLESS_IN_RESPONSES = (
    "background include_reasoning input instructions max_output_tokens max_tool_calls metadata model "
    "logit_bias parallel_tool_calls previous_response_id prompt prompt_cache_key reasoning "
    "service_tier store stream temperature tool_choice tools top_logprobs top_p top_k min_p "
    "truncation user skip_special_tokens include_stop_str_in_output request_id session_id priority "
    "media_io_kwargs mm_processor_kwargs mm_payload return_mm_kwargs cache_salt "
    "enable_response_messages previous_input_messages seed stop stop_token_ids ignore_eos "
    "chat_template_kwargs "
    "context_management conversation moderation prompt_cache_retention safety_identifier "
    "stream_options verbosity"
).split()

RESPONSES: Mapping[str, Effect] = {
    **dict.fromkeys(_HARMLESS_IN_RESPONSES, _nothing),
    **_PENALTIES,
    "include": _included,
    "text": _inner_format,
    "structured_outputs": _filled(STRUCTURED),
    "watermarking": _filled(STATE),
    "vllm_xargs": _filled(STATE),
}
"""OpenAI's Responses. What names another response is refused before (`apis`)."""
