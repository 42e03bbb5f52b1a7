"""The closed vocabularies (`relume.events.vocabulary.enums`) are what code uses: no part has
a list, or a word, of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from relume.events.vocabulary import enums
from relume.events.vocabulary.enums import Word

CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = ("events", "policies", "controlplane", "engine_shim")
WORDS = {x.__name__: x for x in vars(enums).values() if isinstance(x, type) and issubclass(x, Word)}
# What fields and variables are called that carry a word, and of which vocabularies.
CARRIERS = {
    "cause": ("RouteCause", "QueueCause", "MigrationCause", "PlacementCause"),
    "kind": ("TransportKind", "RecoveryKind", "EffectKind", "EngineKind"),
    "mode": ("AttemptMode",),
    "verdict": ("Guarantee",),
    "fallback": ("Guarantee",),
    "outcome": ("RequestOutcome", "ProbeResult"),
    "probe": ("ProbeResult",),
    "engine": ("EnginePhase",),
    "timer": ("TimerKind",),
    "command": ("AdminCommand",),
    "host_kind": ("HostKind",),
}
# Of these names, variables mean other things as well; fields do not.
ONLY_FIELDS = {"kind", "command", "outcome", "engine"}


def words_of(name: str) -> set[str]:
    return {word.value for enum in CARRIERS[name] for word in WORDS[enum]} - {""}


def literals(node: ast.expr) -> list[str]:
    inside = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]
    return [x.value for x in inside if isinstance(x, ast.Constant) and isinstance(x.value, str)]


def free_words(source: str) -> Iterator[tuple[int, str]]:
    """Words written as strings where a field of their vocabulary is compared, set or passed."""
    for node in ast.walk(ast.parse(source)):
        pairs: list[tuple[ast.expr | str, ast.expr]] = []
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            pairs = [(node.left, node.comparators[0]), (node.comparators[0], node.left)]
        elif isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2][:1].isupper():
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
        for to, value in pairs:
            name = to if isinstance(to, str) else getattr(to, "attr", getattr(to, "id", ""))
            if name not in CARRIERS or (isinstance(to, ast.Name) and name in ONLY_FIELDS):
                continue
            for word in literals(value):
                if word in words_of(name):
                    yield node.lineno, f"{name} {word!r}"


def test_no_word_is_a_free_string() -> None:
    found = []
    for room in ROOMS:
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            where = str(path.relative_to(CHECKOUT))
            if path.name != "enums.py":
                found += [f"{where}:{line}: {what}" for line, what in free_words(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('if event.kind == "reset": ...', 1),
        ('if event.mode in ("continue", "replay"): ...', 2),
        ('if "ready" != worker.engine: ...', 1),
        ('worker.engine = "dead"', 1),
        ('v.RouteDecided(cause="arrival")', 1),
        ("if event.kind == TransportKind.RESET: ...", 0),
        ('if event.kind == "a word of nobody": ...', 0),
        ('if kind == "reset": ...', 0),
    ],
)
def test_a_free_word_is_found(source: str, count: int) -> None:
    assert len(list(free_words(source))) == count


def test_request_states_are_live_and_the_outcomes() -> None:
    assert set(enums.RequestState) == {"live", *enums.RequestOutcome}


def test_worker_states_cover_the_phases_of_an_engine() -> None:
    """`worker_state` shows a phase as it is while the engine is not ready."""
    assert set(enums.EnginePhase) - {"ready"} <= set(enums.WorkerState)


def test_every_effect_is_a_command() -> None:
    assert set(enums.EffectKind) <= set(enums.AdminCommand)
