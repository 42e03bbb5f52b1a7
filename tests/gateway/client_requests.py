"""Requests that clients send to a gateway under test, and a wait for what follows."""

from __future__ import annotations

import asyncio
import json

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat_body(**extra) -> bytes:
    return json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
            "stream": True,
            **extra,
        }
    ).encode()


def text_body(**extra) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", "temperature": 0, **extra}).encode()


def stream_body(**extra) -> bytes:
    return text_body(stream=True, **extra)


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def ends_as_vllm(answer: bytes) -> dict:
    """The error with which a broken stream ends, as vLLM ends one: an event, then [DONE]."""
    end = b"\n\ndata: [DONE]\n\n"
    assert answer.endswith(end), answer[-200:]
    return json.loads(answer.removesuffix(end).rpartition(b"data: ")[2])["error"]
