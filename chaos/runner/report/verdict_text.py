"""Verdicts and summaries as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from relume.chaos.runner.judge import Expectation, Struck, Verdict
from relume.chaos.scenario.catalogue import FIGURES

_SHOWN = 5
"""Maximum number of violations of one promise in the text; the JSON has more."""
_MARKS = {"passed": "PASSED", "failed": "FAILED", "inconclusive": "INCONCLUSIVE"}


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """A verdict for people."""
    how = "simulated" if verdict.kind == "sim" else "live"
    yield f"{verdict.scenario}, seed {verdict.seed}, {how}, schedule {verdict.digest}"
    yield ""
    yield from _promises(verdict)
    yield ""
    yield from _figures(verdict)
    if verdict.faults:
        yield ""
        yield from _faults(verdict)
    if verdict.unknown:
        yield ""
        yield f"{verdict.unknown} answers broke off: how they ended is unknown"
    if verdict.not_yet:
        text = f"not yet applicable: {', '.join(verdict.not_yet)}"
        yield ""
        yield from textwrap.wrap(text, 100, subsequent_indent="  ")
    yield ""
    yield f"{_MARKS[verdict.result]}" + (f": {verdict.why[0]}" if verdict.why else "")
    yield from (f"  {reason}" for reason in verdict.why[1:])


def _promises(verdict: Verdict) -> Iterator[str]:
    unproven = {entry.partition(":")[0]: entry.partition(": ")[2] for entry in verdict.unproven}
    kept = [name for name in verdict.judged if name not in unproven and name not in verdict.broken]
    yield f"kept      {' '.join(kept) or 'none'}"
    for name, why in unproven.items():
        yield f"unproven  {name}: {why}"
    for name, count in verdict.broken.items():
        yield f"BROKEN    {name}: {count} times"
        listed = [violation for violation in verdict.violations if violation.promise == name]
        yield from (f"          {violation}" for violation in listed[:_SHOWN])
        if count > _SHOWN:
            yield f"          and {count - _SHOWN} more"


def _figures(verdict: Verdict) -> Iterator[str]:
    bounds = {e.figure: e for e in verdict.expectations}
    for name, value in verdict.figures.items():
        shown = "-" if value is None else f"{value:,.2f}".removesuffix(".00")
        line = f"{name:16} {shown:>12}  {bound(bounds.get(name)):22} {FIGURES.get(name, '')}"
        yield line.rstrip()


def bound(expectation: Expectation | None) -> str:
    """A figure's bound, and whether it holds; empty for a figure without a bound."""
    if expectation is None:
        return ""
    words = [
        f"{sign} {bound:g}"
        for sign, bound in ((">=", expectation.least), ("<=", expectation.most))
        if bound is not None
    ]
    return f"{' '.join(words)} {'ok' if expectation.met else 'NOT MET'}"


def _faults(verdict: Verdict) -> Iterator[str]:
    for fault in verdict.faults:
        yield f"{fault.name:4} {fault.what:24} {fault.target:18} {struck(fault)}"


def struck(fault: Struck) -> str:
    """When a fault struck, or why it did not."""
    if fault.needs:
        return f"not yet applicable: needs {fault.needs}"
    if not fault.at_ns:
        return "did not strike"
    text = f"struck at {', '.join(f'{at / 1e9:.3f} s' for at in fault.at_ns[:4])}"
    return text + (f" and {len(fault.at_ns) - 4} more" if len(fault.at_ns) > 4 else "")
