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
            (s.name, key, str(getattr(values, s.name)), s.kind is int)
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
        """The values in force at `view`, from the log alone. Raises ValueError when a number is
        not one."""
        setting = view.setting
        values: dict[str, int | str] = {}
        for name, key, default, is_integer in self._read:
            text = setting(key, default)
            values[name] = int(text) if is_integer else text
        return self._declaration(**values)
