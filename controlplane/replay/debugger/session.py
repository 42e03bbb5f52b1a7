"""The debugger of a log: its commands. Each takes words and returns data for `--json`;
`screen` makes it readable, `prompt` is the terminal around it.

A place in the log is a transaction. At a revision one sees the fleet as it was after it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from relume.controlplane.admin.models import worker_info
from relume.controlplane.incidents import sentences
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.replay import rendering
from relume.controlplane.replay.debugger.debug_commands import COMMANDS, BadQuestion, full_name
from relume.controlplane.replay.debugger.folded_log import Timeline
from relume.controlplane.replay.debugger.log_window import export_window
from relume.controlplane.replay.debugger.state_diff import diff
from relume.controlplane.replay.debugger.stop_conditions import (
    Match,
    last_match,
    match,
    next_match,
)
from relume.controlplane.replay.recorded_log import History, from_file
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.what_if import Outcome, parse, what_if
from relume.controlplane.replay.why import why
from relume.events.log.codec import to_json
from relume.events.log.entries import Entry
from relume.events.log.errors import LogError
from relume.policies.state.fleet import Fleet, state_hash
from relume.policies.state.overlay.view import View

Data = dict[str, Any]


class Debugger:
    """A session on one log: a cursor, breakpoints, questions."""

    def __init__(self, history: History, timeline: Timeline | None = None) -> None:
        self.history = history
        self.timeline = timeline or Timeline(history, known=history.snapshots())
        self.breaks: dict[int, Match] = {}
        self._numbered = 0

    def run(self, line: str) -> tuple[str, Data]:
        """Run one command line; returns the command's full name and its answer.

        Raises BadQuestion (also for what the other modules call bad), LogError, OSError.
        """
        word, _, rest = line.strip().partition(" ")
        name = full_name(word)
        try:
            return name, getattr(self, COMMANDS[name].method)(shlex.split(rest))
        except (BadQuestion, LogError, OSError):
            raise
        except ValueError as error:
            raise BadQuestion(str(error)) from None

    # --- moving --------------------------------------------------------------------------

    def at(self, words: list[str]) -> Data:
        """Go to a revision, `start` or `end`; without a word, show the current one."""
        if words:
            _most(words, 1)
            self.timeline.seek(self._place(words[0]))
        return self._here()

    def next(self, words: list[str]) -> Data:
        """Transactions forward."""
        self.timeline.seek(self.timeline.at + _number(words, 1))
        return self._here(show=True)

    def back(self, words: list[str]) -> Data:
        """Transactions back."""
        self.timeline.seek(self.timeline.at - _number(words, 1))
        return self._here(show=True)

    def go(self, words: list[str]) -> Data:
        """Forward to the next breakpoint."""
        return self._stopped(next_match, self._wanted(words), "end of the log")

    def reverse(self, words: list[str]) -> Data:
        """Back to the last breakpoint."""
        return self._stopped(last_match, self._wanted(words), "beginning of the log")

    def _wanted(self, words: list[str]) -> list[Match]:
        return [_match(words)] if words else list(self.breaks.values())

    def _stopped(self, search: Callable[..., Any], wanted: list[Match], edge: str) -> Data:
        entries, found = search(self.timeline, wanted)
        data = self._here()
        data["reason"] = found.text if found is not None else edge
        data["found"] = found is not None
        data["events"] = [_entry(entry) for entry in entries]
        return data

    # --- breakpoints ---------------------------------------------------------------------

    def set_break(self, words: list[str]) -> Data:
        """Stop there from now on."""
        if words:
            self._numbered += 1
            self.breaks[self._numbered] = _match(words)
        return {"breaks": [{"number": n, "stop": m.text} for n, m in self.breaks.items()]}

    def delete(self, words: list[str]) -> Data:
        """Remove a breakpoint, or all."""
        _most(words, 1)
        if not words:
            self.breaks.clear()
        elif self.breaks.pop(_number(words, 0), None) is None:
            raise BadQuestion(f"no breakpoint {words[0]}")
        return self.set_break([])

    # --- the fleet as it was -------------------------------------------------------------

    def events(self, words: list[str]) -> Data:
        """The transaction that led here."""
        _most(words, 0)
        return self._here(show=True)

    def state(self, words: list[str]) -> Data:
        """The fleet, or one worker, replica, holder, request or setting of it."""
        fleet = self.timeline.fleet
        if not words:
            return state_of(fleet)
        _most(words, 1)
        known: dict[str, Mapping[str, Any]] = {
            "worker": fleet.workers,
            "replica": fleet.replicas,
            "holder": fleet.holders,
            "request": fleet.requests,
            "planned": fleet.planned,
            "placed": fleet.placed,
        }
        found = {kind: all_[words[0]] for kind, all_ in known.items() if words[0] in all_}
        if not found:
            raise BadQuestion(f"nothing called {words[0]!r} at revision {self.timeline.revision}")
        return {kind: msgspec.to_builtins(what) for kind, what in found.items()}

    def requests(self, words: list[str]) -> Data:
        """Live requests and where they are."""
        _most(words, 0)
        fleet = self.timeline.fleet
        return {
            "revision": self.timeline.revision,
            "requests": [
                {
                    "request": r.request,
                    "gateway": r.owner[2:],
                    "attempt": r.attempt,
                    "workers": [worker for worker, _ in r.places],
                    "holders": list(fleet.placed[r.request].holders)
                    if r.request in fleet.placed
                    else [],
                    "verdict": r.verdict,
                }
                for r in fleet.requests.values()
            ],
        }

    def diff(self, words: list[str]) -> Data:
        """Two revisions; the second is here when it is not named."""
        _most(words, 2)
        if not words:
            raise BadQuestion("diff REVISION [REVISION]")
        one = self.timeline.copy(self._revision(words[0]))
        two = self._revision(words[1]) if len(words) > 1 else self.timeline.revision
        changes = diff(one, self.timeline.copy(two))
        return {
            "from": self._revision(words[0]),
            "to": two,
            "changes": [msgspec.to_builtins(change) for change in changes],
        }

    # --- causes ---------------------------------------------------------------------------

    def why(self, words: list[str]) -> Data:
        """The chain of one request."""
        (name,) = _words(words, 1, "why REQUEST")
        found = why(self.timeline.groups, name)
        if found is None:
            raise BadQuestion(f"no request {name!r} in this log")
        return {"text": list(rendering.lines_of(found)), **rendering.to_json(found)}

    def incidents(self, words: list[str]) -> Data:
        """What failed in this log."""
        _most(words, 0)
        found = incidents_of(self.timeline.groups)
        return {
            "incidents": [
                {"number": number, "subject": r.subject, **msgspec.to_builtins(sentences.info(r))}
                for number, r in enumerate(found, 1)
            ]
        }

    def incident(self, words: list[str]) -> Data:
        """One failure: its streams and the chain of its causes."""
        (incident_name,) = _words(
            words, 1, "incident ID, NAME or NUMBER, as `incidents` lists them"
        )
        found = incidents_of(self.timeline.groups)
        record = sentences.find(found, incident_name)
        if record is None:
            names = ", ".join(dict.fromkeys(r.subject for r in found)) or "the log has none"
            raise BadQuestion(f"no incident {incident_name!r}: {names}")
        data = {"subject": record.subject, **msgspec.to_builtins(sentences.whole(record))}
        return {**data, "text": list(sentences.lines(record))}

    # --- what if, and what goes out ---------------------------------------------------------

    def what_if(self, words: list[str]) -> Data:
        """The log under other settings, from the beginning or a revision on."""
        since = 0
        if len(words) > 2 and words[-2] == "from":
            since, words = self._revision(words[-1]), words[:-2]
        return outcome_of(what_if(self.history, parse(words), since), since)

    def export(self, words: list[str]) -> Data:
        """Revisions FIRST to LAST, redacted, as a stored log that verifies."""
        _most(words, 3)
        if not words:
            raise BadQuestion("export FILE [FIRST [LAST]]")
        first = self._revision(words[1]) if len(words) > 1 else self.timeline.revision_at(1)
        here = self.timeline.revision_at(self.timeline.at or self.timeline.end)
        last = self._revision(words[2]) if len(words) > 2 else here
        if self.timeline.place(first - 1) >= self.timeline.place(last):
            raise BadQuestion(f"nothing in revisions {first} to {last}")
        footer = export_window(self.timeline, words[0], first, last)
        stored = from_file(words[0])
        verdict = verify(stored.groups, stored.base, end=footer.end)
        return {
            "file": words[0],
            "first": first,
            "last": last,
            "records": footer.records,
            "verified": verdict.ok,
            "decisions": verdict.decisions,
            "contested": verdict.contested,
            "divergences": len(verdict.divergences),
        }

    # --- where one is ---------------------------------------------------------------------

    def _here(self, show: bool = False) -> Data:
        timeline = self.timeline
        entries = timeline.entries(timeline.at)
        data: Data = {
            "revision": timeline.revision,
            "place": timeline.at,
            "of": timeline.end,
            "at_ms": max((entry.at_ms for entry in entries), default=0),
        }
        if show:
            data["events"] = [_entry(entry) for entry in entries]
        return data

    def _place(self, word: str) -> int:
        return self.timeline.place(self._revision(word))

    def _revision(self, word: str) -> int:
        known = {
            "start": self.timeline.revision_at(0),
            "end": self.timeline.revision_at(self.timeline.end),
            "here": self.timeline.revision,
        }
        if word in known:
            return known[word]
        if not word.isdecimal():
            raise BadQuestion(f"{word!r} is no revision: a number, start, end or here")
        return int(word)


def state_of(fleet: Fleet) -> Data:
    """The fleet, short: workers as the admin API has them at the leader."""
    leader = View(f"r.{fleet.leader}", fleet)
    return {
        "revision": fleet.revision,
        "hash": state_hash(fleet).hex(),
        "leader": fleet.leader,
        "tick": fleet.tick,
        "arrived": fleet.arrived,
        "ended": fleet.ended,
        "decisions": fleet.decisions,
        "live": len(fleet.requests),
        "workers": [
            msgspec.to_builtins(worker_info(leader, w))
            | {"suspected_by": [r.name for r in fleet.replicas.values() if w.name in r.suspects]}
            for w in fleet.workers.values()
        ],
        "replicas": [
            {"name": r.name, "alive": r.alive, "boot": r.boot, "decisions": r.decisions}
            for r in fleet.replicas.values()
        ],
        "holders": [
            {
                "name": h.name,
                "alive": h.alive,
                "held_bytes": h.held_bytes,
                "budget_bytes": h.budget_bytes,
                "requests": len(h.covered),
                "evicted": h.evicted,
            }
            for h in fleet.holders.values()
        ],
        "config": fleet.config,
    }


def outcome_of(outcome: Outcome, since: int = 0) -> Data:
    """A what-if's outcome as data."""
    return {"since": since, **msgspec.to_builtins(outcome)}


def _entry(entry: Entry) -> Data:
    data = to_json(entry.event)
    data.pop("dispatch", None)
    data["type"] = entry.kind
    return {
        "revision": entry.revision,
        "stream": entry.stream,
        "position": entry.position,
        "at_ms": entry.at_ms,
        "about": sorted(entry.requests),
        "text": rendering.brief(entry.event),
        "event": data,
    }


def _match(words: Sequence[str]) -> Match:
    if len(words) < 2:
        raise BadQuestion("say type TYPE, request ID or worker NAME")
    return match(words[0], " ".join(words[1:]))


def _number(words: Sequence[str], default: int) -> int:
    _most(words, 1)
    if not words:
        return default
    if not words[0].isdecimal():
        raise BadQuestion(f"{words[0]!r} is no number")
    return int(words[0])


def _most(words: Sequence[str], count: int) -> None:
    if len(words) > count:
        raise BadQuestion(f"too many words: {' '.join(words[count:])}")


def _words(words: list[str], count: int, usage: str) -> list[str]:
    if len(words) != count:
        raise BadQuestion(usage)
    return words
