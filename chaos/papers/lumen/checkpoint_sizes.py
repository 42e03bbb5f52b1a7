"""LUMEN's rules and ours for models of 7B to 405B."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from relume.chaos.papers.lumen import model_sizes as lumen_models
from relume.chaos.papers.lumen.model_sizes import SIZES
from relume.chaos.papers.lumen.parts.lumen_study import RECOVERY, SHORT, TPOT, Study
from relume.chaos.papers.lumen.parts.lumen_tables import WITHOUT_DRAFTS
from relume.chaos.papers.lumen.parts.study_runs import PER_S, Case, case_of, title
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

RULES = ("restart", "lumen", "lumen+drafts", "ours")


def cases(name: str) -> Mapping[str, Case]:
    """One of four lost, and none."""
    model = lumen_models.of(name)
    assert model is not None
    found = {}
    for rule in RULES:
        plain = case_of(rule, 4, fails=1)
        case = replace(
            plain, size=name, per_s=PER_S * model.per_s, reload_s=model.reload_s, short=True
        )
        found[f"{name}, {title(rule)}"] = case
    return {f"{name}, no failure": found[f"{name}, {title('restart')}"].whole, **found}


def run(sampling: Sampling) -> Found:
    """Every size."""
    lines, figures = [], {}
    for name, size in SIZES.items():
        model = lumen_models.of(name)
        assert model is not None
        study = Study(sampling, cases(name))
        lines.append(
            f"{size.name}, GPUs a worker: {size.gpus}; {PER_S * model.per_s:.2f} requests a second "
            f"and worker, engine back after {model.reload_s:.0f} s, "
            f"{model.spec.kv_bytes_per_token >> 10} KiB a token, "
            f"a draft needs {model.draft_share:.0%} of a step"
        )
        lines += study.table((*RECOVERY, TPOT))
        of = {rule: f"{name}, {title(rule)}" for rule in RULES}
        for rule, to in (("lumen", "restart"), ("lumen+drafts", "lumen"), ("ours", "lumen")):
            lines.append(study.over(f"{title(rule)} / {title(to)}", of[rule], of[to]))
        lines.append("")
        figures[name] = study.value("ttft", of["lumen"], f"{name}, no failure")
        figures[f"{name} less"] = study.value("ttft", of["lumen"], of["restart"])
    figures["roofline"] = lumen_models.checked()
    return Found(figures, tuple(lines[:-1]))


LOAD = (
    "the cost of a failure depends on the survivors' spare capacity, which the paper does not give."
)
FEW = (
    "kernels for few tokens on many GPUs lie above the roofline; between the models, at the same "
    "weights a GPU, profiles differ from it by 2 to 18 %."
)

RESULT = Result(
    name="lumen-sizes",
    about="models of 7B to 405B, 4 workers, one lost",
    source="LUMEN, scalability (70B), 8-worker prototype (14B); question of the review",
    published=(
        PublishedFigure(
            key="70B",
            what="LUMEN over no failure, mean TTFT, Llama-3-70B",
            value=1.75,
            unit="x",
            within=0.15,
            because=LOAD,
        ),
        PublishedFigure(
            key="14B less",
            what="LUMEN / stop and restart, Qwen3-14B",
            value=0.704,
            unit="x",
            within=0.15,
            because=LOAD,
        ),
        PublishedFigure(
            key="roofline",
            what="profiles off the roofline by at most",
            value=0.0,
            within=0.0,
            because=FEW,
        ),
    ),
    run=run,
    sample=True,
    inputs=(
        "No step profiles of these models: the fitted formula of Qwen3-32B on two RTX PRO 6000, "
        "each part scaled by its reads or computations per GPU. Each model runs on as many of these "
        "GPUs as hold it (7B, 14B: 1; 70B: 4; 405B: 16 in two hosts). Exchange between GPUs keeps "
        "its share of the dense layers, though 16 would need faster links for that. Compared with "
        "profiles of CodeLlama-34B and Llama-2-70B (Vidur, H100). Loading: 3.3 GB/s a host.",
        "Lengths and load: as elsewhere; arrivals scaled so that each size is as busy as "
        "Qwen3-32B at 2.75 a second and worker. Host memory for checkpoints: 64 GiB.",
        SHORT,
        WITHOUT_DRAFTS,
    ),
)
