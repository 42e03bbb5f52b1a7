"""What the debugger stops at: a type of event, a request, a worker, or a predicate.

A predicate is one expression in Python's notation over the fields of an event, e.g.
`type == 'route_decided' and worker == 'w1' and delivered > 0`, beside them `type`, `stream`,
`revision`, `position`, and `fleet`, the fold behind the event's transaction. It is read,
never executed: there are comparisons, and, or, not, in, arithmetic, fields, indices, len.
An event without a field that is named does not match.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
from collections.abc import Callable
from typing import Any, get_args

import msgspec
from msgspec import Struct

from relume.controlplane.replay.debugger_commands import BadQuestion
from relume.controlplane.replay.debugger_fold import Entry, Timeline
from relume.events import codec
from relume.events.vocabulary.changes import AnyChange
from relume.policies.state import Fleet


def kind_of(event: Any) -> str:
    """The name of an event's type as the log has it, e.g. engine_died, first_token."""
    return _KINDS[type(event)]


def requests_of(event: Any) -> set[str]:
    """The requests an event is about."""
    named = {getattr(event, "request", "")}
    for field in ("choices", "changes", "held"):
        parts = getattr(event, field, ())
        if type(parts) is tuple:  # of a judgement `held` is a number
            named |= {part.request for part in parts}
    named |= set(getattr(event, "requests", ()))
    return {name.partition("#")[0] for name in named} - {""}


def workers_of(stream: str, event: Any) -> set[str]:
    """The workers an event is about, holders among them; candidates are not."""
    named = {getattr(event, field, "") for field in ("worker", "primary", "holder")}
    named |= set(getattr(event, "holders", ()))
    named |= {effect.worker for effect in getattr(event, "effects", ())}
    if stream.startswith("w."):
        named.add(stream[2:])
    return named - {""}


class Match(Struct, frozen=True):
    """`text` is for people. `event(entry, fleet)`: whether an entry is meant; None: the state
    alone is asked, and what is meant is the transaction that makes `state` true. `fold`:
    the state is looked at."""

    text: str
    event: Callable[[Entry, Fleet], bool] | None
    state: Callable[[Fleet], bool] = lambda fleet: False
    fold: bool = False


def match(kind: str, value: str) -> Match:
    """A match by `kind`: type, request, worker, where. Raises BadQuestion."""
    text = f"{kind} {value}"
    if kind == "type":
        name = known_kind(value)
        return Match(text, lambda entry, fleet: kind_of(entry.event) == name)
    if kind == "request":
        return Match(text, lambda entry, fleet: value in requests_of(entry.event))
    if kind == "worker":
        return Match(text, lambda entry, fleet: value in workers_of(entry.stream, entry.event))
    if kind == "where":
        return _predicate(text, value)
    raise BadQuestion(f"{kind!r}: say type, request, worker or where")


def known_kind(name: str) -> str:
    """`name`, if there is such a type of event. Raises BadQuestion with the nearest."""
    names = set(_KINDS.values())
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, 3)
    raise BadQuestion(f"no event type {name!r}; " + (", ".join(close) or "see `types`"))


def kinds() -> list[str]:
    """All types of events and of changes inside engine steps."""
    return sorted(_KINDS.values())


Found = tuple[list[Entry], Match | None]
"""What a search came upon: the entries, and which match they are. Nothing and None: none."""


def next_match(timeline: Timeline, wanted: list[Match]) -> Found:
    """Go to the first place behind the cursor that one of `wanted` means, else to the end."""
    fold = any(one.fold for one in wanted)
    look = _Look(timeline, wanted)
    for place in range(timeline.at + 1, timeline.end + 1):
        if fold:
            timeline.seek(place)
        if found := look.at(place):
            timeline.seek(place)
            return found
    timeline.seek(timeline.end)
    return [], None


def last_match(timeline: Timeline, wanted: list[Match]) -> Found:
    """Go to the last place before the cursor that one of `wanted` means, else to the
    beginning."""
    fold = any(one.fold for one in wanted)
    latest: tuple[int, Found] | None = None
    for start, end in timeline.windows(timeline.at - 1):
        if fold:
            timeline.seek(start)
        look = _Look(timeline, wanted)
        for place in range(start + 1, end + 1):
            if fold:
                timeline.seek(place)
            if found := look.at(place):
                latest = place, found
        if latest is not None:
            timeline.seek(latest[0])
            return latest[1]
    timeline.seek(0)
    return [], None


