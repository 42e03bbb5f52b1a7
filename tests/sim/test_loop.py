"""Virtual time and processes that die and stand still."""

import asyncio
import gc
import os
import random
import sys
import time
import uuid

import pytest

from relume.chaos.sim.world.virtual_loop import Late, Stuck, VirtualLoop, current


@pytest.fixture
def loop():
    made = VirtualLoop(seed=7)
    yield made
    made.close()


def test_an_hour_passes_at_once_and_clocks_agree(loop):
    async def main():
        before, wall, mono = time.perf_counter_ns(), time.time(), time.monotonic()
        await asyncio.sleep(3600)
        assert time.time() - wall == pytest.approx(3600)
        assert time.monotonic() - mono == pytest.approx(3600)
        return time.perf_counter_ns() - before

    began = time.perf_counter()
    assert loop.run(main()) == 3600 * 10**9
    assert time.perf_counter() - began < 60


def test_clocks_are_the_machines_again_afterwards(loop):
    async def main():
        return time.time()

    simulated = loop.run(main())
    assert time.time() - simulated > 1e6


def test_a_killed_process_never_runs_again_not_even_its_finally(loop):
    seen = []

    async def work():
        try:
            while True:
                await asyncio.sleep(1)
                seen.append(loop.time())
        finally:
            seen.append("finally")

    async def main():
        process = loop.process("w0")
        process.spawn(work())
        await asyncio.sleep(2.5)
        process.kill()
        await asyncio.sleep(10)

    loop.run(main())
    assert seen == [1, 2]


def test_a_stopped_process_does_late_what_became_due(loop):
    seen = []

    async def work():
        for _ in range(4):
            await asyncio.sleep(1)
            seen.append(round(loop.time(), 3))

    async def main():
        process = loop.process("w0")
        process.spawn(work())
        await asyncio.sleep(1.5)
        process.stop()
        await asyncio.sleep(5)
        process.go_on()
        await asyncio.sleep(5)

    loop.run(main())
    assert seen == [1, 6.5, 7.5, 8.5]


def test_tasks_made_by_a_process_belong_to_it(loop):
    async def child():
        return current().name, os.getpid()

    async def work():
        return await asyncio.create_task(child())

    async def main():
        processes = [loop.process("r0"), loop.process("r1")]
        return [await process.spawn(work()) for process in processes]

    (one, first), (two, second) = loop.run(main())
    assert (one, two) == ("r0", "r1")
    assert first != second


def test_a_wall_clock_jumps_for_its_own_process_only(loop):
    async def wall():
        return time.time()

    async def main():
        process = loop.process("w0")
        process.clock_s = 100
        return await process.spawn(wall()) - time.time(), time.monotonic()

    assert loop.run(main()) == (100, 0)


def test_equal_seeds_give_equal_randomness():
    def draw(seed):
        async def main():
            return random.random(), os.urandom(4), uuid.uuid4().hex

        loop = VirtualLoop(seed)
        try:
            return loop.run(main())
        finally:
            loop.close()

    assert draw(1) == draw(1) != draw(2)


def test_waiting_for_what_never_comes_is_an_error(loop):
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        loop.run(main())


def test_a_run_has_a_limit(loop):
    async def main():
        while True:
            await asyncio.sleep(1)

    with pytest.raises(Late):
        loop.run(main(), until_s=10)


def test_an_unhandled_exception_is_the_runs(loop):
    def broken():
        raise ValueError("here")

    async def main():
        asyncio.get_running_loop().call_later(1, broken)
        await asyncio.sleep(2)

    with pytest.raises(ValueError, match="here"):
        loop.run(main())


def test_what_is_left_of_a_closed_loop_says_nothing_when_it_is_collected(loop, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    async def clean():
        try:
            await asyncio.sleep(100)
        finally:
            asyncio.get_running_loop().call_soon(print)
            await asyncio.sleep(1)
            await asyncio.sleep(1)

    async def main():
        dead = loop.process("dead")
        dead.spawn(clean())
        loop.process("living").spawn(clean())
        await asyncio.sleep(1)
        dead.kill()

    loop.run(main())
    loop.close()
    gc.collect()
    assert not told
