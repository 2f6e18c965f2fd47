"""An import that dies in the middle, and goes on where it was.

python examples/import_orders.py --die-at 4     the process kills itself while item 4 is being loaded
python examples/import_orders.py                goes on: items that were finished are not loaded again
"""

import argparse
import asyncio
import os
import signal
from dataclasses import dataclass

from relight import Relight, flow, foreach, step

DIE_AT = -1


@dataclass
class Row:
    number: int
    text: str


@step
async def extract(source: str) -> list[Row]:
    print(f"extracting {source}", flush=True)
    return [Row(number, f"{source} {number}") for number in range(8)]


@step
async def transform(row: Row) -> str:
    return row.text.upper()


@step
async def load(number: int, text: str) -> int:
    print(f"loading {number}: {text}", flush=True)
    if number == DIE_AT:
        os.kill(os.getpid(), signal.SIGKILL)  # as a power cut would: nothing is cleaned up
    return len(text)


async def one_row(row: Row) -> int:
    return await load(row.number, await transform(row))


@flow
async def import_orders(source: str) -> int:
    rows = await extract(source)
    return sum(await foreach(rows, one_row))


async def main() -> None:
    async with Relight("import.db") as rl:
        # The same id: the second start of this program finds the run that the first one left behind.
        print("characters loaded:", await rl.run(import_orders.with_id("import-1"), "orders"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--die-at", type=int, default=-1, metavar="ITEM")
    DIE_AT = parser.parse_args().die_at
    asyncio.run(main())
