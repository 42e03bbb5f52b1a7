"""Settings as tables in Markdown, for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from relume.events.settings.declared import Setting, limits_of, settings_of


def table(declaration: type[Struct]) -> str:
    """All settings of a program: flag, variable, allowed values, default, meaning."""
    head = ("Flag", "Environment variable", "Allowed values", "Default", "Meaning")
    return _table(head, map(_program_row, settings_of(declaration).values()))


def limit_table(declaration: type[Struct]) -> str:
    """The limits that a struct declares, by name."""
    return key_table(limits_of(declaration), "Name")


def key_table(settings: Mapping[str, Setting], head: str = "Key") -> str:
    """Settings that are recorded in the log, by key."""
    rows = (
        (f"`{key}`", s.expected, f"`{s.shown_default}`", f"{s.description}.")
        for key, s in settings.items()
    )
    return _table((head, "Allowed values", "Default", "Meaning"), rows)


def _program_row(setting: Setting) -> tuple[str, ...]:
    flag = f"`{setting.flag}`" if setting.is_flag else f"file key `{setting.name}`"
    variable = f"`{setting.variable}`" if setting.is_flag else ""
    default = "required" if setting.required else setting.shown_default
    shown = default if default in ("none", "required") else f"`{default}`"
    return flag, variable, setting.expected, shown, f"{setting.description}."


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(c.replace('|', chr(92) + '|') for c in row)} |" for row in lines
    )
