"""Generated documents say what the code says, and the check can fail."""

from __future__ import annotations

import typing
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from deploy.docs import admin_page, benchmarks_page, events_page, generate
from deploy.docs.common_fields import COMMON_FIELDS
from relume.events import vocabulary as v


@pytest.mark.parametrize("name", generate.PAGES)
def test_no_generated_document_is_stale(name: str) -> None:
    path = generate.CHECKOUT / name
    assert path.read_text(encoding="utf-8") == generate.PAGES[name](), f"{name}: run `make docs`"


def test_a_stale_document_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "CHECKOUT", tmp_path)
    monkeypatch.setattr(generate, "PAGES", {"one.md": lambda: "new\n"})
    (tmp_path / "one.md").write_text("old\n")
    assert generate.main(["--check"]) == 1
    assert (tmp_path / "one.md").read_text() == "old\n"
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    assert (tmp_path / "one.md").read_text() == "new\n"


def test_every_field_of_every_event_has_a_meaning() -> None:
    missing = [
        f"{struct.__name__}.{name}"
        for struct in events_page.all_structs()
        for name, meaning in events_page.meanings_of(struct).items()
        if not meaning
    ]
    assert missing == [], "add a docstring below each"


def test_every_common_meaning_serves_two_structs() -> None:
    served: Counter[str] = Counter()
    for struct in events_page.all_structs():
        own = events_page.field_docs(struct)
        served.update(f.name for f in msgspec.structs.fields(struct) if f.name not in own)
    few = [name for name in COMMON_FIELDS if served[name] < 2]
    assert few == [], "say it in a docstring below the field"


def test_the_page_has_every_event_with_its_tag() -> None:
    text = events_page.page()
    for struct in typing.get_args(v.AnyEvent):
        assert f"\n### {struct.__name__}\n" in text
        assert f"`{struct.__struct_config__.tag}`" in text


def test_types_are_written_for_people() -> None:
    assert events_page.type_text(tuple[tuple[str, int], ...]) == "tuple of (str, int)"
    assert events_page.type_text(typing.Literal["a", "b"]) == "one of `a`, `b`"
    assert events_page.type_text(str | None) == "str or none"


def test_the_admin_page_has_every_route() -> None:
    text = admin_page.page()
    for route in admin_page.route_table():
        assert f"`{route.method} {route.path}`" in text


def test_every_result_is_complete() -> None:
    orders = set()
    for bench in benchmarks_page.benches():
        assert {
            "bench",
            "about",
            "date",
            "commit",
            "command",
            "load",
            "tables",
            "notes",
        } <= bench.keys()
        assert bench["order"] not in orders, bench["bench"]
        orders.add(bench["order"])
        for row in bench["rows"]:
            assert {"metric", "goal", "result", "interval", "n", "baseline", "met"} <= row.keys(), (
                row
            )
            assert row["result"], row
            assert bool(row["goal"]) == (row["met"] is not None), row
        for table in bench["tables"]:
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}, table["title"]


def test_a_missed_goal_is_in_the_heading() -> None:
    rows = [{"met": True}, {"met": False}, {"met": None}]
    assert benchmarks_page.verdict({"rows": rows}) == "1 of 2 goals missed"
    assert benchmarks_page.verdict({"rows": rows[:1]}) == "goal met"
    assert benchmarks_page.verdict({"rows": rows[2:]}) == "no goal"
