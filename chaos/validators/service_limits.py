"""Limits of a run within which its control planes may refuse a request, from its settings."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from relume.controlplane.gateway.config import GatewayConfig
from relume.policies.admission.admission_settings import WaitingConfig


class ServiceLimits(Struct, frozen=True, kw_only=True):
    """`wait_s`: time for which a request waits for a worker; `queue_s`: for one that is not full.
    `requests`: maximum number in a replica's queue; `of_tenant`: of one tenant there. `errors`,
    `deaths`: attempts that fail by wrong answers, and by deaths without a token in between, after
    which a request fails."""

    wait_s: float
    queue_s: float
    requests: int
    of_tenant: float
    errors: int
    deaths: int


def limits_of(waiting: Mapping[str, int]) -> ServiceLimits:
    """Those of a fleet whose admission settings differ from the defaults by `waiting`."""
    gateway, queue = GatewayConfig(), replace(WaitingConfig(), **waiting)
    return ServiceLimits(
        wait_s=gateway.wait_timeout_s,
        queue_s=queue.most_ms / 1000,
        requests=queue.requests,
        of_tenant=max(queue.requests * queue.tenant_percent / 100, 1),
        errors=gateway.max_engine_errors,
        deaths=gateway.max_deaths,
    )
