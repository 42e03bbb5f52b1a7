"""The metrics page: what Prometheus' own parser makes of it."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from relume.controlplane.gateway.openai.token_counts import TokenCounters
from relume.controlplane.history.history_keeper import KeeperStatus
from relume.controlplane.serve_settings import ServeConfig
from relume.controlplane.telemetry.metric_table import TABLE
from relume.controlplane.telemetry.metrics_page import Metrics
from relume.controlplane.telemetry.state_families import TokenCollector
from relume.events import vocabulary as v
from relume.policies.state.unreadable import has_unacknowledged
from tests.admin.scene import VIEWER, Scene
from tests.policies.story import ready, started


async def samples(scene: Scene) -> dict[tuple, float]:
    """Every sample of the page by (name, labels)."""
    url, headers = f"{scene.admin.url}/metrics", {"Authorization": f"Bearer {VIEWER}"}
    async with scene.session.get(url, headers=headers) as answer:
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain")
        text = await answer.text()
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


async def test_requests_attempts_and_histograms_count_this_replicas_own():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.serve_request("req-1", tokens=7)
        async with scene.log.writer("r.other") as other:
            other.append(
                v.RequestEnded(
                    request="x",
                    outcome="completed",
                    status=200,
                    tokens=5,
                    finish="stop",
                    attempts=1,
                    verdict="exact",
                    ttft_us=1,
                    longest_gap_us=1,
                )
            )
        await scene.until(lambda: "r.other" in scene.replica.fleet.streams)
        found = await samples(scene)
        assert found["relume_requests_total", ("outcome", "completed")] == 1
        assert found["relume_attempts_total", ("cause", "arrival")] == 1
        assert found["relume_output_tokens_total",] == 7
        assert found["relume_time_to_first_token_seconds_count",] == 1
        assert found["relume_time_to_first_token_seconds_bucket", ("le", "0.025")] == 1
        assert found["relume_time_to_first_token_seconds_bucket", ("le", "0.01")] == 0
        assert found["relume_longest_gap_seconds_sum",] == 0.003
        assert found["relume_decisions_total", ("kind", "route")] == 1


async def test_recoveries_and_stalls_are_counted():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        scheduler = scene.replica.scheduler
        await scene.serve_request("req-0")
        from relume.controlplane.stream.arrival import Arrival

        scheduler.arrived(
            Arrival(
                request="req-1",
                model="tiny",
                route="completions",
                stream=True,
                prompt_tokens=5,
                max_tokens=16,
                verdict="exact",
            )
        )
        first = scheduler.assign("req-1", "arrival", 0)
        scheduler.observed("req-1", 1, "reset", 3)
        second = scheduler.assign("req-1", "reset", 3)
        assert first.worker != second.worker
        scheduler.emit(
            v.StallJudged(
                decision="s",
                basis=scheduler.decisions.basis(),
                worker="w0",
                incarnation=1,
                silent_us=2_000_000,
                probe="silent",
                probe_steps=-1,
                step_age_us=0,
                bound_us=1_000_000,
                hung=True,
            )
        )
        await scene.until(lambda: scene.replica.fleet.revision == scene.log.revision)
        found = await samples(scene)
        assert found["relume_recoveries_total", ("mode", "continue")] == 1
        assert found["relume_transport_failures_total", ("kind", "reset")] == 1
        assert found["relume_stall_judgements_total", ("hung", "true")] == 1
        assert found["relume_streams_live",] == 1


async def test_workers_and_the_log_are_shown_as_they_are_now():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        writer.append(
            v.EngineStep(
                incarnation=1,
                step=1,
                duration_us=9,
                batch=1,
                sum_context=1,
                prefill_tokens=0,
                waiting=3,
                kv_used=25,
                changes=(v.RequestQueued("a", 1, 100),),
            )
        )
        await scene.until(lambda: scene.replica.fleet.workers["w0"].kv_used == 25)
        found = await samples(scene)
        worker = ("worker", "w0")
        assert found["relume_worker_engine_state", ("state", "ready"), worker] == 1
        assert found["relume_worker_engine_state", ("state", "dead"), worker] == 0
        assert found["relume_worker_requests_waiting", worker] == 3
        assert found["relume_worker_kv_usage_ratio", worker] == 0.25
        assert found["relume_worker_prefill_tokens_pending", worker] == 100
        assert found["relume_leader",] == 1 and found["relume_log_healthy",] == 1
        assert found["relume_fold_revision",] > 0 and found["relume_spool_bytes",] == 0
        assert 0 <= found["relume_log_silence_seconds",] < 5


async def test_unreadable_records_are_counted_from_nought():
    """Without the sample before it, Prometheus would take the first one for no increase."""
    async with Scene() as scene:
        writer = await scene.worker("w0")
        name = "relume_unreadable_records_total"
        assert (await samples(scene))[name, ("stream", "w.w0")] == 0
        writer.append(b"\x92\xabtelepathy/9\x01")
        await scene.until(lambda: has_unacknowledged(scene.replica.fleet, "w0"))
        assert (await samples(scene))[name, ("stream", "w.w0")] == 1


async def test_checkpoints_are_shown_as_the_log_tells_them():
    async with Scene() as scene:
        await scene.worker("w0")
        writer = await scene.worker("w1")
        replica = scene.replica
        from relume.controlplane.stream.arrival import Arrival

        replica.scheduler.arrived(
            Arrival(
                request="q",
                model="tiny",
                route="completions",
                stream=True,
                prompt_tokens=5,
                max_tokens=16,
                verdict="exact",
            )
        )
        place = replica.scheduler.assign("q", "arrival", 0)
        basis = replica.scheduler.decisions.basis()
        replica.scheduler.emit(
            v.HolderChosen(
                decision="d",
                basis=basis,
                request="q",
                attempt=1,
                cause="arrival",
                primary=place.worker,
                holders=("w1",),
                policy="load_aware",
                wanted=1,
                expected_blocks=8,
                expected_bytes=800,
            )
        )
        engine = scene.worker_writers[place.worker]
        changes = (v.RequestQueued("q", 1, 5), v.KvBlocksFilled("q", 1, 4))
        ready = v.EngineReady(
            worker=place.worker,
            incarnation=1,
            host="h",
            port=9,
            model="tiny",
            max_model_len=2048,
            block_size=16,
            kv_blocks=9,
            family="f",
            block_bytes=99,
        )
        engine.append(
            ready,
            v.EngineStep(
                incarnation=1,
                step=1,
                duration_us=9,
                batch=1,
                sum_context=1,
                prefill_tokens=0,
                waiting=0,
                kv_used=4,
                changes=changes,
            ),
        )
        writer.append(
            v.StateDaemonStarted(
                worker="w1",
                boot="b",
                epoch=1,
                address="",
                budget_bytes=4096,
                local="unix:/s",
                machine="m",
            ),
            v.CheckpointAcknowledged(
                holder="w1",
                boot="b",
                request="q",
                child=0,
                attempt=1,
                blocks=3,
                tokens=48,
                bytes=300,
            ),
            v.StateDaemonReported("w1", "b", (("memory_used", 4096), ("evicted", 7))),
            v.RestoreDone(
                incarnation=1,
                request="p",
                child=0,
                attempt=2,
                holder="w1",
                tokens=64,
                bytes=640,
                duration_us=900,
            ),
        )
        await scene.until(lambda: replica.fleet.restores.get("done"))
        found = await samples(scene)
        worker = ("worker", "w1")
        assert found["relume_checkpoint_daemon_up", worker] == 1
        assert found["relume_checkpoint_budget_bytes", worker] == 4096
        assert found["relume_checkpoint_acknowledged_bytes", worker] == 300
        assert found["relume_checkpoint_memory_bytes", worker] == 4096
        assert found["relume_checkpoint_evicted_blocks_total", worker] == 7
        assert found["relume_checkpoint_restores_total", ("outcome", "done")] == 1
        assert found["relume_checkpoint_restored_tokens_total",] == 64
        size = replica.fleet.workers[place.worker].block_size
        assert found["relume_checkpoint_lag_tokens",] == 4 * size - 48
        assert found["relume_checkpoint_coverage_ratio",] == 48 / (4 * size)
        assert found["relume_checkpoint_covered_requests_ratio",] == 1


async def test_resumable_streams_are_counted_where_they_are_kept_and_where_clients_return():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        replica = scene.replica
        figures = {
            "streams": 5,
            "bytes": 900,
            "detached": 2,
            "detached_bytes": 300,
            "taken_up": 7,
            "cut_short": 1,
            "expired": 4,
            "refused_bytes": 3,
            "envelopes_too_large": 6,
        }
        writer.append(
            v.StreamsReported(2, (("detached", 99),)),
            v.StreamsReported(1, tuple(figures.items())),
            v.StateDaemonStarted(worker="w0", boot="b", epoch=1, address="", budget_bytes=4096),
            v.StateDaemonReported("w0", "b", (("envelopes", 8), ("envelopes_refused", 9))),
        )
        emit = replica.scheduler.emit
        emit(
            v.RequestArrived(
                request="q",
                model="tiny",
                route="c",
                stream=True,
                prompt_tokens=1,
                max_tokens=1,
                verdict="exact",
                resumable="d",
                grace_ticks=9,
            )
        )
        for request in ("q", "q", "of another replica"):
            emit(v.ClientReturned(request=request, claim="c", attempt=1, tokens=3, events=0))
        emit(v.TimerFired("grace", "q"))
        emit(v.TimerFired("wait", "q"))
        await scene.until(lambda: replica.fleet.revision == scene.log.revision)
        await scene.until(lambda: replica.fleet.holders["w0"].figures)
        found = await samples(scene)
        worker = ("worker", "w0")
        assert found["relume_detached_streams", worker] == 2
        assert found["relume_detached_stream_bytes", worker] == 300
        assert found["relume_kept_streams", worker] == 5
        assert found["relume_stream_attaches_total", worker] == 7
        assert found["relume_stream_attaches_short_total", worker] == 1
        dropped = {
            b: found["relume_detached_streams_dropped_total", ("bound", b), worker]
            for b in ("grace", "bytes", "streams")
        }
        assert dropped == {"grace": 4, "bytes": 3, "streams": 0}
        assert found["relume_envelopes_total", ("outcome", "too_large"), worker] == 6
        assert found["relume_checkpoint_envelopes", worker] == 8
        assert found["relume_checkpoint_refused_envelopes_total", worker] == 9
        assert found["relume_client_returns_total", ("replica", "same")] == 2
        assert found["relume_client_returns_total", ("replica", "other")] == 1
        assert found["relume_client_streams_expired_total",] == 1
        writer.append(v.EngineDied("w0", 1, "killed"))
        await scene.until(lambda: replica.fleet.workers["w0"].engine == "dead")
        found = await samples(scene)
        assert found["relume_detached_streams", worker] == 0
        too_large = "relume_envelopes_total", ("outcome", "too_large"), worker
        assert found[too_large] == 6, "a counter never falls"
        writer.append(
            started("w0", 2),
            ready("w0", 2, "tiny"),
            v.StreamsReported(2, (("envelopes_too_large", 2),)),
        )
        await scene.until(lambda: replica.fleet.workers["w0"].streams)
        found = await samples(scene)
        assert found[too_large] == 8
        assert found["relume_stream_attaches_total", worker] == 7
        assert found["relume_checkpoint_refused_envelopes_total", worker] == 9


async def test_the_page_has_the_metrics_of_the_table_and_no_others():
    async with Scene() as scene:
        replica = scene.replica
        replica.upkeep = KeeperStatus()
        metrics = Metrics(replica, ServeConfig())
        counts = TokenCounters()
        metrics.registry.register(TokenCollector(SimpleNamespace(counters=counts)))
        found = {
            (family.name.removeprefix("relume_"), family.type, family.documentation)
            for family in text_string_to_metric_families(metrics.page().decode())
            if not family.name.endswith("_created")
        }
    assert found == {(metric.name, metric.kind, metric.help) for metric in TABLE.values()}


async def test_spares_of_each_model_are_counted():
    async with Scene(lead=False) as scene:
        await scene.worker("w0")
        assert ("relume_spare_workers", ("model", "tiny")) not in await samples(scene)
        async with scene.log.writer("fleet") as leader:
            leader.append(
                v.SparesDecided(
                    model="tiny", spares=("w0",), was=(), since=0, workers=4, failed=0, due=1,
                    short_ticks=5,
                ),
            )  # fmt: skip
            await scene.until(lambda: "tiny" in (scene.replica.fleet.spares or ()))
            found = await samples(scene)
    assert found["relume_spare_workers", ("model", "tiny")] == 1
    assert found["relume_spare_workers_due", ("model", "tiny")] == 0
