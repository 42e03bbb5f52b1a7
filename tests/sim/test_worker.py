"""A worker's host in virtual time: the real agent's code on a simulated machine."""

import asyncio

import pytest

from relume.chaos.sim.agent import Feed
from relume.chaos.sim.engine import host_types, step_cost
from relume.chaos.sim.engine.manners import BROKEN, LATE, break_off, refusal
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.gateway.answer_bytes import (
    DONE,
    OTHER_CHOICE,
    WRONG,
    AnswerReader,
    bare,
    second_choice,
    style_of,
    tokens_of,
)
from relume.chaos.sim.message_ports import Dispatch
from relume.chaos.sim.worker_host import Host
from relume.chaos.sim.world.link_rules import Rule
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.network_card import Links, carried
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.chaos.sim.world.worker_machine import WorkerSettings
from relume.events import vocabulary as v
from relume.events.log.codec import decode_all
from relume.events.wire.worker_calls import HANDOVER_PATH


class Heard:
    """The gateway's end of an attempt: what it hears, in order."""

    def __init__(self):
        self.stretches, self.ends = [], []

    def tokens(self, stretch):
        self.stretches.append(stretch)

    def end(self, finish):
        self.ends.append(finish)

    def moved(self):
        self.ends.append("moved")

    def lost(self, kind, detail):
        self.ends.append(kind)

    @property
    def count(self):
        return sum(s.count for s in self.stretches)


class Bench:
    """A few hosts with etcd, without a control plane."""

    def __init__(self, workers=1, checkpoint_mb=0, seed=1):
        self.loop = VirtualLoop(seed)
        self.wires = Wires(self.loop)
        self.etcd = SimEtcd(self.loop, self.wires)
        self.holders = {}
        feed = Feed(self.etcd)
        self.hosts = [
            Host(
                loop=self.loop,
                name=f"w{n}",
                domain=f"d{n}",
                model="tiny",
                spec=host_types.spec("tiny", "cpu"),
                cost=step_cost.load("tiny_cpu"),
                wires=self.wires,
                etcd=self.etcd,
                settings=WorkerSettings(),
                budget_bytes=checkpoint_mb << 20,
                holders=self.holders,
                feed=feed,
            )
            for n in range(workers)
        ]

    def run(self, work, until_s=500):
        async def main():
            for host in self.hosts:
                host.start()
            await asyncio.sleep(4)
            return await work

        try:
            return self.loop.run(main(), until_s)
        finally:
            self.etcd.close()
            self.loop.close()

    def events(self, *kinds, stream="w.w0"):
        return [
            event
            for group in self.etcd.groups()
            for segment in group.segments
            if segment.stream == stream
            for event in decode_all(segment.records)
            if type(event) in kinds
        ]

    def changes(self, kind, stream="w.w0"):
        steps = self.events(v.EngineStep, stream=stream)
        return [c for step in steps for c in step.changes if type(c) is kind]

    def dispatch(self, worker=0, request="q1", attempt=1, output=400, delivered=0, **more):
        engine, heard = self.hosts[worker].engine, Heard()
        what = Dispatch(
            request=request,
            attempt=attempt,
            incarnation=engine.incarnation,
            mode="continue" if delivered else "new",
            content_id=request,
            prompt_tokens=100,
            output_tokens=output,
            delivered=delivered,
            record=b"",
            **more,
        )
        engine.process.context.run(engine.dispatch, what, heard)
        return heard


def test_a_request_is_in_the_log_and_its_tokens_come_in_order():
    bench = Bench()

    async def work():
        heard = bench.dispatch(output=50)
        await asyncio.sleep(2)
        return heard

    heard = bench.run(work())
    assert heard.ends == ["length"] and heard.count == 50
    assert [s.start for s in heard.stretches] == [0, 1]
    kinds = (v.RequestQueued, v.RequestAdmitted, v.PrefillChunkDone, v.FirstToken, v.EngineFinished)
    assert [len(bench.changes(kind)) for kind in kinds] == [1] * 5
    assert bench.changes(v.EngineFinished)[0].output_tokens == 50
    assert bench.events(v.EngineStep)[-1].kv_used == 0


def test_the_last_token_of_a_stream_is_known_though_it_was_not_told_when_its_run_ended():
    bench = Bench()
    looks = []

    async def work():
        heard = bench.dispatch()
        engine = bench.hosts[0].engine
        for n in range(2, 7):
            await asyncio.sleep(0.31)
            bench.dispatch(request=f"q{n}", output=5)  # a chunk: the run ends behind its step
            while engine.engine.running_run(bench.loop.now_ns) is not None:
                await asyncio.sleep(0.0005)
            seen, newest = engine.last_ns("q1", 1), engine.newest_ns()
            engine.flush("q1", 1)
            looks.append((seen, newest, heard.stretches[-1].last_ns))

    bench.run(work())
    assert len(looks) == 5 and all(seen == newest == last for seen, newest, last in looks)


