"""absurd on PostgreSQL: `absurdctl init`, then its async client.

One client has one connection, which does one thing at a time: so several workers work on the queue, each with a client of its
own (eight and four were about equal at 50 tasks at once, two and one slower). That the tasks are done is read from its table,
one small query every few milliseconds, instead of asking for each of them.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

from absurd_sdk import AsyncAbsurd  # type: ignore[import-not-found]  # in the bench extra only
from psycopg import AsyncConnection  # type: ignore[import-not-found]

WORKERS = 8
TASKS_PER_WORKER = 16
POLL_SECONDS = 0.01  # of its workers for tasks (default 0.25), and of ours for the end


async def _noop() -> int:
    return 1


async def _steps(parameters: Any, context: Any) -> int:
    for i in range(parameters["steps"]):
        await context.step(f"noop-{i}", _noop)
    return int(parameters["steps"])


def initialise(url: str, binaries: str) -> None:
    """absurdctl works through psql."""
    environment = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", "import sys, absurdctl; sys.argv[0] = 'absurdctl'; absurdctl.main()"]
    for arguments in (["init", "-d", url], ["create-queue", "-d", url, "default"]):
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def client(url: str) -> AsyncAbsurd:
    app = AsyncAbsurd(url)
    app.register_task(name="steps")(_steps)
    return app


def throughput(url: str, binaries: str, runs: int, steps: int, rounds: int, workers: int = WORKERS) -> dict[str, Any]:
    initialise(url, binaries)

    async def main() -> float:
        apps = [client(url) for _ in range(workers)]
        working = [
            asyncio.create_task(app.start_worker(concurrency=TASKS_PER_WORKER, poll_interval=POLL_SECONDS))
            for app in apps
        ]
        starters = [client(url) for _ in range(workers)]
        async with await AsyncConnection.connect(url, autocommit=True) as looking:
            await _at_once(starters, looking, 5, steps)
            began = time.perf_counter()
            for _ in range(rounds):
                await _at_once(starters, looking, runs, steps)
            seconds = time.perf_counter() - began
        for app in apps:
            app.stop_worker()
        await asyncio.gather(*working)
        for app in (*apps, *starters):
            await app.close()
        return seconds

    return {"seconds": asyncio.run(main()), "steps": runs * steps * rounds}


async def _at_once(starters: list[AsyncAbsurd], looking: AsyncConnection[Any], runs: int, steps: int) -> None:
    before = await _completed(looking)

    async def start(app: AsyncAbsurd, share: int) -> None:
        for _ in range(share):
            await app.spawn("steps", {"steps": steps})

    shares = [len(range(first, runs, len(starters))) for first in range(len(starters))]
    await asyncio.gather(*(start(app, share) for app, share in zip(starters, shares, strict=True)))
    while await _completed(looking) < before + runs:  # noqa: ASYNC110 - seen from outside
        await asyncio.sleep(POLL_SECONDS)


async def _completed(looking: AsyncConnection[Any]) -> int:
    cursor = await looking.execute("SELECT count(*) FROM absurd.t_default WHERE state = 'completed'")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
