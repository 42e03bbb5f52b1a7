"""Scenarios from YAML: typed and checked; every error has its line and a remedy."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from relume.chaos.scenario.checks import check
from relume.chaos.scenario.language import Scenario
from relume.chaos.scenario.problems import Path_, Problem, ScenarioError

LIBRARY = Path(__file__).parent / "library"
MOST_DEPTH = 20


def named() -> dict[str, Path]:
    """The scenarios of the library, by name."""
    return {path.stem: path for path in sorted(LIBRARY.glob("*.yaml"))}


def find(given: str) -> Path:
    """The file of a scenario, by its name in the library or by its path.

    Raises ScenarioError.
    """
    known = named()
    if given in known:
        return known[given]
    path = Path(given)
    if path.is_file():
        return path
    close = difflib.get_close_matches(given, known, 1)
    remedy = f"did you mean {close[0]}?" if close else "`relume-chaos list` names the library"
    raise ScenarioError(given, [Problem(0, "", "no such scenario and no such file", remedy)])


def load(path: Path) -> Scenario:
    """Read a scenario. Raises ScenarioError with all problems found, OSError."""
    return parse(text_of(path), str(path), path.parent)


def text_of(path: Path) -> str:
    """The text of a file. Raises ScenarioError if it is not UTF-8, OSError."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ScenarioError(str(path), [Problem(line, "", "is no text", "give UTF-8")]) from None


def parse(text: str, file: str = "scenario", folder: Path | None = None) -> Scenario:
    """The scenario that `text` describes; trace files are relative to `folder`.

    Raises ScenarioError with all problems found.
    """
    root = composed(text, file)
    if root is None:
        raise ScenarioError(file, [Problem(1, "", "is empty", "see `relume-chaos list`")])
    return scenario_at(root, file, folder)


def composed(text: str, file: str) -> yaml.Node | None:
    """The nodes of a YAML document; None for an empty one. Raises ScenarioError."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if isinstance(error, yaml.reader.ReaderError):
            message, line = error.reason, text.count("\n", 0, error.position) + 1
        else:
            message = getattr(error, "problem", None) or str(error)
            line = mark.line + 1 if mark else 0
        raise ScenarioError(file, [Problem(line, "", message, "mend the YAML")]) from None


def scenario_at(root: yaml.Node, file: str, folder: Path | None = None) -> Scenario:
    """The scenario that a node describes, a whole document or a part of one; `folder` as in
    `parse`. Raises ScenarioError with all problems found, at their lines of the document."""
    source = _Source()
    plain = source.plain(root, ())
    problems = source.problems or list(_misfits(plain, Scenario, (), source))
    if not problems:
        scenario = msgspec.convert(plain, Scenario)
        found = check(scenario, folder or Path())
        problems = [Problem(source.line(path), shown(path), *words) for path, *words in found]
    if problems:
        raise ScenarioError(file, sorted(problems, key=lambda p: p.line))
    return scenario


def plain_at(root: yaml.Node, file: str) -> Any:
    """The plain value of a node. Raises ScenarioError."""
    source = _Source()
    plain = source.plain(root, ())
    if source.problems:
        raise ScenarioError(file, source.problems)
    return plain


def shown(path: Path_) -> str:
    """A place in a scenario for people: `faults[0].when`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


class _Source:
    """Plain values of a YAML document and the line of each."""

    def __init__(self) -> None:
        self.lines: dict[Path_, int] = {}
        self.problems: list[Problem] = []
        self._scalars = yaml.SafeLoader("")

    def line(self, path: Path_) -> int:
        """Line of the value at `path`, or of its nearest container."""
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def plain(self, node: yaml.Node, path: Path_) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if len(path) > MOST_DEPTH:
            self._wrong(node, path, "is nested too deep", "an alias may refer to its own container")
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError):
            self._wrong(node, path, f"cannot be read as {node.tag}", "put it in quotes")
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self._wrong(key_node, path, "has a key that is no word", "write `key: value`")
            elif key in found:
                self._wrong(key_node, (*path, key), "is given twice", "delete one of them")
            else:
                self.lines[(*path, key)] = key_node.start_mark.line + 1
                found[key] = self.plain(value, (*path, key))
        return found

    def _wrong(self, node: yaml.Node, path: Path_, message: str, remedy: str) -> None:
        self.problems.append(Problem(node.start_mark.line + 1, shown(path), message, remedy))


