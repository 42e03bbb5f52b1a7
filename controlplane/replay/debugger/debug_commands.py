"""The debugger's commands: how they are written and what they are for. The help is here."""

from __future__ import annotations

import difflib
from typing import NamedTuple


class BadQuestion(ValueError):
    """The question cannot be answered; the text says why, and which can."""


class Command(NamedTuple):
    """`method` of `Debugger` runs it; `more` is shown by `help COMMAND`."""

    group: str
    method: str
    usage: str
    help: str
    more: str = ""


_MATCH = """
MATCH is one of
  type TYPE          an event type, e.g. engine_died; also of changes inside engine steps
  request ID         events about this request
  worker NAME        events of or about this worker
`relume replay --sqlite FILE` finds revisions by any other question; `at REVISION` goes there."""

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
    "incidents": Command("causes", "incidents", "incidents", "what failed in this log"),
    "incident": Command(
        "causes", "incident", "incident ID|NAME|N", "one failure: an id, w0:1, daemon:w0, stream:w0, r0",
        "First sign, detector, decision, how each stream continued, the successor, and the events\n"
        "that say so. As `relume incidents show`.",
    ),
    "what-if": Command(
        "questions", "what_if", "what-if KEY=VALUE ... [from REVISION]",
        "the first decision that other settings would change",
        """
  what-if checkpoints.recovery=eq6
  what-if routing.policy=round_robin from 120
  what-if routing.request_tokens=64

Every decision is repeated on the recorded history. Up to the first difference that is
what would have happened; later ones are counted each by itself. `what-if` alone lists the keys.
`relume-chaos what-if LOG KEY=VALUE ...` simulates what would have followed.""",
    ),
    "export": Command(
        "questions", "export", "export FILE [FIRST [LAST]]",
        "store revisions as a replay test, without clients and operators",
        "It continues from the fold before FIRST, so `relume replay --verify --log FILE` stands\n"
        "by itself. Default: all up to here; at the start, all there is.\n"
        "Add it to tests/replay/logs to keep it true.",
    ),
}  # fmt: skip

ALIASES = {
    "n": "next", "s": "next", "step": "next", "b": "break", "c": "continue", "rc": "reverse",
    "whatif": "what-if", "what_if": "what-if", "p": "state", "e": "events", "d": "diff",
    "failures": "incidents", "failure": "incident",
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
