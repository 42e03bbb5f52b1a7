"""`relume`: the command line. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from relume.controlplane.cli.output import print_error

EPILOG = """
examples:
  relume up                          a fleet on this machine: etcd, control plane, 3 workers
  relume demo                        kill a worker under load; no client notices
  relume status                      workers, leader, and whether the fleet accepts requests
  relume events --follow             what the log says, as it happens
  relume COMMAND --help              each command explains itself, with examples

Commands address the fleet that `relume up` started from this folder (.relume/), or the one whose
admin API --admin or RELUME_ADMIN names, with the token in RELUME_ADMIN_TOKEN.

exit codes: 0 done; 1 the answer is no (a check failed, no leader, a replay diverged);
2 wrong usage or configuration; 3 nothing answers (or, from serve: fenced); 4 the admin API
refused; 5 no divergence, but this build cannot retake every decision; 130 interrupted
"""


class Command(NamedTuple):
    """A subcommand. `arguments` and `run` are `module:function`, imported on use."""

    help: str
    arguments: str
    run: str
    examples: str


COMMANDS: dict[str, Command] = {
    "up": Command(
        "run a whole fleet on this machine until Ctrl-C",
        "relume.controlplane.local.up:add_arguments",
        "relume.controlplane.local.up:main",
        """
  relume up                          3 workers on the tiny model, OpenAI endpoint on 8000
  relume up --workers 2 --replicas 2 two control plane replicas: kill one, clients reconnect
  relume up --keep-log               continue the log of the last run

