"""A continuation for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relume.chaos.whatif.asking import Continuation
from relume.chaos.whatif.outcome_statistics import ChangedRequest, Figures

ROWS = (
    ("TTFT mean", "ttft_ms_mean", " ms"),
    ("TTFT p99", "ttft_ms_p99", " ms"),
    ("time per token, mean", "tpot_ms_mean", " ms"),
    ("last token after", "makespan_s", " s"),
    ("recovery, mean", "recovery_ms_mean", " ms"),
)
COUNTS = (
    ("recoveries", "recoveries"),
    ("requests", "requests"),
    ("not completed", "broken"),
)
JUDGED = {
    "close": ("the simulator is close to what happened", "green"),
    "rough": ("the simulator is only roughly right here", "yellow"),
    "poor": ("the simulator is far from what happened: trust the direction at most", "bold red"),
    "unknown": ("nothing in the log shows how far the simulator can be trusted", "yellow"),
}


def show(console: Console, continuation: Continuation) -> None:
    """Print it."""
    begun, fit = continuation.begun, continuation.agreement
    console.print(
        Text(
            f"\nfrom there, simulated (revision {begun.revision}, seed {continuation.seed})",
            style="bold",
        )
    )
    console.print(f"  {begun.live} requests were live, {begun.coming} arrive later")
    for fault in begun.faults:
        console.print(f"  as recorded: {fault}")
    if begun.down:
        console.print(f"  without an engine at first: {', '.join(begun.down)}")
    console.print(Text(f"  cost of steps: {continuation.cost}", style="dim"))
    for what, count in begun.left_out.items():
        console.print(Text(f"  not repeated, or guessed: {count} {what}", style="yellow"))
    for error in continuation.errors:
        console.print(Text(f"  a simulation did not end: {error}", style="bold red"))
    rows = _rows(continuation.recorded, continuation.changed, continuation.changes)
    console.print(_table(("simulated", "recorded settings", "changed", "change"), rows))
    if continuation.telling is False:
        text = "  the change of the mean TTFT is smaller than the simulator's error"
        console.print(Text(text, style="yellow"))
    judgement, colour = JUDGED[fit.judged]
    console.print(Text(f"\nhow far to trust it: {judgement}", style=colour))
    rows = _rows(fit.real, fit.simulated, fit.off)
    console.print(_table(("recorded settings", "what happened", "simulated", "off by"), rows))
    if fit.each_ms is not None:
        console.print(f"  the median request's TTFT is off by {fit.each_ms:.1f} ms")
    if fit.same_worker is not None:
        console.print(f"  {fit.same_worker:.0%} of them went to the same worker")
    if continuation.most_changed:
        console.print(Text("\nchanged most", style="bold"))
        for moved in continuation.most_changed:
            console.print(f"  {_moved(moved)}")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The first column is text, the others are figures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _rows(
    was: Figures, is_: Figures, by: dict[str, float | None]
) -> Iterator[tuple[str, str, str, str]]:
    for title, name, unit in ROWS:
        before, after, share = getattr(was, name), getattr(is_, name), by[name]
        if before is not None or after is not None:
            yield title, _number(before, unit), _number(after, unit), _share(share)
    for title, name in COUNTS:
        before, after = getattr(was, name), getattr(is_, name)
        yield title, str(before), str(after), "" if before == after else f"{after - before:+}"


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.{2 if value < 100 else 0}f}{unit}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def _moved(one: ChangedRequest) -> str:
    before, after = (
        " then ".join(w) or "no worker" for w in (one.recorded_workers, one.changed_workers)
    )
    return (
        f"{one.request}: {one.what} {one.recorded_ms:,.0f} -> {one.changed_ms:,.0f} ms "
        f"({before} -> {after})"
    )
