"""A process whose system calls fail, because the test makes them fail from outside: `python -m tests.crash.faulty_child
FILE LEDGER`.

It runs ten steps and prints, one JSON object per line, what its caller sees: the fault when there is one, and the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from relight import Relight, StoreUnavailableError, flow, step
from relight.testing.ledger import effect, open_ledger


@step
async def faulty_child_step(number: int) -> int:
    with effect():
        return number


@flow
async def faulty_child_flow() -> list[int]:
    return [await faulty_child_step(number) for number in range(10)]


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def main(file: str) -> None:
    async with Relight(file) as rl:
        run = await rl.start(faulty_child_flow.with_id("run"))
        say(accepted=run.id)
        ended = asyncio.create_task(run.result())
        while not ended.done() and rl.fault is None:  # noqa: ASYNC110 - the fault has no event to wait for
            await asyncio.sleep(0.001)
        if rl.fault is not None:
            say(fault=rl.fault)
            try:
                await rl.start(faulty_child_flow.with_id("other"))
            except StoreUnavailableError as error:
                say(refused=str(error))
            try:
                await run.result(timeout="20ms")
            except TimeoutError as error:
                say(late=str(error))
        say(result=await ended, fault=rl.fault)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    open_ledger(Path(sys.argv[2]), 1)
    asyncio.run(main(sys.argv[1]))
