"""The effects of the stream machine that concern the client, carried out on its connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.controlplane.gateway.context import ClientPort
from relume.controlplane.gateway.http.error_shapes import error_event
from relume.controlplane.gateway.http.replies import (
    JSON,
    Reply,
    as_openai_error,
    error_reply,
    status_line,
)
from relume.controlplane.stream import stream_effects as do


class NoClient:
    """The client's side while it is absent."""

    chunked = False
    lost = True
    undelivered = 0

    def reply(self, reply: Reply) -> None: ...
    def begin(self, head: bytes, first: bytes, last: bool = False) -> None: ...
    def write(self, data: bytes) -> None: ...
    def write_chunk(self, chunk: bytes) -> None: ...
    def finish(self, data: bytes = b"", close: bool = False) -> None: ...
    def break_off(self) -> None: ...


NO_CLIENT = NoClient()


def _begin(client: ClientPort, effect: do.Begin) -> None:
    lines = "".join([f"{name}: {value}\r\n" for name, value in effect.headers])
    head = status_line(effect.status) + lines.encode("latin-1")
    client.begin(head, effect.data, last=effect.last)


def _write(client: ClientPort, effect: do.ToClient) -> None:
    client.write(effect.data)


def _finish(client: ClientPort, effect: do.Finish) -> None:
    client.finish(effect.data)


def _reply(client: ClientPort, effect: do.Reply) -> None:
    body = as_openai_error(effect.status, effect.body) if effect.refusal else effect.body
    client.reply(Reply(status=effect.status, body=body, content_type=JSON, headers=effect.headers))


def _fail(client: ClientPort, effect: do.Fail) -> None:
    reply = error_reply(
        effect.status,
        effect.message,
        code=effect.code or None,
        retry_after_s=effect.retry_after_s or None,
        headers=effect.headers,
    )
    if effect.begun:
        client.finish(error_event(effect.path, reply, effect.event), close=True)
    else:
        client.reply(reply)


def _cut(client: ClientPort, effect: do.Cut) -> None:
    client.break_off()


TO_CLIENT: dict[type, Callable[[ClientPort, Any], None]] = {
    do.Begin: _begin,
    do.ToClient: _write,
    do.Finish: _finish,
    do.Reply: _reply,
    do.Fail: _fail,
    do.Cut: _cut,
}
