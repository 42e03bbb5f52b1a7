"""All checkers pass a sound run, and find an altered log of it."""

from __future__ import annotations

from relume.chaos.validators import CHECKS, check_all
from relume.chaos.validators.promises.log import i13_durable, i16_admin_logged
from relume.chaos.validators.records import events_of
from relume.events import vocabulary as v
from relume.events.log.codec import decode, encode
from tests.replay.tamper import places, replaced
from tests.validators.builders import Run


def test_sound_run_breaks_no_promise(run: Run) -> None:
    engines = [p for p in CHECKS if p != "I12"]  # scripted engines keep their block figures
    assert check_all(run.groups, run.clients, engines) == []
    assert i13_durable.check(run.groups, run.clients, run.landed) == []
    assert i16_admin_logged.check(run.groups, run.clients, [("c1", "root")]) == []
    assert len(run.landed) > 10
    assert len(run.clients) == 67


def test_altered_log_of_a_real_run_is_found_by_name(run: Run) -> None:
    """One end turned into another: the client's word stands against the log's."""
    for at in events_of(run.groups, "r."):
        if type(at.event) is v.RequestEnded and at.event.outcome == "completed":
            break
    for place, segment in places(run.groups, at.stream):
        if decode(segment.records[place[2]]) == at.event:
            break
    fields = {f: getattr(at.event, f) for f in v.RequestEnded.__struct_fields__}
    lie = encode(v.RequestEnded(**{**fields, "outcome": "failed"}))
    promises = {f.promise for f in check_all(replaced(run.groups, place, lie), run.clients)}
    assert {"I1", "I7"} <= promises
