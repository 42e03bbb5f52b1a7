"""Times of tokens from runs of steps, against the same steps one by one."""

from random import Random

from relume.chaos.sim.engine.token_runs import Run, Runs


def test_times_are_those_of_steps_one_by_one():
    random = Random(3)
    for _ in range(200):
        runs, ends, at_ns, before = Runs(), [], 0, 0
        for _ in range(random.randrange(1, 7)):
            at_ns += random.randrange(50)  # a step for prompts only
            run = Run(
                before,
                at_ns,
                random.randrange(5, 30),
                random.randrange(3),
                random.choice((1, 2, 9)),
            )
            ends += [run.end_ns(step) for step in range(before + 1, before + run.count + 1)]
            before, at_ns = before + run.count, ends[-1]
            runs.add(run)
        took = [
            run.took_ns(s)
            for run in runs._all
            for s in range(run.before + 1, run.before + run.count + 1)
        ]
        assert runs.over_ns == ends[-1]
        now = None
        if random.random() < 0.5:  # the last one is still on its way
            now = runs._all.pop()
            runs.ends.pop(), runs._slowest.pop()
        first = random.randrange(1, before + 1)
        last = random.randrange(first, before + 1)
        expected = ends[first - 1], ends[last - 1], max(took[first:last], default=0)
        assert runs.times(first, last, now) == expected
        assert runs.times(first, before + 5, now)[1] == ends[-1]


def test_without_steps_there_are_no_times():
    assert Runs().times(1, 4, None) == (0, 0, 0)
    assert Runs().over_ns == 0
