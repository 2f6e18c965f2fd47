"""Orchestrators that share the work of one store, and a client that starts it.

python examples/orchestrator.py one & python examples/orchestrator.py two &    # until SIGTERM; try kill -9 on one
python examples/orchestrator.py --client

On one machine they may share a SQLite file; RELIGHT_STORE=postgresql://… makes it many machines.
"""

import argparse
import asyncio
import os

from prometheus_client import start_http_server

from relight import Relight, flow, foreach, step

STORE = os.environ.get("RELIGHT_STORE", "orchestrator.db")


@step
async def resize(image: str) -> str:
    await asyncio.sleep(0.05)
    return f"{image} (small)"


@flow
async def album(images: list[str]) -> list[str]:
    small: list[str] = await foreach(images, resize, concurrency=2)
    return small


async def drive(name: str, port: int) -> None:
    """A whole orchestrator: it takes up what is due or orphaned, until SIGTERM or SIGINT, and then stops gracefully."""
    async with Relight(STORE, orchestrator_id=name, recovery={"lease_ttl": "10s"}) as rl:
        if port:
            start_http_server(port, "127.0.0.1", rl.metrics.registry)
        print(f"{name} drives runs", flush=True)
        await rl.signalled()
    print(f"{name} has stopped", flush=True)


async def start() -> None:
    """A client: it owns nothing and drives nothing, so it may come and go."""
    async with Relight(STORE, drive=False) as rl:
        runs = [await rl.start(album.with_id(f"album-{n}"), [f"{n}.jpg", f"{n}b.jpg"]) for n in range(4)]
        for run in runs:
            print(f"{run.id}: {', '.join(await run.result(timeout='1m'))}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "name", nargs="?", default="one", help="of this orchestrator; its own, and the same after a restart"
    )
    parser.add_argument("--client", action="store_true", help="start runs, wait for them, and drive none")
    parser.add_argument("--metrics", type=int, default=0, metavar="PORT", help="serve metrics for Prometheus")
    arguments = parser.parse_args()
    asyncio.run(start() if arguments.client else drive(arguments.name, arguments.metrics))


if __name__ == "__main__":
    main()
