"""Who of those that may take a request gets it: metrics, then filters, then a selector.

A selector brings workers into an order (`_ORDERS`), out of which as few as possible are looked
at. The first without an objection is chosen. Objections come in two kinds. Health is never
traded: a worker that is lost, drains or is suspected is on no board. Limits are: no room for
the prompt's KV, a silence where work should be told of, a first token expected too late for the
request's tier, a failure of this very request there, as many requests as the waiting room lets a
worker have (`policies.fullness`); where all that were looked at have one, the first is taken all
the same, unless late requests are to be shed. A policy may look at full workers only while others
are not: then it is the one that the room is open for. What a worker cannot do at all (a server
without our plugin goes on with nothing that was begun) stays an objection.

Several replicas decide at once, each blind for a moment to what the others just did. One that
is not alone therefore draws among those that are no worse than the best would be if each of
the others had just sent it a request like this one (`_spread`). What is drawn depends on seed,
replica, revision and number of the decision, so replay draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from operator import attrgetter

from msgspec import Struct

from relume.events.vocabulary import Candidate
from relume.policies import board as boards
from relume.policies.board import Board
from relume.policies.hits import NONE, Hits
from relume.policies.kept import Why
from relume.policies.view import View

LOOKED = 16
"""So many of the best are looked at for one without objection. Logs depend on it."""
HITS = 32
"""So many workers that hold most of the prompt are looked at one by one; what the others hold
only bounds how far the order of all must be followed."""
SURE, SURE_US = 4, 10_000
"""Times to first token that differ by less than such a part of them, and by less than so much, are
alike: who has fewest requests is taken."""
_requests = attrgetter("requests")
BLIND = 4
"""Replicas are blind to one another for some milliseconds only: what another may have sent counts
as so much less."""
UNABLE = "tells no token ids"
FAILED, FULL, TOO_LATE, SILENT = "failed it before", "no KV room", "too late", "silent"
BUSY = "saturated"


class Asked(Struct, frozen=True, gc=False):
    """What a selector must know of a request: `tokens` it would compute on a worker that holds
    nothing of it, `hits` what workers hold, `at_us` on the replica's clock, `slo_us`
    (0: none) and whether it is refused when that cannot be kept; `begun`: it goes on behind tokens
    that its client has."""

    tokens: int
    at_us: int = 0
    session: str = ""
    avoid: tuple[str, ...] = ()
    hits: Hits = NONE
    slo_us: int = 0
    shed: bool = False
    begun: bool = False


Entry = tuple[int, int, int, int]
"""(cost, whatever goes on when costs are equal: two numbers, at) of a worker."""
Found = Iterator[Entry]
"""Open workers, best first."""


def predicted_ttft(view: View, board: Board, asked: Asked) -> Found:
    """Where the first token is expected first: what waits there, and what of this prompt is
    not held there, each at that worker's price."""
    turn = _turn(view, board)
    plain = board.quickest(asked.at_us, asked.tokens, turn)
    return _merged(board, plain, asked, turn) if asked.hits else plain


def jsq(view: View, board: Board, asked: Asked) -> Found:
    """Join the shortest queue: fewest requests."""
    return board.shortest(_turn(view, board))


