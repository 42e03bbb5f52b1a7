"""Try the seeded bugs of `bugs.toml` one by one, and print what notices each.

Each bug is put into a copy of the tree. Then `fuzz` runs up to so many seeds, until one fails. If none
does, the tests that the entry names run, and the one that fails runs again without the bug. Of several
bugs, one sweep of all seeds first says which runs meet each (`tests.bugs.probes`); the others are not
made, as they would end as without the bug.

python -m tests.bugs                           every bug; --jobs N, --seeds N
python -m tests.bugs NAME ... --everything     these, and their tests in any case
python -m tests.bugs --part leader             those of one part
python -m tests.bugs --seeds 0                 the tests alone
python -m tests.bugs --remember                write the seeds that found bugs into bugs.toml
python -m tests.bugs --write                   also write docs/testing/seeded-bugs.md
python -m tests.bugs --results FILE            continue what FILE has results of
python -m tests.bugs --tries N                 of the runs that meet a bug, make N drawn at random; with
                                               --results and a greater N, later, also the others

The exit status is 1 if a bug was noticed by nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue

from tests.bugs.bug_table import ROOT, TABLE, Bug, bugs, remember
from tests.bugs.results_file import OtherCommit, ResultsFile
from tests.bugs.seeding import ALL, Noticed, Tree

PAGE = ROOT / "docs" / "testing" / "seeded-bugs.md"
SEEDS = 300
GOAL = 0.85
"""Share of the bugs that fuzz is to find within `SEEDS` seeds."""


def try_all(
    chosen: Sequence[Bug],
    jobs: int,
    seeds: int,
    everything: bool,
    results: ResultsFile,
    tries: int = ALL,
) -> Iterator[Noticed]:
    """What noticed each that has no result, or fewer `tries` without one, as it comes; each of `jobs` has
    a copy of the tree."""
    chosen = [bug for bug in chosen if _is_open(results.noticed.get(bug.name), tries)]
    with tempfile.TemporaryDirectory(prefix="relume-bugs-") as folder:
        trees: Queue[Tree] = Queue()
        for number in range(jobs):
            trees.put(Tree(Path(folder) / str(number)))

        unknown = [bug for bug in chosen if bug.name not in results.met]
        if seeds and len(unknown) > 1:
            tree = trees.get()
            results.add_met(tree.seeds_that_meet(unknown, seeds))
            trees.put(tree)

        def work(bug: Bug) -> Noticed:
            tree = trees.get()
            try:
                met = results.met.get(bug.name, tuple(range(seeds)))
                before = results.noticed.get(bug.name)
                return tree.try_bug(bug, seeds, met, everything, tries, before)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(work, bug) for bug in chosen]):
                results.add(done.result())
                yield done.result()


def _is_open(found: Noticed | None, tries: int) -> bool:
    return found is None or (not found.fuzz and found.tried < min(found.met, tries))


def by_what(found: Noticed) -> str:
    """In words."""
    if found.fuzz:
        return f"fuzz: {', '.join(found.fuzz)} within {found.seeds} seeds ({found.scenario})"
    if found.broken:
        return f"it could not be tried: {found.broken}"
    met = f"; {found.met} of {found.seeds} runs met it" if found.seeds else ""
    made = f", {found.tried} of these were made" if found.tried < found.met else ""
    return (found.unit or "**nothing**") + met + made


def summary(results: Sequence[Noticed], seeds: int) -> str:
    """The shares, in one sentence."""
    fuzz, anything, met = (
        sum(bool(r.fuzz) for r in results),
        sum(r.by_anything for r in results),
        sum(r.met > 0 or bool(r.fuzz) for r in results),
    )
    return (
        f"{anything} of {len(results)} noticed; by fuzz within {seeds} seeds {fuzz} "
        f"({fuzz / len(results):.0%}, goal {GOAL:.0%}), of {met} that a run met"
    )


def page(results: Sequence[Noticed], seeds: int, commit: str) -> str:
    """docs/testing/seeded-bugs.md."""
    table = bugs()
    lines = [
        "# Seeded bugs",
        "",
        "<!-- Written by `python -m tests.bugs --write`; do not edit. -->",
        "",
        "Small bugs (`tests/bugs/bugs.toml`) were put into a copy of the product, one at a time. Fuzz ran "
        "until a seed failed. If none did, the unit tests that look at the place ran. A run meets a bug if it "
        "computes what the bug changes.",
        "",
        f"{time.strftime('%Y-%m-%d')}, {commit}: {summary(results, seeds)}.",
    ]
    by_name = {result.bug: result for result in results}
    for part in dict.fromkeys(bug.part for bug in table.values()):
        lines += ["", f"## {part[:1].upper()}{part[1:]}", "", "| Bug | File | Noticed by |"]
        lines.append("|---|---|---|")
        for bug in table.values():
            if bug.part == part and (result := by_name.get(bug.name)) is not None:
                lines.append(f"| {bug.what} | `{bug.file}` | {by_what(result)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: see above; 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bugs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs to try (default: all)")
    parser.add_argument("--part", default="", help="only those of this part")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default 1)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"per bug (default {SEEDS})")
    parser.add_argument(
        "--tries", type=int, default=ALL, help="maximum runs per bug (default: all)"
    )
    parser.add_argument("--everything", action="store_true", help="run the tests of each, too")
    parser.add_argument("--remember", action="store_true", help=f"write seeds into {TABLE.name}")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--results", type=Path, metavar="FILE", help="continue, and add to it")
    given = parser.parse_args(argv)
    table = bugs()
    if unknown := [name for name in given.names if name not in table]:
        parser.error(f"no such bug: {', '.join(unknown)}; tests/bugs/bugs.toml has the names")
    chosen = [
        bug
        for bug in table.values()
        if given.part in ("", bug.part) and (not given.names or bug.name in given.names)
    ]
    if not chosen:
        parser.error(f"no bug of part {given.part!r}")
    if given.write and len(chosen) < len(table):
        parser.error("--write needs all of them")
    commit = subprocess.run(
        ("git", "rev-parse", "--short=8", "HEAD"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    try:
        file = ResultsFile(given.results, commit, given.seeds)
    except OtherCommit as error:
        parser.error(str(error))
    jobs = max(given.jobs, 1)
    for found in try_all(chosen, jobs, given.seeds, given.everything, file, given.tries):
        also = f"; {found.unit}" if found.fuzz and found.unit else ""
        print(f"{found.bug}: {by_what(found)}{also} [{found.took_s:.0f} s]", flush=True)
    results = [file.noticed[bug.name] for bug in chosen]
    print(summary(results, given.seeds))
    if given.remember:
        remember({found.bug: found.seeds - 1 for found in results if found.fuzz})
    if given.write:
        PAGE.write_text(page(results, given.seeds, commit))
    return int(not all(result.by_anything for result in results))


if __name__ == "__main__":
    sys.exit(main())