def test_an_engine_that_only_decodes_tells_of_its_steps_every_second():
    bench = Bench()

    async def work():
        bench.dispatch(output=4000)
        await asyncio.sleep(6)
        return bench.hosts[0].engine.state()["steps"]

    made = bench.run(work())
    steps = [step for step in bench.events(v.EngineStep) if step.batch]
    assert 5 <= len(steps) <= 12 and all(step.duration_us > 0 for step in steps)
    numbers = [step.step for step in steps]
    assert numbers == sorted(set(numbers))
    assert steps[-1].sum_context - steps[0].sum_context == numbers[-1] - numbers[0]
    assert numbers[-1] <= made < 4000


def test_an_engine_that_pauses_reports_each_step_with_the_gap_before_it():
    bench = Bench()

    async def work():
        bench.hosts[0].slow(1.0, pause_ms=60.0)
        bench.dispatch(output=20)
        await asyncio.sleep(6)

    bench.run(work())
    steps = [step for step in bench.events(v.EngineStep) if step.duration_us]
    assert [step.step for step in steps] == list(range(1, 21))
    assert [step.gap_us for step in steps] == [0] + [60_000] * 19
    assert all(step.duration_us < 30_000 for step in steps)


def test_what_an_engine_sent_before_it_was_killed_arrives_and_the_next_has_another_number():
    bench = Bench()

    async def work():
        heard = bench.dispatch()
        await asyncio.sleep(1)
        bench.hosts[0].engine.kill()
        await asyncio.sleep(5)
        return heard

    heard = bench.run(work())
    assert 100 < heard.count < 400
    assert all(s.last_ns <= 5_000_000_000 + 10_000_000 for s in heard.stretches)
    assert [e.incarnation for e in bench.events(v.EngineDied)] == [1]
    assert [e.incarnation for e in bench.events(v.EngineReady)] == [1, 2]


def test_the_engine_of_a_killed_agent_ends_and_a_successor_continues_the_stream():
    bench = Bench()

    async def work():
        engine = bench.hosts[0].engine
        bench.hosts[0].end(bench.hosts[0].agent.process)
        await asyncio.sleep(1)
        gone = not engine.process.alive
        await asyncio.sleep(5)
        return gone

    assert bench.run(work())
    assert len(bench.events(v.WorkerRegistered)) == 2
    assert [e.incarnation for e in bench.events(v.EngineDied)] == [1]
    assert [e.incarnation for e in bench.events(v.EngineStarted)] == [1, 2]


def test_a_stopped_engine_makes_no_token_and_continues_where_it_was():
    bench = Bench()

    async def work():
        heard, engine = bench.dispatch(), bench.hosts[0].engine
        await asyncio.sleep(1)
        engine.stop()
        at_stop = heard.count
        await asyncio.sleep(20)
        still = heard.count
        engine.go_on()
        await asyncio.sleep(5)
        return heard, at_stop, still

    heard, at_stop, still = bench.run(work())
    assert 0 < at_stop == still < 400
    assert heard.ends == ["length"] and heard.count == 400
    later = [s for s in heard.stretches if s.start >= at_stop]
    assert min(s.first_ns for s in later) >= 25_000_000_000


def test_failed_starts_are_recorded_and_retried():
    bench = Bench()

    async def work():
        bench.hosts[0].failing_starts = 2
        bench.hosts[0].engine.kill()
        await asyncio.sleep(10)

    bench.run(work())
    assert [e.incarnation for e in bench.events(v.EngineDied)] == [1, 2, 3]
    assert bench.events(v.EngineReady)[-1].incarnation == 4


def test_an_effect_is_applied_once_though_the_agent_dies_after_it():
    bench = Bench()

    async def work():
        leader = bench.loop.process("r0")
        host = bench.hosts[0]

        async def decide():
            async with bench.etcd.writer("fleet", leader) as writer:
                effect = v.Effect("restart", "w0")
                writer.append(
                    v.EffectsDecided(
                        decision="d1", basis=v.Basis(0, 0), cause="admin", effects=(effect,)
                    )
                )
                await asyncio.sleep(1000)

        leader.spawn(decide())
        await asyncio.sleep(3)
        host.end(host.agent.process)
        await asyncio.sleep(5)

    bench.run(work())
    assert [e.outcome for e in bench.events(v.EffectApplied)] == ["applied"]
    assert bench.events(v.EngineDied)[0].reason == "replaced"


