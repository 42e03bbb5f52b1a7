"""`relume log begin`: end the log that etcd holds, and begin a new one in its place.

It goes to etcd directly, with the settings of `relume serve`: no replica can start on an etcd that lacks
a part of its log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets

from relume.controlplane import serve_settings
from relume.controlplane.cli.admin_client import EXIT_USAGE, CliError, read_fleet_file
from relume.controlplane.cli.output import print_json, print_line
from relume.controlplane.serve_settings import ServeConfig
from relume.events.settings.flags import add_flags

NO_ID = "none"
"""For --replace: the log in etcd has no id yet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`relume log begin`, with the flags of `relume serve` to reach etcd."""
    parser.add_argument(
        "action", choices=("begin",), help="begin: end the log in etcd, begin another"
    )
    parser.add_argument(
        "--replace",
        default="",
        metavar="LOG_ID",
        help="confirmation: id of the log that ends, as `relume doctor` shows it; "
        f"{NO_ID}: it has no id",
    )
    add_flags(parser, ServeConfig)
    parser.add_argument("--state-dir", default=".relume", help="state of `relume up`")
    parser.add_argument("--json", action="store_true", help="print JSON")


def log_command(args: argparse.Namespace) -> int:
    """Begin a new log. Raises CliError, LogError, ConfigError."""
    flags = dict(vars(args))
    fleet = read_fleet_file(args.state_dir)
    if fleet.get("etcd") and not flags.get("etcd"):
        if serve_settings.SETTINGS["etcd"].variable not in os.environ:
            flags["etcd"] = ",".join(fleet["etcd"])
    config = serve_settings.load(flags, os.environ, args.config)
    former = "" if args.replace == NO_ID else args.replace
    found = asyncio.run(_begin(config, former, is_confirmed=bool(args.replace)))
    if args.json:
        print_json(found)
        return 0
    print_line(
        f"log {found['log']} begins; {found['segments']} segments of the former log are deleted"
    )
    print_line("Running agents keep their engines and register in the new log.")
    print_line("Replicas of the former log end their streams and exit with 1: start them again.")
    print_line("Resumable streams that they cut continue when their clients return.")
    if former and config.archive_dir:
        print_line(f"The former log: relume replay --verify --log {config.archive_dir}/{former}")
    return 0


async def _begin(config: ServeConfig, former: str, is_confirmed: bool) -> dict[str, object]:
    import msgspec

    from relume.events.etcd.factory import EtcdLog
    from relume.events.etcd.maintenance import Maintenance
    from relume.events.etcd.new_log import begin_log

    async with EtcdLog(serve_settings.etcd_config(config)) as log:
        if not is_confirmed:
            present = await Maintenance(log.client).identity() or NO_ID
            raise CliError(
                f"this deletes the log in etcd at {', '.join(config.etcd)}, prefix {config.prefix}; "
                f"to confirm, add --replace {present}",
                EXIT_USAGE,
            )
        fresh = secrets.token_hex(8)
        removed = await begin_log(log.client, former, fresh)
        return {"log": fresh, "former": former, **msgspec.structs.asdict(removed)}
