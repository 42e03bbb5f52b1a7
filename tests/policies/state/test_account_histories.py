"""Random histories, honest and not: the sums hold at every event, and after a drain every
account is exactly zero."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from relume.events import vocabulary as v
from relume.policies.routing.first_token_v1 import forecast
from relume.policies.state.account import FLIGHT_TICKS, SILENT_TICKS
from relume.policies.state.fleet import Worker
from relume.policies.state.invariants import check
from relume.policies.state.overlay.view import View
from tests.policies.story import Story, arrived, decided, died, ended, observed, ready, started

WORKERS = ("w0", "w1")
REPLICAS = ("r0", "r1")
FIGURES = ("batch", "sum_context", "prefill_tokens", "waiting", "kv_used")
WHAT = st.sampled_from((
    "arrive", "arrive", "arrive", "queue", "queue", "admit", "step", "step", "step", "finish",
    "preempt", "abort", "refuse", "fail over", "die", "lose records", "again", "lie", "late step",
    "tick", "gateway dies", "leave",
))  # fmt: skip


class Held:
    """One attempt as its engine has it."""

    def __init__(self, name: str, attempt: int, prompt: int) -> None:
        self.name, self.attempt, self.prompt = name, attempt, prompt
        self.left = prompt
        self.admitted = self.decoding = False
        self.made = 0


class World:
    """Scripted engines and replicas that write a log; `story.fleet` is its fold."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.story = Story()
        self.number = dict.fromkeys(WORKERS, 0)
        self.incarnation = dict.fromkeys(WORKERS, 1)
        self.engine: dict[str, dict[str, Held]] = {name: {} for name in WORKERS}
        self.sent: dict[str, tuple[str, str, int, int]] = {}
        """Live requests: (replica, worker, attempt, prompt)."""
        self.under_way: list[tuple[str, str, int, int]] = []
        self.said: dict[str, list[v.EngineStep]] = {name: [] for name in WORKERS}
        self.count = 0
        for name in WORKERS:
            self.story.tell(
                f"w.{name}", v.WorkerRegistered(worker=name, domain="host", agent_pid=7)
            )
            self.begin(name)
        for name in REPLICAS:
            self.story.replica(name)
        self.story.leader()

    def begin(self, name: str) -> None:
        told = ready(name, self.incarnation[name])
        told = structs.replace(told, hardware="scripted", step_tokens=64)
        self.story.tell(f"w.{name}", started(name, self.incarnation[name]), told)

    def any(self, of: Any) -> Any:
        return self.draw(st.sampled_from(sorted(of)))

    def say(self, name: str, *changes: Any, us: int = 0, batch: int = 0, context: int = 0) -> None:
        waiting = sum(not h.admitted for h in self.engine[name].values())
        prompt = sum(c.tokens for c in changes if type(c) is v.PrefillChunkDone)
        told = v.EngineStep(
            incarnation=self.incarnation[name],
            step=self.number[name],
            duration_us=us,
            batch=batch,
            sum_context=context,
            prefill_tokens=prompt,
            waiting=waiting,
            kv_used=3,
            changes=changes,
        )
        self.said[name].append(told)
        self.story.tell(f"w.{name}", told)

    def act(self, what: str) -> None:
        name = self.any(WORKERS)
        held = self.engine[name]
        if what == "arrive":
            self.count += 1
            request, replica = f"q{self.count}", self.any(REPLICAS)
            prompt = self.draw(st.integers(1, 300))
            self.story.tell(f"r.{replica}", arrived(request, prompt))
            self.dispatch(replica, request, name, 1, prompt)
        elif what == "queue" and self.under_way:
            request, target, attempt, prompt = self.under_way.pop(0)
            one = Held(request, attempt, prompt)
            self.engine[target][f"{request}/{attempt}"] = one
            self.say(target, v.RequestQueued(request, attempt, prompt))
        elif what == "admit":
            self.admit(name)
        elif what == "step" and held:
            self.step(name)
        elif what == "finish" and (key := self.done(name)):
            self.finish(name, key, "stop")
        elif what == "preempt":
            running = [k for k, h in held.items() if h.admitted]
            if running:
                one = held[self.any(running)]
                one.admitted = one.decoding = False
                one.left = one.prompt + one.made
                self.say(name, v.RequestPreempted(one.name, one.attempt, one.left))
        elif what == "abort" and held:
            self.finish(name, self.any(held), "abort")
        elif what == "refuse" and self.under_way:
            request, target, attempt, _ = self.under_way.pop(0)
            if request in self.sent:
                replica = self.sent.pop(request)[0]
                self.story.tell(
                    f"r.{replica}",
                    observed(request, attempt, target, self.incarnation[target], "refused"),
                    ended(request, "failed", attempt),
                )
        elif what == "fail over" and self.sent:
            request = self.any(self.sent)
            replica, target, attempt, prompt = self.sent[request]
            other = self.any(WORKERS)
            seen = observed(request, attempt, target, self.incarnation[target], "timeout")
            self.story.tell(f"r.{replica}", seen)
            self.dispatch(replica, request, other, attempt + 1, prompt)
        elif what == "die":
            self.engine[name].clear()
            self.under_way = [u for u in self.under_way if u[1] != name]
            self.story.tell(f"w.{name}", died(name, self.incarnation[name]))
            self.incarnation[name] += 1
            self.number[name] = 0
            self.said[name].clear()
            self.begin(name)
        elif what == "leave":
            self.leave(name)
        elif what == "lose records" and held:
            key = self.any(held)
            one = held.pop(key)
            self.number[name] += 1
            lost = v.EngineStep(
                incarnation=self.incarnation[name],
                step=self.number[name],
                duration_us=900,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=0,
                kv_used=3,
                changes=(),
                lost=2,
            )
            self.story.tell(f"w.{name}", lost)
            self.over(one.name)
        elif what == "again" and self.said[name]:
            self.story.tell(
                f"w.{name}", self.said[name][self.draw(st.integers(-3, -1)) % len(self.said[name])]
            )
        elif what == "lie":
            odd = self.draw(st.sampled_from((-1, -(1 << 62), 1 << 62)))
            at = self.draw(st.integers(0, 4))
            figures = {f: odd if n == at else 7 for n, f in enumerate(FIGURES)}
            liar = v.EngineStep(
                incarnation=self.incarnation[name],
                step=self.number[name] + 1,
                duration_us=5,
                **figures,
            )
            self.story.tell(f"w.{name}", liar)
            queued = v.RequestQueued("nobody", 1, self.draw(st.sampled_from((-5, 1 << 60))))
            gone = v.EngineFinished("nobody", 1, "stop", -9)
            self.say(name, queued, v.PrefillChunkDone("nobody", 1, -7, -7), gone)
        elif what == "late step" and self.said[name]:
            old = structs.replace(self.said[name][0], changes=(), duration_us=700)
            self.story.tell(f"w.{name}", old)
        elif what == "tick":
            self.story.healthy_ticks(1)
        elif what == "gateway dies" and self.under_way:
            # its dispatch never reaches the log, but its engine got the request
            request, target, attempt, prompt = self.under_way.pop()
            key = f"ghost-{request}"
            self.engine[target][f"{key}/1"] = Held(key, 1, prompt)
            self.say(target, v.RequestQueued(key, 1, prompt))

    def leave(self, name: str) -> None:
        """It leaves by itself or is lost, may be forgotten, and comes again."""
        self.engine[name].clear()
        self.said[name].clear()
        epoch = self.story.epochs[f"w.{name}"]
        if self.draw(st.booleans()):
            self.story.tell(f"w.{name}", v.WorkerDeregistered(name, "asked to"))
        else:
            self.story.tell("fleet", v.WorkerLost(name, epoch, "lease lapsed"))
        nothing_left(self.story.fleet.workers[name])
        if self.draw(st.booleans()):
            self.story.tell("fleet", v.WorkerForgotten(name, epoch))
            assert name not in self.story.fleet.workers
        while self.under_way and self.draw(st.booleans()):  # sent there all the same
            request, _, attempt, prompt = self.under_way.pop()
            late = decided(request, attempt + 1, name, self.incarnation[name], prompt)
            self.story.tell("r.r0", late)
        self.under_way = [u for u in self.under_way if u[1] != name]
        self.story.own(f"w.{name}")
        self.story.tell(f"w.{name}", v.WorkerRegistered(worker=name, domain="host", agent_pid=7))
        self.incarnation[name] += 1
        self.number[name] = 0
        self.begin(name)

    def dispatch(self, replica: str, request: str, name: str, attempt: int, prompt: int) -> None:
        told = decided(request, attempt, name, self.incarnation[name], prompt)
        self.story.tell(f"r.{replica}", told)
        self.sent[request] = (replica, name, attempt, prompt)
        self.under_way.append((request, name, attempt, prompt))

    def admit(self, name: str) -> None:
        changes = []
        for one in self.engine[name].values():
            if not one.admitted:
                one.admitted = True
                cached = self.draw(st.integers(0, max(one.left - 1, 0)))
                one.left -= cached
                changes.append(v.RequestAdmitted(one.name, one.attempt, cached))
        if changes:
            self.say(name, *changes)

    def step(self, name: str) -> None:
        self.number[name] += 1
        changes: list[Any] = []
        batch = context = 0
        budget = 64
        for one in self.engine[name].values():
            if not one.admitted:
                continue
            whole = one.prompt + one.made
            if one.decoding:
                one.made += 1
                batch += 1
                context += whole
            elif budget and one.left:
                chunk = min(one.left, budget)
                budget -= chunk
                one.left -= chunk
                changes.append(v.PrefillChunkDone(one.name, one.attempt, chunk, whole - one.left))
                if not one.left:
                    one.decoding = True
                    if not one.made:
                        one.made = 1
                        changes.append(v.FirstToken(one.name, one.attempt))
        self.say(name, *changes, us=900, batch=batch, context=context)

    def done(self, name: str) -> str:
        return next((k for k, h in self.engine[name].items() if h.decoding), "")

    def finish(self, name: str, key: str, reason: str) -> None:
        one = self.engine[name].pop(key)
        self.say(name, v.EngineFinished(one.name, one.attempt, reason, one.made))
        self.over(one.name)

    def over(self, request: str) -> None:
        if request in self.sent and self.draw(st.booleans()):
            replica, _, attempt, _ = self.sent.pop(request)
            self.story.tell(f"r.{replica}", ended(request, attempts=attempt))

    def drain(self) -> None:
        """Engines let go of everything, replicas end what is open, and time passes."""
        for name in WORKERS:
            while self.engine[name]:
                self.finish(name, next(iter(self.engine[name])), "abort")
        for request, (replica, _, attempt, _) in list(self.sent.items()):
            self.story.tell(f"r.{replica}", ended(request, "cancelled", attempt))
        self.story.healthy_ticks(SILENT_TICKS + 2)


