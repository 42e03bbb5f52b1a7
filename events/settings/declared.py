"""What a setting is: a field of a frozen struct, annotated with `option`.

The annotation holds everything that help, errors and documentation say about the
setting: its meaning, unit, bounds or choices, and whether it is secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, Struct

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
    dict: "a list of NAME=VALUE",
}
METAVARS = {bool: "BOOL", int: "N", float: "S", str: "TEXT", tuple: "A,B", dict: "K=V,K=V"}


def option(
    description: str,
    *,
    unit: str = "",
    choices: Sequence[str] = (),
    members: Mapping[str, tuple[float, float]] | None = None,
    form: str = "",
    secret: bool = False,
    variable: str = "",
    metavar: str = "",
    is_flag: bool = True,
    **bounds: Any,
) -> Meta:
    """The annotation of one setting.

    `bounds` are those of `msgspec.Meta` (ge, le, pattern, min_length). `form` says in words
    what `pattern` allows. `members` are the names of a mapping to numbers, each with its
    minimum and maximum: whole numbers where these are. `variable` replaces the usual name of the environment variable.
    """
    extra = {
        "unit": unit,
        "choices": tuple(choices),
        "members": dict(members or {}),
        "form": form,
        "secret": secret,
        "variable": variable,
        "metavar": metavar,
        "is_flag": is_flag,
    }
    return Meta(description=description, extra=extra, **bounds)


def limits(about: str, declaration: type[Struct]) -> Meta:
    """The annotation of a setting that maps names of limits of `declaration` to numbers."""
    members: dict[str, tuple[float, float]] = {}
    defaults = []
    for name, setting in limits_of(declaration).items():
        assert setting.least is not None and setting.most is not None
        members[name] = setting.least, setting.most
        defaults.append(f"{name} ({setting.shown_default})")
    return option(f"{about}: {', '.join(defaults)}", members=members)


class Setting(Struct, frozen=True, kw_only=True):
    """One setting of a program. `type` is what `msgspec.convert` checks a value against;
    `default` is NODEFAULT for a setting that must be given."""

    name: str
    type: Any
    kind: Any
    default: Any
    description: str
    least: float | None = None
    most: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    members: dict[str, tuple[float, float]] = {}
    form: str = ""
    secret: bool = False
    variable: str = ""
    metavar: str = ""
    is_flag: bool = True

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return flag_of(self.name)

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is NODEFAULT

    @property
    def bounds(self) -> str:
        """Its bounds with their unit, in words; empty for none."""
        unit = f" {self.unit}" if self.unit else ""
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}{unit}"
        if self.least is not None:
            return f"at least {self.least}{unit}"
        return self.unit

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.form:
            return self.form
        if self.members:
            whole = all(isinstance(low, int) for low, _ in self.members.values())
            return f"NAME=N with {'whole ' if whole else ''}numbers: {self.known_members}"
        kind = KINDS[self.kind]
        if self.bounds == self.unit:
            return f"{kind} in {self.unit}" if self.unit else kind
        return f"{kind}, {self.bounds}"

    @property
    def known_members(self) -> str:
        """The names of a mapping with their bounds."""
        return ", ".join(f"{n} {low} to {high}" for n, (low, high) in self.members.items())

    @property
    def shown_default(self) -> str:
        """The default as one would write it in a flag."""
        value = "" if self.required else self.default
        if isinstance(value, tuple):
            value = ",".join(_shown(item) for item in value)
        elif isinstance(value, dict):
            value = ",".join(f"{key}={item}" for key, item in value.items())
        return _shown(value) or "none"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def flag_of(name: str) -> str:
    """The flag of the setting called `name`."""
    return "--" + name.replace("_", "-")


@cache
def settings_of(declaration: type[Struct]) -> dict[str, Setting]:
    """The settings that a struct declares, by name, in order."""
    hints = get_type_hints(declaration, include_extras=True)
    return {
        field.name: _setting(field, hints[field.name])
        for field in msgspec.structs.fields(declaration)
    }


def limits_of(declaration: type[Struct]) -> dict[str, Setting]:
    """The settings of a struct that are numbers with a minimum and a maximum."""
    settings = settings_of(declaration)
    return {n: s for n, s in settings.items() if s.least is not None and s.most is not None}


def masked_repr(config: Struct) -> str:
    """`repr` of a struct of settings, with its secrets masked: logs and tracebacks show it."""
    shown = []
    for name, setting in settings_of(type(config)).items():
        value = getattr(config, name)
        shown.append(f"{name}={'***' if value and setting.secret else repr(value)}")
    return f"{type(config).__name__}({', '.join(shown)})"


def _setting(field: msgspec.structs.FieldInfo, hint: Any) -> Setting:
    default = field.default
    if default is NODEFAULT and field.default_factory is not NODEFAULT:
        default = field.default_factory()  # an empty dict
    bare, metas = hint, []
    if get_origin(hint) is Annotated:
        bare, *found = get_args(hint)
        metas = [meta for meta in found if isinstance(meta, Meta)]
    extra: dict[str, Any] = {"variable": ""}
    least: float | None = None
    most: float | None = None
    description = field.name
    for meta in metas:
        extra.update(meta.extra or {})
        least = meta.ge if meta.ge is not None else least
        most = meta.le if meta.le is not None else most
        description = meta.description or description
    kind = get_origin(bare) or bare
    extra["variable"] = extra["variable"] or f"RELUME_{field.name.upper()}"
    extra["metavar"] = extra.get("metavar") or METAVARS.get(kind, "TEXT")
    return Setting(
        name=field.name,
        type=hint,
        kind=kind,
        default=default,
        description=description,
        least=least,
        most=most,
        **extra,
    )
