"""A whole engine in one process: vLLM's AsyncLLM, OpenAI app and server, and EngineCore
on a thread. Forked from the zygote in tests, demo and small fleets; production runs
stock `vllm serve` (`vllm_serve`). Same arguments, same environment, same protocol.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import create_server_socket, validate_api_server_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core_client import EngineCoreClient

from relume.engine_shim.engine import plugin
from relume.engine_shim.engine.hosts.inproc_core import ThreadedCoreClient
from relume.engine_shim.engine.hosts.vllm_serve import MIDDLEWARE, SCHEDULER
from relume.engine_shim.engine.vllm_private import model_runner

_parser: FlexibleArgumentParser | None = None


def argument_parser() -> FlexibleArgumentParser:
    """vLLM's own parser; built once, since building it takes long (the zygote does)."""
    global _parser
    if _parser is None:
        _parser = make_arg_parser(FlexibleArgumentParser())
    return _parser


def parse(argv: list[str]) -> Namespace:
    """Arguments as `vllm serve` takes them, with ours added. Exits on a bad one."""
    args = argument_parser().parse_args(argv)
    args.host = args.host or "127.0.0.1"
    args.distributed_executor_backend = "uni"
    args.scheduler_cls = args.scheduler_cls or SCHEDULER
    if MIDDLEWARE not in args.middleware:
        args.middleware = [*args.middleware, MIDDLEWARE]
    validate_parsed_serve_args(args)
    validate_api_server_args(args)
    return args


def main(argv: list[str]) -> None:
    """Serves until SIGTERM or SIGINT. Call in a process without other threads."""
    # vLLM's CPU platform starts a process per rank unless configured otherwise.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    plugin.register("core")
    model_runner.install()
    EngineCoreClient.make_async_mp_client = staticmethod(_threaded_client)
    uvloop.run(_serve(parse(argv)))


def _threaded_client(
    vllm_config: Any, executor_class: Any, log_stats: bool, *_: Any, **__: Any
) -> ThreadedCoreClient:
    return ThreadedCoreClient(vllm_config, executor_class, log_stats)


async def _serve(args: Namespace) -> None:
    sock = create_server_socket((args.host, args.port), reuse_port=False)
    address = f"http://{args.host}:{args.port}"
    await run_server_worker(address, sock, args, client_config=None)


if __name__ == "__main__":
    main(sys.argv[1:])
