"""An engine of a hundred lines: speaks the report protocol, answers HTTP, behaves as told.

It takes vLLM's `--host`, `--port`, `--model`, says that it takes part in checkpoints when
given `--kv-transfer-config`, and ignores the rest; the script is in its own arguments:

    --mute              never reports ready
    --exit STATUS       ends with that status after its hello
    --after S           waits so long before it is ready (or exits)
    --ignore-term       takes no notice of SIGTERM
    --inexact NAME=WHY  what its self-test did not find exact
    --family N          starts N children in the same session, which say hello as workers
    --steps N           sends N steps once ready
    --pace S            then a step every S seconds for ever; every 20th ends a request
    --busy S            has a request for so long, once ready
    --garbage           sends an unknown frame, then an absurd length, after its steps

With `--as zygote SOCKET` it is a zygote instead: the real one, forking this engine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from relume.engine_shim.engine import stacks
from relume.engine_shim.engine.reporter import Reporter
from relume.events.log.codec import encode
from relume.events.vocabulary import EngineFinished, EngineStep, KvBlocksFilled
from relume.events.wire.reports import Hello, Layout, Ready, frame, layout_frame, ready_frame


class Health(BaseHTTPRequestHandler):
    """200 on everything, with the number of requests; nothing after SIGUSR1, until SIGUSR2."""

    answering = threading.Event()
    answering.set()
    busy_until = 0.0

    def do_GET(self) -> None:
        self.answering.wait()
        count = int(time.monotonic() < self.busy_until)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"running": count, "waiting": 0}).encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="m")
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--kv-transfer-config", default="")
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--family", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--busy", type=float, default=0.0)
    parser.add_argument("--garbage", action="store_true")
    parser.add_argument("--role", default="core")
    parser.add_argument("--inexact", default="", help="NAME=WHY, found by its self-test")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Live as told; ends by signal, by EOF of the agent, or by `--exit`."""
    args = parse(argv)
    incarnation = int(os.environ["RELUME_INCARNATION"])
    if args.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: Health.answering.clear())
    signal.signal(signal.SIGUSR2, lambda *_: Health.answering.set())
    stacks.arm(os.environ["RELUME_AGENT_SOCKET"])
    hello = Hello(os.getpid(), args.role, incarnation)
    reporter = Reporter(os.environ["RELUME_AGENT_SOCKET"], hello)
    for _ in range(args.family):
        subprocess.Popen(
            [sys.executable, "-m", "tests.agent.scripted_engine", "--role", "worker", "--mute"]
        )
    time.sleep(args.after)
    if args.exit is not None:
        os._exit(args.exit)
    if args.mute:
        while True:
            time.sleep(60)
    Health.busy_until = time.monotonic() + args.busy
    server = ThreadingHTTPServer((args.host, args.port), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if args.kv_transfer_config:
        reporter.send(layout_frame(Layout("f", 4096)))
    name, _, why = args.inexact.partition("=")
    exact = {"greedy": True} | ({name: why} if name else {})
    reporter.send(
        ready_frame(
            Ready(
                port=server.server_port,
                max_model_len=2048,
                block_size=32,
                kv_blocks=100,
                model=args.model,
                vllm="0",
                exact=exact,
            )
        )
    )
    for step in range(1, args.steps + 1):
        reporter.send(
            frame(
                encode(
                    EngineStep(
                        incarnation=incarnation,
                        step=step,
                        duration_us=900,
                        batch=1,
                        sum_context=10,
                        prefill_tokens=0,
                        waiting=0,
                        kv_used=1,
                    )
                )
            )
        )
    if args.garbage:
        reporter.send(frame(b"\x92\xa5bogus\x01"))
        reporter.send(struct.pack("<I", 1 << 31) + b"lost framing")
    step = args.steps
    while args.pace:
        time.sleep(args.pace)
        step += 1
        reporter.send(frame(encode(paced(incarnation, step))))
    while True:
        # A signal that comes while this thread waits for the interpreter's lock is handled after the
        # next call only.
        time.sleep(0.05)


def paced(incarnation: int, step: int) -> EngineStep:
    """Progress of a request in each step; every 20th is the end of one."""
    number, place = divmod(step, 20)
    name = f"q{incarnation}-{number + bool(place)}"
    change = KvBlocksFilled(name, 1, place) if place else EngineFinished(name, 1, "stop", number)
    return EngineStep(
        incarnation=incarnation,
        step=step,
        duration_us=900,
        batch=1,
        sum_context=10,
        prefill_tokens=0,
        waiting=0,
        kv_used=1,
        changes=(change,),
    )


def zygote(path: str) -> None:
    """engine_shim's zygote, with this engine in the place of vLLM's."""
    from relume.engine_shim.engine.hosts.zygote import Zygote

    host = types.ModuleType("relume.engine_shim.engine.hosts.inproc_host")
    host.main = main
    sys.modules["relume.engine_shim.engine.hosts.inproc_host"] = host
    from relume import engine_shim

    engine_shim.engine_host = host
    Zygote(path).run()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        zygote(sys.argv[3])
    else:
        main(sys.argv[1:])
