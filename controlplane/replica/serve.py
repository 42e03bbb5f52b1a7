"""`relume serve`: one control plane replica as a process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
import structlog

from relume.controlplane.gateway.config import GatewayConfig, ResumeConfig
from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.history.continuity.last_seen import LastSeen
from relume.controlplane.history.continuity.lost_log import begin_remedy
from relume.controlplane.history.history_keeper import Keeper
from relume.controlplane.history.wiring import history_of, keeper_of
from relume.controlplane.replica.former_log.log_loss import (
    LOG_LOST,
    is_log_lost,
    learn_log_id,
    name_log,
    outlive_log,
)
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.controlplane.serve_settings import ServeConfig, etcd_config
from relume.controlplane.telemetry.request_spans import tracing
from relume.events import vocabulary as v
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.failpoints import failpoint_client
from relume.events.log.errors import (
    Fenced,
    LogError,
    LogUnavailable,
    StreamOwned,
    first_cause,
)
from relume.events.systemd import keep_informed
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.canary.canary_settings import CanaryConfig
from relume.policies.checkpoints.checkpoint_settings import CheckpointConfig
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from relume.policies.degradation.degradation_settings import DegradationConfig
from relume.policies.health.health_settings import HealthConfig
from relume.policies.leader.feature_level import FleetTooNew
from relume.policies.liveness.overdue import OverdueConfig
from relume.policies.liveness.stall import StallConfig
from relume.policies.migration.migration_settings import MigrationConfig
from relume.policies.routing.routing_settings import RoutingConfig
from relume.policies.spares.spare_settings import SparesConfig

GATHER_MS = 50
"""Maximum time arrivals, decisions and ends of requests are batched before they are written to the
log."""

EXIT_FENCED = 3
log = structlog.get_logger("relume.serve")


def main(config: ServeConfig) -> int:
    """Run until SIGTERM or SIGINT (exit 0), or until fenced (exit 3)."""
    import uvloop

    try:
        uvloop.run(_serve(config))
    except asyncio.CancelledError:
        log.info("stopped_while_starting")
    except (LogError, BaseExceptionGroup) as raised:
        return _explain(first_cause(raised))
    return 0


def _explain(error: BaseException) -> int:
    """Log why the replica ends, and return its exit code; other errors than LogError propagate."""
    if isinstance(error, LOG_LOST):
        remedy = f"ask relume doctor; if etcd lost a part of the log: {begin_remedy()}"
        log.error("log_replaced", reason=str(error), remedy=remedy)
        return 1
    if isinstance(error, Fenced):
        remedy = "another process has my name, or a stray key stands in my stream (relume doctor)"
        log.error("fenced", reason=str(error), remedy=remedy)
        return EXIT_FENCED
    if isinstance(error, StreamOwned):
        remedy = "stop the other replica, give this one another --name, or wait for its lease"
        log.error("name_taken", reason=str(error), remedy=remedy)
        return 1
    if isinstance(error, LogUnavailable):
        log.error("no_log", reason=str(error), remedy="is etcd up? see relume doctor")
        return 1
    if isinstance(error, FleetTooNew):
        remedy = "start the build of the other replicas, or a newer one: a raised level stays"
        log.error("build_too_old", reason=str(error), remedy=remedy)
        return 1
    if isinstance(error, LogError):
        log.error("log_failed", reason=str(error), remedy="relume doctor")
        return 1
    raise error


class _Progress:
    """How far the replica is, for systemd. `gateway`: it accepts requests."""

    def __init__(self) -> None:
        self.text = "waits for etcd"
        self.gateway: Gateway | None = None

    def notice(self) -> str:
        """As sd_notify(3) wants it: ready while GET /ready answers 200."""
        if self.gateway is None:
            return f"STATUS={self.text}"
        if self.gateway.draining:
            return "STOPPING=1\nSTATUS=its requests end"
        return "READY=1\nSTATUS=serving"


async def _serve(config: ServeConfig) -> None:
    failpoint_client.start(f"replica {config.name}")
    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    starting = asyncio.current_task()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()
        if starting is not None:
            starting.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    progress = _Progress()
    async with AsyncExitStack() as stack:
        stack.callback(asyncio.create_task(keep_informed(progress.notice)).cancel)
        etcd = await stack.enter_async_context(EtcdLog(etcd_config(config)))
        history = history_of(config, etcd)
        # After a kill -9 our own old lease still holds the name, for a TTL at most.
        opening = etcd.writer(
            f"r.{config.name}", wait_s=2.0 * config.lease_ttl_s, gather_s=GATHER_MS / 1000
        )
        progress.text = f"waits for the stream r.{config.name}"
        writer = await stack.enter_async_context(opening)
        progress.text = "reads the log"
        for loss in writer.spool_losses:
            log.error("spool_set_aside", path=str(loss.path), why=loss.why, remedy=loss.remedy)
        reader = etcd.reader()
        replica = Replica(_replica_config(config), reader, writer, etcd.writer, history)
        reader.on_foreign_key = replica.note_foreign_key
        reader.on_damage = replica.damaged.note
        keeper = keeper_of(config, replica, reader, etcd)
        stack.enter_context(tracing(replica.scheduler, config.name, config.trace_file, os.environ))
        seen = LastSeen.of_replica(config.spool_dir, config.name, Maintenance(etcd.client))
        await seen.check()
        await replica.catch_up()
        if not config.archive_dir:  # else the leader names the log, with its archive
            await name_log(Maintenance(etcd.client))
        with suppress(LogUnavailable):
            decisions = replica.scheduler.decisions
            decisions.log_id = await Maintenance(etcd.client).identity()
        gateway = Gateway(replica.scheduler, _gateway_config(config))
        await stack.enter_async_context(gateway)
        if config.admin_port:
            from relume.controlplane.admin.admin_server import AdminServer
            from relume.controlplane.telemetry.state_families import TokenCollector

            log_id = Maintenance(etcd.client).identity
            admin = await stack.enter_async_context(
                AdminServer(replica, config, etcd.reader(), log_id)
            )
            gateway.service.metrics = admin.metrics_page
            if gateway.tokens is not None:
                admin.metrics.registry.register(TokenCollector(gateway.tokens))
        starting, progress.gateway = None, gateway
        log.info("serving", url=f"http://{config.host}:{config.port}", name=config.name)
        running = asyncio.create_task(
            _run(replica, gateway, keeper, seen, Maintenance(etcd.client))
        )
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            hurrying = asyncio.create_task(at_once.wait())
            await _leave(config, replica, gateway, {running, hurrying})
            hurrying.cancel()
            running.cancel()
            with suppress(TimeoutError, LogError):
                await writer.flush(2.0)
        elif is_log_lost(running.exception()):
            await outlive_log(gateway, config.drain_s, stop)
        stopping.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def _leave(
    config: ServeConfig, replica: Replica, gateway: Gateway, hurried: set[asyncio.Task[Any]]
) -> None:
    """Let requests end, at most as long as configured, or until one of `hurried` is done; then leave
    the rest."""
    began = asyncio.get_running_loop().time()
    log.info(
        "stopping",
        requests=gateway.counters.in_flight,
        drain_s=config.drain_s,
        announce_s=config.drain_announce_s,
    )
    draining = asyncio.create_task(gateway.drain(config.drain_s, config.drain_announce_s))
    await asyncio.wait({draining, *hurried}, return_when=asyncio.FIRST_COMPLETED)
    reason = "stopped" if draining.done() else "stopped at once"
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    counted = msgspec.structs.asdict(await gateway.stop())
    replica.scheduler.emit(v.ReplicaStopped(config.name, reason, **counted))
    seconds = round(asyncio.get_running_loop().time() - began, 1)
    log.info("stopped", reason=reason, seconds=seconds, **counted)


async def _run(
    replica: Replica,
    gateway: Gateway,
    keeper: Keeper | None,
    seen: LastSeen,
    maintenance: Maintenance,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(learn_log_id(replica.scheduler.decisions, maintenance), name="log-id")
        tasks.create_task(seen.keep_noting(replica.fleet), name="last-seen")
        tasks.create_task(replica.run(gateway), name="replica")
        tasks.create_task(gateway.join(), name="gateway")
        if keeper is not None:
            tasks.create_task(keeper.run(), name="history")


def _replica_config(config: ServeConfig) -> ReplicaConfig:
    return ReplicaConfig(
        name=config.name,
        host=config.host,
        port=config.port,
        policy=config.policy,
        tick_s=config.tick_ms / 1000,
        stall=StallConfig(
            floor_us=config.stall_floor_ms * 1000,
            cap_us=config.stall_cap_ms * 1000,
            factor=config.stall_factor,
        ),
        checkpoints=_checkpoint_config(config),
        migration=MigrationConfig(moves=config.migration_moves, **config.migration_limits),
        routing=msgspec.structs.replace(
            RoutingConfig(policy=config.policy, shed=config.routing_shed), **config.routing_limits
        ),
        waiting=WaitingConfig(**config.waiting_limits),
        health=HealthConfig(**config.health_limits),
        overdue=OverdueConfig(**config.overdue_limits),
        canary=CanaryConfig(**config.canary_limits),
        cross_checks=CrossCheckConfig(**config.crosscheck_limits),
        degradation=DegradationConfig(mode=config.degradation, **config.degradation_limits),
        spares=SparesConfig(**config.spares),
    )


def _checkpoint_config(config: ServeConfig) -> CheckpointConfig:
    links = {f"link_{tier}": mb_s * 1000 for tier, mb_s in config.checkpoint_links.items()}
    return CheckpointConfig(
        placement=config.checkpoint_placement,
        recovery=config.checkpoint_recovery,
        holders=config.checkpoint_holders,
        **links,
    )


def _gateway_config(config: ServeConfig) -> GatewayConfig:
    return msgspec.structs.replace(_gateway_base(config), **config.gateway_limits)


def _gateway_base(config: ServeConfig) -> GatewayConfig:
    return GatewayConfig(
        host=config.host,
        port=config.port,
        api_keys=frozenset(config.api_keys),
        unkept_tenants=frozenset(config.unkept_tenants),
        allowed_origins=frozenset(config.allowed_origins),
        max_body_bytes=config.max_body_bytes,
        wait_timeout_s=config.wait_for_worker_s,
        tokenizer=config.tokenizer,
        tokenize_wait_s=config.tokenize_wait_ms / 1000,
        resume=ResumeConfig(
            grace_s=config.resume_grace_s,
            grace_ticks=-(-config.resume_grace_s * 1000 // config.tick_ms),
            stream_bytes=config.resume_stream_kb << 10,
            total_bytes=config.resume_total_mb << 20,
            streams=config.resume_streams,
        ),
    )
