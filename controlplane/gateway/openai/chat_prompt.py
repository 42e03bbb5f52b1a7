"""The text of a chat's prompt, as vLLM's renderer for Hugging Face templates makes it.

Templates are Jinja in the sandbox, with what transformers gives them. A body that vLLM handles
differently (images, custom formats) is `Unusable` here: its tokens are estimated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_UNSET = (None, "auto")
_FUNCTION = ("name", "description", "parameters")


class Unusable(Exception):
    """The body's prompt cannot be made here; why is the message."""


class _Generation(jinja2.ext.Extension):
    """Templates may mark what the assistant said; nothing comes of it."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it for instances)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class Template:
    """One chat template; `tokens` are the tokenizer's special ones by name (`bos_token`, ...).
    Raises jinja2.TemplateError for a text that is none."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(text)
        self._tokens = dict(tokens)
        self._in_parts = _reads_parts(environment.parse(text))
        self._knows_developers = "developer" in text

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt of a chat completion's body. Raises Unusable."""
        if body.get("chat_template") is not None or body.get("continue_final_message"):
            raise Unusable("a custom template, or a message to continue")
        given = body.get("chat_template_kwargs") or {}
        effort = body.get("reasoning_effort")
        extra = {
            "add_generation_prompt": body.get("add_generation_prompt", True),
            "reasoning_effort": effort,
        }
        if effort is not None and "enable_thinking" not in given:
            extra["enable_thinking"] = effort != "none"
        extra |= {name: value for name, value in given.items() if value not in _UNSET}
        try:
            return self._template.render(
                messages=[self._message(one) for one in body["messages"]],
                tools=_tools(body.get("tools")),
                documents=body.get("documents"),
                **{**self._tokens, **{k: x for k, x in extra.items() if x not in _UNSET}},
            )
        except Unusable:
            raise
        except Exception as error:  # a template is a foreign program
            raise Unusable(f"template: {error!s:.200}") from None

    def _message(self, given: Mapping[str, Any]) -> dict[str, Any]:
        role, content = given["role"], given.get("content")
        if role == "developer" and not self._knows_developers:
            raise Unusable("a role the template does not know")
        parts = [content] if isinstance(content, str) else content or []
        texts = [part if isinstance(part, str) else _text(part) for part in parts]
        made: dict[str, Any] = {"role": role}
        if self._in_parts and role != "tool":
            made["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            made["content"] = "\n".join(texts)
        if role == "assistant":
            if calls := given.get("tool_calls"):
                made["tool_calls"] = [_call(call) for call in calls]
            if (reasoning := given.get("reasoning")) is not None:
                made["reasoning"] = made["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in given:
            made["tool_call_id"] = given["tool_call_id"]
        if isinstance(given.get("name"), str):
            made["name"] = given["name"]
        return made


def _text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise Unusable("content that is not text")
    return str(part["text"])


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's call, its arguments as templates expect them."""
    function = dict(given["function"])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**given, "function": {**function, "arguments": arguments}}


def _tools(given: Any) -> list[dict[str, Any]] | None:
    """As vLLM's models of them are dumped: what is not given is None, and in its place."""
    if not given:
        return None
    made = []
    for tool in given:
        function = tool["function"]
        if "defer_loading" in tool or "defer_loading" in function:
            raise Unusable("tools that are loaded later")
        known = {name: function.get(name) for name in _FUNCTION}
        if function.get("strict") is not None:
            known["strict"] = function["strict"]
        made.append({"type": tool.get("type", "function"), "function": known})
    return made


def _reads_parts(root: nodes.Template) -> bool:
    """Whether the template goes through the parts of a message's content: it is given lists
    then, as vLLM decides it."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter | nodes.Test):
            return node.node is not None and is_content(node.node)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return False

    names = {"content"}
    for macro in root.find_all(nodes.Macro):
        inside = [argument.name for argument in macro.args]
        for call in root.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                names |= {n for n, a in zip(inside, call.args, strict=False) if is_content(a)}
    return any(
        is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in root.find_all(nodes.For)
    )
