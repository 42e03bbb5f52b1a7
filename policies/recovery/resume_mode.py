"""How an interrupted request continues: the mode of its next attempt.

| guarantee | nothing delivered | something delivered |
|---|---|---|
| exact | new | continue after the delivered tokens, the rest is identical |
| best_effort | new | continue: the engine failed its self-test, so the rest may differ |
| sampled | new | continue: a valid continuation, not the identical one |
| replay | new | replay: generate again and compare; the client sees only the rest |
| restart | new | not possible if the client has bytes, else new |

If a worker that computes wrong results delivered some of it, no attempt continues after that. What
can be generated again is replayed and compared, whatever the guarantee; the rest ends with an error.
"""

from __future__ import annotations

from relume.events.vocabulary.enums import AttemptMode, EnginePhase, Guarantee
from relume.policies.state import dirty_set
from relume.policies.state.overlay.view import View

MODES: dict[tuple[Guarantee, bool], AttemptMode] = {
    (Guarantee.EXACT, False): AttemptMode.NEW,
    (Guarantee.EXACT, True): AttemptMode.CONTINUE,
    (Guarantee.BEST_EFFORT, False): AttemptMode.NEW,
    (Guarantee.BEST_EFFORT, True): AttemptMode.CONTINUE,
    (Guarantee.SAMPLED, False): AttemptMode.NEW,
    (Guarantee.SAMPLED, True): AttemptMode.CONTINUE,
    (Guarantee.REPLAY, False): AttemptMode.NEW,
    (Guarantee.REPLAY, True): AttemptMode.REPLAY,
    (Guarantee.RESTART, False): AttemptMode.NEW,
    (Guarantee.RESTART, True): AttemptMode.HOPELESS,
}


UNCOMPARED = frozenset(("choices", "parsers"))
"""Features of requests (`Arrival.needs`) whose answers a replay does not compare."""


def mode_of(
    verdict: Guarantee, streaming: bool, delivered: int, doubted: bool = False
) -> AttemptMode:
    """Mode of the next attempt; HOPELESS: none can continue it. `doubted`: some of what was
    delivered comes from a worker that computes wrong results.

    A non-streaming client has nothing before the end, so a request that cannot be continued is
    generated again. Raises KeyError for an unknown guarantee.
    """
    if doubted and delivered:
        if not streaming:
            return AttemptMode.NEW
        comparable = verdict not in (Guarantee.SAMPLED, Guarantee.RESTART)
        return AttemptMode.REPLAY if comparable else AttemptMode.HOPELESS
    if not streaming and verdict in (Guarantee.RESTART, Guarantee.REPLAY):
        return AttemptMode.NEW
    return MODES[verdict, delivered > 0]


def grounded(
    view: View,
    model: str,
    verdict: Guarantee,
    needs: tuple[str, ...] = (),
    fallback: Guarantee = Guarantee.NONE,
) -> tuple[Guarantee, str]:
    """(guarantee, reason) that the fleet can give, by the self-tests of every engine of the
    model that serves now: any of them may have to take the request over, so the weakest
    decides.

    Where recomputed tokens are exact but one of `needs` cannot be resumed, the `fallback`
    holds; where they are not, `exact` becomes `best_effort`.
    """
    marks = dirty_set.of(view.fleet)
    since = marks, marks.whole  # what engines are and can changes with rare events only
    if view.grounds[0] != since or len(view.grounds[1]) > MOST_GROUNDS:
        view.grounds = since, {}
    question = model, verdict, needs, fallback
    found: tuple[Guarantee, str] | None = view.grounds[1].get(question)
    if found is None:
        found = view.grounds[1][question] = _grounded(view, *question)
    return found


MOST_GROUNDS = 256


def _grounded(
    view: View, model: str, verdict: Guarantee, needs: tuple[str, ...], fallback: Guarantee
) -> tuple[Guarantee, str]:
    result: tuple[Guarantee, str] = verdict, ""
    for worker in view.fleet.workers.values():
        if worker.model != model or worker.engine != EnginePhase.READY:
            continue
        if "greedy" not in worker.exact:
            if verdict == Guarantee.EXACT:
                result = (
                    Guarantee.BEST_EFFORT,
                    f"{worker.name} failed its self-test of recomputed tokens",
                )
        elif missing := [need for need in needs if need not in worker.exact]:
            return fallback, f"{worker.name} failed its self-test of {missing[0]}"
    return result