def _restored(bench, corrupt=False, cut=False):
    async def work():
        bench.dispatch(output=1500, checkpoint=("tcp://w1:6000",))
        await asyncio.sleep(2)
        if corrupt:
            daemon = bench.hosts[1].daemon
            content = daemon.store.run("q1", 0, 0, 5, 1)[0]
            daemon.arena.view(content.offset, 16)[0] ^= 1
        if cut:
            bench.wires.cut("w1", "w2", "holder")
        bench.hosts[0].engine.kill()
        heard = bench.dispatch(2, attempt=2, output=1500, delivered=300, restore=("tcp://w1:6000",))
        await asyncio.sleep(15)
        return heard

    return bench.run(work())


def test_blocks_come_back_from_their_holder_and_the_rest_is_computed():
    bench = Bench(3, checkpoint_mb=4)
    heard = _restored(bench)
    assert heard.ends == ["length"] and heard.count == 1200
    (done,) = bench.events(v.RestoreDone, stream="w.w2")
    assert done.tokens == 384 and done.bytes == 12 * host_types.spec("tiny", "cpu").block_bytes
    (admitted,) = bench.changes(v.RequestAdmitted, stream="w.w2")
    assert admitted.cached_tokens == 384
    dropped = bench.events(v.CheckpointDropped, v.StateDaemonReported, stream="w.w1")
    assert dropped


def test_a_damaged_block_ends_a_restore_and_what_is_behind_it_is_computed():
    bench = Bench(3, checkpoint_mb=4)
    heard = _restored(bench, corrupt=True)
    assert heard.ends == ["length"]
    (failed,) = bench.events(v.RestoreFailed, stream="w.w2")
    assert (failed.reason, failed.tokens) == ("corrupt", 160)
    assert bench.changes(v.PrefillChunkDone, stream="w.w2")[0].tokens == 400 - 160


def test_a_holder_that_does_not_answer_ends_a_restore_before_it_begins():
    bench = Bench(3, checkpoint_mb=4)
    heard = _restored(bench, cut=True)
    assert heard.ends == ["length"]
    (failed,) = bench.events(v.RestoreStarted, v.RestoreFailed, stream="w.w2")
    assert (type(failed), failed.holder, failed.tokens) == (v.RestoreFailed, "tcp://w1:6000", 0)
    assert failed.reason == "unreachable"
    assert bench.changes(v.PrefillChunkDone, stream="w.w2")[0].tokens == 400


def test_an_attempt_that_waits_for_its_blocks_keeps_its_place_in_the_queue():
    bench = Bench(3, checkpoint_mb=4)

    async def work():
        bench.dispatch(output=1500, checkpoint=("tcp://w1:6000",))
        await asyncio.sleep(2)
        bench.hosts[0].engine.kill()
        bench.hosts[2].engine.engine.limit_batch(1)
        bench.dispatch(2, request="before", output=300)
        heard = bench.dispatch(2, attempt=2, output=1500, delivered=300, restore=("tcp://w1:6000",))
        bench.dispatch(2, request="after", output=300)
        assert [s.job.name for s in bench.hosts[2].engine.engine.waiting] == ["after/1"]
        await asyncio.sleep(30)
        return heard

    assert bench.run(work()).ends == ["length"]
    admitted = [c.request for c in bench.changes(v.RequestAdmitted, stream="w.w2")]
    assert admitted == ["before", "q1", "after"]


def test_an_attempt_that_waits_for_its_blocks_is_handed_over_at_once():
    bench = Bench(3, checkpoint_mb=4)

    async def work():
        bench.dispatch(output=1500, checkpoint=("tcp://w1:6000",))
        await asyncio.sleep(2)
        bench.hosts[0].engine.kill()
        heard = bench.dispatch(2, attempt=2, output=1500, delivered=300, restore=("tcp://w1:6000",))
        while not bench.hosts[2].engine.checkpoints.loads:
            await asyncio.sleep(0.0001)
        bench.wires.cut("w1", "w2", "holder")
        engine, at_s = bench.hosts[2].engine, bench.loop.time()
        call = {"request": "q1", "attempt": 2, "incarnation": engine.incarnation}
        assert engine.process.context.run(engine.call, HANDOVER_PATH, call)[0] == 200
        while not heard.ends:
            await asyncio.sleep(0.001)
        took_s = bench.loop.time() - at_s
        await asyncio.sleep(10)
        return heard, took_s

    heard, took_s = bench.run(work())
    assert heard.ends == ["moved"] and took_s < 0.1
    assert [c.reason for c in bench.changes(v.EngineFinished, stream="w.w2")] == ["abort"]
    assert bench.changes(v.RequestAdmitted, stream="w.w2") == []


