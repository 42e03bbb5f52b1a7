"""Bugs put into the product on purpose, to see whether fuzzing finds them and by which promise.

python -m tests.runner.plants [NAME ...]     after how many seeds each is found
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from relume.chaos.runner import fuzz
from relume.chaos.sim.etcd.key_store import Store, Txn
from relume.controlplane.incidents.served_requests import ServedRequests
from relume.controlplane.replica.crosscheck.check_queue import CrossCheckQueue
from relume.controlplane.replica.scheduler import Scheduler
from relume.controlplane.replica.stall_watch import StallWatch
from relume.controlplane.stream.answer import Answer
from relume.controlplane.stream.event_ids import Stamp
from relume.controlplane.stream.handlers.endings import end
from relume.controlplane.stream.reception import Reception
from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.stream_events import ClientGone
from relume.controlplane.stream.stream_states import Streaming
from relume.controlplane.stream.table import TABLE
from relume.engine_shim.agent.effects import EffectRunner
from relume.engine_shim.checkpoints.daemon.store.extents import PAGE, Extents
from relume.events.etcd.errors import CallFailed
from relume.events.etcd.writer import appends
from relume.events.etcd.writer.appends import Append, Outcome
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.vocabulary.enums import RequestOutcome
from relume.policies.canary import answers
from relume.policies.checkpoints import decisions, placement
from relume.policies.crosscheck import choice, disputes
from relume.policies.leader import duties
from relume.policies.liveness import overdue, stall
from relume.policies.recovery.lineage import Lineage
from relume.policies.routing import choose_worker, eligibility
from relume.policies.state import coverage
from tests.runner import (
    decision_plants,
    fold_plants,
    process_plants,
    refusal_plants,
    service_plants,
)

LIMIT_S = 280.0
"""Real time of a run: on a machine with other work some take minutes."""
SEEDS = 100
"""Each must be found within so many."""
HOST_PAUSED = Path(__file__).with_name("host-paused.yaml")
"""Nothing but the judgement of a replica ends the wait for that engine: neither its agent nor a lease."""

Set = Callable[[Any, str, Any], None]


class Plant:
    """One: what is wrong, the promises of which any finds it, a run in which one did ("SCENARIO
    SEED"), and how to put it in."""

    def __init__(self, promises: str, run: str, put: Callable[[Set], None]) -> None:
        self.promises = frozenset(promises.split())
        scenario, seed = run.split()
        self.run = fuzz.PlannedRun(scenario, int(seed), LIMIT_S, None)
        self.put = put
        self.what = " ".join((put.__doc__ or "").split())


def _lost_token(patch: Set) -> None:
    """an attempt that continues a stream says that its client has a token more"""
    resumption = Answer.resumption

    def more(self: Answer, mode: str) -> tuple[str, bytes]:
        if mode == "continue" and self.ids:
            self.ids.append((self.ids[-1] + 1) % 256)
            found = resumption(self, mode)
            self.ids.pop()
            return found
        return resumption(self, mode)

    patch(Answer, "resumption", more)


def _resumed_too_early(patch: Set) -> None:
    """an attempt that continues a stream says that its client has a token fewer, and its frames
    are taken as they come"""
    resumption = Answer.resumption

    def fewer(self: Answer, mode: str) -> tuple[str, bytes]:
        if mode == "continue" and self.ids:
            self.ids.pop()
        return resumption(self, mode)

    patch(Answer, "resumption", fewer)


def _half_counted_frame(patch: Set) -> None:
    """of a frame with several tokens the last one is passed on but not counted"""
    told = Reception.on_tokens

    def short(self: Reception, start: int, ids: list[int], shown: list[bytes]) -> None:
        told(self, start, ids[:-1] if len(ids) > 1 else ids, shown)

    patch(Reception, "on_tokens", short)


def _frames_out_of_order(patch: Set) -> None:
    """the position of a frame is not compared with that of the stream"""
    patch(Answer, "expect", lambda self, ids, start: None)


def _tail_repeated(patch: Set) -> None:
    """what a continued stream repeats of the bytes after the last token goes to the client again"""
    patch(Reception, "without_known", lambda self, payload: payload)


def _event_twice(patch: Set) -> None:
    """events of one frame are known by their frame's place, not by how many a client has"""

    def by_place(self: Stamp, at: int) -> bool:
        return at < self.have[0]

    patch(Stamp, "_is_known", by_place)


def _wrong_resume_position(patch: Set) -> None:
    """a client that returns is taken to have a token more than it says"""
    rewind = Stream.rewind

    def more(self: Stream, have: tuple[int, int]) -> None:
        rewind(self, (have[0] + 1, 0))

    patch(Stream, "rewind", more)


def _left_is_complete(patch: Set) -> None:
    """a client that leaves its resumable stream is taken to have all of it"""
    row = TABLE[Streaming]
    left = row[ClientGone]

    def complete(stream: Stream, state: Any, event: Any, now: float) -> Any:
        if stream.stamp is None or not stream.begun:
            return left(stream, state, event, now)
        return end(stream, state, RequestOutcome.COMPLETED, 200, finish="length")

    patch(row, ClientGone, complete)


def _wrong_delivered(patch: Set) -> None:
    """a decision to go on counts a delivered token too few"""
    assign = Scheduler.assign

    def fewer(self: Scheduler, request: str, cause: str, delivered: int) -> Any:
        return assign(self, request, cause, max(delivered - 1, 0))

    patch(Scheduler, "assign", fewer)


def _no_fence(patch: Set) -> None:
    """an append does not ask who owns the stream"""
    begin = appends._AppendTemplate.__init__

    def unasked(self: Any, owner: bytes, epoch: int, behind: bool) -> None:
        begin(self, owner, epoch, behind)
        mine = self._request.compare[0]
        mine.key, mine.create_revision = b"\0nobody", 0

    patch(appends._AppendTemplate, "__init__", unasked)


def _resent_lands_again(patch: Set) -> None:
    """an append that had landed before it was sent again counts as written at the second answer"""
    judge = Append.judge

    def later(self: Append, answer: Any) -> Any:
        outcome, revision = judge(self, answer)
        return outcome, (answer.header.revision if outcome is Outcome.LANDED else revision)

    patch(Append, "judge", later)


def _unanswered_has_landed(patch: Set) -> None:
    """an append counts as durable although etcd has not answered"""
    append = EtcdWriter._append

    async def trusting(self: EtcdWriter) -> None:
        try:
            await append(self)
        except CallFailed:
            sent = self._under_way
            if sent is None:
                raise
            self._landed(sent, self._tail.revision + 1)

    patch(EtcdWriter, "_append", trusting)


def _owned_key_taken(patch: Set) -> None:
    """etcd lets a writer create the owner key of a stream that has a living owner"""
    txn = Store.txn

    def lax(self: Store, given: Txn) -> Any:
        compares = tuple(one for one in given.compares if one[1] or b"/own/" not in one[0])
        return txn(self, replace(given, compares=compares))

    patch(Store, "txn", lax)


def _no_end(patch: Set) -> None:
    """the end of a request that was moved is not written"""
    ended = Scheduler.ended

    def silent(self: Scheduler, request: str, *given: Any, **more: Any) -> None:
        if self.live[request].attempt > 1:
            self.live.pop(request)
            return
        ended(self, request, *given, **more)

    patch(Scheduler, "ended", silent)


def _holder_at_home(patch: Set) -> None:
    """placement does not look at the primary's domain"""
    chosen = placement._load_aware

    def anywhere(index: Any, demand: Any) -> Any:
        return chosen(index, replace(demand, domain=""))

    patch(placement._CHOOSERS, "load_aware", anywhere)


def _effects_again(patch: Set) -> None:
    """an agent carries out what it applied before"""
    carry = EffectRunner._carry_out

    def again(self: EffectRunner, key: Any, effect: Any) -> None:
        self._answered.pop(key, None)
        applied = tuple(one for one in self._directory.state.applied if one != key)
        self._directory.update(applied=applied)
        carry(self, key, effect)

    patch(EffectRunner, "_carry_out", again)


def _one_block_more(patch: Set) -> None:
    """a state daemon has room for a block more than its budget"""
    begin = Extents.__init__

    def wide(self: Extents, capacity: int) -> None:
        begin(self, capacity + 9 * PAGE)

    patch(Extents, "__init__", wide)


def _by_chance(patch: Set) -> None:
    """routing goes by something that is not in the log"""
    best = choose_worker.RECORDED["predicted_ttft"]
    turns = iter(range(1 << 30))

    def other(view: Any, query: Any) -> Any:
        choice = best(view, query)
        open_ = [c for c in choice.candidates if not c.excluded]
        if next(turns) % 7 or not open_:
            return choice
        return replace(choice, worker=open_[-1].worker, incarnation=open_[-1].incarnation)

    patch(choose_worker.RECORDED, "predicted_ttft", other)


def _never_released(patch: Set) -> None:
    """nobody has the blocks of requests let go whose engine died"""
    patch(coverage, "to_release", lambda fleet, tick: ())


def _never_hung(patch: Set) -> None:
    """a silent engine is never taken for hung"""
    patch(stall, "hung", lambda *given: False)
    patch(stall, "HUNG", dict.fromkeys(stall.HUNG, lambda *given: False))


def _never_stuck(patch: Set) -> None:
    """a stream that gets no tokens stays where it is, as long as its engine makes steps"""
    patch(overdue, "is_known", lambda fleet: False)


def _open_breakers_ignored(patch: Set) -> None:
    """a worker whose breaker is open gets requests all the same"""
    patch(eligibility, "_BY_HEALTH", {})


def _probes_uncounted(patch: Set) -> None:
    """every replica sends a worker that is probed as many requests as it likes"""
    patch(eligibility, "_may_probe", lambda view, worker, health: True)


def _canaries_ignored(patch: Set) -> None:
    """an answer to a canary is right, whatever it is"""
    patch(answers, "difference", lambda answer, values, tolerance: "")


def _corrupt_tokens_continued(patch: Set) -> None:
    """streams with tokens of a quarantined worker continue after them"""
    patch(Lineage, "is_doubted", lambda self, corrupt, request: False)


def _corrupt_blocks_restored(patch: Set) -> None:
    """blocks that a quarantined worker wrote to holders are restored when its streams move"""
    patch(decisions, "_is_doubted", lambda fleet, request: False)


def _corrupt_streams_stay(patch: Set) -> None:
    """streams of a quarantined worker stay there, and its engine is not restarted"""
    patch(StallWatch, "_leave_corrupt", lambda self, name, incarnation, evidence: None)
    patch(duties, "_restarted", lambda fleet, worker: [])


def _verdict_from_now_on(patch: Set) -> None:
    """the incident of a corrupt worker lists nothing of what it served before the verdict"""
    patch(ServedRequests, "blame", lambda self, case, worker, incarnation, good_tick: None)


def _busy_engines_checked(patch: Set) -> None:
    """engines with requests answer finished ones again"""
    patch(choice, "_is_idle", lambda view, worker: True)


def _two_engines_decide(patch: Set) -> None:
    """of two engines that answer differently the one that served the client is outvoted"""

    def outvoted(fleet: Any, known: Any, request: str, dispute: Any) -> list[Any]:
        worker = fleet.workers[dispute.worker]
        worker.checks.disputed.pop(request, None)
        worker.checks.outvoted[request] = fleet.tick
        del known[request]
        return [worker]

    patch(disputes, "_decide", outvoted)


def _second_answer_ignored(patch: Set) -> None:
    """what the engine that served the client answers once more counts for nothing"""
    take = disputes.take

    def without(fleet: Any, event: Any, config: Any) -> list[Any]:
        if event.by == event.worker:
            event = replace(event, error="ignored")
        return take(fleet, event, config)

    patch(disputes, "take", without)


def _contradicted_once(patch: Set) -> None:
    """one majority quarantines a worker"""
    patch(disputes, "is_outvoted", lambda record, config: bool(record and record.outvoted))


def _share_by_chance(patch: Set) -> None:
    """which requests are answered again does not depend on their names"""
    turns = iter(range(1 << 30))
    patch(choice, "is_drawn", lambda request, share_ppm: bool(share_ppm and next(turns) % 16))


def _unkept_prompts(patch: Set) -> None:
    """prompts whose clients do not let them be kept are kept"""
    offer = CrossCheckQueue.offer

    def kept(self: CrossCheckQueue, live: Any, *given: Any) -> None:
        live.arrival = replace(live.arrival, may_keep=True)
        offer(self, live, *given)

    patch(CrossCheckQueue, "offer", kept)


PLANTS = {
    put.__name__.strip("_"): Plant(promises, run, put)
    for promises, run, put in (
        ("I2 bound:broken_streams", "agent-killed 0", _lost_token),
        ("I1 I2", "agent-killed 0", _resumed_too_early),
        ("I1 I2", "agent-killed 0", _half_counted_frame),
        ("I1 I2", "frames-lost-or-repeated 28", _frames_out_of_order),
        ("I1 I2", "two-leaders 100", _tail_repeated),
        ("I1 I2", "composed 7", _event_twice),
        ("I1 I2", "composed 7", _wrong_resume_position),
        ("I1", "composed 7", _left_is_complete),
        ("I3", "agent-killed 0", _wrong_delivered),
        ("I5", "etcd-away 22", _no_fence),
        ("I13", "etcd-leader-killed 3", _resent_lands_again),
        ("I13", "etcd-leader-killed 0", _unanswered_has_landed),
        ("I5", "two-leaders 0", _owned_key_taken),
        ("I1", "agent-killed 0", _no_end),
        ("I8", "agents-terminated-in-turn 2", _holder_at_home),
        ("I15", "composed 35", _effects_again),
        ("I8", "agents-terminated-in-turn 2", _one_block_more),
        ("I9", "composed 35", _open_breakers_ignored),
        ("I9", "frames-lost-or-repeated 28", _probes_uncounted),
        ("I7", "agent-stopped 1", _by_chance),
        ("I12", "agents-terminated-in-turn 2", _never_released),
        ("I10", f"{HOST_PAUSED} 0", _never_hung),
        ("I1 I10", "wrong-silence 0", _never_stuck),
        ("bound:workers_quarantined", "wrong-weights 56", _canaries_ignored),
        ("I14", "wrong-weights 56", _corrupt_tokens_continued),
        ("I14", "wrong-weights 56", _corrupt_blocks_restored),
        ("I14", "wrong-weights 56", _corrupt_streams_stay),
        ("I14", "wrong-weights-unseen 56", _verdict_from_now_on),
        ("I9", "storm 54", _busy_engines_checked),
        ("I9", "wrong-weights-unseen 54", _two_engines_decide),
        ("bound:workers_quarantined", "wrong-weights-unseen 54", _second_answer_ignored),
        ("I9", "wrong-weights-unseen 54", _contradicted_once),
        ("I7", "wrong-weights-unseen 54", _share_by_chance),
        ("I9", "storm 54", _unkept_prompts),
        *decision_plants.TABLE,
    )
}

PLANTS |= {
    put.__name__.strip("_"): Plant(promises, run, put)
    for promises, run, put in (
        *fold_plants.BUGS,
        *process_plants.BUGS,
        *refusal_plants.BUGS,
        *service_plants.BUGS,
    )
}


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """The product with this bug in it."""
    undo: list[tuple[Any, str, Any]] = []

    def patch(where: Any, name: str, new: Any) -> None:
        if isinstance(where, dict):
            undo.append((where, name, where[name]))
            where[name] = new
        else:
            undo.append((where, name, getattr(where, name)))
            setattr(where, name, new)

    try:
        plant.put(patch)
        yield
    finally:
        for where, name, old in reversed(undo):
            if isinstance(where, dict):
                where[name] = old
            else:
                setattr(where, name, old)


def find(
    plant: Plant, runs: Iterable[fuzz.PlannedRun] = ()
) -> tuple[fuzz.PlannedRun, fuzz.Ran] | None:
    """The first of these runs that fails, by default of `relume-chaos fuzz`; None: none does."""
    with planted(plant):
        for asked in runs or fuzz.planned_runs(fuzz.usable()[0], 0, SEEDS, LIMIT_S, None):
            ran = fuzz.one(asked)
            if ran.result == "failed":
                return asked, ran
    return None


def main() -> int:
    """Exit status 1 when one is not found."""
    missed = 0
    for name in sys.argv[1:] or PLANTS:
        plant = PLANTS[name]
        found = find(plant)
        missed += found is None
        if found is None:
            print(f"{name}: not found in {SEEDS} seeds ({plant.what})", flush=True)
            continue
        asked, ran = found
        told = f"{' '.join(ran.signature)} after {asked.seed + 1} seeds, {asked.given}"
        print(f"{name}: {told}; {plant.what}\n    {ran.why[0]}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
