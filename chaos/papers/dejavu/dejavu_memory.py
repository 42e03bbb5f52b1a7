"""DéjàVu Eq. 2 and 3 against Tables 2 to 5: microbatches that fit, and the machines they need."""

from __future__ import annotations

from relume.chaos.papers.dejavu.dejavu_tables import SETTINGS, Best, Setting
from relume.chaos.papers.dejavu.inputs import (
    BATCHES,
    CONTEXT_TOKENS,
    PROMPT_TOKENS,
    Machine,
    Model,
    fits,
)
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling
from relume.policies.disaggregation.machine_split import (
    Footprint,
    prompt_machines_at_least,
    token_machines_at_least,
)


def footprint(model: Model, machine: Machine, batch: int) -> Footprint:
    """The sizes of Eq. 2 and 3 for microbatches of `batch` requests."""
    a_layer = batch * model.kv_bytes // model.layers
    return Footprint(
        memory=machine.bytes,
        layers=model.layers,
        weights=model.weights // model.layers,
        prompt_kv=PROMPT_TOKENS * a_layer,
        token_kv=(CONTEXT_TOKENS - PROMPT_TOKENS) * a_layer,
    )


def row_fits(setting: Setting, row: Best) -> bool:
    """Whether every pipeline of a row is at least as deep as Eq. 2 and 3 require."""
    serving = [(row.machines, row.batch)]
    prompts: list[tuple[int, int]] = []
    if row.parallel:
        serving.append(row.parallel[1:])
    if row.apart:
        prompts.append(row.apart[:2])
        serving.append(row.apart[2:])

    def size(batch: int) -> Footprint:
        return footprint(setting.model, setting.machine, batch)

    return all(token_machines_at_least(size(b)) <= d for d, b in serving) and all(
        prompt_machines_at_least(size(b)) <= d for d, b in prompts
    )


def largest(setting: Setting, machines: int) -> int:
    """The largest microbatch of `BATCHES` that fits one pipeline of `machines` (0: none)."""
    fitting = (b for b in BATCHES if fits(setting.model, setting.machine, machines, b))
    return max(fitting, default=0)


def run(_: Sampling) -> Found:
    figures: dict[str, float] = {}
    lines = ["figure  machines: largest microbatch that fits (chosen in the paper)"]
    fitting = 0
    for setting in SETTINGS:
        first = setting.rows[0]
        figures[f"largest_{setting.figure}"] = largest(setting, first.machines)
        figures[f"least_{setting.figure}"] = next(
            machines for machines in range(1, 17) if largest(setting, machines)
        )
        fitting += sum(row_fits(setting, row) for row in setting.rows)
        pairs = [
            f"{row.machines}: {largest(setting, row.machines)} ({row.batch})"
            for row in setting.rows
        ]
        lines.append(f"Fig. {setting.figure}  " + ", ".join(pairs))
    figures["fit"] = fitting
    return Found(figures, tuple(lines))


def _exact(key: str, what: str, value: float) -> PublishedFigure:
    return PublishedFigure(key=key, what=what, value=value, within=0.0)


RESULT = Result(
    name="dejavu-memory",
    about="which microbatches fit on how many machines",
    source="DéjàVu Eq. 2 and 3, Tables 2 to 5",
    published=(
        _exact("fit", "rows of Tables 2 to 5 that fit", sum(len(s.rows) for s in SETTINGS)),
        *(
            figure
            for s in SETTINGS
            for figure in (
                _exact(
                    f"least_{s.figure}",
                    f"{s.model.name} on {s.machine.gpus} GPUs: fewest machines",
                    s.rows[0].machines,
                ),
                _exact(
                    f"largest_{s.figure}",
                    "  largest microbatch there",
                    s.rows[0].batch,
                ),
            )
        ),
    ),
    run=run,
    inputs=(
        "Memory is reserved for 2,000 tokens per request, prompt and up to 1,000 generated, as in the "
        "authors' public simulator; the text says only that prompts have 1,000.",
    ),
)
