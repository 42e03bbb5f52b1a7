"""Settings that decisions depend on. They are recorded in the log, so that a replay has them.

A replica records its values when it starts (`ReplicaStarted.settings`); an operator changes
one with `relume config set`. Each is text under a key such as `migration.gap`. A struct
declares them, each field annotated with `option`.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from relume.events.settings.declared import settings_of

T = TypeVar("T", bound=Struct)


class SettingsView(Protocol):
    """What the log has of settings, from one place in it."""

    def setting(self, name: str, default: str) -> str:
        """The value in force."""
        ...


def number_in(view: SettingsView, name: str, default: int) -> int:
    """The number in force; the default where the text is none, since no text in the log ends a reader."""
    return _number(view.setting(name, ""), default)


def _number(text: str, default: int) -> int:
    try:
        return int(text)
    except ValueError:
        return default


class RecordedSettings(Generic[T]):
    """The settings of one struct under one prefix.

    `unrecorded` holds the values that decided in logs which do not record a setting; by
    default the struct's own defaults.
    """

    def __init__(self, prefix: str, declaration: type[T], unrecorded: T | None = None) -> None:
        self.prefix = prefix
        self._declaration = declaration
        self.settings = {prefix + n: s for n, s in settings_of(declaration).items()}
        values = unrecorded if unrecorded is not None else declaration()
        self._read = tuple(
            (s.name, key, str(default := getattr(values, s.name)), default)
            for key, s in self.settings.items()
        )

    @property
    def limits(self) -> dict[str, tuple[int, int, str]]:
        """Minimum, maximum and meaning of each number, by its name without the prefix."""
        return {
            s.name: (int(s.least), int(s.most), s.description)
            for s in self.settings.values()
            if s.least is not None and s.most is not None
        }

    def recorded(self, config: T) -> tuple[tuple[str, str], ...]:
        """The values as a replica records them when it starts."""
        return tuple((key, str(getattr(config, s.name))) for key, s in self.settings.items())

    def config_of(self, view: SettingsView) -> T:
        """The values in force at `view`, from the log alone. See `number_in` for a text that is no
        number."""
        setting = view.setting
        values: dict[str, int | str] = {}
        for name, key, default_text, default in self._read:
            text = setting(key, default_text)
            values[name] = text if isinstance(default, str) else _number(text, default)
        return self._declaration(**values)
