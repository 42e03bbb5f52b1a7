"""A vLLM engine in virtual time: continuous batching as its scheduler does it.

A step consists of one token of each decoding sequence, then chunks of prompts, older ones first, up
to `max_tokens`. The engine admits waiting jobs in their order while there are places and blocks. A
step that lacks blocks preempts the sequence admitted last, which is computed again later.

The model does not simulate decode-only steps one by one. From one change of the batch to the next
they are one *run*, whose steps last a, a+b, a+2b, ... ns. A job that arrives meanwhile ends the
run after the current step. The tokens of each sequence follow from the number of decode steps alone
(`_decoded`), so a run's cost does not depend on its length or batch. The blocks that a run needs
follow from counts of sequences that begin a block, by step modulo block length. A step with prompts
that gives each sequence several tokens (drafts, `StepCost.given`) is also a run, which cannot be
cut short. While the engine pauses before its steps (`StepCost.pause_ns`), each run is one step.

The model has no I/O and no clock: `submit`, `abort`, `kill` and `advance` receive the time,
`next_ns` returns the time of the next call.
"""

from __future__ import annotations

import heapq
from collections import deque
from math import isqrt
from typing import NamedTuple

from msgspec import Struct

from relume.chaos.sim.engine.kv_blocks import KvBlocks
from relume.chaos.sim.engine.step_cost import StepCost
from relume.chaos.sim.engine.token_runs import Run, Runs
from relume.engine_shim.engine.step_estimate import StepEstimate


class EngineConfig(Struct, frozen=True, kw_only=True):
    """vLLM's settings of the same meaning: max_num_seqs, max_num_batched_tokens, block size and
    number of KV blocks, and whether prefixes are cached."""

    kv_blocks: int
    max_seqs: int = 128
    max_tokens: int = 2048
    block_tokens: int = 16
    prefix_cache: bool = True


class Job(Struct, frozen=True, kw_only=True):
    """A request to an engine. `generated` of its `output_tokens` exist already and are computed
    with the prompt; `restored` tokens, whole blocks from the first on, were restored; `prefix`
    holds the ids of its first segments of `prefix_block` tokens. `place`: it waits before jobs with a
    higher one, and after those with the same one."""

    name: str
    prompt_tokens: int
    output_tokens: int
    generated: int = 0
    prefix: tuple[int, ...] = ()
    prefix_block: int = 0
    restored: int = 0
    place: int = 0


class JobEvent(Struct, frozen=True, gc=False, kw_only=True):
    """An event of a job: `admitted` (`amount` tokens need no computing), `chunk` (`amount` of its
    tokens were computed), `first` (token since its admission), `preempted`, `finished`, `aborted`.
    `tokens` of its output exist."""

    what: str
    name: str
    at_ns: int
    tokens: int
    amount: int = 0


class Step(NamedTuple):
    """The last completed step: its duration, decoding sequences and their context, prompt tokens
    computed, and the pause before it (0 after the engine was idle)."""

    took_ns: int = 0
    batch: int = 0
    context: int = 0
    prompt: int = 0
    gap_ns: int = 0


class Account(NamedTuple):
    """A job in the engine. `computed`: tokens that it had at its admission, or has computed since.
    `generated`: those of its output that were computed before it lost its blocks."""

    is_admitted: bool
    decodes: bool
    computed: int
    blocks: int
    generated: int


class _Sequence:
    """A job in the engine. `context` tokens have KV, at decode step `joined` if it decodes."""

    __slots__ = (
        "blocks", "chunk", "computed", "context", "ends", "generated", "job", "joined",
        "published", "restored", "segments", "shared", "target",
    )  # fmt: skip

    def __init__(self, job: Job) -> None:
        self.job = job
        self.generated = job.generated
        self.restored = job.restored
        self.reset()

    def reset(self) -> None:
        self.target = self.job.prompt_tokens + self.generated
        self.computed = self.chunk = self.context = self.blocks = 0
        self.joined = self.ends = -1
        self.shared: tuple[int, ...] = ()
        self.segments = self.published = 0


