"""The tokenising process of a gateway: `python -m relume.controlplane.gateway.openai.tokenizing SPEC`.

A process of its own, because tokenising in threads holds Python's lock for tens of milliseconds
and the token path with it. `Ask` comes in on stdin, `Told` goes out on stdout, in any order
(`relume.events.wire.tokenizer_messages`). Two threads, so that short prompts do not wait behind long ones. It
ends at EOF. Whatever goes wrong with one prompt is that prompt's answer.

SPEC: a folder with a `tokenizer.json`, or the name of a repository in the local Hugging Face
cache (nothing is downloaded); or several, `MODEL=FOLDER,MODEL=FOLDER`, each for one model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from relume.controlplane.gateway.openai.chat_prompt import Template, Unusable
from relume.events.wire import prefix
from relume.events.wire.tokenizer_messages import HEADER, CountReply, CountRequest, frame

LONG_BYTES = 32 << 10
"""Bodies from here on go to the second thread."""
SWITCH_S = 0.0005
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tokenizers_of(spec: str) -> dict[str, str]:
    """Folder or name by model; "" means every other model."""
    found = {}
    for part in spec.split(","):
        model, given, where = part.strip().rpartition("=")
        found[model if given else ""] = where
    return found


class Tokenizer:
    """One model's. Raises OSError, ValueError when the folder holds none."""

    def __init__(self, where: str) -> None:
        from tokenizers import Tokenizer as Fast

        files = {name: _file(where, name) for name in FILES}
        path = files["tokenizer.json"]
        if path is None:
            raise FileNotFoundError(f"{where}: no tokenizer.json")
        self._fast = Fast.from_file(str(path))
        self._fast.no_truncation()
        self._fast.no_padding()
        path = files["tokenizer_config.json"]
        config = json.loads(path.read_text()) if path is not None else {}
        tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, dict | str)
        }
        given = config.get("chat_template") or ""
        if files["chat_template.jinja"] is not None:
            given = files["chat_template.jinja"].read_text()
        named = {one["name"]: one["template"] for one in given} if isinstance(given, list) else {}
        text = named.get("default", "") if named else given
        self._template = Template(text, tokens) if text else None
        tools = named.get("tool_use")
        self._with_tools = Template(tools, tokens) if tools else self._template

    def tell(self, ask: CountRequest) -> CountReply:
        """The answer. Raises Unusable, and any error that an unchecked body can cause."""
        body = msgspec.json.decode(ask.body)
        if body.get("truncate_prompt_tokens") is not None:
            raise Unusable("the prompt is truncated")
        if ask.chat:
            template = self._with_tools if body.get("tools") else self._template
            if template is None:
                raise Unusable("no chat template")
            ids = self._encode(template.render(body), body.get("add_special_tokens", False))
            return self._reply(ask, [ids], body)
        given, special = body["prompt"], body.get("add_special_tokens", True)
        many = given if isinstance(given, list) and not _are_ids(given) else [given]
        return self._reply(ask, [self._ids(one, special) for one in many], body)

    def _ids(self, given: Any, special: bool) -> list[int]:
        if isinstance(given, str):
            return self._encode(given, special)
        if not _are_ids(given):
            raise Unusable("neither text nor token ids")
        return given

    def _encode(self, text: str, special: bool) -> list[int]:
        # Of a batch the lock of Python is given back meanwhile.
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=bool(special))[0]
        return list(encoding.ids)

    def _reply(
        self, ask: CountRequest, prompts: list[list[int]], body: dict[str, Any]
    ) -> CountReply:
        marks = b""
        if prompts and ask.block_tokens:
            marks = prefix.of_tokens(prompts[0], ask.block_tokens, body.get("cache_salt") or "")
        return CountReply(ask.number, sum(map(len, prompts)), marks)


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is int for one in given)


def _file(where: str, name: str) -> Path | None:
    """The file of a folder, or of a repository that was downloaded before."""
    if where.startswith(("/", ".")) or Path(where).is_dir():
        path = Path(where) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(where, name)
    return Path(found) if isinstance(found, str) else None


class Server:
    """Answers what comes in on `source` on `sink`, until EOF."""

    def __init__(self, tokenizers: dict[str, Tokenizer], source: BinaryIO, sink: BinaryIO) -> None:
        self._tokenizers = tokenizers
        self._source = source
        self._sink = sink
        self._lock = threading.Lock()

    def run(self) -> None:
        """Returns at EOF."""
        decode = msgspec.msgpack.Decoder(CountRequest).decode
        with ThreadPoolExecutor(1) as short, ThreadPoolExecutor(1) as long:
            while len(head := self._source.read(HEADER.size)) == HEADER.size:
                (length,) = HEADER.unpack(head)
                ask = decode(self._source.read(length))
                (long if len(ask.body) >= LONG_BYTES else short).submit(self._answer, ask)

    def _answer(self, ask: CountRequest) -> None:
        try:
            tokenizer = self._tokenizers.get(ask.model) or self._tokenizers.get("")
            if tokenizer is None:
                raise Unusable("no tokenizer for this model")
            reply = tokenizer.tell(ask)
        except Exception as error:  # the prompt is a client's: the engine will judge it
            reply = CountReply(ask.number, -1, why=f"{error!s:.200}")
        with self._lock:
            self._sink.write(frame(reply))
            self._sink.flush()


def main(spec: str) -> None:
    """Serve on stdin and stdout. Raises what `Tokenizer` raises."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the gateway decides when it ends
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    made = {model: Tokenizer(where) for model, where in tokenizers_of(spec).items()}
    sys.setswitchinterval(SWITCH_S)
    sink.write(frame(CountReply(0, 0)))
    sink.flush()
    Server(made, source, sink).run()


if __name__ == "__main__":
    main(sys.argv[1])
