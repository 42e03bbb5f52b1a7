"""`relume replay --ui`: the page over a stored log, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal

from msgspec import Struct

from relume.controlplane.cli.admin_client import EXIT_NO, EXIT_USAGE, CliError
from relume.controlplane.cli.output import print_line
from relume.controlplane.replay.recorded_log import History
from relume.controlplane.ui.recorded_fleet import RecordedFleet
from relume.controlplane.ui.recording_server import RecordingServer
from relume.events.log.errors import LogError


def show_page(history: History, port: int, revision: int = 0, report: Struct | None = None) -> int:
    """Serve the page until SIGINT or SIGTERM. It opens at `revision`, or at the end (0); `report`: of
    the run that made the log. Raises CliError."""
    if not history.groups:
        raise CliError(f"no log at {history.origin}", EXIT_NO)
    print_line(f"reading {history.origin}")
    try:
        recorded = RecordedFleet(history)
        return asyncio.run(_serve(recorded, port, revision, report))
    except LogError as error:
        raise CliError(str(error), EXIT_NO) from None
    except OSError as error:
        text = f"cannot listen on port {port}: {error}; choose another with --port"
        raise CliError(text, EXIT_USAGE) from None


async def _serve(recorded: RecordedFleet, port: int, revision: int, report: Struct | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with RecordingServer(recorded, port, report) as server:
        place = f"#revision={revision}" if revision else ""
        print_line(f"open {server.url}{place}")
        print_line("Ctrl-C ends it")
        await stop.wait()
    return 0
