"""How long a request's prompt is by an engine's count: `Request.engine_prompt_tokens`.

A gateway counts prompts by their bytes. An engine says what it has queued: prompt and the delivered
tokens that it resumed with; the dispatch has the number of those. The order of the two in the log
does not matter. A request of several choices or prompts has one count for each and none for itself:
the estimate stays.
"""

from __future__ import annotations

from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import AttemptMode
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Fleet, Request, Worker

SEVERAL = -1


def prompt_tokens(fleet: Fleet, request: str, estimate: int) -> int:
    """Tokens of the request's prompt: the engine's count, else `estimate`."""
    known = fleet.requests.get(request)
    return (
        known.engine_prompt_tokens
        if known is not None and known.engine_prompt_tokens > 0
        else estimate
    )


def queued(fleet: Fleet, change: v.RequestQueued) -> None:
    """An engine has the attempt."""
    name, _, child = change.request.partition("#")
    request = fleet.requests.get(name)
    if request is None:
        return  # its arrival comes later: `dispatched` looks again
    if child:
        request.engine_prompt_tokens = SEVERAL
    elif not request.engine_prompt_tokens and (delivered := _delivered(change)) >= 0:
        request.engine_prompt_tokens = max(change.prompt_tokens - delivered, 0)


def dispatched(request: Request, worker: Worker, event: v.RouteDecided) -> None:
    """The dispatch was folded; its engine may have spoken before."""
    attempt = worker.attempts.get(key_of(event.request, event.attempt))
    if attempt is None or not attempt.tokens:
        return
    if key_of(f"{event.request}#1", event.attempt) in worker.attempts:
        request.engine_prompt_tokens = SEVERAL
    elif not request.engine_prompt_tokens:
        request.engine_prompt_tokens = max(attempt.tokens - _taken_up(event), 0)


def _delivered(change: v.RequestQueued) -> int:
    """Delivered tokens among those queued; -1 if unknown."""
    if change.attempt == 1:
        return 0
    try:
        event = codec.decode(change.dispatch)
    except LogError:
        return -1
    return _taken_up(event) if type(event) is v.RouteDecided else -1


def _taken_up(event: v.RouteDecided) -> int:
    return event.delivered if event.mode == AttemptMode.CONTINUE else 0
