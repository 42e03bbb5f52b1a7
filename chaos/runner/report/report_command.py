"""`relume-chaos report`: a stored run as text or JSON, or in a browser."""

from __future__ import annotations

import msgspec

from relume.chaos.outcome import Outcome
from relume.chaos.runner.artifacts import Run
from relume.chaos.runner.judge import Verdict
from relume.chaos.runner.report.run_report import run_report
from relume.chaos.runner.report.timeline import timeline
from relume.chaos.runner.report.verdict_text import verdict_lines
from relume.controlplane.cli.output import print_line, print_lines
from relume.controlplane.replay.recorded_log import History

EXIT = {"passed": 0, "failed": 1, "inconclusive": 2}


def report_command(outcome: Outcome, run: Run, verdict: Verdict, as_json: bool) -> int:
    """Print it; the exit status is the verdict's. Raises LogError."""
    if as_json:
        whole = {"run": run, "verdict": verdict, "timeline": timeline(outcome)}
        print(msgspec.json.encode(whole).decode())
    else:
        print_lines(verdict_lines(verdict))
        dirty = " with changes" if run.dirty else ""
        print_line(f"commit {run.commit or 'unknown'}{dirty}")
        print_line(f"repeat: {run.command}")
    return EXIT[verdict.result]


def show_run(outcome: Outcome, run: Run, verdict: Verdict, port: int) -> int:
    """Show it in a browser with its log, until Ctrl-C; the exit status is the verdict's.

    Raises CliError, also if the run has no log; LogError.
    """
    from relume.controlplane.ui.replay_page import show_page

    origin = f"{verdict.scenario}, seed {verdict.seed}: {verdict.result}"
    history = History(groups=list(outcome.groups), origin=origin)
    show_page(history, port, report=run_report(timeline(outcome), verdict, run))
    return EXIT[verdict.result]
