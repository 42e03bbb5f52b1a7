"""Published results: each has its published figure, and each figure of the paper comes out or
is explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relume.chaos.papers import __main__ as command
from relume.chaos.papers import registry
from relume.chaos.papers.dejavu.inputs import (
    BLOOM_176B,
    MEAN_TOKENS,
    OPT_66B,
    a100,
    fits,
    lengths,
    prompt_ns,
    sampled,
    token_ns,
)
from relume.chaos.papers.dejavu.table6 import KV_BYTES, extra_s, transfer_s
from relume.chaos.papers.result import (
    CHANGED,
    EXPLAINED,
    OPEN,
    REPRODUCED,
    Found,
    PublishedFigure,
    Result,
    compare,
)
from relume.chaos.papers.sampling import Sampling

pytestmark = pytest.mark.full

QUICK = [name for name in registry.NAMES if not registry.load(name).sample]


@pytest.mark.parametrize("name", QUICK)
def test_each_result_stands_beside_its_published_figure_and_nothing_is_unexplained(
    name: str,
) -> None:
    result = registry.load(name)
    assert result.name == name
    assert result.source.startswith(("DéjàVu", "LUMEN"))
    assert result.published
    compared = compare(result, result.run(Sampling()))
    assert len(compared) == len(result.published)
    assert not [line for line in compared if line.verdict in (OPEN, CHANGED)]
    assert any(line.verdict == REPRODUCED for line in compared)


@pytest.mark.parametrize("name", ["dejavu-makespan", "dejavu-table6"])
def test_a_seed_gives_the_same_figures_again(name: str) -> None:
    result = registry.load(name)
    assert result.run(Sampling(seed=7)) == result.run(Sampling(seed=7))


def test_every_module_with_a_result_is_registered() -> None:
    folder = Path(registry.__file__).parent
    with_result = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "\nRESULT = Result(" in path.read_text()
    }
    assert with_result == set(registry.MODULES.values())


def test_a_figure_that_is_off_is_open_until_it_is_explained() -> None:
    def verdict(within: float, because: str, recorded: float | None = None) -> str:
        figure = PublishedFigure(
            key="x",
            what="x",
            value=100.0,
            within=within,
            because=because,
            recorded=recorded,
            recorded_within=0.05,
        )
        result = Result(
            name="r", about="about", source="DéjàVu", published=(figure,), run=lambda _: Found({})
        )
        return compare(result, Found({"x": 110.0}))[0].verdict

    assert verdict(0.1, "") == REPRODUCED
    assert verdict(0.09, "") == OPEN
    assert verdict(0.09, "lengths") == OPEN
    assert verdict(0.09, "lengths", 106.0) == EXPLAINED
    assert verdict(0.09, "lengths", 104.0) == CHANGED


def test_every_figure_can_fail() -> None:
    """A reason alone excuses no figure: ours is recorded beside it."""
    for name in registry.NAMES:
        result = registry.load(name)
        excused = [figure for figure in result.published if figure.because]
        assert all(f.recorded is not None for f in excused), name


def test_a_run_that_leaves_a_figure_out_is_an_error() -> None:
    result = Result(
        name="r",
        about="a",
        source="s",
        published=(PublishedFigure(key="x", what="x", value=1.0),),
        run=lambda _: Found({}),
    )
    with pytest.raises(KeyError):
        compare(result, result.run(Sampling()))


def test_the_command_lists_prints_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in registry.NAMES)
    assert command.main(["dejavu-table6", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["result"] for line in lines] == ["dejavu-table6"]
    assert all({"published", "ours", "ratio", "verdict"} <= set(f) for f in lines[0]["figures"])
    assert command.main(["nonsense"]) == 2
    assert "dejavu-table6" in capsys.readouterr().err


def test_an_open_figure_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    off = Result(
        name="r",
        about="a",
        source="s",
        published=(PublishedFigure(key="x", what="x", value=1.0),),
        run=lambda _: Found({"x": 2.0}),
    )
    monkeypatch.setattr(registry, "load", lambda _name: off)
    assert command.main(["dejavu-table6"]) == 1


def test_the_first_word_of_a_name_means_all_of_that_paper() -> None:
    assert registry.matching("lumen") == [n for n in registry.NAMES if n.startswith("lumen")]
    assert registry.matching("dejavu-table6") == ["dejavu-table6"]
    assert registry.matching("dejavu-table") == []


def test_it_is_a_command_of_relume_chaos() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "relume.chaos.cli", "papers", "--list"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "dejavu-makespan" in said.stdout


def test_table_6_by_hand() -> None:
    assert KV_BYTES == 8 * 1000 * 4 * 70 * 14336 / 3
    assert transfer_s(10) == pytest.approx(8.5634, abs=1e-3)
    assert extra_s(10) == pytest.approx(8.5634 - 3.1, abs=1e-3)
    assert extra_s(40) == 0


def test_the_inputs_meet_the_two_figures_they_come_from() -> None:
    two = a100(2)
    assert prompt_ns(BLOOM_176B, two, 8) / 3e9 == pytest.approx(3.1)
    assert prompt_ns(OPT_66B, two, 2) / token_ns(OPT_66B, two, 2, 1000) == pytest.approx(14)


def test_a_token_step_reads_weights_and_cache() -> None:
    one, two = (token_ns(OPT_66B, a100(2), b, 1000) for b in (8, 16))
    cache = 8 * 1000 * 4 * 64 * 9216
    assert (two - one) / one == pytest.approx(cache / (132e9 + cache))


def test_lengths_keep_to_the_limits_and_stand_for_as_many_requests_at_any_size() -> None:
    assert all(2 <= tokens <= 1000 for tokens in sampled(0))
    assert sum(sampled(0)) / len(sampled(0)) == pytest.approx(MEAN_TOKENS, rel=0.01)
    assert {len(lengths(batch)) * batch for batch in (4, 8, 16, 32)} == {256 * 64}


def test_what_fits_by_hand() -> None:
    # 132 GB of weights; 4 requests of 2,000 tokens at 2.36 MB each: 18.9 GB; 160 GB in all.
    assert fits(OPT_66B, a100(2), 1, 4)
    assert not fits(OPT_66B, a100(2), 1, 8)
    assert not fits(BLOOM_176B, a100(4), 1, 1)
