"""One process of one version: `python -m tests.upgrade.node STORE drive NAME` is an orchestrator; `… poke RUN` and `… pause RUN`
post a message to a run as that version does."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from relight import Relight
from tests.upgrade import flows

RECOVERY = {"lease_ttl": "2s", "check_interval": "500ms"}


async def main(store: str, what: str, name: str) -> None:
    assert flows
    if what == "drive":
        options: dict[str, Any] = {"recovery": RECOVERY, "checkpoint": {"every": 6}, "park_after": "50ms"}
        async with Relight(store, orchestrator_id=name, **options) as rl:
            print("ready", flush=True)
            await rl.signalled()
        return
    async with Relight(store, drive=False, migrate=False) as rl:
        run: Any = await rl.get(name)
        await (run.poke("go") if what == "poke" else run.pause())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
