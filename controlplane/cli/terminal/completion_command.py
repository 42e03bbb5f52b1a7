"""`relume completion`: a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
import sys

import shtab

SHELLS = ("bash", "zsh", "fish")
"""Shells whose scripts have the options of each command too."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of `relume completion`."""
    parser.add_argument("shell", choices=SHELLS)


def completion(args: argparse.Namespace) -> int:
    """Print the script of one shell."""
    from relume.controlplane.cli.relume_command import whole_parser

    sys.stdout.write(shtab.complete(whole_parser(), args.shell) + "\n")
    return 0
