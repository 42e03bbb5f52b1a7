"""Cases: a scenario with its schedule, from a name, a file, a seed or an earlier run.

A fixed case is a YAML file that has both scenario and schedule; no part of it is drawn again.
`shrink` writes such files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import NODEFAULT, UNSET, Struct, to_builtins

from relume.chaos.runner.composed.compose import COMPOSED, compose
from relume.chaos.scenario import scenario_reader as reading
from relume.chaos.scenario.language import Scenario
from relume.chaos.scenario.problems import Problem, ScenarioError
from relume.chaos.scenario.schedule import Schedule, expand

NOTE = "# A fixed case: the schedule is not drawn again. Repeat it: relume-chaos run FILE\n"


class Case(Struct, frozen=True):
    """A scenario and its schedule, from a seed or a manual edit. `given` names it in commands;
    `fixed`: that file has the schedule."""

    given: str
    scenario: Scenario
    schedule: Schedule
    fixed: bool = False

    @property
    def command(self) -> str:
        """The command that repeats it."""
        seed = "" if self.fixed else f" --seed {self.schedule.seed}"
        return f"relume-chaos run {self.given}{seed}"


def case_of(given: str, seed: int = 0) -> Case:
    """The case of a named scenario, a scenario's file, a fixed case's file, the folder of an
    earlier run (as it was, regardless of the seed), or `composed`: a scenario drawn from the seed.

    Raises ScenarioError, traces.TraceError, OSError.
    """
    if given == COMPOSED:
        scenario = compose(seed)
        return Case(given, scenario, expand(scenario, seed))
    path = Path(given)
    if path.is_dir():
        scenario = reading.load(path / "scenario.yaml")
        schedule = _schedule((path / "schedule.json").read_bytes(), given)
        return Case(given, scenario, schedule, fixed=True)
    path = reading.find(given)
    text = reading.text_of(path)
    if "\nschedule:" in text:
        return parse_fixed(text, given, path.parent)
    scenario = reading.parse(text, str(path), path.parent)
    return Case(given, scenario, expand(scenario, seed, path.parent))


def parse_fixed(text: str, given: str, folder: Path | None = None) -> Case:
    """A fixed case from its YAML. Raises ScenarioError."""
    root = reading.composed(text, given)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    if sorted(str(key.value) for key, _ in pairs) != ["scenario", "schedule"]:
        remedy = "give `scenario:` and `schedule:`, nothing else"
        raise ScenarioError(given, [Problem(1, "", "is no fixed case", remedy)])
    nodes = {key.value: (key.start_mark.line + 1, node) for key, node in pairs}
    scenario = reading.scenario_at(nodes["scenario"][1], given, folder)
    line, node = nodes["schedule"]
    schedule = msgspec.json.encode(reading.plain_at(node, given))
    return Case(given, scenario, _schedule(schedule, given, line), fixed=True)


def _schedule(data: bytes, given: str, line: int = 0) -> Schedule:
    try:
        return msgspec.json.decode(data, type=Schedule)
    except msgspec.MsgspecError as error:
        remedy = "take one that `relume-chaos` wrote"
        raise ScenarioError(given, [Problem(line, "schedule", str(error), remedy)]) from None


def fixed_yaml(case: Case, note: str = "") -> str:
    """`case` as the file of a fixed case, with `note` as comment lines at its head."""
    head = "".join(f"# {line}\n" for line in note.splitlines())
    whole = {"scenario": plain(case.scenario), "schedule": to_builtins(case.schedule)}
    return NOTE + head + _dumped(whole)


def scenario_yaml(scenario: Scenario) -> str:
    """A scenario as YAML for the library."""
    return _dumped(plain(scenario))


def _dumped(whole: Mapping[str, Any]) -> str:
    return yaml.safe_dump(whole, sort_keys=False, width=100, allow_unicode=True)


def plain(value: Any) -> Any:
    """A scenario, or a part of one, as plain values for YAML, without defaults."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if not isinstance(value, Struct):
        return value
    found: dict[str, Any] = {}
    config = value.__struct_config__
    if config.tag_field:
        found[config.tag_field] = config.tag
    for field in msgspec.structs.fields(value):
        here = getattr(value, field.name)
        default = field.default
        if default is NODEFAULT and field.default_factory is not NODEFAULT:
            default = field.default_factory()
        if default is NODEFAULT or default is UNSET or here != default:
            found[field.name] = plain(here)
    return found
