"""The engine's cost formula: fitted to profiles, true to a real run, not the scheduler's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from relume.chaos.bench import sim_speed
from relume.chaos.scenario.catalogue import HARDWARE
from relume.chaos.sim.engine import compare, fit
from relume.chaos.sim.engine.speed import Speculative
from relume.chaos.sim.engine.step_cost import FOLDER, StepCost, load, names

NAME = "qwen3-32b_rtxpro6000x2"
SIM = FOLDER.parent


def test_the_simulated_run_is_within_a_tenth_of_the_real_one() -> None:
    real = compare.real_run()
    assert len(real) == 300
    was = compare.figures(real)
    found = compare.figures(compare.simulate(load(NAME).formula, real))
    for name, value in was.items():
        assert abs(found[name] / value - 1) < compare.BOUND, (name, value, found[name])


def test_requests_served_after_the_calibration_fit_as_well() -> None:
    real = compare.real_run()
    simulated = compare.simulate(load(NAME).formula, real)
    late = [i for i, r in enumerate(real) if r.first_s > fit.CALIBRATION_S]
    assert len(late) > 150
    was = compare.figures([real[i] for i in late])
    found = compare.figures([simulated[i] for i in late])
    for name, value in was.items():
        assert abs(found[name] / value - 1) < compare.BOUND, (name, value, found[name])


def test_the_comparison_can_fail() -> None:
    """Kernels alone, without what profiles leave out, are not within the bound."""
    real = compare.real_run()
    found = compare.figures(compare.simulate(fit.profiled(), real))
    assert abs(found["ttft_s_mean"] / compare.figures(real)["ttft_s_mean"] - 1) > compare.BOUND


@pytest.mark.full
def test_the_stored_formula_is_the_fit_of_the_stored_profiles() -> None:
    stored, fitted = load(NAME).formula, fit.calibrated(fit.profiled())
    assert stored.source == fitted.source
    for name in ("decode", "prefill", "mixed"):
        assert getattr(stored, name) == pytest.approx(getattr(fitted, name), rel=1e-6)
    for (_, us), (_, expected) in zip(stored.knots, fitted.knots, strict=True):
        assert us == pytest.approx(expected, rel=1e-6)
    assert stored.base == pytest.approx(fitted.base, rel=1e-3)
    assert stored.collective == pytest.approx(fitted.collective, rel=1e-3)


def test_the_formula_meets_the_profiles() -> None:
    formula = fit.profiled()
    cost = StepCost(formula)
    errors: dict[str, list[float]] = {"decode": [], "prefill": [], "mixed": []}
    for row in fit.rows("attention_tp2"):
        chunk, before, sequences, each, us = (float(x) for x in row.values())
        context = int(sequences * each)
        if not chunk:
            kind, (ns, _) = "decode", cost.decode(int(sequences), context)
        else:
            kind = "mixed" if sequences else "prefill"
            ns = cost.step([(int(chunk), int(before))], int(sequences), context)
        rest = cost._without_attention(int(chunk + sequences))
        errors[kind].append(abs((ns - rest) / 1000 / formula.layers / us - 1))
    mean = {kind: sum(found) / len(found) for kind, found in errors.items()}
    assert mean["decode"] < 0.10 and mean["prefill"] < 0.10 and mean["mixed"] < 0.20, mean


def test_steps_of_a_run_take_what_the_formula_says() -> None:
    cost = load(NAME)
    first, more = cost.decode(40, 50_000)
    tenth, _ = cost.decode(40, 50_000 + 10 * 40)
    assert abs(first + 10 * more - tenth) <= 10


def test_every_formula_is_of_a_class_that_scenarios_may_name() -> None:
    assert names() and set(names()) <= {f"{m}_{h}" for m, hs in HARDWARE.items() for h in hs}


def test_the_engine_shares_no_code_with_the_scheduler() -> None:
    """Nor does anything of the simulator that it imports."""
    parts = [
        f"engine.{name}"
        for name in (
            "engine_model", "kv_blocks", "step_cost", "speed", "host_types", "fit", "compare",
        )
    ]  # fmt: skip
    seen = set(parts)
    while parts:
        part = parts.pop()
        for name in imported(module_path(part)):
            assert not name.startswith(("relume.policies", "relume.controlplane")), (
                f"{part}.py: {name}"
            )
            more = name.removeprefix("relume.chaos.sim.")
            if (
                name.startswith("relume.chaos.sim.")
                and more not in seen
                and module_path(more).exists()
            ):
                seen.add(more)
                parts.append(more)
    assert "engine.token_runs" in seen


def module_path(name: str) -> Path:
    """The file of `relume.chaos.sim.NAME`."""
    return SIM.joinpath(*name.split(".")).with_suffix(".py")


def imported(path: Path) -> list[str]:
    """Names of modules, and of what is taken from them."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_data_tells_its_licence() -> None:
    said = (FOLDER / "LICENCES.md").read_text()
    stored = {path.name for path in FOLDER.iterdir()} - {"LICENCES.md"}
    assert all(f"`{name}`" in said for name in stored) and "MIT License" in said


def test_all_requests_of_the_bench_are_served() -> None:
    requests = sim_speed.traffic(4, 300)
    ran, again = sim_speed.simulate(4, requests), sim_speed.simulate(4, requests)
    assert ran.finished == 300
    assert (ran.events, ran.steps, ran.end_ns) == (again.events, again.steps, again.end_ns)
    assert ran.steps > 2 * ran.events  # runs, not steps


def test_drafts_that_are_accepted_make_decoding_faster_and_wrong_ones_slower() -> None:
    cost = load(NAME)
    plain, _ = cost.decode(8, 8 * 1000)
    good = Speculative(cost, 0.8, 4)
    assert good.gain == pytest.approx((1 - 0.8**5) / (1 - 0.8))  # LUMEN Eq. 3
    assert good.decode(8, 8 * 1000)[0] < plain / 2
    assert Speculative(cost, 0.0, 4).decode(8, 8 * 1000)[0] > plain
    assert good.step([(100, 0)], 8, 8000) == cost.step([(100, 0)], 8, 8000)


def test_steps_that_are_all_alike_have_a_fit() -> None:
    points, values = [(1.0, 4.0)] * 3, [200.0] * 3
    fitted = fit.least_squares(points, values)
    assert sum(x * y for x, y in zip(points[0], fitted, strict=True)) == pytest.approx(200.0)
    assert fit.least_squares([(1.0, 1.0), (1.0, 3.0)], [10.0, 20.0]) == pytest.approx((5.0, 5.0))