def nothing_left(worker: Worker) -> None:
    """Exactly zero."""
    assert worker.attempts == {} and worker.finished_early == {}
    assert (worker.prefill_left, worker.flights, worker.flight_left) == (0, 0, 0)
    assert (worker.prefilling, worker.prefilling_tokens) == (0, 0)
    assert (worker.decoding, worker.context) == (0, 0)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.lists(WHAT, min_size=5, max_size=50))
def test_sums_hold_and_a_drain_leaves_nothing(data: Any, acts: list[str]) -> None:
    world = World(data.draw)
    view = View("r.r0", world.story.fleet)
    for what in acts:
        world.act(what)
        view.landed()
        assert [*check(world.story.fleet)] == []
        for worker in world.story.fleet.workers.values():
            told = forecast(view, worker)
            assert min(told.prefill_tokens, told.batch, told.context, told.kv_blocks) >= 0
    world.drain()
    for worker in world.story.fleet.workers.values():
        nothing_left(worker)
    assert world.story.fleet.requests == {}


def test_dispatch_to_a_hung_engine_expires_by_ticks() -> None:
    world = World(None)
    world.any = lambda of: sorted(of)[0]  # type: ignore[method-assign]
    world.story.tell("r.r0", arrived(), decided())
    world.story.healthy_ticks(FLIGHT_TICKS)
    worker = world.story.fleet.workers["w0"]
    assert worker.prefill_left == 100
    world.story.healthy_ticks(2)
    nothing_left(worker)
    world.story.tell("r.r0", ended())
    nothing_left(worker)


def test_a_lying_record_changes_no_figure() -> None:
    world = World(None)
    world.number["w0"] = 1
    world.say("w0", us=900, batch=2, context=300)
    worker = world.story.fleet.workers["w0"]
    for figures in ((-1, 5, 5, 5, 5), (5, 1 << 47, 5, 5, 5), (5, 5, 5, -9, 5), (5, 5, 5, 5, -1)):
        told = dict(zip(FIGURES, figures, strict=True))
        lie = v.EngineStep(incarnation=1, step=2, duration_us=900, **told)
        world.story.tell("w.w0", lie)
    assert (worker.decoding, worker.context, worker.kv_used, worker.absurd) == (2, 300, 3, 4)
