"""Flags of a program, with their help text, from its declared settings."""

from __future__ import annotations

import argparse

from msgspec import Struct

from relume.events.settings.declared import Setting, settings_of


def add_flags(parser: argparse.ArgumentParser, declaration: type[Struct]) -> None:
    """One flag for each setting, and `--config`. Values stay text until `sources.load`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default="",
        help="Settings file: YAML, TOML or JSON, by its suffix. [RELUME_CONFIG]",
    )
    for setting in settings_of(declaration).values():
        if setting.is_flag:
            parser.add_argument(
                setting.flag,
                dest=setting.name,
                metavar=setting.metavar,
                help=help_text(setting).replace("%", "%%"),
            )


def help_text(setting: Setting) -> str:
    """What `--help` says about a setting."""
    allowed = setting.expected if setting.choices or setting.form else setting.bounds
    bounds = f" ({allowed})" if allowed else ""
    default = "required" if setting.required else f"default {setting.shown_default}"
    return f"{setting.description}{bounds}. [{setting.variable}; {default}]"
