"""`relume drain`, and what is left on a worker that drains."""

from __future__ import annotations

import argparse
import time

from relume.controlplane.cli.admin_client import EXIT_NO, AdminClient
from relume.controlplane.cli.fleet_commands import change
from relume.controlplane.cli.output import print_line

POLL_S = 0.5


def drain(args: argparse.Namespace) -> int:
    """Drain a worker; with --wait return when nothing is left on it (exit 1: something is)."""
    order = {"reason": args.reason, "deadline_s": args.deadline, "force": args.force}
    code = change(args, {name: value for name, value in order.items() if value} or None)
    if code or args.wait is None:
        return code
    return _wait(AdminClient.find(args), args.worker, args.wait)


def _wait(client: AdminClient, worker: str, seconds: float) -> int:
    """Print what is left each time it changes, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    shown = ""
    while True:
        found = client.get(f"workers/{worker}")
        if not found["draining"]:
            print_line(f"{worker} takes requests again: the drain was cancelled")
            return EXIT_NO
        held = sum(
            h["requests"] for h in client.get("checkpoints")["holders"] if h["worker"] == worker
        )
        if not found["requests"] and not held:
            print_line(f"{worker} is empty")
            return 0
        left = f"{worker}: {found['requests']} requests run there, of {held} it holds checkpoints"
        if left != shown:
            print_line(left)
            shown = left
        if time.monotonic() >= deadline:
            print_line(f"{worker} is not empty after {seconds:g} s; the drain continues")
            return EXIT_NO
        time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.0)))
