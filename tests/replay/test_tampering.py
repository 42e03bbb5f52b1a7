"""Whatever is changed in a log, verification finds it, though every chain holds.

Everything up to the last recorded state hash counts; what stands behind it is said to be
unanchored, and a stored file carries a hash for its end (tests/replay/test_store.py).
"""

from __future__ import annotations

import asyncio
import random

import pytest
from msgspec import structs

from relume.controlplane.replay.divergence import Verdict
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.codec import decode, encode
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import ProbeResult
from relume.policies.liveness import stall
from relume.policies.routing import choose_worker
from relume.policies.state import engine_step as engine_steps
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.policies.story import Story, died, engine_step
from tests.replay.scene import Scene
from tests.replay.tamper import Place, dropped, exchanged, places, replaced, swapped


@pytest.fixture(scope="module")
def groups() -> list[RevisionGroup]:
    """A small log with a death in it."""
    return asyncio.run(small_log())


async def small_log() -> list[RevisionGroup]:
    async with Scene(11, workers=3, replicas=2) as scene:
        await scene.traffic(12, at_once=6)
        scene.workers["w1"].die()
        await scene.traffic(6, "more", at_once=6)
        scene.workers["w1"].start()
        await scene.settled()
    return scene.log.groups


def anchored(groups: list[RevisionGroup]) -> int:
    """The last revision whose state the log holds a hash of."""
    hashed = [
        event.revision
        for g in groups
        for s in g.segments
        if s.stream == "fleet"
        for event in map(decode, s.records)
        if isinstance(event, v.StateHashed)
    ]
    return hashed[-1]


def anchored_places(groups: list[RevisionGroup]) -> list[Place]:
    last = anchored(groups)
    return [p for p, _ in places(groups) if groups[p[0]].revision <= last]


def found(groups: list[RevisionGroup]) -> Verdict:
    verdict = verify(groups, limit=1)
    assert verdict.divergences, "tampering was not found"
    assert not any(d.what == "chain" for d in verdict.divergences), "the chain was to hold"
    return verdict


def test_the_log_itself_is_sound(groups: list[RevisionGroup]) -> None:
    verdict = verify(groups)
    assert verdict.divergences == []
    assert verdict.contested > 10
    assert 0 < verdict.unanchored < verdict.events


@pytest.mark.full
def test_any_dropped_event_is_found(groups: list[RevisionGroup]) -> None:
    tried = anchored_places(groups)
    assert len(tried) > 10
    for place in tried:
        found(dropped(groups, place))


def test_any_two_neighbours_swapped_are_found(groups: list[RevisionGroup]) -> None:
    tried = 0
    for g, s, r in anchored_places(groups):
        records = groups[g].segments[s].records
        if r + 1 < len(records) and records[r] != records[r + 1]:
            found(swapped(groups, (g, s, r)))
            tried += 1
    assert tried > 3


def test_any_two_transactions_exchanged_are_found(groups: list[RevisionGroup]) -> None:
    """Even if no decision and no state depended on which came first."""
    last = anchored(groups)
    tried = 0
    for index in range(len(groups) - 1):
        one, two = groups[index], groups[index + 1]
        if two.revision > last or not one.segments or not two.segments:
            continue
        streams = {s.stream for g in (one, two) for s in g.segments}
        if len(streams) == 2:
            found(exchanged(groups, index))
            if (tried := tried + 1) > 12:
                break
    assert tried > 12


def test_altered_records_are_found(groups: list[RevisionGroup]) -> None:
    rng = random.Random(3)
    tried = 0
    for place in rng.sample(anchored_places(groups), 40):
        event = decode(groups[place[0]].segments[place[1]].records[place[2]])
        if isinstance(event, v.EngineStep):
            lie = structs.replace(event, kv_used=event.kv_used + 1)
            found(replaced(groups, place, encode(lie)))
            tried += 1
    assert tried > 3


