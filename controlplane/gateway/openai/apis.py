"""The APIs whose requests survive the loss of their worker: what their bodies call things."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Raw, Struct

from relume.controlplane.gateway.errors import ClientError
from relume.controlplane.gateway.openai.request_fields import MESSAGES as MESSAGES_FIELDS
from relume.controlplane.gateway.openai.request_fields import OPENAI, Effect
from relume.controlplane.gateway.openai.request_fields import RESPONSES as RESPONSES_FIELDS

Fields = dict[str, Any]
Members = Mapping[str, Raw]

_TOOL_ADDED = b'"tool_addition"'


def _as_they_are(fields: Fields, members: Members) -> None:
    """The fields have the names and values that `classify` expects."""


def _of_messages(fields: Fields, members: Members) -> None:
    """Put the choice of tools in OpenAI's terms, and drop the seed, which vLLM does not read."""
    fields.pop("seed", None)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        kind = choice.get("type")
        fields["tool_choice"] = kind if kind in ("auto", "none") else "required"
    if _TOOL_ADDED in bytes(members["messages"]):  # a message may declare a tool, too
        fields["tools"] = fields.get("tools") or True


_PARSED_TOOLS = ("function", "custom", "namespace")
"""Their calls are for the client. All others run beside the worker, within the response."""
_NOT_STORED = "a response is not stored: any worker may serve the next request. Send the earlier turns in 'input'"
_NO_BACKGROUND = (
    "'background' needs a stored response, and no response is stored. Send 'stream': true; a stream "
    "continues when its worker is lost"
)


def _of_responses(fields: Fields, members: Members) -> None:
    """Refuse what refers to a stored response. Raises ClientError."""
    for name, why in (
        ("previous_response_id", f"'previous_response_id' cannot be used: {_NOT_STORED}"),
        ("background", _NO_BACKGROUND),
        ("conversation", f"'conversation' cannot be used: {_NOT_STORED}"),
    ):
        if fields.get(name):
            raise ClientError(400, why, name, "unsupported_parameter")


def runs_tools(fields: Fields) -> bool:
    """Whether some tool of a request runs beside the worker, which generates several times then."""
    tools = fields.get("tools")
    return isinstance(tools, list) and any(
        isinstance(tool, dict) and tool.get("type", "function") not in _PARSED_TOOLS
        for tool in tools
    )


class Api(Struct, frozen=True, kw_only=True):
    """One API. `prompt`: the member without which there is no request, an array or, if
    `prompt_is_text`, a string; `texts`: the members whose
    text makes the prompt; `opaque`: further members that are looked at and not decoded. `limits`: names of the
    limit of output tokens, the one that counts first; a limit is added under the last. `media`:
    what a prompt with more than text has. `effects`: of its fields, see `request_fields`. `adapt`
    puts decoded fields into the terms of `classify`. `countable`: the tokenizer can render its
    prompt."""

    prompt: str
    texts: tuple[str, ...]
    opaque: frozenset[str]
    limits: tuple[str, ...]
    media: tuple[bytes, ...] = ()
    effects: Mapping[str, Effect]
    adapt: Callable[[Fields, Members], None] = _as_they_are
    prompt_is_text: bool = False
    is_chat: bool = False
    countable: bool = True


_OPENAI_OPAQUE = frozenset(
    "messages prompt prompt_embeds documents chat_template chat_template_kwargs metadata".split()
)

COMPLETIONS = Api(
    prompt="prompt",
    texts=("prompt",),
    opaque=_OPENAI_OPAQUE,
    limits=("max_tokens",),
    effects=OPENAI,
)
CHAT = Api(
    prompt="messages",
    texts=("messages",),
    opaque=_OPENAI_OPAQUE,
    limits=("max_completion_tokens", "max_tokens"),
    media=(
        b'"image_url"',
        b'"input_audio"',
        b'"audio_url"',
        b'"video_url"',
        b'"image_embeds"',
        b'"file"',
    ),
    effects=OPENAI,
    is_chat=True,
)
MESSAGES = Api(
    prompt="messages",
    texts=("system", "messages"),
    opaque=frozenset(("messages", "system", "chat_template_kwargs", "metadata")),
    limits=("max_tokens",),
    media=(b'"image"', b'"document"'),
    effects=MESSAGES_FIELDS,
    adapt=_of_messages,
    is_chat=True,
    countable=False,
)
RESPONSES = Api(
    prompt="input",
    texts=("instructions", "input", "previous_input_messages"),
    opaque=frozenset(
        "input instructions previous_input_messages chat_template_kwargs metadata".split()
    ),
    limits=("max_output_tokens",),
    media=(b'"input_image"', b'"input_file"', b'"input_audio"'),
    effects=RESPONSES_FIELDS,
    adapt=_of_responses,
    prompt_is_text=True,
    is_chat=True,
    countable=False,
)
