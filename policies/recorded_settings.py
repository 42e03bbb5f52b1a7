"""All settings that decisions depend on, in the order in which replicas record them."""

from __future__ import annotations

from relume.events.settings.declared import Setting
from relume.policies.admission import admission_settings
from relume.policies.canary import canary_settings
from relume.policies.checkpoints import checkpoint_settings
from relume.policies.crosscheck import check_settings
from relume.policies.degradation import degradation_settings
from relume.policies.health import health_settings
from relume.policies.liveness import overdue, stall
from relume.policies.migration import migration_settings
from relume.policies.routing import routing_settings
from relume.policies.spares import spare_settings

SETTINGS: dict[str, Setting] = {
    **stall.SETTINGS.settings,
    **checkpoint_settings.SETTINGS.settings,
    **migration_settings.SETTINGS.settings,
    **routing_settings.SETTINGS.settings,
    **admission_settings.SETTINGS.settings,
    **health_settings.SETTINGS.settings,
    **overdue.SETTINGS.settings,
    **canary_settings.SETTINGS.settings,
    **check_settings.SETTINGS.settings,
    **degradation_settings.SETTINGS.settings,
    **spare_settings.SETTINGS.settings,
}
CHOICES = {key: setting.choices for key, setting in SETTINGS.items() if setting.choices}
INTEGERS = frozenset(key for key, setting in SETTINGS.items() if setting.kind is int)
