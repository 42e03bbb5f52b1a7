"""The debugger's commands: how they are written and what they are for. The help is here."""

from __future__ import annotations

import difflib
from typing import NamedTuple


class BadQuestion(ValueError):
    """What was asked cannot be answered; the text says why and what can."""


class Command(NamedTuple):
    """`method` of `Debugger` runs it; `more` is shown by `help COMMAND`."""

    group: str
    method: str
    usage: str
    help: str
    more: str = ""


_MATCH = """
MATCH is one of
  type TYPE          an event type (`types` lists them), also of changes inside engine steps
  request ID         events about this request
  worker NAME        events of or about this worker
  where EXPRESSION   fields of the event, `type`, `stream`, `revision`, and `fleet`, e.g.
      where type == 'route_decided' and worker == 'w1' and delivered > 0
      where fleet.workers['w0'].engine == 'dead'        (stops where it becomes true)"""

COMMANDS: dict[str, Command] = {
    "at": Command(
        "moving", "at", "at [REVISION|start|end]", "go there; without a word: where am I",
        "A place is a transaction. `at 120` shows the fleet as it was after revision 120.",
    ),
    "next": Command("moving", "next", "next [N]", "N transactions forward"),
    "back": Command("moving", "back", "back [N]", "N transactions back"),
    "continue": Command(
        "moving", "go", "continue [MATCH]", "forward to the next breakpoint, or to MATCH", _MATCH
    ),
    "reverse": Command(
        "moving", "reverse", "reverse [MATCH]", "back to the last breakpoint, or to MATCH", _MATCH
    ),
    "break": Command(
        "moving", "set_break", "break [MATCH]", "stop at MATCH; without a word: list", _MATCH
    ),
    "delete": Command("moving", "delete", "delete [N]", "remove breakpoint N, or all"),
    "find": Command(
        "looking", "find", "find MATCH", "list the next events that match, without moving", _MATCH
    ),
    "events": Command("looking", "events", "events", "the events of this transaction"),
    "state": Command(
        "looking", "state", "state [NAME]",
        "the fleet as it was; all about one worker, replica or request",
    ),
    "requests": Command("looking", "requests", "requests", "live requests and where they are"),
    "diff": Command(
        "looking", "diff", "diff REVISION [REVISION]",
        "what changed between two revisions (the second: here)",
    ),
    "why": Command(
        "causes", "why", "why REQUEST", "the chain of causes of one request",
        "Each decision with its basis and what the others would have cost, as `relume why`.",
    ),
    "failures": Command("causes", "failures", "failures", "what failed in this log"),
    "failure": Command(
        "causes", "failure", "failure NAME|N", "the chain of one failure: w0:1, daemon:w0, r0",
        "First sign, who noticed, the plan, how each request went on, the successor.",
    ),
    "what-if": Command(
        "questions", "what_if", "what-if KEY=VALUE ... [from REVISION]",
        "the first decision that other settings would change",
        """
  what-if checkpoints.recovery=eq6
  what-if routing.policy=round_robin from 120
  what-if routing.request_tokens=64

Every decision is asked again on the recorded history. Up to the first difference that is
what would have happened; later ones are counted each by itself. `settings` lists the keys.
`relume-chaos what-if LOG KEY=VALUE ...` simulates what would have followed.""",
    ),
    "settings": Command(
        "questions", "settings", "settings", "what decisions depend on here, for `what-if`"
    ),
    "verify": Command("questions", "verify", "verify", "take every decision again and compare"),
    "export": Command(
        "questions", "export", "export FILE [FIRST [LAST]]",
        "store revisions as a replay test, without clients and operators",
        "It goes on from the fold before FIRST, so `relume replay --verify --log FILE` stands\n"
        "by itself. Default: all up to here; at the start, all there is.\n"
        "Add it to tests/replay/logs to keep it true.",
    ),
    "types": Command("questions", "types", "types", "the types of events"),
}  # fmt: skip

ALIASES = {
    "n": "next", "s": "next", "step": "next", "b": "break", "c": "continue", "rc": "reverse",
    "whatif": "what-if", "what_if": "what-if", "p": "state", "e": "events", "d": "diff",
}  # fmt: skip

GROUPS = {
    "moving": "Moving in the log",
    "looking": "Looking",
    "causes": "Causes",
    "questions": "Questions, and what goes out",
}


def full_name(word: str) -> str:
    """The command meant by a name, an alias, or a beginning that fits one alone.

    Raises BadQuestion.
    """
    word = ALIASES.get(word, word)
    if word in COMMANDS:
        return word
    fitting = [name for name in COMMANDS if word and name.startswith(word)]
    if len(fitting) == 1:
        return fitting[0]
    fitting = fitting or difflib.get_close_matches(word, COMMANDS, 2)
    hint = f": {' or '.join(fitting)}?" if fitting else "; `help` lists them"
    raise BadQuestion(f"no command {word!r}{hint}")
