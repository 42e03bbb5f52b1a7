"""Settings of the fleet: recorded in the log, so that a replay has them too. An operator reads
and changes them with `relume config`."""

from __future__ import annotations

from relume.controlplane.admin.errors import BadRequest
from relume.controlplane.admin.models import Setting
from relume.events.settings import declared
from relume.policies.recorded_settings import SETTINGS
from relume.policies.state.overlay.view import View

KNOWN: dict[str, declared.Setting] = {
    key: setting
    for key, setting in SETTINGS.items()
    if setting.choices or setting.least is not None  # others are not for operators
}


def checked(key: str, value: str | int | float) -> str:
    """The value as it goes into the log. Raises BadRequest."""
    known = KNOWN.get(key)
    if known is None:
        raise BadRequest(f"{key!r} is not a setting; known: {', '.join(KNOWN)}", "key")
    text = str(value)
    if known.choices:
        if text not in known.choices:
            raise BadRequest(f"{key}={text!r}: expected {known.expected}", "value")
        return text
    assert known.least is not None and known.most is not None
    if not text.isdigit() or not known.least <= int(text) <= known.most:
        raise BadRequest(f"{key}={text!r}: expected {known.expected}", "value")
    return str(int(text))


def settings_of(view: View) -> list[Setting]:
    """All settings with the values in force for this replica's decisions."""
    config = view.fleet.config
    found = []
    for key in [*KNOWN, *(key for key in config if key not in KNOWN)]:
        known = KNOWN.get(key)
        default = str(known.default) if known else ""
        text = known.description if known else "Written by another version"
        found.append(
            Setting(
                key=key,
                value=view.setting(key, default),
                default=default,
                changed=key in config,
                description=text,
            )
        )
    return found