class _Look:
    """Looks at places in order; remembers which states were true at the one before."""

    def __init__(self, timeline: Timeline, wanted: list[Match]) -> None:
        self._timeline = timeline
        self._wanted = wanted
        self._held = [one.event is None and one.state(timeline.fleet) for one in wanted]

    def at(self, place: int) -> Found | None:
        """What is meant at `place`, where the cursor stands if the fold is looked at."""
        entries = self._timeline.entries(place)
        fleet = self._timeline.fleet
        result: Found | None = None
        for index, one in enumerate(self._wanted):
            if one.event is None:
                held, self._held[index] = self._held[index], one.state(fleet)
                if self._held[index] and not held and result is None:
                    result = entries, one
            elif result is None and (meant := [e for e in entries if one.event(e, fleet)]):
                result = meant, one
        return result


# --- predicates ----------------------------------------------------------------------


class _Missing(Exception):
    """The event has no field of that name."""


Names = dict[str, Any]
_Value = Callable[[Names], Any]

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_PLACE = ("type", "stream", "revision", "position", "at_ms")


def _predicate(text: str, expression: str) -> Match:
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadQuestion(f"not an expression: {expression} ({error})") from None
    value = _compiled(tree)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"len"}
    if unknown := names - _fields() - {*_PLACE, "fleet", "event"}:
        raise BadQuestion(f"no event has a field {', '.join(sorted(unknown))}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _is_type(node.left):
            for other in node.comparators:
                if isinstance(other, ast.Constant) and isinstance(other.value, str):
                    known_kind(other.value)
    if names == {"fleet"}:
        return Match(text, None, lambda fleet: _holds(value, {"fleet": fleet}), fold=True)
    return Match(
        text,
        lambda entry, fleet: _holds(value, _names(entry, fleet)),
        fold="fleet" in names,
    )


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "type"


def _fields() -> set[str]:
    return {field for kind in _KINDS for field in kind.__struct_fields__}


def _names(entry: Entry, fleet: Fleet) -> Names:
    event = entry.event
    named = {name: getattr(event, name) for name in event.__struct_fields__}
    place = {name: getattr(entry, name) for name in _PLACE[1:]}
    return {**named, **place, "type": kind_of(event), "event": event, "fleet": fleet}


def _holds(value: _Value, names: Names) -> bool:
    try:
        return bool(value(names))
    except (_Missing, KeyError, IndexError, TypeError, ZeroDivisionError):
        return False


def _compiled(node: ast.AST) -> _Value:
    """The expression as a function of the names. Raises BadQuestion for what is not allowed."""
    if isinstance(node, ast.Constant):
        constant = node.value
        return lambda names: constant
    if isinstance(node, ast.Name):
        return lambda names, name=node.id: _named(names, name)
    if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
        of, field = _compiled(node.value), node.attr
        return lambda names: _field(of(names), field)
    if isinstance(node, ast.Subscript):
        of, index = _compiled(node.value), _compiled(node.slice)
        return lambda names: of(names)[index(names)]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = [_compiled(part) for part in node.elts]
        return lambda names: tuple(part(names) for part in parts)
    if isinstance(node, ast.BoolOp):
        parts = [_compiled(part) for part in node.values]
        whole = all if isinstance(node.op, ast.And) else any
        return lambda names: whole(part(names) for part in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        of = _compiled(node.operand)
        negated = operator.not_ if isinstance(node.op, ast.Not) else operator.neg
        return lambda names: negated(of(names))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right, apply = _compiled(node.left), _compiled(node.right), _OPERATORS[type(node.op)]
        return lambda names: apply(left(names), right(names))
    if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
        return _comparison(node)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id, len(node.args), node.keywords) == ("len", 1, [])
    ):
        of = _compiled(node.args[0])
        return lambda names: len(of(names))
    raise BadQuestion(f"not allowed in a predicate: {ast.unparse(node)}")


def _comparison(node: ast.Compare) -> _Value:
    parts = [_compiled(part) for part in (node.left, *node.comparators)]
    tests = [_OPERATORS[type(op)] for op in node.ops]

    def holds(names: Names) -> bool:
        values = [part(names) for part in parts]
        return all(t(a, b) for t, a, b in zip(tests, values, values[1:], strict=False))

    return holds


def _named(names: Names, name: str) -> Any:
    if name not in names:
        raise _Missing(name)
    return names[name]


def _field(value: Any, name: str) -> Any:
    if not isinstance(value, msgspec.Struct) or name not in value.__struct_fields__:
        raise _Missing(name)
    return getattr(value, name)


def _snake(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


_KINDS: dict[type, str] = {
    **{kind: tag.partition("/")[0] for tag, kind in codec.TAGS.items()},
    **{kind: _snake(kind.__name__) for kind in get_args(AnyChange)},
}