@pytest.mark.parametrize("rule", ["loss", "duplicate", "reorder"])
def test_a_link_that_loses_repeats_or_reorders_costs_time_only(rule):
    bench = Bench(2, checkpoint_mb=4)

    async def work():
        bench.wires.shape(Rule(one="w0", other="w1", kind="holder", both=True, **{rule: 0.3}))
        bench.dispatch(output=1000, checkpoint=("tcp://w1:6000",))
        await asyncio.sleep(4)
        return bench.hosts[1].daemon.store.position("q1")[0][0].blocks

    assert bench.run(work()) > 15
    acknowledged = [e.blocks for e in bench.events(v.CheckpointAcknowledged, stream="w.w1")]
    assert acknowledged == sorted(acknowledged)


def test_a_budget_that_shrinks_is_kept_to():
    bench = Bench(2, checkpoint_mb=1)

    async def work():
        for n in range(4):
            bench.dispatch(request=f"q{n}", output=1000, checkpoint=("tcp://w1:6000",))
        await asyncio.sleep(3)
        daemon = bench.hosts[1].daemon
        before = daemon.arena.used
        bench.hosts[1].shrink(0.25)
        after = daemon.arena.used
        await asyncio.sleep(3)
        return before, after, daemon.arena.used

    before, after, later = bench.run(work())
    assert before > 1 << 19
    assert max(after, later) <= 1 << 18
    assert bench.events(v.CheckpointEvicted, v.CheckpointDropped, stream="w.w1")


def test_blocks_voided_while_an_agent_registers_its_daemon_anew_are_dropped_at_once() -> None:
    """I21 of composed 21171: they stayed until the keeper's next report, up to ten seconds."""
    bench = Bench(2, checkpoint_mb=4)

    async def work() -> int:
        bench.dispatch(attempt=2, output=300, checkpoint=("tcp://w1:6000",))
        await asyncio.sleep(1)
        bench.hosts[0].engine.kill()
        await asyncio.sleep(1)
        keeper, daemon = bench.hosts[1].agent._daemon, bench.hosts[1].daemon
        assert daemon.store.position("q1")[0][0].blocks
        keeper._renew()
        keeper.void((("q1", 2),))
        keeper.void((("q1", 1),))
        await asyncio.sleep(1)
        return len(daemon.store.position("q1")[0])

    assert bench.run(work()) == 0
    assert len(bench.events(v.StateDaemonStarted, stream="w.w1")) == 2
    assert [e.request for e in bench.events(v.CheckpointDropped, stream="w.w1")] == ["q1"]


def test_tokens_are_a_function_of_what_was_asked_and_the_index():
    whole = tokens_of("q1", 0, 700)
    assert tokens_of("q1", 300, 400) == whole[300:]
    assert tokens_of("q2", 0, 700) != whole
    assert len(whole) == 700 and whole[1:300] != whole[:299]


def test_a_client_reads_both_choices() -> None:
    """What the second one has is judged by the first; one that is short is no whole answer."""
    first = tokens_of("q", 0, 3)
    second = [OTHER_CHOICE + token for token in second_choice(first)]

    def read(numbers: list[int]) -> tuple[list[int], int, bool]:
        reader = AnswerReader(style_of("q", "choices"))
        found = reader.read(bare(numbers) + DONE)
        return found, reader.other_tokens, reader.is_complete

    assert read([*first, *second]) == (first, 3, True)
    assert read([*first, *second[:2]]) == (first, 2, False)
    assert WRONG in read([*first, second[1]])[0] and WRONG in read(second)[0]
    wrong, others, _ = read([*first, OTHER_CHOICE + WRONG, *second[1:]])
    assert (len(wrong) + others, wrong[-1]) == (6, WRONG), "composed 164749: each counts once"


def test_what_an_engine_refuses_is_a_share_of_the_attempts() -> None:
    names = [f"r{n}/1" for n in range(400)]
    assert not any(refusal(name, 0.0) or break_off(name, "new", 0.0)[0] for name in names)
    assert 60 < sum(refusal(name, 0.25) > 0 for name in names) < 140
    later = [{refusal(f"r{n}/{at}", 0.5) for at in range(2, 9)} for n in range(400)]
    assert 60 < sum(len(found) == 1 and found != {0} for found in later) < 140
    kinds = {break_off(name, "new", 1.0)[0] for name in names}
    assert kinds == (BROKEN | LATE) - {"mismatch", "taken"}
    assert "mismatch" in {break_off(name, "continue", 1.0)[0] for name in names}


def test_a_busy_receiver_holds_up_no_other_traffic() -> None:
    """Only between buffered links: A to a busy B waits, and what A sends to C does not."""
    for buffered, at in ((True, 2.0), (False, 12.0)):
        a, b, c = (Links(1.0, buffered) for _ in range(3))
        b.back = 10.0
        assert carried(a, b, 1, 0.0) == 11.0
        assert carried(a, c, 1, 0.0) == at
