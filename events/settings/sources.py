"""Reading settings: flag > environment `RELUME_*` > file > default.

A setting `lease_ttl_s` is the flag `--lease-ttl-s`, the variable `RELUME_LEASE_TTL_S` and
the key `lease_ttl_s` of the file. Lists are comma-separated in flags and variables,
mappings are `NAME=VALUE,NAME=VALUE`; both may be JSON. A secret `@path` is read from that
file, so that it does not appear in a process list.

The suffix of a file says how to read it: `.json`, `.toml`, `.yaml` or `.yml`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from relume.events.settings.config_error import ConfigError
from relume.events.settings.declared import Setting, settings_of
from relume.events.settings.variables import is_service_link

T = TypeVar("T", bound=Struct)
FILE_VARIABLE = "RELUME_CONFIG"


def load(
    declaration: type[T],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    path: str = "",
    file_format: str = "yaml",
) -> T:
    """The settings from all sources, each checked against its own declaration.

    `flags` maps names to values of the command line (None: not given). `path` is the
    settings file, by default what RELUME_CONFIG names; `file_format` is that of a file
    whose suffix says nothing. Raises ConfigError.
    """
    settings = settings_of(declaration)
    path = path or environ.get(FILE_VARIABLE, "")
    from_file = read_file(path, settings, file_format) if path else {}
    values: dict[str, Any] = {}
    for name, setting in settings.items():
        given = environ.get(setting.variable)
        if flags.get(name) is not None:
            values[name] = typed(setting, flags[name], setting.flag)
        elif setting.is_flag and given is not None and not is_service_link(given):
            values[name] = typed(setting, given, setting.variable)
        elif name in from_file:
            values[name] = typed(setting, from_file[name], path)
        if setting.required and not values.get(name):
            remedy = f"set {setting.flag} or {setting.variable}: {setting.description}"
            raise ConfigError(name, "", "is required", remedy)
    return declaration(**values)


def typed(setting: Setting, given: Any, source: str) -> Any:
    """The value of one setting, from text or from a file. Raises ConfigError."""
    value = _from_text(setting, given, source) if isinstance(given, str) else given
    shown = "***" if setting.secret else given
    try:
        value = msgspec.convert(value, setting.type, strict=False)
    except msgspec.ValidationError:
        remedy = f"change it, or leave it out (default {setting.shown_default})"
        raise ConfigError(
            setting.name, shown, f"is not {setting.expected}", remedy, source
        ) from None
    if setting.choices and value not in setting.choices:
        known = ", ".join(setting.choices)
        raise ConfigError(setting.name, shown, "is not known", f"use one of {known}", source)
    return _members(setting, value, source) if setting.members else value


def _members(setting: Setting, given: Mapping[str, float], source: str) -> dict[str, float]:
    remedy = f"use {setting.known_members}"
    found: dict[str, float] = {}
    for name, number in given.items():
        if name not in setting.members:
            raise ConfigError(setting.name, f"{name}={number}", "is not known", remedy, source)
        low, high = setting.members[name]
        whole = isinstance(low, int)
        if not low <= number <= high or (whole and number != int(number)):
            raise ConfigError(setting.name, f"{name}={number}", "is out of bounds", remedy, source)
        found[name] = int(number) if whole else number
    return found


def _from_text(setting: Setting, text: str, source: str) -> Any:
    if text.startswith("@") and setting.secret:
        try:
            text = Path(text[1:]).read_text().strip()
        except OSError as error:
            reason = error.strerror or "cannot be read"
            raise ConfigError(setting.name, text, reason, "name a readable file", source) from None
    if setting.kind in (tuple, dict) and text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError as error:
            shown = "***" if setting.secret else text
            problem = f"is not valid JSON: {error}"
            raise ConfigError(setting.name, shown, problem, "correct it", source) from None
    parts = [part.strip() for part in text.replace("\n", ",").split(",") if part.strip()]
    if setting.kind is tuple:
        return tuple(parts)
    if setting.kind is dict:
        pairs = [part.partition("=") for part in parts]
        if any(not sign for _, sign, _ in pairs):
            problem = "has an entry without ="
            raise ConfigError(setting.name, "***", problem, "write KEY=VALUE", source)
        return {key: value for key, _, value in pairs}
    return text


def read_file(path: str, settings: Mapping[str, Setting], file_format: str) -> dict[str, Any]:
    """The values a settings file gives, unchecked except for their names. Raises ConfigError."""
    form = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}.get(
        Path(path).suffix, file_format
    )
    try:
        text = Path(path).read_text()
    except OSError as error:
        remedy = "name a readable YAML, TOML or JSON file"
        raise ConfigError("config", path, error.strerror or "cannot be read", remedy) from None
    try:
        found = _PARSERS[form](text)
    except ValueError as error:  # JSON's and TOML's errors are ValueErrors
        first_line = str(error).splitlines()[0]
        raise ConfigError("config", path, f"is not valid {form}: {first_line}", "correct it") from (
            None
        )
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError("config", path, "is not a mapping", "write `key: value` lines")
    for key in found:
        if key not in settings:
            close = difflib.get_close_matches(str(key), settings, 1)
            remedy = f"did you mean {close[0]}?" if close else "--help lists all settings"
            raise ConfigError("config", str(key), "is not a setting", remedy, path)
    return found


def _yaml(text: str) -> Any:
    import yaml  # only when a file is given: the import takes 20 ms

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": _yaml,
}