class SimEngine:
    """One engine. Raises ValueError for settings or jobs that vLLM would refuse."""

    def __init__(self, config: EngineConfig, cost: StepCost) -> None:
        if config.max_tokens < config.max_seqs:
            raise ValueError("max_tokens below max_seqs: a step could not decode them all")
        self.config = config
        self.cost = cost
        self._reset()

    def _reset(self) -> None:
        self.kv = KvBlocks(self.config.kv_blocks, self.config.block_tokens)
        self.waiting: deque[_Sequence] = deque()
        self.running: dict[str, _Sequence] = {}
        self._most_running = self.config.max_seqs
        self.steps = 0
        """Number of steps, with each step of a run counted."""
        self.preemptions = 0
        self.busy_ns = 0
        """Time spent in completed steps."""
        self.last = Step()
        self.runs = Runs()
        """Number of completed steps that gave tokens."""
        self._held_ns: int | None = None
        self._prefilling: dict[str, _Sequence] = {}
        self._ending: list[tuple[int, int, _Sequence]] = []
        self._joins = 0
        self._decoded = 0
        self._decoding = 0
        self._context = 0
        self._begin_block = [0] * self.config.block_tokens
        self._gone: set[str] = set()
        # The current run: its start, steps, first duration, and increase per step.
        self._began = self._count = self._first = self._more = 0
        # Of its first duration, the pause; and how much of it followed another step.
        self._pause = self._gap = 0
        self._due: int | None = None
        self._owed = 0.0
        self._whole = False
        self.estimate = StepEstimate()

    @property
    def next_ns(self) -> int | None:
        """End of the current run; None: the engine is idle."""
        return self._due

    @property
    def load(self) -> int:
        """Jobs in the engine."""
        return len(self.waiting) + len(self.running)

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences that decode, and tokens of their KV, without what the current run adds."""
        return self._decoding, self._context

    @property
    def prompt_left(self) -> int:
        """Tokens of prompts that are not computed yet."""
        left = sum(sequence.target for sequence in self.waiting)
        return left + sum(s.target - s.computed for s in self._prefilling.values())

    def account_of(self, name: str) -> Account | None:
        """What a job has computed; None: it is not here. `advance` must have been called up to now."""
        sequence = self.running.get(name)
        if sequence is None:
            sequence = next((one for one in self.waiting if one.job.name == name), None)
        if sequence is None:
            return None
        decodes, generated = sequence.joined >= 0, sequence.generated - sequence.job.generated
        return Account(
            is_admitted=name in self.running,
            decodes=decodes,
            computed=sequence.target if decodes else sequence.computed,
            blocks=sequence.blocks + sequence.segments,
            generated=0 if decodes else generated,
        )

    def submit(self, job: Job, now_ns: int) -> list[JobEvent]:
        """Accept a job with a new name; `advance` must have been called up to
        `now_ns`.

        Raises ValueError if it can never fit.
        """
        most = job.prompt_tokens + job.output_tokens
        if not 0 <= job.generated < job.output_tokens or job.prompt_tokens < 1:
            raise ValueError(f"{job.name}: no prompt or nothing to generate")
        if self.kv.for_tokens(most) > self.kv.total:
            raise ValueError(f"{job.name}: {most} tokens do not fit {self.kv.total} blocks")
        self._line_up(_Sequence(job))
        events: list[JobEvent] = []
        if self._due is None:
            self._schedule(now_ns, events)
        elif self._may_admit():
            self._cut(now_ns)
        return events

    def _line_up(self, sequence: _Sequence) -> None:
        """Let it wait in its place."""
        waiting = self.waiting
        at = len(waiting)
        while at and waiting[at - 1].job.place > sequence.job.place:
            at -= 1
        waiting.insert(at, sequence)

    def abort(self, name: str, now_ns: int) -> bool:
        """Drop a job: at once if it waits, else after the current step. False: it is not here."""
        for sequence in self.waiting:
            if sequence.job.name == name:
                self.waiting.remove(sequence)
                return True
        if name not in self.running:
            return False
        self._gone.add(name)
        self._cut(now_ns)
        return True

    def kill(self, now_ns: int) -> dict[str, int]:
        """Die, and lose all jobs. Returns the number of tokens that each job's stream has by now,
        in the order of admission, then of arrival."""
        self._cut(now_ns)
        done = self._steps_by(now_ns) if self._due is not None else 0
        found = {
            name: s.generated + (self._decoded - s.joined + done if s.joined >= 0 else 0)
            for name, s in self.running.items()
            if name not in self._gone
        }
        found |= {s.job.name: s.generated for s in self.waiting}
        self._reset()
        return found

    def hold(self, now_ns: int) -> None:
        """Stand still in the current step; call `advance` first."""
        self._cut(now_ns)
        self._held_ns = now_ns

    def release(self, now_ns: int) -> None:
        """Continue after `hold`."""
        held, self._held_ns = self._held_ns, None
        if held is not None and self._due is not None:
            self._began += now_ns - held
            self._due += now_ns - held

    def paced(self, cost: StepCost, now_ns: int) -> None:
        """Use `cost` for the steps after the current one."""
        self._cut(now_ns)
        self.cost = cost

    @property
    def decoded(self) -> int:
        """Number of completed decode steps, without those of the current run."""
        return self._decoded

    @property
    def kv_used(self) -> int:
        """KV blocks that sequences hold, without those that the current run adds."""
        return self.kv.total - self.kv.available

    def running_run(self, now_ns: int) -> Run | None:
        """The completed part of the current run; None: there is no run."""
        if self._due is None or not self._decoding or self._held_ns is not None:
            return None
        if now_ns - self._began < self._first:
            return None
        steps = self._steps_by(now_ns)
        return Run(self._decoded, self._began, self._first, self._more, steps) if steps else None

    def under_way(self, now_ns: int) -> tuple[int, Step]:
        """Number of steps by now, and the last of them; counts those of a current decode-only run."""
        run = self.running_run(now_ns)
        if run is None or any(sequence.chunk for sequence in self._prefilling.values()):
            return self.steps, self.last
        context = self._context + self._decoding * run.count
        took_ns = run.took_ns(run.before + run.count)
        return self.steps + run.count, Step(took_ns, self._decoding, context)

    def progress(self, now_ns: int) -> tuple[int, int, int]:
        """Number of steps, age of the current one (0: none) and time spent in steps, ns."""
        if self._due is None:
            return self.steps, 0, self.busy_ns
        until = self._held_ns if self._held_ns is not None else now_ns
        done = min(self._steps_by(until), self._count - 1)
        spent = max(until - self._began - self._pause, 0)
        age = max(now_ns - self._began - self._took(done) - self._pause, 0)
        return self.steps + done, age, self.busy_ns + spent

    def expected_us(self) -> int:
        """The longest that the current step should take, by those before it; -1: unknown."""
        chunks = sum(sequence.chunk for sequence in self._prefilling.values())
        return self.estimate.of(chunks if self._due is not None else 0)

    def advance(self, now_ns: int) -> list[JobEvent]:
        """Simulate up to and including `now_ns`; returns the events in order."""
        events: list[JobEvent] = []
        if self._held_ns is not None:
            return events
        while self._due is not None and self._due <= now_ns:
            at = self._due
            self._apply(at, events)
            self._schedule(at, events)
        return events

    # --- a run ---------------------------------------------------------------------------

    def _steps_by(self, now_ns: int) -> int:
        """Number of the run's steps completed at `now_ns`: the greatest k with
        a k + b k (k - 1) / 2 <= now - began."""
        spent, a, b = now_ns - self._began, self._first, self._more
        if not b:
            return min(spent // a, self._count)
        linear = 2 * a - b
        steps = (isqrt(linear * linear + 8 * b * spent) - linear) // (2 * b)
        return min(steps, self._count)

    def _took(self, steps: int) -> int:
        return self._first * steps + self._more * (steps * (steps - 1) // 2)

    def _cut(self, now_ns: int) -> None:
        """End the run after the step that is current at `now_ns`."""
        if self._due is None or self._count == 1 or self._whole:
            return
        steps = self._steps_by(now_ns)
        if steps == self._count:
            return
        self._count = steps + 1
        self._due = self._began + self._took(steps + 1)

    def _apply(self, now_ns: int, events: list[JobEvent]) -> None:
        """The run is over: give every sequence its tokens."""
        count = self._count
        self.steps += count
        self.busy_ns += now_ns - self._began - self._pause
        decoding = self._decoding
        run = Run(self._decoded, self._began, self._first, self._more, count)
        if decoding:
            self.runs.add(run)
            self.kv.take(self._blocks_for(count))
        self._decoded += count
        self._context += decoding * count
        prompt = sum(sequence.chunk for sequence in self._prefilling.values())
        took_ns = now_ns - self._began if prompt else run.took_ns(self._decoded)
        self.last = Step(took_ns - self._pause, decoding, self._context, prompt, self._gap)
        self.estimate.learn((took_ns - self._pause) // 1000, prompt)
        while self._ending and self._ending[0][0] <= self._decoded:
            stands = self._stands(self._ending[0])
            _, _, sequence = heapq.heappop(self._ending)
            if stands:
                name = sequence.job.name
                self._leave(sequence)
                del self.running[name]
                self._gone.discard(name)
                events.append(
                    JobEvent(
                        what="finished", name=name, at_ns=now_ns, tokens=sequence.job.output_tokens
                    )
                )
        for name, sequence in list(self._prefilling.items()):
            if sequence.chunk:
                self._computed(name, sequence, now_ns, events)
        for name in sorted(self._gone):
            sequence = self.running.pop(name)
            self._leave(sequence)
            events.append(
                JobEvent(what="aborted", name=name, at_ns=now_ns, tokens=sequence.generated)
            )
        self._gone.clear()

    def _computed(
        self, name: str, sequence: _Sequence, now_ns: int, events: list[JobEvent]
    ) -> None:
        """A chunk of a prompt is computed."""
        sequence.computed += sequence.chunk
        events.append(
            JobEvent(
                what="chunk",
                name=name,
                at_ns=now_ns,
                tokens=sequence.computed,
                amount=sequence.chunk,
            )
        )
        sequence.chunk = 0
        self._publish(sequence)
        if sequence.computed < sequence.target:
            return
        del self._prefilling[name]
        sequence.generated += 1
        events.append(JobEvent(what="first", name=name, at_ns=now_ns, tokens=sequence.generated))
        if sequence.generated == sequence.job.output_tokens:
            self._leave(sequence)
            del self.running[name]
            self._gone.discard(name)
            events.append(
                JobEvent(what="finished", name=name, at_ns=now_ns, tokens=sequence.generated)
            )
            return
        sequence.context = sequence.computed
        sequence.joined = self._decoded
        sequence.ends = self._decoded + sequence.job.output_tokens - sequence.generated
        self._decoding += 1
        self._context += sequence.context
        self._begin_block[self._residue(sequence)] += 1
        self._joins += 1
        heapq.heappush(self._ending, (sequence.ends, self._joins, sequence))

    def _stands(self, entry: tuple[int, int, _Sequence]) -> bool:
        """Whether an end is still valid: its sequence may have been preempted or dropped."""
        ends, _, sequence = entry
        return sequence.ends == ends and self.running.get(sequence.job.name) is sequence

    def _residue(self, sequence: _Sequence) -> int:
        """Decode step, modulo block length, at which the sequence begins a block."""
        return (sequence.joined - sequence.context) % self.config.block_tokens

    def _blocks_for(self, steps: int) -> int:
        """Blocks that the next `steps` decode steps begin."""
        begin, length = self._begin_block, self.config.block_tokens
        whole, rest = divmod(steps, length)
        first = self._decoded % length
        beyond = max(first + rest - length, 0)
        return whole * self._decoding + sum(begin[first : first + rest]) + sum(begin[:beyond])

    def _leave(self, sequence: _Sequence) -> None:
        """Remove a running sequence: its blocks and its share of the sums."""
        private = sequence.blocks
        if sequence.joined >= 0:
            grown = self._decoded - sequence.joined
            context = sequence.context + grown
            self._context -= context
            self._decoding -= 1
            self._begin_block[self._residue(sequence)] -= 1
            private += self.kv.for_tokens(context) - self.kv.for_tokens(sequence.context)
            sequence.generated += grown
        else:
            self._prefilling.pop(sequence.job.name, None)
        self.kv.give(private)
        self.kv.leave(sequence.shared)

    # --- scheduling ----------------------------------------------------------------------

    def limit_batch(self, percent: int) -> None:
        """Run at most this share of its maximum number of requests at once."""
        self._most_running = max(self.config.max_seqs * percent // 100, 1)

    def _may_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self._most_running

    def _schedule(self, now_ns: int, events: list[JobEvent]) -> None:
        """Choose the next run, or become idle."""
        before = self.preemptions
        while self._spare() < 0:
            self._preempt(now_ns, events)
        left = max(self.config.max_tokens - self._decoding * self.cost.width, 0)
        for name, sequence in list(self._prefilling.items()):
            wanted = min(sequence.target - sequence.computed, left)
            while name in self._prefilling and self._spare() < self._chunk_blocks(sequence, wanted):
                self._preempt(now_ns, events)
            if name in self._prefilling:
                left -= self._chunk(sequence, left)
        preempted = self.preemptions > before
        if not preempted:
            while left > 0 and self._may_admit():
                taken = self._admit(left, now_ns, events)
                if not taken:
                    break
                left -= taken
        chunks = [(s.chunk, s.computed) for s in self._prefilling.values() if s.chunk]
        self._began, self._whole = now_ns, bool(chunks)
        self._pause = pause = self.cost.pause_ns
        self._gap = 0 if self._due is None else pause
        if chunks:
            self._count, self._more = self._given(), 0
            context = self._context + self._decoding
            took = pause + self.cost.step(chunks, self._decoding, context)
            self._first = took // self._count
        elif self._decoding:
            context = self._context + self._decoding
            self._first, self._more = self.cost.decode(self._decoding, context)
            self._first += pause
            self._count = 1 if preempted or pause else self._run_length()  # may admit again then
        else:
            self._due = None
            return
        self._due = now_ns + self._took(self._count)

    def _given(self) -> int:
        """Tokens that the next step, which has prompts, gives each decoding sequence."""
        if self.cost.given == 1 or not self._decoding:
            return 1
        self._owed += self.cost.given
        tokens = int(self._owed)
        self._owed -= tokens
        while tokens > 1 and self._blocks_for(tokens) > self.kv.available:
            tokens -= 1
        return tokens

    def _run_length(self) -> int:
        """Decode steps until a sequence ends, or blocks run out."""
        while not self._stands(self._ending[0]):
            heapq.heappop(self._ending)
        steps = self._ending[0][0] - self._decoded
        most = self.kv.available
        if self._blocks_for(steps) <= most:
            return steps
        low, high = 1, steps  # enough blocks for `low`, not for `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._blocks_for(middle) <= most else (low, middle)
        return low

    def _preempt(self, now_ns: int, events: list[JobEvent]) -> None:
        """Preempt the sequence admitted last; it is computed again later."""
        name, sequence = self.running.popitem()
        self._leave(sequence)
        sequence.reset()
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        events.append(
            JobEvent(what="preempted", name=name, at_ns=now_ns, tokens=sequence.generated)
        )

    def _chunk(self, sequence: _Sequence, left: int) -> int:
        """Give a prompt its next chunk, of at most `left` tokens, with its blocks, which must be
        available; returns the number of tokens."""
        sequence.chunk = min(sequence.target - sequence.computed, left)
        more = self._chunk_blocks(sequence, sequence.chunk)
        self.kv.take(more)
        sequence.blocks += more
        return sequence.chunk

    def _chunk_blocks(self, sequence: _Sequence, tokens: int) -> int:
        """Blocks that a prompt needs in addition to its own for further tokens."""
        held = sequence.blocks + sequence.segments
        return max(self.kv.for_tokens(sequence.computed + tokens) - held, 0)

    def _spare(self) -> int:
        """Blocks that decoding sequences do not begin in the next step."""
        return self.kv.available - self._begin_block[self._decoded % self.config.block_tokens]

    def _admit(self, left: int, now_ns: int, events: list[JobEvent]) -> int:
        """Admit the job that has waited longest if blocks for its first chunk are available;
        returns the tokens of that chunk; 0: it must wait."""
        sequence = self.waiting[0]
        job, length = sequence.job, self.config.block_tokens
        hit: tuple[int, ...] = ()
        if self.config.prefix_cache and job.prefix and job.prefix_block >= length:
            full = min(len(job.prefix), job.prompt_tokens // job.prefix_block)
            hit = job.prefix[: self.kv.held(job.prefix[:full])]
        # At least one token is computed, for the logits.
        cached = min(len(hit) * job.prefix_block, sequence.target - 1) // length * length
        cached = max(cached, min(sequence.restored, sequence.target - 1) // length * length)
        chunk = min(sequence.target - cached, left)
        spare = self._spare() - self.kv.idle_among(hit)
        sizes = len(hit) * (job.prefix_block // length)
        if self.kv.for_tokens(cached + chunk) - sizes > spare:
            return 0
        self.waiting.popleft()
        self.running[job.name] = self._prefilling[job.name] = sequence
        sequence.shared, sequence.published = hit, len(hit)
        sequence.segments = self.kv.use(hit)
        sequence.computed = cached
        sequence.restored = 0  # used once; after a preemption the tokens are computed
        events.append(
            JobEvent(
                what="admitted",
                name=job.name,
                at_ns=now_ns,
                tokens=sequence.generated,
                amount=cached,
            )
        )
        return self._chunk(sequence, left)

    def _publish(self, sequence: _Sequence) -> None:
        """Publish the prefix segments computed by now for other jobs."""
        job = sequence.job
        if not self.config.prefix_cache or not job.prefix:
            return
        size = job.prefix_block // self.config.block_tokens
        full = min(len(job.prefix), min(sequence.computed, job.prompt_tokens) // job.prefix_block)
        while size and sequence.published == len(sequence.shared) and sequence.published < full:
            segment = job.prefix[sequence.published]
            if not self.kv.publish(segment, size, sequence.published * size):
                return  # another job computed it meanwhile; this copy stays private
            sequence.shared = (*sequence.shared, segment)
            sequence.published += 1
            sequence.blocks -= size
            sequence.segments += size