def power_of_two(view: View, board: Board, asked: Asked) -> Found:
    """The better of two drawn at random."""
    there = board.there
    if asked.avoid:
        places = ((at, board.workers[at]) for at in there)
        fresh = [at for at, w in places if f"{w.name}:{w.incarnation}" not in asked.avoid]
        there = fresh or there
    if len(there) < 2:
        return iter([(_ttft(board, at, asked), 0, 0, at) for at in there])
    number = draw(view, "two")
    first = number % len(there)
    second = (first + 1 + number // len(there) % (len(there) - 1)) % len(there)
    drawn = [(_ttft(board, there[at], asked), 0, 0, there[at]) for at in (first, second)]
    return iter(sorted(drawn, key=lambda found: found[0]))


def prefix_first(view: View, board: Board, asked: Asked) -> Found:
    """Where most of the prompt is held, however long the queue there; for comparison."""
    held = []
    for name, hit in asked.hits.longest():
        at = board.index.get(name)
        if at is not None and not board.excluded(at):
            held.append((-hit, _ttft(board, at, asked), at))
    held.sort()
    for hit, cost, at in held:
        yield cost, hit, 0, at
    holding = {at for _, _, at in held}
    for entry in board.quickest(asked.at_us, asked.tokens, _turn(view, board)):
        if entry[3] not in holding:
            yield entry


def session_affinity(view: View, board: Board, asked: Asked) -> Found:
    """Where the session belongs, unless that worker has more than its share; requests without
    a session as `predicted_ttft`."""
    if not asked.session:
        yield from predicted_ttft(view, board, asked)
        return
    count = max(len(board.there), 1)
    most = (board.config.affinity_percent * (board.requests + 1) + 100 * count - 1) // (100 * count)
    crowded = []
    for at in board.ring.from_(asked.session):
        if board.excluded(at):
            continue
        has = board.outlooks[at].requests
        if has < most:
            yield has, 0, 0, at
        else:
            crowded.append((has, 0, 0, at))
    yield from crowded


Order = Callable[[View, Board, Asked], Found]
_ORDERS: dict[str, tuple[Order, boards.Order, bool]] = {
    "predicted_ttft": (predicted_ttft, boards.by_time, True),
    "prefix_first": (prefix_first, boards.by_time, False),
    "session_affinity": (session_affinity, boards.by_time, False),
    "jsq": (jsq, boards.by_requests, True),
    "power_of_two": (power_of_two, boards.by_time, False),
}
"""Of each policy: its order, the board it reads, whether the choice among equals is drawn."""
POLICIES = tuple(_ORDERS)


def board_of(view: View, model: str, policy: str, why: Why) -> Board:
    """What `policy` reads."""
    return boards.of(view, model, why, _ORDERS[policy][1])


def select(
    view: View,
    board: Board,
    policy: str,
    asked: Asked,
    named: int,
    queues: Callable[[], Board],
) -> tuple[Candidate | None, list[Candidate], bool]:
    """Whom `policy` chooses, those looked at (the `named` best, and whoever else it turned on),
    and whether nobody was chosen because it would be too late. What excludes a candidate is its
    objection; the chosen one may have one. `queues` gives the board of the waiting room."""
    order, _, spread = _ORDERS[policy]
    replicas = board.replicas if spread else 1
    looked, chosen = _look(board, order(view, board, asked), asked, named, replicas)
    busy = [x for x in looked if x.excluded == BUSY] if chosen is None else []
    if busy:
        chosen = _open(board, queues(), asked, looked)
    if chosen is None and busy:  # all are: it goes where it would go anyhow
        chosen, fit = busy[0], busy
    else:
        fit = [x for x in looked if not x.excluded]
    if chosen is not None and (replicas > 1 or policy == "predicted_ttft"):
        if replicas > 1:
            chosen = _spread(view, board, asked, policy, fit, replicas)
        else:
            most = chosen.cost + _unsure(chosen)
            chosen = min((x for x in fit if x.cost <= most), key=_requests)
    if chosen is None:
        able = [x for x in looked if x.excluded != UNABLE]
        limited = [x for x in able if x.excluded != FAILED]
        if asked.shed and limited and all(x.excluded == TOO_LATE for x in limited):
            return None, looked[:named], True
        if able:
            chosen = (limited or able)[0]
    if len(looked) > named:
        beyond = [x for x in looked[named:] if x is chosen or x.excluded == FAILED]
        looked = looked[:named] + beyond
    return chosen, looked, False


def _look(
    board: Board, found: Found, asked: Asked, named: int, replicas: int
) -> tuple[list[Candidate], Candidate | None]:
    """The best of an order, with what speaks against each, and the first without an objection: as
    many as are to be named, and up to `LOOKED` while none of them may be chosen, or the choice is
    drawn."""
    looked: list[Candidate] = []
    best = None
    most = max(named, LOOKED) + len(asked.avoid)
    enough = max(named, LOOKED) if replicas > 1 else named
    rows = board.rows
    hits = asked.hits if asked.hits else None
    whole, at_us, slo_us = asked.tokens, asked.at_us, asked.slo_us
    of_its_own = asked.begun or asked.avoid
    limit = board.limit
    latest = at_us + limit.ahead_us if limit.ahead_us else boards.LATE
    few = limit.queued // (limit.others + 1) if limit.queued else boards.LATE
    for cost, _, _, at in found:
        (
            name, incarnation, free_at, token_ns, fixed_us, block, room, silent_at,
            prefill, requests, batch, context, kv_free, tpot_us,
        ) = rows[at]  # fmt: skip
        tokens, hit = whole, 0
        if hits is not None:
            hit = min(hits.of(name), whole)
            tokens -= hit
        expected = tokens * token_ns // 1000 + fixed_us
        if free_at > at_us:
            expected += free_at - at_us
        if tokens // block >= room:
            objection = FULL
        elif at_us > silent_at:
            objection = SILENT
        elif slo_us and expected > slo_us:
            objection = TOO_LATE
        elif free_at > latest or (
            requests >= few
            and limit.full(requests - batch, requests - len(board.workers[at].attempts))
        ):
            objection = BUSY
        else:
            objection = ""
        if of_its_own:
            objection = _own_objection(board, at, asked) or objection
            if objection == UNABLE:
                enough += 1
                most += 1
        here = Candidate(
            name, incarnation, cost, prefill, requests, objection, hit, batch, context, kv_free,
            expected, tpot_us,
        )  # fmt: skip
        looked.append(here)
        if best is None and not objection:
            best = here
        seen = len(looked)
        if seen >= enough and (best is not None or seen >= most):
            break
    return looked, best


def _open(board: Board, queues: Board, asked: Asked, looked: list[Candidate]) -> Candidate | None:
    """The worker that is open when those looked at are full, if nothing else speaks against it."""
    _, at = queues.soonest(board.limit)
    if at < 0 or any(x.worker == board.workers[at].name for x in looked):
        return None
    found, best = _look(board, iter([(_ttft(board, at, asked), 0, 0, at)]), asked, 1, 1)
    looked += found
    return best


def _own_objection(board: Board, at: int, asked: Asked) -> str:
    """What speaks against a worker for this request alone."""
    worker = board.workers[at]
    if asked.begun and worker.plain:
        return UNABLE
    return FAILED if f"{worker.name}:{worker.incarnation}" in asked.avoid else ""


def _merged(board: Board, plain: Found, asked: Asked, turn: int) -> Found:
    """The order with hits, from the order without: a worker gains at most what it holds at the
    highest price, so whatever is cheaper than the next without its hits is final."""
    hits, count = asked.hits, len(board.workers)

    def entry(at: int) -> Entry:
        return _ttft(board, at, asked), boards.turn_of(board.outlooks[at]), (at - turn) % count, at

    known, most = {}, 0
    for number, (name, tokens) in enumerate(hits.longest()):
        if number == HITS:
            most = min(tokens, asked.tokens)
            break
        at = board.index.get(name)
        if at is not None and not board.excluded(at):
            known[at] = entry(at)
    gain = most * board.dearest // 1000 + 1 if most else 0
    waiting = sorted(known.values(), reverse=True)
    for cost, *rest, at in plain:
        while waiting and waiting[-1] < (cost - gain,):
            yield waiting.pop()
        if at in known:
            continue
        if gain:
            waiting.append(entry(at))
            waiting.sort(reverse=True)
        else:
            here = (cost, *rest, at)
            while waiting and waiting[-1] < here:
                yield waiting.pop()
            yield here
    yield from reversed(waiting)


def _turn(view: View, board: Board) -> int:
    return view.turn % max(len(board.workers), 1)


def _hit(asked: Asked, name: str) -> int:
    hits = asked.hits
    return min(hits.of(name), asked.tokens) if hits else 0


def _ttft(board: Board, at: int, asked: Asked) -> int:
    of = board.outlooks[at]
    wait = of.free_at_us - asked.at_us
    tokens = asked.tokens - _hit(asked, board.workers[at].name)
    return (wait if wait > 0 else 0) + tokens * of.token_ns // 1000 + of.fixed_us


def _unsure(best: Candidate) -> int:
    """What another's cost may be above the best one's for the two to be alike."""
    return min(best.cost // SURE, SURE_US)


def _spread(
    view: View, board: Board, asked: Asked, policy: str, fit: list[Candidate], replicas: int
) -> Candidate:
    """One of those that would not be worse than the best, had each other replica sent it a
    request like this one just now."""
    best = fit[0]
    slack = 0
    if policy == "predicted_ttft":
        price = board.outlooks[board.index[best.worker]].token_ns
        own = (asked.tokens - best.hit_tokens) * price // 1000
        slack = max(own * (replicas - 1) // replicas // BLIND, _unsure(best))
    alike = [x for x in fit if x.cost <= best.cost + slack]
    return alike[draw(view, "spread") % len(alike)] if len(alike) > 1 else best


def draw(view: View, what: str) -> int:
    """A number that nobody can foresee and everybody can repeat: of this decision of this
    replica on this state of the log."""
    replica = view.fleet.replicas.get(view.replica)
    seed = replica.seed if replica is not None else 0
    text = f"{seed}:{view.replica}:{view.fleet.revision}:{view.turn}:{what}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def unasked(board: Board, looked: set[str]) -> Iterator[Candidate]:
    """The workers that were not looked at, for small fleets, which name everybody."""
    for at, worker in enumerate(board.workers):
        if worker.name not in looked:
            of = board.outlooks[at]
            name, load = (worker.name, worker.incarnation), (of.prefill_tokens, of.requests)
            yield Candidate(*name, 0, *load, board.excluded(at))
