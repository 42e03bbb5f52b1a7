"""Settings that decisions depend on: kept in the log, so that a replay has them too."""

from __future__ import annotations

from msgspec import Struct

from relume.controlplane.admin.errors import BadRequest
from relume.controlplane.admin.models import Setting
from relume.policies import (
    checkpoint_settings,
    migration_settings,
    routing_settings,
    waiting_settings,
)
from relume.policies.checkpoint_settings import CheckpointConfig
from relume.policies.migration_settings import MigrationConfig
from relume.policies.routing_settings import RoutingConfig
from relume.policies.stall import StallConfig
from relume.policies.view import View
from relume.policies.waiting_settings import WaitingConfig


class Known(Struct, frozen=True):
    """A setting: its default, limits (of a number) or choices, and meaning."""

    default: int | str
    least: int
    most: int
    description: str
    choices: tuple[str, ...] = ()


def _checkpoint(name: str, least: int, most: int, description: str) -> tuple[str, Known]:
    key = checkpoint_settings.PREFIX + name
    choices = checkpoint_settings.CHOICES.get(key, ())
    return key, Known(getattr(CheckpointConfig(), name), least, most, description, choices)


def _migration(name: str, least: int, most: int, description: str) -> tuple[str, Known]:
    key = migration_settings.PREFIX + name
    choices = migration_settings.CHOICES.get(key, ())
    return key, Known(getattr(MigrationConfig(), name), least, most, description, choices)


def _routing(name: str, least: int, most: int, description: str) -> tuple[str, Known]:
    key = routing_settings.PREFIX + name
    choices = routing_settings.CHOICES.get(key, ())
    return key, Known(getattr(RoutingConfig(), name), least, most, description, choices)


def _waiting(name: str, least: int, most: int, description: str) -> tuple[str, Known]:
    default = getattr(WaitingConfig(), name)
    return waiting_settings.PREFIX + name, Known(default, least, most, description)


_STALL = StallConfig()
KNOWN: dict[str, Known] = {
    "stall.floor_us": Known(
        _STALL.floor_us, 10_000, 600_000_000, "silence below this is never judged, microseconds"
    ),
    "stall.cap_us": Known(
        _STALL.cap_us, 10_000, 600_000_000, "silence beyond this is always judged, microseconds"
    ),
    "stall.factor": Known(_STALL.factor, 1, 10_000, "silence allowed, in slowest recent steps"),
    **dict(
        (
            _checkpoint("placement", 0, 0, "who holds a request's checkpoint"),
            _checkpoint("recovery", 0, 0, "how interrupted requests go on"),
            _checkpoint("holders", 1, 4, "holders of a request, in other failure domains"),
            _checkpoint("alpha", 0, 10_000, "recovery load of a block to restore"),
            _checkpoint("beta", 0, 10_000, "recovery load of a request in the queue"),
            _checkpoint(
                "theta_percent",
                0,
                1_000_000,
                "eq6: a holder's load that is too much, in percent of the mean",
            ),
            _checkpoint("tau", 0, 1 << 31, "eq6: a longer prefix is restored all the same, tokens"),
            _checkpoint("output_tokens", 0, 1 << 20, "a request is expected to make at most"),
            _migration("moves", 0, 0, "running requests leave nobody, draining or also crowded"),
            *(_migration(name, *limits) for name, limits in migration_settings.LIMITS.items()),
            _routing("policy", 0, 0, "which worker takes a request"),
            _routing("shed", 0, 0, "requests that would begin too late are refused"),
            _routing("overfill", 0, 0, "full workers get requests though others have room"),
            *(_routing(name, *limits) for name, limits in routing_settings.LIMITS.items()),
            *(_waiting(name, *limits) for name, limits in waiting_settings.LIMITS.items()),
        )
    ),
}


def checked(key: str, value: str | int | float) -> str:
    """The value as it goes into the log. Raises BadRequest."""
    known = KNOWN.get(key)
    if known is None:
        raise BadRequest(f"{key!r} is no setting; known: {', '.join(KNOWN)}", "key")
    text = str(value)
    if known.choices:
        if text not in known.choices:
            raise BadRequest(f"{key}={text!r}: expected {', '.join(known.choices)}", "value")
        return text
    if not text.isdigit() or not known.least <= int(text) <= known.most:
        raise BadRequest(
            f"{key}={text!r}: expected a whole number from {known.least} to {known.most}", "value"
        )
    return str(int(text))


def settings_of(view: View) -> list[Setting]:
    """All settings with the values in force for this replica's decisions."""
    config = view.fleet.config
    found = []
    for key in [*KNOWN, *(key for key in config if key not in KNOWN)]:
        known = KNOWN.get(key)
        default = str(known.default) if known else ""
        text = known.description if known else "written by another version"
        found.append(Setting(key, view.setting(key, default), default, key in config, text))
    return found