It prints what to try next. Everything it writes is under .relume/.""",
    ),
    "demo": Command(
        "kill a worker under load and show that no client notices",
        "",
        "relume.controlplane.cli.relume_command:demo",
        """
  relume demo                        needs nothing but this machine; about a minute
  relume demo --health               wrong, failing and stopped engines are found; two minutes""",
    ),
    "status": Command(
        "workers, leader, and whether the fleet accepts requests",
        "relume.controlplane.cli.arguments:listing",
        "relume.controlplane.cli.fleet_commands:status",
        """
  relume status
  relume status --json | jq .log
  relume status --admin http://10.0.0.5:8001""",
    ),
    "workers": Command(
        "workers with their state, load and pids",
        "relume.controlplane.cli.arguments:listing",
        "relume.controlplane.cli.fleet_commands:workers",
        """
  relume workers
  kill -9 $(relume workers --json | jq '.workers[0].engine_pid')   see it come back""",
    ),
    "top": Command(
        "the fleet as it changes: workers, incidents, live requests",
        "relume.controlplane.cli.terminal.top_command:arguments",
        "relume.controlplane.cli.terminal.top_command:top",
        """
  relume top                         until Ctrl-C
  relume top --interval 5
  relume top | cat                   one look""",
    ),
    "requests": Command(
        "live requests and the last that ended",
        "relume.controlplane.cli.arguments:requests",
        "relume.controlplane.cli.fleet_commands:requests",
        """
  relume requests                    the newest 100
  relume requests --state live       only those being served
  relume requests --search chat-17   whose id, or client's id, contains this
  relume requests --before cmpl-4f2a the 100 before that one
  relume requests cmpl-4f2a          everything about one, as JSON""",
    ),
    "events": Command(
        "what the log says, from the past or as it happens",
        "relume.controlplane.cli.arguments:events",
        "relume.controlplane.cli.log_events:events",
        """
  relume events                      the newest, without the noise of engine steps
  relume events --follow             as they happen
  relume events --type engine_died,engine_ready --since 1
  relume events --request cmpl-4f2a  the course of one request
  relume events --worker w0 --all    engine steps and ticks too""",
    ),
    "incidents": Command(
        "what failed, what clients felt of it, and when capacity was back",
        "relume.controlplane.cli.arguments:incidents",
        "relume.controlplane.cli.incident_commands:incidents",
        """
  relume incidents                   one line for each failure, the newest last
  relume incidents --open            capacity that is not back
  relume incidents show w0           the latest of w0: times, streams, and the events that say so
  relume incidents show 412.3 --json
  relume incidents show 412.3 --trace incident.json   one OpenTelemetry trace; a collector takes it:
    curl -H 'Content-Type: application/json' --data @incident.json localhost:4318/v1/traces
  relume incidents --log incident.rlog   of a stored log, or of an archive's directory

A replica remembers the latest 200 since it started, or since the snapshot that it started from.
For older ones name the archive of the log with --log.""",
    ),
    "degradation": Command(
        "demand and capacity by model, and why a level limits or refuses requests",
        "relume.controlplane.cli.arguments:degradation",
        "relume.controlplane.cli.degradation_command:degradation",
        """
  relume degradation                 each model, then the newest decisions with their figures
  relume config set degradation.mode observe   decide and show levels, touch no request
  relume degradation --log incident.rlog   of a stored log, or of an archive's directory""",
    ),
    "why": Command(
        "why a request ran on the workers it ran on",
        "relume.controlplane.replay.replay_command:add_why_arguments",
        "relume.controlplane.replay.replay_command:run_why",
        """
  relume why cmpl-4f2a               each decision, its basis, and what the others would cost""",
    ),
    "replay": Command(
        "repeat every decision of a log and compare; step through it; ask what if",
        "relume.controlplane.replay.replay_command:add_arguments",
        "relume.controlplane.replay.replay_command:run",
        """
  relume replay --verify             exit 1 if a decision differs, 5 if it cannot be retaken
  relume replay --at 120             the fleet as it was after revision 120
  relume replay --ui incident.rlog   the log in a browser, at any moment
  relume replay --debug              step forward and back, break, why, diff, what-if
  relume replay --sqlite log.db      events, decisions, candidates, requests, workers as tables
  relume replay --debug --log incident.rlog --do incidents --do 'incident 1'
  relume replay --what-if checkpoints.recovery=eq6   the first decision that would differ
  relume replay --debug --do 'export window.rlog 100 200'   a replay test, redacted""",
    ),
    "drain": Command(
        "stop new requests to a worker; running requests migrate or end there",
        "relume.controlplane.cli.arguments:drain",
        "relume.controlplane.cli.drain:drain",
        """
  relume drain w0 --reason "new driver" --deadline 120   move all that can after two minutes
  relume drain w0 --force            although no other worker of its model is open
  relume drain w0 --wait 60          return when nothing runs there and nothing is held there;
                                     what cannot move ends there, and where its client stays
                                     away no later than --resume-grace-s of the replicas
  relume config set migration.moves off   let running requests end where they are""",
    ),
    "undrain": Command(
        "send requests to a drained worker again",
        "relume.controlplane.cli.arguments:one_worker",
        "relume.controlplane.cli.fleet_commands:change",
        """
  relume undrain w0""",
    ),
    "restart": Command(
        "restart a worker's engine; its streams continue on other workers",
        "relume.controlplane.cli.arguments:one_worker",
        "relume.controlplane.cli.fleet_commands:restart",
        """
  relume drain w0 --wait && relume restart w0 && relume undrain w0   without a client noticing""",
    ),
    "rollout": Command(
        "restart all engines of a model, one failure domain after the other",
        "relume.controlplane.cli.arguments:rollout",
        "relume.controlplane.cli.rollout_command:rollout",
        """
  relume rollout restart --wait        each worker: requests leave, its engine restarts, answers a canary
  relume rollout status                how far it is, and why it waits
  relume rollout cancel                workers that drain for it get requests again

The next step waits while a worker of the model is unwell, or while too few would stay open
(migration.drain_floor, at least one). It goes on after a restart of the control plane.""",
    ),
    "disable-restart": Command(
        "keep a worker's engine stopped after it ends",
        "relume.controlplane.cli.arguments:one_worker",
        "relume.controlplane.cli.fleet_commands:change",
        """
  relume disable-restart w0          to examine a crashing engine""",
    ),
    "enable-restart": Command(
        "restart a worker's engine after it ends; undoes disable-restart",
        "relume.controlplane.cli.arguments:one_worker",
        "relume.controlplane.cli.fleet_commands:change",
        """
  relume enable-restart w0""",
    ),
    "trust": Command(
        "end a worker's quarantine, or acknowledge its unreadable records",
        "relume.controlplane.cli.arguments:one_worker",
        "relume.controlplane.cli.fleet_commands:change",
        """
  relume trust w0                    after a wrong answer to a canary; it is probed first, and one
                                     more wrong answer quarantines it again
  relume trust w0                    after its agent wrote a record that cannot be read, and was
                                     mended: it gets requests again""",
    ),
    "config": Command(
        "show or change the settings of the fleet",
        "relume.controlplane.cli.arguments:config",
        "relume.controlplane.cli.fleet_commands:config",
        """
  relume config get
  relume config set stall.cap_us 5000000   allow engines five seconds of silence""",
    ),
    "leader": Command(
        "show the leading replica, or make it step down",
        "relume.controlplane.cli.arguments:leader",
        "relume.controlplane.cli.fleet_commands:leader",
        """
  relume leader                      exit 1 if there is no leader
  relume leader resign               another replica takes over (needs the role admin)""",
    ),
    "doctor": Command(
        "check this machine, the configuration and etcd",
        "relume.controlplane.cli.doctor:add_arguments",
        "relume.controlplane.cli.doctor:doctor",
        """
  relume doctor                      each line ok, warn or fail, with the remedy
  relume doctor --etcd 10.0.0.5:2379 exit 1 when something fails""",
    ),
    "completion": Command(
        "print a script with which a shell completes commands and options",
        "relume.controlplane.cli.terminal.completion_command:arguments",
        "relume.controlplane.cli.terminal.completion_command:completion",
        """
  eval "$(relume completion bash)"   in this shell; or in ~/.bashrc
  relume completion zsh > ~/.zsh/completions/_relume""",
    ),
    "log": Command(
        "end the log in etcd and begin a new one, after etcd lost a part of it",
        "relume.controlplane.cli.log_command:add_arguments",
        "relume.controlplane.cli.log_command:log_command",
        """
  relume doctor                      says whether this is necessary, and the id of the log
  relume log begin --replace 4f2a90c1d7e86b35   deletes the log in etcd; its archive stays

It goes to etcd directly, with the settings of `relume serve` (--etcd, --prefix).""",
    ),
    "serve": Command(
        "run one control plane replica",
        "relume.controlplane.cli.arguments:serve",
        "relume.controlplane.cli.relume_command:serve",
        """
  relume serve --etcd 10.0.0.5:2379 --name r0
  relume serve --config relume.yaml --port 9000
  RELUME_API_KEYS=@keys.txt RELUME_ADMIN_TOKENS=@tokens.txt relume serve --host 0.0.0.0

precedence: flag > environment > file > default
SIGTERM, SIGINT: requests end within --drain-s, then it stops; a second signal stops it at once
exit codes: 0 stopped; 1 no log, or etcd lost a part of it; 2 configuration; 3 fenced by another
with its name""",
    ),
    "worker": Command(
        "run the agent of one worker (its own flags: relume worker --help)",
        "",
        "relume.controlplane.cli.relume_command:worker",
        """
  relume worker --worker w0 --etcd 10.0.0.5:2379 --model /models/qwen""",
    ),
    "attach": Command(
        "let a running server join as it is (its own flags: relume attach --help)",
        "",
        "relume.controlplane.cli.relume_command:attach",
        """
  relume attach http://10.0.0.7:8000""",
    ),
}
_FORMER = {"hold": "disable-restart", "release": "enable-restart"}
"""Former names of commands; they still work, and help does not list them."""
_REMEDIES = {
    "openai": "run: pip install 'relume[client]'",
    "vllm": "install vLLM in this environment (in a checkout: make env)",
}
"""Where a package comes from that a command lacks, except those of the extra `control`."""
_PASSED_ON = ("worker", "attach", "demo")
"""Commands that hand all their arguments to another program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    given[:1] = [_FORMER.get(name, name) for name in given[:1]]
    if given and given[0] in _PASSED_ON:
        return _resolve(COMMANDS[given[0]].run)(given[1:])
    try:
        parser = _parser(given[0] if given else "")
        args = parser.parse_args(given)
        if args.version:
            return _version()
        if args.command is None:
            parser.print_help()
            return 2
        return _run(args)
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) in ("", "relume"):
            raise  # a part of ours is missing: a bug
        remedy = _REMEDIES.get(missing, "run: pip install 'relume[control]'")
        command = f"relume {given[0]}" if given else "relume"
        print_error(f"{command}: needs the package {missing}; {remedy}")
        return 2


def _version() -> int:
    from relume.controlplane.cli.output import print_line
    from relume.controlplane.replay.store import relume_version
    from relume.events.log.feature_levels import LEVEL

    print_line(f"relume {relume_version()}, feature level {LEVEL}")
    return 0


def _run(args: argparse.Namespace) -> int:
    from relume.controlplane.cli.admin_client import EXIT_NO, CliError
    from relume.events.log.errors import RelumeError

    try:
        return _resolve(COMMANDS[args.command].run)(args)
    except CliError as error:
        print_error(f"relume {args.command}: {error}")
        return error.code
    except RelumeError as error:
        print_error(f"relume {args.command}: {error}")
        return getattr(error, "exit_code", EXIT_NO)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `relume events | head`: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def whole_parser() -> argparse.ArgumentParser:
    """The parser with the arguments of every command."""
    return _parser(*COMMANDS)


def _parser(*chosen: str) -> argparse.ArgumentParser:
    """The parser; only the chosen commands' arguments are imported and added."""
    parser = argparse.ArgumentParser(
        prog="relume",
        description="Keeps a fleet of vLLM workers answering through failures.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="version and feature level")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog=f"examples:\n{command.examples.strip(chr(10))}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name in chosen and command.arguments:
            _resolve(command.arguments)(sub)
    return parser


def _resolve(place: str) -> Callable[..., int]:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def serve(args: argparse.Namespace) -> int:
    """`relume serve`."""
    from relume.controlplane import serve_settings
    from relume.controlplane.cli.admin_client import EXIT_NO, EXIT_USAGE, CliError

    settings = serve_settings.load(vars(args), os.environ, args.config)
    import structlog

    from relume.controlplane.telemetry.logs import setup_logging

    setup_logging(settings.log_level, settings.log_format)
    from relume.controlplane.replica.serve import main as serve_main
    from relume.events.log.disk import is_full
    from relume.events.settings import variables

    log = structlog.get_logger("relume.serve")
    for name, close in variables.unknown(os.environ).items():
        log.warning("unknown_variable", name=name, remedy=variables.remedy(close))

    try:
        return serve_main(settings)
    except OSError as error:
        if is_full(error):
            remedy = "make room where --spool-dir and --archive-dir are; `relume doctor` looks"
            raise CliError(f"{error}: {remedy}", EXIT_NO) from None
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        raise CliError(
            f"{error.strerror}: choose other ports (--port, --admin-port); "
            "`relume doctor` tells which are taken",
            EXIT_USAGE,
        ) from None


def worker(rest: list[str]) -> int:
    """`relume worker`: becomes the agent; the control plane never imports it."""
    return _become("relume.engine_shim.agent", rest)


def attach(rest: list[str]) -> int:
    """`relume attach`: becomes the agent of a plain worker."""
    from relume.controlplane.cli.admin_client import CliError
    from relume.controlplane.local.attach import worker_arguments

    try:
        return _become("relume.engine_shim.agent", worker_arguments(rest))
    except CliError as error:
        print_error(f"relume attach: {error}")
        return error.code


def demo(rest: list[str]) -> int:
    """`relume demo`: becomes the demo, which stands above us and is not imported either.

    It is part of the distribution relume-chaos: a checkout has it, a worker host need not."""
    if find_spec("relume.chaos") is None:
        missing = "relume demo: the distribution relume-chaos is not installed"
        print_error(f"{missing}; install it, or use a checkout (make demo)")
        return 2
    return _become("relume.chaos.demo", rest)


def _become(module: str, rest: list[str]) -> int:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *rest])


if __name__ == "__main__":
    sys.exit(main())
