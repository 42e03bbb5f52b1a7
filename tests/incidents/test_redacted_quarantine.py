"""An exported quarantine names no operator, and can still be verified."""

from __future__ import annotations

from relume.controlplane.replay.debugger.log_window import redacted
from relume.controlplane.replay.recorded_log import History
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.vocabulary.enums import HealthState
from relume.policies.leader.duties import step
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.policies.crosscheck.checked_fleet import RIGHT, WRONG, CheckedFleet


def quarantined_and_trusted() -> CheckedFleet:
    fleet = CheckedFleet()
    fleet.set("confirm", 1)
    finished = fleet.finished("w0", "a")
    for name, answer in {"w1": WRONG, "w0": RIGHT, "w2": RIGHT}.items():
        event = fleet.checks(finished, name, answer)
        fleet.tell("fleet", *(e for e in step(fleet.fleet, event) if type(e) is v.EffectsDecided))
    (verdict,) = [e for e in fleet.decisions if e.state == HealthState.QUARANTINED]
    fleet.tell("fleet", *(e for e in step(fleet.fleet, verdict) if type(e) is v.EffectsDecided))
    trust = v.AdminCommanded(
        command_id="zoe@ops:1", principal="zoe@ops", command="trust", target="w1"
    )
    fleet.tell("r.r0", trust)
    return fleet


def test_decisions_of_the_leader_keep_their_names_and_operators_do_not() -> None:
    fleet = quarantined_and_trusted()
    assert fleet.state("w1") == HealthState.PROBING
    assert fleet.health("w1").evidence == "zoe@ops ended its quarantine"
    groups = redacted(History(groups=fleet.groups, origin="")).groups
    events = [
        codec.decode(record) for g in groups for s in g.segments for record in s.records
    ]  # fmt: skip
    assert [e.decision for e in events if type(e) is v.EffectsDecided] == [
        "dispute.r0.b.1", "quarantine.w1.1",
    ]  # fmt: skip
    evidence = [e.evidence for e in events if type(e) is v.HealthDecided]
    assert evidence[-1] == "principal-1 ended its quarantine"
    assert not any(b"zoe@ops" in record for g in groups for s in g.segments for record in s.records)


def test_a_window_that_begins_after_it_names_no_operator_either() -> None:
    fleet = quarantined_and_trusted()
    base = Fleet()
    for group in fleet.groups:
        apply_group(base, group)
    health = redacted(History(groups=[], origin="", base=base)).base.workers["w1"].health
    assert health.evidence == "principal-1 ended its quarantine"
