"""How a cut request goes on: the mode of its next attempt.

| verdict | nothing delivered | something delivered |
|---|---|---|
| exact | new | continue: taken up behind the delivered tokens, the rest is identical |
| best_effort | new | continue: the engine failed its self-test, so the rest may differ |
| sampled | new | continue: a valid continuation, not the identical one |
| replay | new | replay: generate again and compare; the client sees only the rest |
| restart | new | hopeless when the client has bytes, else new |
"""

from __future__ import annotations

from relume.policies import touched
from relume.policies.view import View

MODES: dict[tuple[str, bool], str] = {
    ("exact", False): "new",
    ("exact", True): "continue",
    ("best_effort", False): "new",
    ("best_effort", True): "continue",
    ("sampled", False): "new",
    ("sampled", True): "continue",
    ("replay", False): "new",
    ("replay", True): "replay",
    ("restart", False): "new",
    ("restart", True): "hopeless",
}


def mode_of(verdict: str, streaming: bool, delivered: int) -> str:
    """Mode of the next attempt: new, continue, replay or hopeless.

    A non-streaming client has nothing before the end, so what cannot be continued is
    simply generated again. Raises KeyError for an unknown verdict.
    """
    if not streaming and verdict in ("restart", "replay"):
        return "new"
    return MODES[verdict, delivered > 0]


def grounded(
    view: View, model: str, verdict: str, needs: tuple[str, ...] = (), fallback: str = ""
) -> tuple[str, str]:
    """(verdict, reason) that the fleet can keep, by the self-tests of every engine of the
    model that serves now: any of them may have to take the request over, so the weakest
    decides.

    Where recomputed tokens are exact but one of `needs` is not taken up, the `fallback`
    holds; where they are not, `exact` becomes `best_effort`.
    """
    marks = touched.of(view.fleet)
    since = marks, marks.whole  # what engines are and can changes with rare events only
    if view.grounds[0] != since or len(view.grounds[1]) > MOST_GROUNDS:
        view.grounds = since, {}
    asked = model, verdict, needs, fallback
    found: tuple[str, str] | None = view.grounds[1].get(asked)
    if found is None:
        found = view.grounds[1][asked] = _grounded(view, *asked)
    return found


MOST_GROUNDS = 256


def _grounded(
    view: View, model: str, verdict: str, needs: tuple[str, ...], fallback: str
) -> tuple[str, str]:
    kept = verdict, ""
    for worker in view.fleet.workers.values():
        if worker.model != model or worker.engine != "ready":
            continue
        if "greedy" not in worker.exact:
            if verdict == "exact":
                kept = "best_effort", f"{worker.name} failed its self-test of recomputed tokens"
        elif missing := [need for need in needs if need not in worker.exact]:
            return fallback, f"{worker.name} failed its self-test of {missing[0]}"
    return kept
