"""Handler that shows checkpoints: which holder has what of which request."""

from __future__ import annotations

from aiohttp import web

from relume.controlplane.admin import models as m
from relume.controlplane.replica.loop import Replica
from relume.policies.checkpoints import decisions, placement
from relume.policies.checkpoints.checkpoint_settings import config_of
from relume.policies.checkpoints.placement import Site, Weights
from relume.policies.state import coverage
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Fleet, Placed
from relume.policies.state.overlay.view import View

SHOWN = 1000
"""Maximum number of requests in one answer, newest first."""


class CheckpointsApi:
    """Read-only, over one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def checkpoints(self, request: web.Request) -> m.CheckpointList:
        """GET checkpoints; `request` and `worker` narrow the requests."""
        view = self._replica.view
        fleet, config = view.fleet, config_of(view)
        sites = {site.worker: site for site in decisions.sites(view)}
        weights = Weights(config.alpha, config.beta)
        wanted, worker = request.query.get("request"), request.query.get("worker")
        found = [
            _request(fleet, name, placed)
            for name, placed in fleet.placed.items()
            if wanted in (None, "", name) and worker in (None, "", placed.primary)
        ]
        return m.CheckpointList(
            revision=fleet.revision,
            placement=config.placement,
            recovery=config.recovery,
            wanted=config.holders,
            balance_percent=balance_percent(view),
            restores=dict(fleet.restores),
            holders=[
                _holder(fleet, site, placement.load(site, weights)) for site in sites.values()
            ],
            requests=found[-SHOWN:],
        )


def balance_percent(view: View) -> int:
    """The highest expected recovery load (Eq. 4) of a holder that may be chosen to the lowest,
    counted from one block on; 0 when there are fewer than two."""
    config = config_of(view)
    weights = Weights(config.alpha, config.beta)
    loads = [placement.load(s, weights) for s in decisions.sites(view) if placement.usable(s)]
    return 100 * max(*loads, 1) // max(min(loads), 1) if len(loads) > 1 else 0


def _holder(fleet: Fleet, site: Site, load: int) -> m.HolderInfo:
    holder = fleet.holders[site.worker]
    rates = {name: coverage.bandwidth(fleet, holder.name, name) for name in holder.rates}
    return m.HolderInfo(
        worker=holder.name,
        alive=site.alive,
        boot=holder.boot,
        domain=site.domain,
        address=holder.address,
        local=holder.local,
        budget_bytes=holder.budget_bytes,
        held_bytes=holder.held_bytes,
        promised_bytes=site.used_bytes - holder.held_bytes,
        placed_blocks=site.blocks,
        load=load,
        requests=len(holder.covered),
        evicted=holder.evicted,
        rates_bytes_s=rates,
    )


def _request(fleet: Fleet, request: str, placed: Placed) -> m.CheckpointInfo:
    worker = fleet.workers.get(placed.primary)
    attempt = worker.attempts.get(key_of(request, placed.attempt)) if worker else None
    kv_tokens = attempt.filled * worker.block_size if worker and attempt else -1
    covered = {
        name: coverage.covered_tokens(fleet, name, request)
        for name, holder in fleet.holders.items()
        if request in holder.covered
    }
    return m.CheckpointInfo(
        request=request,
        attempt=placed.attempt,
        worker=placed.primary,
        holders=placed.holders,
        expected_blocks=placed.blocks,
        covered=covered,
        kv_tokens=kv_tokens,
    )
