"""The pool of threads: every slot comes back, and no job that was given to a thread is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading

import pytest

from relight.execution.thread_pool import Job, Threads
from tests.flows.world import until


async def test_a_slot_that_came_for_a_waiter_that_no_longer_waits_is_given_back():
    pool = Threads(asyncio.get_running_loop(), 1)
    first = await pool.slot()
    waiting = asyncio.create_task(pool.slot())
    await until(lambda: pool.wanted == 1)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    first.release()
    await until(lambda: pool.in_use == 0)
    async with asyncio.timeout(60):
        await pool.slot()


async def test_a_slot_that_comes_in_the_moment_of_a_cancellation_is_given_back():
    pool = Threads(asyncio.get_running_loop(), 1)
    first = await pool.slot()
    waiting = asyncio.create_task(pool.slot())
    await until(lambda: pool.wanted == 1)
    first.release()
    await asyncio.sleep(0)  # the slot is given, and the waiter has not gone on yet
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await waiting).release()
    assert pool.in_use == 0


def test_a_job_that_is_handed_to_a_thread_which_is_about_to_end_is_done(monkeypatch: pytest.MonkeyPatch):
    idle, handed_over = threading.Event(), threading.Event()

    class Late(queue.SimpleQueue[Job]):
        """A queue whose wait times out only after a job was put into it."""

        def get(self, block: bool = True, timeout: float | None = None) -> Job:
            if timeout is None:
                return super().get()
            idle.set()
            assert handed_over.wait(60)
            raise queue.Empty

    monkeypatch.setattr(queue, "SimpleQueue", Late)
    loop = asyncio.new_event_loop()
    pool, done = Threads(loop, 2), threading.Event()
    pool.start(Job(pool, lambda: None, None, "the first"))
    assert idle.wait(60)
    pool.start(Job(pool, done.set, None, "the second"))
    handed_over.set()
    assert done.wait(60)
    loop.close()
