"""Arguments of the commands that call the admin API."""

from __future__ import annotations

import argparse

from relume.controlplane.cli.admin_client import add_arguments as listing

__all__ = [
    "config",
    "degradation",
    "drain",
    "events",
    "incidents",
    "leader",
    "listing",
    "one_worker",
    "requests",
    "rollout",
    "serve",
]


def serve(parser: argparse.ArgumentParser) -> None:
    """`relume serve`."""
    from relume.controlplane.serve_settings import ServeConfig  # not needed by other commands
    from relume.events.settings.flags import add_flags

    add_flags(parser, ServeConfig)


def requests(parser: argparse.ArgumentParser) -> None:
    """`relume requests`."""
    parser.add_argument("request", nargs="?", default="", help="show this one in full")
    parser.add_argument("--state", default="", help="live, completed, cancelled, failed, rejected")
    parser.add_argument("--worker", default="", help="only requests with an attempt on this worker")
    parser.add_argument("--model", default="", help="only requests for this model")
    parser.add_argument(
        "--search",
        default="",
        metavar="TEXT",
        help="only those whose id or client's id contains it",
    )
    parser.add_argument(
        "--before", default="", metavar="REQUEST", help="only those that came before this one"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=100,
        help="maximum number of requests, newest first (%(default)s)",
    )
    listing(parser)


def events(parser: argparse.ArgumentParser) -> None:
    """`relume events`."""
    parser.add_argument("--follow", "-f", action="store_true", help="as they happen, until Ctrl-C")
    parser.add_argument("--type", default="", metavar="A,B", help="only these types of event")
    parser.add_argument("--request", default="", help="only events about this request")
    parser.add_argument("--worker", default="", help="only events of or about this worker")
    parser.add_argument("--stream", default="", help="only this stream, e.g. r.r0")
    parser.add_argument("--since", default="", metavar="REVISION", help="begin with this revision")
    parser.add_argument(
        "--limit", type=int, default=100, help="maximum number of events (%(default)s)"
    )
    parser.add_argument("--all", action="store_true", help="engine steps, ticks, receipts too")
    listing(parser)


def incidents(parser: argparse.ArgumentParser) -> None:
    """`relume incidents [list|show ID]`."""
    parser.add_argument(
        "action", nargs="?", default="list", choices=("list", "show"), help="(%(default)s)"
    )
    parser.add_argument(
        "incident",
        nargs="?",
        default="",
        metavar="ID",
        help="with show: an id of the list, or the latest of w0, w0:1, daemon:w0, stream:w0, r0",
    )
    parser.add_argument("--worker", default="", help="only those of this worker or gateway")
    parser.add_argument("--open", action="store_true", help="only those whose capacity is not back")
    parser.add_argument(
        "--limit",
        type=int,
        default=100,
        help="maximum number of incidents, newest first (%(default)s)",
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        default="",
        help="read a stored log, or an archive's directory, instead of asking the fleet",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        default="",
        help="with show: write it as one OpenTelemetry trace (OTLP JSON) as well",
    )
    listing(parser)


def degradation(parser: argparse.ArgumentParser) -> None:
    """`relume degradation`."""
    parser.add_argument("--model", default="", help="only this model")
    parser.add_argument(
        "--limit",
        type=int,
        default=20,
        help="maximum number of decisions, the newest (%(default)s)",
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        default="",
        help="read a stored log, or an archive's directory, instead of asking the fleet",
    )
    listing(parser)


def rollout(parser: argparse.ArgumentParser) -> None:
    """`relume rollout`."""
    parser.add_argument("action", choices=("restart", "status", "cancel"))
    parser.add_argument("--model", default="", help="needed if the fleet serves several")
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        default=0.0,
        help="maximum time in seconds in which requests may leave each worker (120)",
    )
    parser.add_argument(
        "--wait",
        nargs="?",
        type=float,
        const=1800.0,
        metavar="SECONDS",
        help="show each change until its end, up to this maximum time (%(const)s; exit 1: not ended)",
    )
    listing(parser)


def one_worker(parser: argparse.ArgumentParser) -> None:
    """Commands on one worker."""
    parser.add_argument("worker", metavar="WORKER", help="its name, as in `relume workers`")
    listing(parser)


def drain(parser: argparse.ArgumentParser) -> None:
    """`relume drain`."""
    parser.add_argument(
        "--wait",
        nargs="?",
        type=float,
        const=300.0,
        metavar="SECONDS",
        help="wait until the worker is empty, up to this maximum time (%(const)s)",
    )
    parser.add_argument(
        "--reason", default="", help="why, for `relume workers`, `relume why` and the log"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="then move what can continue elsewhere, however long the pause (default: no deadline)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also if fewer than migration.drain_floor workers of the model stay open",
    )
    one_worker(parser)


def leader(parser: argparse.ArgumentParser) -> None:
    """`relume leader [resign]`."""
    parser.add_argument(
        "action", nargs="?", default="show", choices=("show", "resign"), help="(%(default)s)"
    )
    listing(parser)


def config(parser: argparse.ArgumentParser) -> None:
    """`relume config get|set`."""
    actions = parser.add_subparsers(dest="action", metavar="get|set", required=True)
    get = actions.add_parser("get", help="show all settings, or one")
    get.add_argument("key", nargs="?", default="")
    listing(get)
    change = actions.add_parser("set", help="change one setting")
    change.add_argument("key")
    change.add_argument("value")
    listing(change)
