"""Reads from a request body what the gateway must know, and no more.

The body is split into its top-level members without decoding them; only members whose
value decides something are decoded. What is certainly a client's mistake raises
`ClientError`; what only the model can check (an over-long prompt, an unknown stop token)
is left to the worker, whose 4xx is relayed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from relume.controlplane.gateway.errors import ClientError
from relume.controlplane.gateway.openai.apis import (
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Api,
    runs_tools,
)
from relume.controlplane.gateway.openai.classify import classify
from relume.events.vocabulary.enums import Guarantee

# A client could read another tenant's KV blocks with these: never passed on.
FORBIDDEN = ("kv_transfer_params", "ec_transfer_params")

BYTES_PER_TOKEN = 4  # the estimate used for text; token-id prompts are counted

_INT64 = (-(1 << 63), (1 << 63) - 1)

_split = msgspec.json.Decoder(dict[str, Raw]).decode
_items = msgspec.json.Decoder(list[Raw]).decode
_value = msgspec.json.Decoder().decode


class ParsedBody(Struct, frozen=True, kw_only=True):
    """What the gateway read. `body` is the client's bytes unless something was stripped.
    `prompt_tokens` is an estimate where `estimated`; `max_tokens` 0: not given. `verdict`
    and what follows it: see `classify.Classification`. `priority` as vLLM has it: lower is more
    urgent. `countable`: its prompt is text or token ids. `may_keep`: it does not say `"store": false`,
    and has no salt that sets it apart from other requests. `output_limit`: the limit that `max_tokens`
    was lowered to; 0: it was not. `runs_tools`: the worker runs some of its tools, so that it can only
    be relayed."""

    model: str
    stream: bool
    prompt_tokens: int
    estimated: bool
    max_tokens: int
    verdict: Guarantee
    reason: str
    needs: tuple[str, ...]
    fallback: Guarantee
    body: bytes
    priority: int = 0
    countable: bool = False
    may_keep: bool = False
    output_limit: int = 0
    runs_tools: bool = False


def _number(low: float, high: float, low_open: bool = False) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise _bad(name, "a number", value)
        if not low <= value <= high or (low_open and value == low):
            bound = f"a number {'above' if low_open else 'from'} {low:g} to {high:g}"
            raise _bad(name, bound, value)

    return check


def _integer(low: int, high: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _bad(name, "an integer", value)
        if not low <= value <= high:
            raise _bad(name, f"an integer of at least {low}", value)

    return check


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _bad(name, "a boolean", value)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 512:
        raise _bad(name, "a non-empty string", value)


def _bad(name: str, expected: str, value: Any) -> ClientError:
    shown = f"{value!r:.60}"
    return ClientError(400, f"'{name}' must be {expected}, got {shown}", name, "invalid_value")


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "model": _text,
    "stream": _boolean,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, low_open=True),
    "min_p": _number(0, 1),
    "top_k": _integer(-1, 1 << 31),
    "n": _integer(1, 1 << 14),
    "best_of": _integer(1, 1 << 14),
    "max_tokens": _integer(0, 1 << 31),
    "max_completion_tokens": _integer(0, 1 << 31),
    "max_output_tokens": _integer(0, 1 << 31),
    "min_tokens": _integer(0, 1 << 31),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 1e6, low_open=True),
    "seed": _integer(*_INT64),
    "priority": _integer(*_INT64),
    "ignore_eos": _boolean,
    "use_beam_search": _boolean,
    "echo": _boolean,
}


def without_forbidden(body: bytes) -> bytes:
    """A JSON body of any route without what a client must not set; raises `ClientError`."""
    return _without_forbidden(_members(body), body)


def parse(body: bytes, api: Api) -> ParsedBody:
    """Read the body of a request of `api`; raises `ClientError` for what no worker could serve."""
    members = _members(body)
    body = _without_forbidden(members, body)
    fields: dict[str, Any] = {}
    for name, raw in members.items():
        if name in api.opaque:
            continue
        value = _decode(name, raw)
        check = CHECKS.get(name)
        if check is not None and value is not None:
            check(name, value)
        fields[name] = value
    prompt_tokens, estimated = _read_prompt(members, fields, api)
    api.adapt(fields, members)
    judged = classify(fields, api.effects)
    return ParsedBody(
        model=fields.get("model") or "",
        stream=fields.get("stream") or False,
        prompt_tokens=prompt_tokens,
        estimated=estimated,
        max_tokens=_max_tokens(fields, api),
        verdict=judged.verdict,
        reason=judged.reason,
        needs=judged.needs,
        fallback=judged.fallback,
        body=body,
        priority=fields.get("priority") or 0,
        countable=api.countable and not fields.get("multimodal") and "prompt_embeds" not in fields,
        may_keep=fields.get("store") is not False and not fields.get("cache_salt"),
        runs_tools=api is RESPONSES and runs_tools(fields),
    )


def limit_output(parsed: ParsedBody, limit: int, api: Api) -> ParsedBody:
    """The same with at most `limit` output tokens, or with what it must generate if that is more;
    itself if it wants no more."""
    members = _members(parsed.body)
    limit = max(limit, _least_output(members, api))
    if 0 < parsed.max_tokens <= limit:
        return parsed
    name = next((name for name in api.limits if name in members), api.limits[-1])
    members[name] = Raw(str(limit).encode())
    return replace(parsed, max_tokens=limit, output_limit=limit, body=msgspec.json.encode(members))


def _least_output(members: dict[str, Raw], api: Api) -> int:
    """Output tokens below which its limit must not be lowered."""
    if api is not MESSAGES:
        return _value(members["min_tokens"]) or 0 if "min_tokens" in members else 0
    thinking = _value(members["thinking"]) if "thinking" in members else None
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return budget + 1 if isinstance(budget, int) else 0  # vLLM refuses a lower limit


def _members(body: bytes) -> dict[str, Raw]:
    try:
        if not body.isascii():
            body.decode()  # what is not decoded below must be text too
        return _split(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientError(
            400, f"the body is not a JSON object: {error}", code="invalid_json"
        ) from None
    except RecursionError:
        raise ClientError(400, "the body is nested too deeply", code="invalid_json") from None


def _decode(name: str, raw: Raw) -> Any:
    try:
        return _value(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientError(
            400, f"'{name}' is not valid JSON: {error}", name, "invalid_json"
        ) from None
    except RecursionError:
        raise ClientError(400, f"'{name}' is nested too deeply", name, "invalid_json") from None


def _without_forbidden(members: dict[str, Raw], body: bytes) -> bytes:
    """The body without members a client must not set; encoded again only if it has some."""
    found = [name for name in FORBIDDEN if members.pop(name, None) is not None]
    xargs = members.get("vllm_xargs")
    if xargs is not None:
        value = _decode("vllm_xargs", xargs)
        if isinstance(value, dict) and any(n in FORBIDDEN or n.startswith("relume") for n in value):
            raise ClientError(
                400, "'vllm_xargs' holds a reserved name", "vllm_xargs", "invalid_value"
            )
    return msgspec.json.encode(members) if found else body


def _max_tokens(fields: dict[str, Any], api: Api) -> int:
    if api is not COMPLETIONS:
        return next((found for name in api.limits if (found := fields.get(name))), 0)
    given = fields.get("max_tokens", 16)  # vLLM's default for completions
    if given == 0 and not fields.get("echo"):
        raise _bad("max_tokens", "an integer of at least 1", given)
    return given or 0


def _read_prompt(members: dict[str, Raw], fields: dict[str, Any], api: Api) -> tuple[int, bool]:
    """(prompt tokens, estimated); puts "multimodal" and "prompts" into `fields`."""
    if api is COMPLETIONS:
        return _read_completion_prompt(members, fields)
    raw = members.get(api.prompt)
    if raw is None:
        raise ClientError(
            400, f"'{api.prompt}' is required", api.prompt, "missing_required_parameter"
        )
    if bytes(raw)[:1] not in ((b"[", b'"') if api.prompt_is_text else (b"[",)):
        expected = "a string or an array" if api.prompt_is_text else "an array"
        raise _bad(api.prompt, expected, _decode(api.prompt, raw))
    texts = [bytes(members[name]) for name in api.texts if name in members]
    if any(mark in text for text in texts for mark in api.media):
        fields["multimodal"] = True
    return sum(map(len, texts)) // BYTES_PER_TOKEN + 1, True


def _read_completion_prompt(members: dict[str, Raw], fields: dict[str, Any]) -> tuple[int, bool]:
    if members.get("prompt_embeds") is not None and bytes(members["prompt_embeds"]) != b"null":
        fields["prompt_embeds"] = True  # not in the table, so it counts as state
        return 1, True
    raw = members.get("prompt")
    text = bytes(raw) if raw is not None else b"null"
    if raw is None or text == b"null":
        raise ClientError(400, "'prompt' is required", "prompt", "missing_required_parameter")
    if text[:1] == b'"':
        return len(text) // BYTES_PER_TOKEN + 1, True
    if text[:1] != b"[":
        raise _bad("prompt", "a string or an array", _decode("prompt", raw))
    return _read_prompt_list(text, fields)


def _read_prompt_list(text: bytes, fields: dict[str, Any]) -> tuple[int, bool]:
    first = text[1:].lstrip()[:1]
    if first.isdigit():  # one prompt of token ids
        return text.count(b",") + 1, False
    prompts = _items(text)
    if not prompts:
        raise ClientError(400, "'prompt' must not be empty", "prompt", "invalid_value")
    fields["prompts"] = len(prompts)
    if first == b"[":
        return text.count(b",") + 1, False
    return len(text) // BYTES_PER_TOKEN + 1, True
