"""A process's side of failpoints: it takes rules from a socket and obeys them where it passes.

Call sites read `active` first, so a process without the environment variable pays for one
attribute and one branch. Protocol, one JSON object per line:

    process -> {"process": "engine w0", "pid": 7}             once, at its start
    server  -> {"serial": 3, "rules": [{"id": 1, "point": "engine.decode", "action": "pause",
                "nth": 1, "times": 1, "seconds": 0, "factor": 1, "facts": {"tokens": 40}}]}
                                                              all in force
    process -> {"applied": 3}                                 they are in force here
    process -> {"reached": 1, "facts": {"request": "..", "tokens": 40}}

In each process a rule acts `times` times (0: always), from its `nth` passage with these facts on. A
process reports the first one. A paused thread continues when its rule is no longer in force. A
process whose server has left has no rules, so nothing stays paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from relume.events.failpoints.points import Action, Failpoint

ENVIRONMENT = "RELUME_FAILPOINTS"
ANSWER_S = 10.0
"""Maximum time a starting process waits for its first rules."""
PAUSE_S = 300.0
"""Maximum time of a pause."""

active = False
"""Whether this process has a server. Read it before `reach`."""
_client: _Client | None = None


class FailpointReached(OSError):
    """What `fail` raises where the call site names no error of its own."""


class _Rule:
    def __init__(self, given: dict[str, Any]) -> None:
        self.id = int(given["id"])
        self.point = Failpoint(given["point"])
        self.action = Action(given["action"])
        self.nth = int(given["nth"])
        self.times = int(given["times"])
        self.seconds = float(given["seconds"])
        self.factor = float(given["factor"])
        self.facts: dict[str, Any] = given["facts"]
        self.passages = 0
        self.released = threading.Event()

    def acts(self, point: Failpoint, facts: dict[str, Any]) -> bool:
        """Count a passage; whether the rule acts on it."""
        if point != self.point or any(facts.get(k) != v for k, v in self.facts.items()):
            return False
        self.passages += 1
        acted = self.passages - self.nth
        return acted >= 0 and (not self.times or acted < self.times)


class _Client:
    """One connection. Its thread applies rules; any thread may reach a failpoint."""

    def __init__(self, path: str, process: str) -> None:
        self._lock = threading.Lock()
        self._rules: dict[int, _Rule] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rb")
        self._send({"process": process, "pid": os.getpid()})
        if not (rules := self._lines.readline()):
            raise ConnectionResetError("it closed the connection")
        self._apply(rules)
        self._socket.settimeout(None)
        threading.Thread(target=self._follow, name="relume-failpoints", daemon=True).start()

    def rule(self, point: Failpoint, facts: dict[str, Any]) -> _Rule | None:
        """The rule that acts on this passage."""
        with self._lock:
            found = next((r for r in self._rules.values() if r.acts(point, facts)), None)
            is_first = found is not None and found.passages == found.nth
        if found is not None and is_first:
            self._send({"reached": found.id, "facts": facts})
        return found

    def _follow(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := self._lines.readline():
                self._apply(line)
        self._replace({})

    def _apply(self, line: bytes) -> None:
        message = json.loads(line)
        with self._lock:
            known = self._rules
        rules = {given["id"]: known.get(given["id"]) or _Rule(given) for given in message["rules"]}
        self._replace(rules)
        self._send({"applied": message["serial"]})

    def _replace(self, rules: dict[int, _Rule]) -> None:
        with self._lock:
            left, self._rules = self._rules, rules
        for rule in left.values():
            if rule.id not in rules:
                rule.released.set()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self._lock:  # a server that left has no use for it
            self._socket.sendall(json.dumps(message).encode() + b"\n")


def start(process: str) -> None:
    """Connect this process, if the environment names a server. Call once, before anything that
    may be reached. Raises OSError if no server answers."""
    global active, _client
    if path := os.environ.get(ENVIRONMENT):
        try:
            _client = _Client(path, process)
        except OSError as error:
            why = f"no failpoint server answers: {error}; unset it unless a test runs"
            raise OSError(f"{ENVIRONMENT}={path}: {why}") from error
        active = True


def environment() -> dict[str, str]:
    """What connects a process that does not inherit this one's environment."""
    return {ENVIRONMENT: os.environ[ENVIRONMENT]} if ENVIRONMENT in os.environ else {}


def reach(
    point: Failpoint,
    error: Callable[[str], Exception] = FailpointReached,
    took_s: float = 0.0,
    **facts: Any,
) -> None:
    """Pass `point` on this thread. `fail` raises `error(text)`. `took_s`: what `stretch` makes longer."""
    rule = _client.rule(point, facts) if _client is not None else None
    if rule is None:
        return
    if rule.action is Action.PAUSE:
        rule.released.wait(PAUSE_S)
    elif rule.action is Action.SPIN:
        deadline = time.monotonic() + PAUSE_S
        while not rule.released.is_set() and time.monotonic() < deadline:
            pass
    elif rule.action is Action.DELAY:
        time.sleep(rule.seconds)
    elif rule.action is Action.STRETCH:
        time.sleep((rule.factor - 1) * took_s)
    else:
        _end(rule, error)


async def reach_async(
    point: Failpoint, error: Callable[[str], Exception] = FailpointReached, **facts: Any
) -> None:
    """The same for one task: the event loop runs other tasks meanwhile."""
    rule = _client.rule(point, facts) if _client is not None else None
    if rule is None:
        return
    if rule.action in (Action.PAUSE, Action.SPIN):
        deadline = time.monotonic() + PAUSE_S
        while not rule.released.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
    elif rule.action is Action.DELAY:
        await asyncio.sleep(rule.seconds)
    else:
        _end(rule, error)


def _end(rule: _Rule, error: Callable[[str], Exception]) -> None:
    if rule.action is Action.EXIT:
        os.kill(os.getpid(), signal.SIGKILL)
    raise error(f"failpoint {rule.point}")
