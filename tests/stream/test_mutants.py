"""Small bugs planted into the machine: the random runs of `test_machine` must find each one."""

from __future__ import annotations

import inspect
import textwrap
from random import Random
from types import ModuleType

import pytest

from relume.controlplane.stream import answer, event_ids, reception, stream_data
from relume.controlplane.stream.handlers import answering, attempts, endings, resuming
from relume.controlplane.stream.table import TABLE
from tests.stream.world import World

pytestmark = pytest.mark.full

RUNS = 24_000

# owner, function, the line as it is, the line as the bug has it
Mutant = tuple[object, str, str, str]

FRAMES: list[Mutant] = [
    (answer.Answer, "take", "data[at:]", "data[at + 1:]"),
    (answer.Answer, "take", "size, data[at:]", "size - 1, data[at:]"),
    (answer.Answer, "take", "not data.startswith(head)", "not data.startswith(head[:4])"),
    (answer.Answer, "take", "or data.endswith(LAST_CHUNKS)", ""),
    (answer.Answer, "take_with_id", "stamp.at = (place, 0)", "stamp.at = (place - 1, 0)"),
    (answer.Answer, "take_with_id", "size + len(line)", "size + len(line) - 1"),
    (answer.Answer, "expect", "start != len(ids)", "start < len(ids)"),
    (answer.Answer, "add", "ids.fromlist(new)", "ids.fromlist(new[:-1] or new)"),
    (answering, "_add", "answer.expect(known, start)", "pass"),
    (answering, "on_data", "return found  # the rest", "continue  # the rest"),
]
TAILS: list[Mutant] = [
    (answer.Answer, "follow", 'self.tail = b""', "pass"),
    (answer.Answer, "follow", "self.tail += payload", "self.tail = payload"),
    (answer.Answer, "follow", "self.tail += payload", "self.tail += payload[1:]"),
    (answer.Answer, "take", 'self.tail = b""', "pass"),
    (answer.Answer, "take_with_id", 'self.tail = b""', "pass"),
    (answering, "_add", 'answer.tail = b""', "pass"),
    (reception.Reception, "without_known", "due[known:]", "due[known + 1:]"),
    (reception.Reception, "without_known", "return payload[known:]", "return payload[known + 1:]"),
    (reception.Reception, "without_known", "return payload[known:]", "return payload"),
    (attempts, "_send", "repeats=answer.tail", 'repeats=b""'),
]
POSITIONS: list[Mutant] = [
    (answer.Answer, "resumption", "self._choices or {0: self.ids}",
     "self._choices or {0: self.ids[:-1]}"),
    (stream_data.Stream, "rewind", "self.known[: have[0]]", "self.known[: have[0] + 1]"),
    (stream_data.Stream, "rewind", "(len(self.known), 0)", "(have[0], 0)"),
    (event_ids.Stamp, "frame", "not self._is_known(at)", "place > self.have"),
    (event_ids.Stamp, "_is_known", "at < tokens", "at <= tokens"),
    (event_ids.Stamp, "_is_known", "self._passed < events", "self._passed <= events"),
    (event_ids.Stamp, "frame", "events + number + 1", "events + number"),
    (event_ids.Stamp, "frame", "(at, events + len(parts))", "(at, len(parts))"),
    (event_ids.Stamp, "run", "self.at[0] + 1", "self.at[0]"),
    (event_ids.Stamp, "skipped", "self.at[0] + tokens", "self.at[0]"),
    (answering, "_take_run", "state.base <= stream.have[0]", "state.base <= stream.have[0] + 1"),
    (answering, "settle", "stamp.is_behind", "False"),
    (resuming, "on_client_returned", "drop_plan(stream, state)", "pass"),
    (resuming, "on_client_returned", "left = leave(", "drop_plan(stream, state); left = leave("),
    (resuming, "detach", "drop_plan(stream, state)", "pass"),
    (attempts, "_send", "stream.stamp.restart((0, 0), stream.have)", "pass"),
]  # fmt: skip
LIVES: list[Mutant] = [
    (attempts, "lose", "stream.effects.append(Close(reuse=refusal is not None))", "pass"),
    (attempts, "on_head", "stream.effects.append(Close())", "pass"),
    (attempts, "complete", "StopWaiting(), Close(reuse=True)", "StopWaiting(),"),
    (attempts, "lose", "if answer.is_complete:", "if False:"),
    (attempts, "_leave_for", "flush(stream)", "pass"),
    (endings, "leave", "stream.effects.append(Close())", "pass"),
    (endings, "end", "effects.append(Close(reuse))", "pass"),
    (resuming, "on_client_gone", "stream.begun or", ""),
    (resuming, "on_client_gone", "may_return and", "False and"),
    (resuming, "_rewind", "stream.begun = ", ""),
    (resuming, "on_client_returned", "left = leave(stream, state)", "left = None"),
    (endings, "on_taken_over", "if is_there:", "if is_there and stream.begun:"),
    (resuming, "on_owned", "if is_there:", "if False:"),
    (resuming, "on_client_gone", "isinstance(state, Delivering) and", "False and"),
]


def plant(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Put the function with the bug in its place."""
    owner, name, line, bug = mutant
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert line in source, f"{name} no longer says {line!r}"
    module = inspect.getmodule(function)
    assert isinstance(module, ModuleType)
    found: dict[str, object] = {}
    exec("from __future__ import annotations\n" + source.replace(line, bug, 1), vars(module), found)
    monkeypatch.setattr(owner, name, found[name])
    for row in TABLE.values():
        for event in [event for event, handler in row.items() if handler is function]:
            monkeypatch.setitem(row, event, found[name])


def is_found() -> bool:
    """Whether one of the runs fails."""
    for seed in range(RUNS):
        rng = Random(seed)
        try:
            if seed % 4 == 1:
                World(rng, calm=True).run_with_one_return(rng.randint(0, 15))
            elif seed % 2:
                World(rng, calm=True).run_with_one_loss(rng.randint(0, 15))
            else:
                World(rng, rng.choice((0.1, 0.3, 0.6))).run(rng.randint(0, 60))
        except Exception:
            return True
    return False


def test_without_a_bug_none_is_found() -> None:
    assert not is_found()


@pytest.mark.parametrize(
    "mutant", [*FRAMES, *TAILS, *POSITIONS, *LIVES], ids=lambda m: f"{m[1]}: {m[3]}"
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    plant(monkeypatch, mutant)
    assert is_found()
