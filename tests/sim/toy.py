"""A worker that says one token every 20 ms to each request, told late, and writes its steps."""

from relume.chaos.sim.message_ports import Stretch
from relume.chaos.sim.world.virtual_loop import NS
from relume.events import vocabulary as v
from relume.events.vocabulary import step_changes as c
from relume.events.wire.notices import DeathNotice

TOKEN_NS = NS // 50


class Running:
    def __init__(self, what, answer, now_ns):
        self.what, self.answer = what, answer
        self.begun_ns = now_ns
        self.told = what.delivered

    def made(self, now_ns):
        return min(self.what.delivered + (now_ns - self.begun_ns) // TOKEN_NS,
                   self.what.output_tokens)  # fmt: skip


class Engine:
    """The `Endpoint` of one incarnation."""

    def __init__(self, worker, incarnation):
        self.worker, self.incarnation = worker, incarnation
        self.loop = worker.loop
        self.process = self.loop.process(f"{worker.name}.engine")
        self.running = {}
        self.hung = False
        self.steps = 0
        self.wrong = False
        self.calls = []

    def dispatch(self, what, answer):
        if what.incarnation != self.incarnation:
            answer.lost("stale", "another incarnation")
            return
        key = what.request, what.attempt
        run = self.running[key] = Running(what, answer, self.loop.now_ns)
        queued = c.RequestQueued(*key, what.prompt_tokens, what.record)
        self.step((queued, c.RequestAdmitted(*key, 0), c.FirstToken(*key)))
        ends_ns = (what.output_tokens - what.delivered) * TOKEN_NS
        self.process.call_at(self.loop.time() + ends_ns / NS, self.finish, key, run)

    def finish(self, key, run):
        if self.running.get(key) is not run or self.hung:
            return
        self.flush(*key)
        del self.running[key]
        run.answer.end("length")
        self.step((c.EngineFinished(*key, "length", run.what.output_tokens),))

    def flush(self, request, attempt):
        run = self.running.get((request, attempt))
        if run is None or self.hung:
            return
        made = run.made(self.loop.now_ns)
        if made > run.told:
            at_ns = run.begun_ns + (run.told - run.what.delivered + 1) * TOKEN_NS
            count = made - run.told
            last_ns = at_ns + (count - 1) * TOKEN_NS
            run.answer.tokens(
                Stretch(
                    start=run.told, count=count, first_ns=at_ns, last_ns=last_ns, wrong=self.wrong
                )
            )
            run.told = made

    def last_ns(self, request, attempt):
        run = self.running.get((request, attempt))
        made = 0 if run is None else run.made(self.loop.now_ns) - run.what.delivered
        return run.begun_ns + made * TOKEN_NS if made else 0

    def newest_ns(self):
        return max((self.last_ns(*key) for key in self.running), default=0)

    def drop(self, request, attempt, answer):
        run = self.running.pop((request, attempt), None)
        if run is not None:
            made = run.made(self.loop.now_ns)
            self.step((c.EngineFinished(request, attempt, "abort", made),))

    def call(self, path, body):
        self.calls.append((path, body))
        self.steps += not self.hung
        state = {"worker": self.worker.name, "incarnation": self.incarnation, "steps": self.steps}
        return 200, state | {"running": len(self.running), "cpu_us": self.steps}

    def step(self, changes):
        self.steps += 1
        self.worker.write(
            v.EngineStep(
                incarnation=self.incarnation,
                step=self.steps,
                duration_us=20_000,
                batch=len(self.running),
                sum_context=0,
                prefill_tokens=0,
                waiting=0,
                kv_used=0,
                changes=changes,
            )
        )

    def flush_all(self):
        for key in list(self.running):
            self.flush(*key)


class Worker:
    """An agent and its engines."""

    def __init__(self, loop, wires, log, name):
        self.loop, self.wires, self.log, self.name = loop, wires, log, name
        self.agent = loop.process(name)
        self.engine = None
        self.incarnation = 0
        self.writer = None
        self.ears = []
        wires.serve(f"{name}:9000", self.agent, self)
        self.agent.spawn(self.live())

    async def live(self):
        async with self.log.writer(f"w.{self.name}", self.agent, wait_s=20) as writer:
            self.writer = writer
            self.write(
                v.WorkerRegistered(
                    worker=self.name, domain="d0", agent_pid=1, notices=f"{self.name}:9000"
                )
            )
            self.start()
            await writer.fenced()

    def write(self, event):
        if self.writer is not None:
            self.writer.append(event)
            self.writer.hurry()

    def start(self):
        self.incarnation += 1
        engine = self.engine = Engine(self, self.incarnation)
        self.wires.serve(f"{self.name}:8100", engine.process, engine)
        self.write(v.EngineStarted(self.name, self.incarnation, 1, 1))
        self.write(
            v.EngineReady(
                worker=self.name,
                incarnation=self.incarnation,
                host=self.name,
                port=8100,
                model="tiny",
                max_model_len=4096,
                block_size=16,
                kv_blocks=1000,
                exact=("greedy",),
            )
        )

    def kill_engine(self, notice=True):
        engine = self.engine
        engine.flush_all()
        engine.process.kill()
        for hear in self.ears if notice else ():
            hear(DeathNotice(self.writer.epoch, self.incarnation))
        self.agent.call_at(self.loop.time() + 0.05, self.died)

    def died(self):
        self.write(v.EngineDied(self.name, self.incarnation, "killed"))
        self.agent.call_at(self.loop.time() + 2, self.start)

    def listen(self, hear):
        self.ears.append(hear)


class Client:
    """A `Caller` that keeps what it hears."""

    def __init__(self):
        self.stretches = []
        self.outcome = ""

    def tokens(self, stretch):
        self.stretches.append(stretch)

    def end(self, finish):
        self.outcome = finish

    def refused(self, status, message):
        self.outcome = f"{status} {message}"

    def cut(self):
        self.outcome = "cut"

    @property
    def indices(self):
        return [i for s in self.stretches for i in range(s.start, s.start + s.count)]
