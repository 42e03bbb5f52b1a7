"""`relume up`: keep a local fleet running until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from relume.controlplane.cli.output import print_error
from relume.controlplane.local.local_checkpoints import LINKS
from relume.controlplane.local.local_fleet import FleetFailed, FleetOptions, LocalFleet
from relume.events.log.disk import SteadyOutput, is_full
from relume.policies.migration.migration_settings import MOVES, MigrationConfig
from relume.policies.routing.routing_settings import POLICIES, RoutingConfig

CHECKPOINT_MB = 128

NEXT_STEPS = """
The fleet answers. Watch it in a browser:

  {page}

Try, in another terminal:

  curl -N {gateway}/v1/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 200,
         "temperature": 0, "stream": true}}'

  relume status                 workers and leader
  relume workers                engines with their pids
  kill -9 ENGINE_PID            while the curl above streams: another worker continues it
  relume events --follow        what the log says meanwhile
  relume why REQUEST            why a request went where it went
  relume replay --verify        take every decision again and compare

Logs are in {logs}. Ctrl-C stops everything.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `relume up`."""
    defaults = FleetOptions()
    add = parser.add_argument
    add("--workers", type=int, default=defaults.workers, help="vLLM workers (default %(default)s)")
    add("--replicas", type=int, default=defaults.replicas, help="control plane replicas")
    add("--state-dir", default=defaults.state_dir, help="logs, sockets and etcd's data")
    add("--model", default=defaults.model, help="model folder (default: the tiny one)")
    add("--model-name", default=defaults.model_name, help="name clients use")
    add(
        "--port",
        type=int,
        default=defaults.port,
        help="port of the OpenAI endpoint; if it is in use, any free one",
    )
    add(
        "--admin-port",
        type=int,
        default=defaults.admin_port,
        help="port of the admin API; if it is in use, any free one",
    )
    add("--etcd", default="", help="use this etcd (host:port) instead of starting one")
    add("--keep-log", action="store_true", help="continue the log of the last run")
    add("--checkpoints", action=argparse.BooleanOptionalAction, default=True,
        help="keep KV checkpoints of running requests on other workers' hosts")  # fmt: skip
    add("--checkpoint-mb", type=int, default=CHECKPOINT_MB,
        help="memory for checkpoints on each worker's host (default %(default)s)")  # fmt: skip
    add("--checkpoint-file-mb", type=int, default=0,
        help="disk for checkpoints without recent use, MiB (default %(default)s)")  # fmt: skip
    add("--checkpoint-holders", type=int, choices=range(1, 5), default=1, metavar="N",
        help="number of workers that hold each checkpoint, 1 to 4 (default %(default)s)")  # fmt: skip
    add("--checkpoint-link", choices=LINKS, default="shared",
        help="how engines reach them: in shared memory, or as between hosts over TCP, in "
        "authenticated plaintext or under CURVE (default %(default)s)")  # fmt: skip
    add("--migration-moves", choices=MOVES, default=MigrationConfig().moves,
        help="when to migrate running requests. off: never; drain: from draining workers; "
        "all: also from persistently overloaded workers (default %(default)s)")  # fmt: skip
    add("--migration-limits", metavar="K=V,K=V", default="",
        help="when and how many, see `relume serve --help`")  # fmt: skip
    add("--policy", choices=POLICIES, default=RoutingConfig().policy,
        help="policy that selects a worker for each request (default %(default)s)")  # fmt: skip
    add("--host-kind", choices=("zygote", "serve"), default=defaults.host_kind,
        help="engines forked from one process, or stock `vllm serve`")  # fmt: skip


def options_of(args: argparse.Namespace) -> FleetOptions:
    """The fleet that the arguments describe."""
    options = FleetOptions(
        **{name: getattr(args, name) for name in FleetOptions.__struct_fields__ if name in args}
    )
    replica: tuple[str, ...] = ("--policy", args.policy, "--migration-moves", args.migration_moves)
    if args.migration_limits:
        replica += ("--migration-limits", args.migration_limits)
    options = msgspec.structs.replace(options, replica_args=replica, tokenizer=True)
    if not args.checkpoints:
        options = msgspec.structs.replace(options, checkpoint_mb=0)
    return options


def main(args: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM. Exit 1 with the reason when the fleet does not come up."""
    options = options_of(args)
    if "@" in options.etcd:
        remedy = "start `relume serve` and `relume worker` with --etcd @FILE"
        print_error(f"relume up: --etcd takes HOST:PORT and no password; {remedy}")
        return 2
    if find_spec("vllm") is None:
        remedy = "install vLLM in this environment (in a checkout: make env)"
        print_error(f"relume up: its workers need vLLM; {remedy}")
        return 2
    if not Path(options.model).exists():
        print_error(f"no model at {options.model}: run `make env`, or give --model")
        return 1
    try:
        asyncio.run(_run(options))
    except FleetFailed as error:
        print_error(f"relume up: {error}")
        return 1
    except OSError as error:
        if not is_full(error):
            raise
        print_error(f"relume up: {error}: make room, or give --state-dir")
        return 1
    return 0


async def _run(options: FleetOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    output = SteadyOutput(sys.stdout)

    def say(text: str) -> None:
        output.write(text + "\n")

    fleet = LocalFleet(options, say)
    starting = asyncio.create_task(fleet.__aenter__())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return
    try:
        await starting
        steps = NEXT_STEPS.format(
            page=fleet.page,
            gateway=fleet.gateways[0],
            model=options.model_name,
            logs=fleet.dir / "logs",
        )
        say(steps)
        supervising = asyncio.create_task(fleet.supervise())
        await asyncio.wait({stopping, supervising}, return_when=asyncio.FIRST_COMPLETED)
        supervising.cancel()
        say("stopping")
    finally:
        await fleet.stop()
