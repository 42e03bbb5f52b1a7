"""Requests of every kind, each with what the undisturbed fleet answered.

A case is one request body; `Truth` is the answer nobody disturbed, with the text length
after each token, so that stop strings can be laid across a chosen token.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from relume.chaos.traffic import Stream, prompts

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_TOKENS = 120
PROMPTS = prompts(8)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
CALL = (
    r'[a-z ]{30,60}<tool_call>\n\{"name": "look_up", "arguments": \{"word": "[a-z ]{60,90}"\}\}'
    r"\n</tool_call>"
)


class Case(Struct, frozen=True, kw_only=True):
    """One request. `verdict` and `reason` (a part of it): what response and log must say."""

    name: str
    route: str
    body: dict[str, Any]
    verdict: str = "exact"
    reason: str = ""
    window: tuple[int, int] = (0, 0)
    """Tokens over which its stop string lies."""

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def tells_tokens(self) -> bool:
        """Whether each chunk carries the id of its one token."""
        body = self.body
        return body["return_token_ids"] and "stream_interval" not in body and "n" not in body

    @property
    def deterministic(self) -> bool:
        return self.body["temperature"] == 0 or self.body.get("seed") is not None


class Truth(Struct):
    """An undisturbed answer, and the length of its text after each token."""

    stream: Stream
    lengths: list[int] = field(default_factory=lambda: [0])

    def on_token(self, stream: Stream) -> None:
        """Called with each chunk."""
        self.lengths += [len(stream.text)] * (len(stream.tokens) + 1 - len(self.lengths))

    def across(self, first: int, last: int) -> str:
        """A string that begins inside token `first` - 1 and ends inside token `last`, and
        stands nowhere before."""
        text, lengths = self.stream.text, self.lengths
        stop = text[lengths[first] - 1 : lengths[last] + 1]
        assert text.find(stop) == lengths[first] - 1, (first, last, stop)
        return stop

    def token_first_at(self, low: int, high: int) -> int:
        """A token id that comes for the first time at an index within the bounds."""
        tokens = self.stream.tokens
        return next(t for i, t in enumerate(tokens) if low <= i < high and t not in tokens[:i])


def body_of(route: str, number: int, stream: bool, **extra: Any) -> dict[str, Any]:
    """A greedy request; `extra` overrides."""
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": MAX_TOKENS}
    body["return_token_ids"] = True
    if route == TEXT:
        body["prompt"] = PROMPTS[number]
    else:
        body["messages"] = [
            {"role": "system", "content": "Answer at length."},
            {"role": "user", "content": PROMPTS[number]},
        ]
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return {**body, **extra}


def _case(name: str, route: str, number: int, stream: bool, **extra: Any) -> Case:
    return Case(name=name, route=route, body=body_of(route, number, stream, **extra))


def plain_cases() -> list[Case]:
    """Nothing but greedy text, in all four shapes; the others are chosen from them."""
    return [
        _case("text-stream", TEXT, 0, True),
        _case("text-whole", TEXT, 0, False),
        _case("chat-stream", CHAT, 1, True),
        _case("chat-whole", CHAT, 1, False),
    ]


def exact_cases(text: Truth, chat: Truth, point: int) -> list[Case]:
    """What must go on exactly, with stop strings around token `point`."""
    late = text.token_first_at(MAX_TOKENS - 12, MAX_TOKENS - 2)
    soon = text.token_first_at(8, 30)
    late_chat = chat.token_first_at(MAX_TOKENS - 12, MAX_TOKENS - 2)
    usage_in_each = {"include_usage": True, "continuous_usage_stats": True}
    cases = [
        *plain_cases(),
        _case("stop-id-text-stream", TEXT, 0, True, stop_token_ids=[late]),
        _case("stop-id-text-whole", TEXT, 0, False, stop_token_ids=[late]),
        _case("stop-id-chat-stream", CHAT, 1, True, stop_token_ids=[late_chat]),
        _case("min-tokens-stream", TEXT, 0, True, stop_token_ids=[soon], min_tokens=90),
        _case("min-tokens-whole", TEXT, 0, False, stop_token_ids=[soon], min_tokens=90),
        _case("ignore-eos-stream", TEXT, 2, True, ignore_eos=True),
        _case("ignore-eos-chat-whole", CHAT, 2, False, ignore_eos=True),
        _case("usage-in-each-chunk", TEXT, 3, True, stream_options=usage_in_each),
        _case("no-usage", TEXT, 3, True, stream_options=None),
        _case("several-tokens-a-chunk", TEXT, 4, True, stream_interval=5),
        Case(
            name="token-prompt",
            route=TEXT,
            body={**body_of(TEXT, 0, True), "prompt": list(range(300, 340))},
        ),
        _case("neutral-sampling", TEXT, 4, True, top_p=0.9, top_k=40, min_p=0.1, n=1),
        _case("without-ids-chat", CHAT, 5, True, return_token_ids=False),
        _case("max-completion-tokens", CHAT, 5, True, max_tokens=None, max_completion_tokens=117),
    ]
    both = ((text, TEXT, 0), (chat, CHAT, 1))
    for shift, shapes in enumerate((both, both, both[:1], both[:1])):
        # They overlap: wherever the streams stand, some stop string lies across.
        window = point - 1 + 8 * shift, point + 11 + 8 * shift
        if window[1] < MAX_TOKENS:
            cases += [case for shape in shapes for case in _stops(*shape, window)]
    stop = text.across(point, point + 6)
    body = body_of(TEXT, 0, True, stop=stop, include_stop_str_in_output=True)
    cases.append(Case(name="stop-included", route=TEXT, body=body, window=(point, point + 6)))
    return cases


def _stops(truth: Truth, route: str, number: int, window: tuple[int, int]) -> list[Case]:
    """A stop string over the tokens of `window`, streamed and not."""
    stop = [truth.across(*window), "never to be seen"]
    name = f"stop-{window[0]}-{'chat' if route == CHAT else 'text'}"
    return [
        Case(
            name=f"{name}-stream",
            route=route,
            body=body_of(route, number, True, stop=stop),
            window=window,
        ),
        Case(
            name=f"{name}-whole",
            route=route,
            body=body_of(route, number, False, stop=stop),
            window=window,
        ),
    ]


def stateful_cases() -> list[Case]:
    """What has state of its own along the output, and goes on exactly all the same."""

    def case(name: str, route: str, stream: bool, **extra: Any) -> Case:
        return Case(name=name, route=route, body=body_of(route, 6, stream, **extra))

    seeded = {"temperature": 0.8, "seed": 7}
    penalties = {"presence_penalty": 0.8, "frequency_penalty": 0.5}
    json_format = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    regex = {"structured_outputs": {"regex": r"[a-z]{3,9}( [a-z]{3,9}){30}\."}}
    called = {"structured_outputs": {"regex": CALL}, "tools": [TOOL]}
    several = {"prompt": [PROMPTS[6], PROMPTS[7]]}
    return [
        case("seeded-stream", TEXT, True, **seeded),
        case("seeded-chat-whole", CHAT, False, **seeded),
        case("seeded-filtered", TEXT, True, **seeded, top_p=0.9, top_k=50),
        case("penalties", TEXT, True, **penalties),
        case("penalties-seeded-whole", TEXT, False, **penalties, **seeded),
        case("repetition", CHAT, True, repetition_penalty=1.2),
        case("logprobs-stream", TEXT, True, logprobs=2),
        case("logprobs-whole", TEXT, False, logprobs=2),
        case("logprobs-chat", CHAT, True, logprobs=True, top_logprobs=2),
        case("logprobs-chat-whole", CHAT, False, logprobs=True, top_logprobs=2),
        case("json", CHAT, True, response_format=json_format),
        case("json-whole", CHAT, False, response_format=json_format),
        case("regex-seeded", TEXT, True, **regex, **seeded),
        case("bias", TEXT, True, logit_bias={"400": 2.0, "500": -3.0}),
        case("echo", TEXT, True, echo=True),
        case("choices-whole", TEXT, False, n=2, **seeded),
        case("choices-stream", TEXT, True, n=2, **seeded),
        case("choices-chat", CHAT, True, n=2, **seeded),
        case("prompts-whole", TEXT, False, **several),
        case("prompts-stream", TEXT, True, **several),
        case("tools-whole", CHAT, False, tools=[TOOL]),
        case("tools-stream", CHAT, True, tools=[TOOL]),
        case("called-whole", CHAT, False, **called),
        case("called-stream", CHAT, True, **called),
    ]


def other_cases() -> list[Case]:
    """What cannot be continued exactly: each says so, and why."""

    def case(name: str, verdict: str, reason: str, route: str, stream: bool, **extra: Any) -> Case:
        return Case(
            name=name,
            route=route,
            body=body_of(route, 7, stream, **extra),
            verdict=verdict,
            reason=reason,
        )

    seeded = {"temperature": 0.8, "seed": 7}
    prompt_too = {"echo": True, "logprobs": 1}
    shown = "log probabilities of the prompt"
    unseeded = "unseeded sampling"
    sampled = {"temperature": 0.9, "ignore_eos": True}
    return [
        case("echoed-logprobs", "replay", shown, TEXT, True, **prompt_too),
        case("echoed-logprobs-whole", "replay", shown, TEXT, False, **prompt_too),
        case("unknown-stream", "replay", "vllm_xargs", CHAT, True, vllm_xargs={"a": 1}),
        case("replayed-choices-whole", "restart", shown, TEXT, False, n=2, **seeded, **prompt_too),
        case("replayed-choices-stream", "restart", shown, TEXT, True, n=2, **seeded, **prompt_too),
        case(
            "sampled-unknown-stream",
            "restart",
            "vllm_xargs",
            TEXT,
            True,
            vllm_xargs={"a": 1},
            **sampled,
        ),
        case("sampled-stream", "sampled", unseeded, TEXT, True, **sampled),
        case("sampled-whole", "sampled", unseeded, CHAT, False, **sampled),
        case("sampled-penalties", "sampled", unseeded, TEXT, True, presence_penalty=1, **sampled),
    ]
