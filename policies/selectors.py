"""Who of those that may take a request gets it: metrics, then filters, then a selector.

A selector brings workers into an order (`_ORDERS`), out of which as few as possible are looked
at. The first without an objection is chosen. Objections come in two kinds. Health is never
traded: a worker that is lost, drains or is suspected is on no board. Limits are: no room for
the prompt's KV, a silence where work should be told of, a first token expected too late for the
request's tier, a failure of this very request there; where all that were looked at have one, the
first is taken all the same, unless late requests are to be shed. What a worker cannot do at all
(a server without our plugin goes on with nothing that was begun) stays an objection.

Several replicas decide at once, each blind for a moment to what the others just did. One that
is not alone therefore draws among those that are no worse than the best would be if each of
the others had just sent it a request like this one (`_spread`). What is drawn depends on seed,
replica, revision and number of the decision, so replay draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b

from msgspec import Struct

from events.vocabulary import Candidate
from policies import board as boards
from policies.board import Board
from policies.hits import NONE, Hits
from policies.kept import Why
from policies.view import View

LOOKED = 16
"""So many of the best are looked at for one without objection. Logs depend on it."""
HITS = 32
"""So many workers that hold most of the prompt are looked at one by one; what the others hold
only bounds how far the order of all must be followed."""
UNABLE = "tells no token ids"
FAILED, FULL, TOO_LATE, SILENT = "failed it before", "no KV room", "too late", "silent"


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


Found = Iterator[tuple[int, int]]
"""(cost, at) of open workers, best first."""


def predicted_ttft(view: View, board: Board, asked: Asked) -> Found:
    """Where the first token is expected first: what waits there, and what of this prompt is
    not held there, each at that worker's price."""
    for cost, _, _, at in _by_time(view, board, asked):
        yield cost, at


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
        return iter([(_ttft(board, at, asked), at) for at in there])
    number = draw(view, "two")
    first = number % len(there)
    second = (first + 1 + number // len(there) % (len(there) - 1)) % len(there)
    drawn = [(_ttft(board, there[at], asked), there[at]) for at in (first, second)]
    return iter(sorted(drawn, key=lambda found: found[0]))


def prefix_first(view: View, board: Board, asked: Asked) -> Found:
    """Where most of the prompt is held, however long the queue there; for comparison."""
    held = []
    for name, hit in asked.hits.longest():
        at = board.index.get(name)
        if at is not None and not board.excluded(at):
            held.append((-hit, _ttft(board, at, asked), at))
    held.sort()
    for _, cost, at in held:
        yield cost, at
    holding = {at for _, _, at in held}
    for cost, _, _, at in board.quickest(asked.at_us, asked.tokens, _turn(view, board)):
        if at not in holding:
            yield cost, at


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
            yield has, at
        else:
            crowded.append((has, at))
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
    view: View, board: Board, policy: str, asked: Asked, named: int
) -> tuple[Candidate | None, list[Candidate], bool]:
    """Whom `policy` chooses, those looked at (the `named` best, and whoever else it turned on),
    and whether nobody was chosen because it would be too late. What excludes a candidate is its
    objection; the chosen one may have one."""
    order, _, spread = _ORDERS[policy]
    replicas = board.replicas if spread else 1
    looked = _look(board, order(view, board, asked), asked, named, replicas)
    fit = [x for x in looked if not x.excluded]
    chosen = fit[0] if fit else None
    if len(fit) > 1 and replicas > 1:
        chosen = _spread(view, board, asked, policy, fit, replicas)
    if chosen is None:
        able = [x for x in looked if x.excluded != UNABLE]
        limited = [x for x in able if x.excluded != FAILED]
        if asked.shed and limited and all(x.excluded == TOO_LATE for x in limited):
            return None, looked[:named], True
        if able:
            chosen = (limited or able)[0]
    shown = looked[:named]
    shown += [x for x in looked[named:] if x is chosen or x.excluded == FAILED]
    return chosen, shown, False


def _look(board: Board, found: Found, asked: Asked, named: int, replicas: int) -> list[Candidate]:
    """The best of an order, and what speaks against each: as many as are to be named, and up to
    `LOOKED` while none of them may be chosen, or the choice is drawn."""
    looked: list[Candidate] = []
    enough = max(named, LOOKED) if replicas > 1 else named
    most = max(named, LOOKED) + len(asked.avoid)
    fit = 0
    workers, outlooks = board.workers, board.outlooks
    hits = asked.hits if asked.hits else None
    at_us, slo_us, avoid = asked.at_us, asked.slo_us, asked.avoid
    begun = asked.begun
    reserve = board.config.kv_reserve_percent
    unable = 0
    for cost, at in found:
        worker, of = workers[at], outlooks[at]
        name, tokens, hit = worker.name, asked.tokens, 0
        if hits is not None:
            hit = min(hits.of(name), tokens)
            tokens -= hit
        wait = of.free_at_us - at_us
        expected = tokens * of.token_ns // 1000 + of.fixed_us + (wait if wait > 0 else 0)
        objection = ""
        blocks = worker.kv_blocks
        if begun and worker.plain:
            objection = UNABLE
            unable += 1
        elif avoid and f"{name}:{worker.incarnation}" in avoid:
            objection = FAILED
        elif (
            blocks
            and of.requests  # an empty one has room
            and (of.kv_free - tokens // (worker.block_size or 1)) * 100 <= reserve * blocks
        ):
            objection = FULL
        elif of.silent_at_us and at_us > of.silent_at_us:
            objection = SILENT
        elif slo_us and expected > slo_us:
            objection = TOO_LATE
        else:
            fit += 1
        looked.append(
            Candidate(
                name,
                worker.incarnation,
                cost,
                of.prefill_tokens,
                of.requests,
                objection,
                hit,
                of.batch,
                of.context_tokens,
                of.kv_free,
                expected,
                of.tpot_us,
            )
        )
        seen = len(looked) - unable
        if seen >= most or (fit and seen >= enough):
            break
    return looked


Entry = tuple[int, int, int, int]
"""Expected TTFT, end of prompts, its turn, at: in this order the least is the best."""


def _by_time(view: View, board: Board, asked: Asked) -> Iterator[Entry]:
    """The order of expected TTFT, with what workers hold."""
    turn = _turn(view, board)
    plain = board.quickest(asked.at_us, asked.tokens, turn)
    return _merged(board, plain, asked, turn) if asked.hits else plain


def _merged(board: Board, plain: Iterator[Entry], asked: Asked, turn: int) -> Iterator[Entry]:
    """The order with hits, from the order without: a worker gains at most what it holds at the
    highest price, so whatever is cheaper than the next without its hits is final."""
    hits, count = asked.hits, len(board.workers)

    def entry(at: int) -> Entry:
        return _ttft(board, at, asked), board.outlooks[at].free_at_us, (at - turn) % count, at

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


def _spread(
    view: View, board: Board, asked: Asked, policy: str, fit: list[Candidate], replicas: int
) -> Candidate:
    """One of those that would not be worse than the best, had each other replica sent it a
    request like this one just now."""
    best = fit[0]
    slack = 0
    if policy == "predicted_ttft":
        price = board.outlooks[board.index[best.worker]].token_ns
        slack = (asked.tokens - best.hit_tokens) * price // 1000 * (replicas - 1) // replicas
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
