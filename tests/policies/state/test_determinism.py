"""The fold is the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
from tests.policies.story import *
story = Story()
for name in ("w0", "wee", "w-long-name", "7"):
    story.worker(name)
for name in ("r0", "zeta", "b"):
    story.replica(name)
story.leader()
story.healthy_ticks(12)
for n in range(40):
    w = ("w0", "wee", "w-long-name", "7")[n % 4]
    q = f"request-{n}"
    story.tell("r.r0", arrived(q), decided(q, worker=w))
    story.tell(f"w.{w}", engine_step(queued(q), v.RequestAdmitted(q, 1, n)))
    if n % 3:
        story.tell("r.r0", observed(q, worker=w, kind="reset"))
        story.tell(f"w.{w}", engine_step(finished(q)))
from relume.policies.state.fleet import dump, state_hash
from relume.policies.routing.choose_worker import least_load
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.overlay.view import View
view = View("r.r0", story.fleet)
choice = least_load(view, RouteQuery(request="x", model="m", prompt_tokens=1, delivered=0))
print(dump(story.fleet).hex(), state_hash(story.fleet).hex(), choice)
"""


def test_fold_and_choice_do_not_depend_on_the_hash_seed() -> None:
    answers = set()
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    assert len(answers) == 1
    assert len(answers.pop()) > 1000