def _misfits(value: Any, kind: Any, path: Path_, source: _Source) -> Iterator[Problem]:
    """All places below `path` where `value` does not fit `kind`."""

    def wrong(at: Path_, message: str, remedy: str) -> Problem:
        return Problem(source.line(at), shown(at), message, remedy)

    members = [member for member in _members(kind) if isinstance(member, type)]
    structs = [member for member in members if issubclass(member, msgspec.Struct)]
    if structs and isinstance(value, dict):
        tags = {_tag(member): member for member in structs if _tag(member)}
        if tags and value.get("kind") not in tags:
            given = value.get("kind")
            message = "is missing" if given is None else f"names no kind: {given!r}"
            yield wrong((*path, "kind"), message, _instead(str(given), list(tags)))
            return
        chosen = tags[value["kind"]] if tags else structs[0]
        yield from _struct_misfits(value, chosen, path, source)
    elif get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _misfits(item, get_args(kind)[0], (*path, index), source)
    elif get_origin(kind) is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _misfits(item, get_args(kind)[1], (*path, key), source)
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            message = str(error).partition(" - at `$")[0]
            is_word = isinstance(value, bool) and str in members
            remedy = "put it in quotes" if is_word else f"give {_described(kind)}"
            yield wrong(path, message[:1].lower() + message[1:], remedy)


def _struct_misfits(
    value: dict[str, Any], kind: Any, path: Path_, source: _Source
) -> Iterator[Problem]:
    hints = get_type_hints(kind, include_extras=True)
    tag = "kind" if _tag(kind) else None
    known = [tag, *hints] if tag else list(hints)
    for key, item in value.items():
        at = (*path, key)
        if key in hints:
            yield from _misfits(item, hints[key], at, source)
        elif key != tag:
            yield Problem(source.line(at), shown(at), "is not known here", _instead(key, known))
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in value:
            remedy = f"add `{field.name}: ...`, {_described(hints[field.name])}"
            at = (*path, field.name)
            yield Problem(source.line(at), shown(at), "is missing", remedy)


def _members(kind: Any) -> Sequence[Any]:
    if get_origin(kind) in (Union, types.UnionType):
        return [member for member in get_args(kind) if member is not type(None)]
    return [kind]


def _chosen(kind: Any, plain: Any) -> Any:
    """Of a union, the member that `plain` means; the union itself if that is not clear."""
    members = _members(kind)
    if len(members) == 1:
        return members[0]
    if isinstance(plain, dict):
        tagged = [m for m in members if _tag(m) == plain.get("kind")]
        return tagged[0] if tagged else kind
    listed = [m for m in members if get_origin(m) is tuple]
    return listed[0] if listed and isinstance(plain, list) else kind


def _tag(kind: Any) -> Any:
    config = getattr(kind, "__struct_config__", None)
    return config.tag if config else None


def _instead(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, 1)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"there are: {', '.join(known)}" if known else "delete it"


_WORDS = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false",
    dict: "a mapping `key: value`", tuple: "a list",
}  # fmt: skip


def _described(kind: Any) -> str:
    """A type in words, with its limits."""
    members = _members(kind)
    if len(members) > 1:
        tags = [str(_tag(member)) for member in members if _tag(member)]
        if tags:
            return f"a mapping with `kind:` one of {', '.join(tags)}"
        return " or ".join(_described(member) for member in members)
    if get_origin(kind) is Annotated:
        meta = kind.__metadata__[0]
        limits = [
            f"{word} {value}"
            for word, value in (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le),
                                ("like", meta.pattern))
            if value is not None
        ]  # fmt: skip
        base = _described(get_args(kind)[0])
        return f"{base} ({', '.join(limits)})" if limits else base
    if get_origin(kind) is tuple:
        inner = [a for a in get_args(kind) if a is not Ellipsis]
        return (
            f"two bounds [low, high], each {_described(inner[0])}" if len(inner) == 2 else "a list"
        )
    if fields := getattr(kind, "__struct_fields__", ()):
        return f"a mapping with {', '.join(fields)}"
    return _WORDS.get(get_origin(kind) or kind, "another value")
