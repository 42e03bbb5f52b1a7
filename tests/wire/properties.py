"""How the properties of the wire are run. A failure prints the example that shows it."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

some_examples = settings(
    max_examples=100,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