def test_altered_candidate_is_found_by_the_policy(groups: list[RevisionGroup]) -> None:
    """Not by a hash: here the log ends before the next one."""
    for place, _ in places(groups):
        event = decode(groups[place[0]].segments[place[1]].records[place[2]])
        if isinstance(event, v.RouteDecided) and event.worker and event.candidates:
            break
    values = {f: getattr(event, f) for f in event.__struct_fields__}
    first = event.candidates[0]
    lie = v.Candidate(
        worker=first.worker,
        incarnation=first.incarnation,
        cost=first.cost + 1,
        prefill_tokens=first.prefill_tokens,
        requests=0,
    )
    values["candidates"] = (lie, *event.candidates[1:])
    verdict = verify(replaced(groups, place, encode(v.RouteDecided(**values))), limit=1)
    (divergence,) = verdict.divergences
    assert divergence.what == "decision"
    assert "costs" in divergence.actual
    assert divergence.actual != divergence.expected


def test_changed_weight_is_found(
    groups: list[RevisionGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_worker, "REQUEST_TOKENS", choose_worker.REQUEST_TOKENS + 1)
    assert found(groups).divergences[0].what == "decision"


def test_changed_tie_rule_is_found(
    groups: list[RevisionGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choose_worker.RECORDED, "least_load", choose_worker.round_robin)
    assert found(groups).divergences[0].what == "decision"


def test_changed_fold_is_found(
    groups: list[RevisionGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, also = engine_steps._HANDLERS[v.EngineFinished]
    forgotten = lambda worker, key, change: None  # noqa: E731
    monkeypatch.setitem(engine_steps._HANDLERS, v.EngineFinished, (forgotten, also))
    assert found(groups).divergences[0].what in ("decision", "state")


def test_decision_of_an_unknown_policy_is_found(groups: list[RevisionGroup]) -> None:
    for place, _ in places(groups):
        event = decode(groups[place[0]].segments[place[1]].records[place[2]])
        if isinstance(event, v.RouteDecided):
            values = {f: getattr(event, f) for f in event.__struct_fields__}
            values["policy"] = "astrology"
            tampered = replaced(groups, place, encode(v.RouteDecided(**values)))
            assert "unknown policy" in found(tampered).divergences[0].actual
            return


def test_missing_segment_breaks_the_chain(groups: list[RevisionGroup]) -> None:
    index = next(i for i, g in enumerate(groups) if g.segments)
    verdict = verify(groups[:index] + groups[index + 1 :])
    assert verdict.divergences[0].what == "chain"


def test_groups_out_of_order_are_found(groups: list[RevisionGroup]) -> None:
    verdict = verify([*groups, groups[-1]])
    assert verdict.divergences[-1].what == "order"


def test_unreadable_record_is_found(groups: list[RevisionGroup]) -> None:
    verdict = verify(replaced(groups, anchored_places(groups)[5], b"\x91\xa9nothing/1"))
    assert verdict.divergences
    (known,) = verdict.unreadable
    assert "nothing/1" in known


def stall_story(hung: bool, silent_us: int = 1_500_000) -> Story:
    """A silent engine was judged, on the bound its steps taught."""
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("w.w0", engine_step(us=150_000))
    basis = v.Basis(story.revision, 1)
    bound = stall.bound_us(worker, stall.StallConfig())
    judged = v.StallJudged(
        decision="d1",
        basis=basis,
        worker="w0",
        incarnation=1,
        silent_us=silent_us,
        probe="silent",
        probe_steps=-1,
        step_age_us=0,
        bound_us=bound,
        hung=hung,
    )
    story.tell("r.r0", judged)
    return story


def test_stall_judgement_is_taken_again() -> None:
    sound = verify(stall_story(True).groups)
    assert (sound.stalls, sound.divergences) == (1, [])
    lie = verify(stall_story(False).groups)
    assert [d.what for d in lie.divergences] == ["decision"]


def test_stall_bound_is_worked_out_again() -> None:
    story = stall_story(True)
    place = next(p for p, s in places(story.groups, "w.w0") if p[2] == 0 and len(s.records) == 1)
    slower = encode(engine_step(us=170_000))
    (divergence,) = verify(replaced(story.groups, place, slower)).divergences
    assert "of 1200000 us allowed" in divergence.expected
    assert "of 1360000 us allowed" in divergence.actual


def test_leader_that_owes_nothing_but_writes_is_found() -> None:
    story = Story()
    story.worker()
    story.replica()
    story.leader()
    story.tell(
        "fleet",
        v.RequestEnded(
            request="q7",
            outcome="failed",
            status=0,
            tokens=-1,
            finish="error",
            attempts=1,
            verdict="exact",
        ),
    )
    (divergence,) = verify(story.groups).divergences
    assert (divergence.what, divergence.actual) == ("answer", "nothing owed")


def test_leader_that_answers_wrongly_is_found() -> None:
    story = Story()
    story.worker()
    story.replica()
    story.leader()
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    wrong = v.EffectsDecided(
        decision="c1", basis=v.Basis(story.revision, 0), cause="root: drain w0", effects=()
    )
    story.tell("fleet", wrong)
    assert [d.what for d in verify(story.groups).divergences] == ["answer"]


def test_new_leader_answers_what_the_old_one_owed() -> None:
    """The command was folded, its leader died before it wrote the answer."""
    story = Story()
    story.worker()
    story.replica()
    story.leader()
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    story.leader()
    effects = (v.Effect("drain", "w0"),)
    basis = v.Basis(story.revision, 0)
    story.tell(
        "fleet",
        v.EffectsDecided(decision="c1", basis=basis, cause="root: drain w0", effects=effects),
    )
    verdict = verify(story.groups)
    assert (verdict.answers, verdict.divergences) == (1, [])


def test_log_of_a_build_with_other_state_is_held_to_its_order(
    groups: list[RevisionGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """State hashes of another shape say nothing here; decisions and order still do."""
    import relume.controlplane.replay.verify as module

    monkeypatch.setattr(module, "missing_shape", lambda recorded: "another")
    verdict = verify(groups)
    assert verdict.ok
    assert verdict.foreign == verdict.hashes > 3
    rng = random.Random(5)
    for place in rng.sample(anchored_places(groups), 10):
        found(dropped(groups, place))


def test_basis_the_log_does_not_bear_out_is_found() -> None:
    story = Story()
    story.worker()
    story.replica()
    story.tell("w.w0", died())
    from tests.policies.story import arrived, decided

    story.tell("r.r0", arrived(), decided(basis=v.Basis(story.revision, 7)))
    (divergence,) = verify(story.groups).divergences
    assert divergence.expected == str(v.Basis(story.revision - 1, 7))


def test_verification_leaves_its_base_alone(groups: list[RevisionGroup]) -> None:
    base = Fleet()
    for group in groups[:20]:
        apply_group(base, group)
    before = base.revision, base.order
    verify(groups[20:], base)
    assert (base.revision, base.order) == before


CLEARED = v.WorkerCleared("w1", 2, "3 steps made", probe=ProbeResult.ANSWERED, steps=3, held=1)
FALSE = {
    "neither idle nor stepping": {"steps": 0, "evidence": "0 steps made"},
    "no answer": {"probe": ProbeResult.SILENT},
    "other words": {"evidence": "idle and answering"},
}


@pytest.mark.parametrize("lie", FALSE)
async def test_the_end_of_a_suspicion_is_decided_again(lie: str) -> None:
    async with Scene(11, workers=2, replicas=1) as scene:
        await scene.traffic(2, at_once=2)
        await scene.settled()
        scene.replicas["r0"].scheduler.emit(v.WorkerSuspected("w1", 2, "silent, probe silent"))
        scene.replicas["r0"].scheduler.emit(CLEARED)
        await scene.settled()
    groups = scene.log.groups
    assert verify(groups).divergences == []
    (place,) = (p for p, s in places(groups) if decode(s.records[p[2]]) == CLEARED)
    groups = groups[: place[0] + 1]
    altered = replaced(groups, place, encode(structs.replace(CLEARED, **FALSE[lie])))
    assert [d.what for d in verify(altered).divergences] == ["decision"]
