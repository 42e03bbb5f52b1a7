"""The debugger's terminal: a prompt, or commands from arguments or a pipe."""

from __future__ import annotations

import cmd
import contextlib
import json
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from relume.controlplane.cli.output import print_error
from relume.controlplane.replay.debugger.debug_commands import COMMANDS, BadQuestion, full_name
from relume.controlplane.replay.debugger.screen import show, show_help
from relume.controlplane.replay.debugger.session import Debugger
from relume.controlplane.replay.debugger.stop_conditions import kinds
from relume.controlplane.replay.what_if import DEFAULTS
from relume.controlplane.telemetry.visible_text import visible
from relume.events.log.errors import LogError

_REPEATED = ("next", "back", "continue", "reverse")
_WIDE = 200


def console_of(width: int = _WIDE) -> Console:
    """Standard output: coloured and as wide as the terminal if it is one, else plain."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def script(debugger: Debugger, lines: Iterable[str], as_json: bool) -> int:
    """Run commands; the exit code is 1 at the first that cannot be answered. JSON is one
    document a line: `command`, and `answer` or `error`."""
    console = console_of()
    for line in lines:
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line in ("quit", "exit"):
            break
        try:
            if not as_json and line.split()[0] == "help":
                show_help(console, *map(full_name, line.split()[1:2]))
                continue
            name, answer = debugger.run(line)
        except (BadQuestion, LogError, OSError) as error:
            if as_json:
                print(json.dumps({"command": line, "error": str(error)}), flush=True)
            else:
                print_error(f"relume replay: {line}: {error}")
            return 1
        if as_json:
            print(json.dumps({"command": line, "answer": answer}), flush=True)
        else:
            show(console, name, answer)
    return 0


class Prompt(cmd.Cmd):
    """The interactive prompt."""

    def __init__(self, debugger: Debugger) -> None:
        super().__init__()
        self._debugger = debugger
        self._console = console_of()
        self._last = ""
        self._placed()

    def greet(self) -> None:
        """Say what is open."""
        timeline = self._debugger.timeline
        self._console.print(
            Text(
                f"{visible(self._debugger.history.origin)}: revisions {timeline.revision_at(1)} to "
                f"{timeline.revision_at(timeline.end)}, {timeline.end} transactions; "
                "`help` tells what can be asked"
            )
        )

    def onecmd(self, line: str) -> bool:
        """Run one line; True ends the prompt."""
        line = line.strip() or self._last
        self._last = ""
        if line in ("quit", "exit", "q", "EOF"):
            return True
        if not line:
            return False
        try:
            if line.split()[0] in ("help", "?"):
                show_help(self._console, *map(full_name, line.split()[1:2]))
                return False
            name, answer = self._debugger.run(line)
            show(self._console, name, answer)
            if name in _REPEATED:
                self._last = line
        except (BadQuestion, LogError, OSError) as error:
            self._console.print(Text(visible(str(error)), style="bold red"))
        except KeyboardInterrupt:
            self._console.print("interrupted")
        self._placed()
        return False

    def completenames(self, text: str, *_: object) -> list[str]:
        """Commands that begin so."""
        return [name for name in (*COMMANDS, "help", "quit") if name.startswith(text)]

    def completedefault(self, text: str, line: str, *_: object) -> list[str]:
        """Words of what is being written: kinds of match, types, names, settings."""
        fleet = self._debugger.timeline.fleet
        words = [
            *("type", "request", "worker"),
            *kinds(),
            *fleet.workers,
            *fleet.requests,
            *(f"{key}=" for key in DEFAULTS),
        ]
        return [word for word in words if word.startswith(text) and word.isprintable()]

    def _placed(self) -> None:
        self.prompt = f"({self._debugger.timeline.revision}) "


def interactive(debugger: Debugger) -> int:
    """The prompt until quit, Ctrl-D; Ctrl-C leaves the line."""
    prompt = Prompt(debugger)
    with contextlib.suppress(ImportError):
        import readline

        readline.set_completer_delims(" \t\n")
    prompt.greet()
    while True:
        try:
            prompt.cmdloop()
            return 0
        except KeyboardInterrupt:
            print()
