"""An exported rolling restart names no operator, and can still be verified."""

from __future__ import annotations

from relume.controlplane.replay.debugger.log_window import redacted
from relume.controlplane.replay.recorded_log import History
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.policies.state.fleet import Fleet, dump
from relume.policies.state.fold import apply_group
from tests.policies.rollout.test_rollout import RollingFleet

PRINCIPAL = b"\xa3ann"
"""As msgpack writes it."""
COMMAND = "7af3:roll.out"
"""Of the operator: with the key, whoever has both recognises it."""


def rolling() -> RollingFleet:
    """One worker is drained, restarted and back; another drains."""
    fleet = RollingFleet("a", "b", "c")
    fleet.command(name=COMMAND)
    fleet.healthy_ticks(4)
    fleet.again("w0")
    fleet.healthy_ticks(3)
    assert fleet.told[-1] == ("draining", ("w1",))
    return fleet


def test_its_decisions_follow_the_command_and_name_no_operator() -> None:
    fleet = rolling()
    groups = redacted(History(groups=fleet.groups, origin="")).groups
    records = [record for g in groups for s in g.segments for record in s.records]
    assert not any(PRINCIPAL in record or COMMAND.encode() in record for record in records)
    events = [codec.decode(record) for record in records]
    assert {e.rollout for e in events if type(e) is v.RolloutDecided} == {"command-1"}
    decisions = {e.decision for e in events if type(e) is v.EffectsDecided}
    assert "command-1.restart.w0.1" in decisions
    plain, shown = verify(fleet.groups, limit=100), verify(groups, limit=100)
    assert len(shown.divergences) == len(plain.divergences) == 0


def test_a_window_that_begins_while_it_goes_on_names_no_operator_either() -> None:
    base = Fleet()
    for group in rolling().groups:
        apply_group(base, group)
    state = dump(redacted(History(groups=[], origin="", base=base)).base)
    assert PRINCIPAL not in state and COMMAND.encode() not in state
