"""`relume-chaos report`: a stored run as text, JSON or a page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from relume.chaos.outcome import Outcome
from relume.chaos.runner.artifacts import Run
from relume.chaos.runner.judge import Verdict
from relume.chaos.runner.report.page import page
from relume.chaos.runner.report.timeline import timeline
from relume.chaos.runner.report.verdict_text import verdict_lines
from relume.controlplane.cli.output import print_line, print_lines

EXIT = {"passed": 0, "failed": 1, "inconclusive": 2}


def report_command(
    outcome: Outcome, run: Run, verdict: Verdict, html: Path | None, as_json: bool
) -> int:
    """Show it; the exit status is the verdict's. Raises OSError, LogError."""
    run_timeline = timeline(outcome) if html is not None or as_json else None
    if html is not None and run_timeline is not None:
        html.write_text(page(run_timeline, verdict, run), encoding="utf-8")
    if as_json:
        whole = {"run": run, "verdict": verdict, "timeline": run_timeline}
        print(msgspec.json.encode(whole).decode())
    elif html is not None:
        print_line(str(html))
    else:
        print_lines(verdict_lines(verdict))
        dirty = " with changes" if run.dirty else ""
        print_line(f"commit {run.commit or 'unknown'}{dirty}")
        print_line(f"repeat: {run.command}")
    return EXIT[verdict.result]
