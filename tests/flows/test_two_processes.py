"""Two processes on one SQLite file: one drives a run, and the other sends it messages or takes it over."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relight import Relight, RunCancelledError, RunNotFoundError
from relight.backends.none import NoLeases
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_CLOCK
from relight.model.run import Status
from tests.flows import two_processes_child as flows
from tests.flows.world import until

CHILD = Path(flows.__file__)
LOCKED = "database is locked"


class Child:
    """The other process, and the lines that it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []
        self.logged = ""
        self._readers = [asyncio.create_task(self._hear()), asyncio.create_task(self._read_log())]

    async def _hear(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.said.append(line.decode().strip())

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.logged += line.decode()

    async def says(self, line: str) -> None:
        def heard() -> bool:
            assert self.process.returncode is None or line in self.said, f"it has ended: {self.said} {self.logged}"
            return line in self.said

        await until(heard)

    async def logs(self, text: str) -> None:
        await until(lambda: text in self.logged)

    async def ended(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 60)
        await asyncio.gather(*self._readers)
        return code

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.ended()


class Stage:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "relight.db"
        self.ledger = folder / "ledger"
        self.gate = folder / "gate"
        self.children: list[Child] = []

    async def child(self, role: str, *arguments: object) -> Child:
        root = CHILD.parents[2]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(CHILD),
            role,
            str(self.path),
            *map(str, arguments),
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self.children.append(Child(process))
        return self.children[-1]

    def effects(self) -> Counter[str]:
        """What steps have done, in both processes."""
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return Counter(line.split()[0] for line in lines)

    async def until_waiting(self, run: Any) -> None:
        async def waiting() -> bool:
            return await run.status() is Status.WAITING

        await until(waiting)


@pytest.fixture
async def stage(tmp_path: Path, registry: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """A folder, and this process as one of the two. It knows the same flows."""
    made = Stage(tmp_path)
    for flow in (flows.asking, flows.guarded, flows.busy):
        registry.add(flow)
    monkeypatch.setattr(flows, "LEDGER", made.ledger)
    monkeypatch.setattr(flows, "GATE", made.gate)
    yield made
    for child in made.children:
        await child.end()


async def test_one_process_signals_and_awaits_a_run_that_another_drives(stage: Stage):
    child = await stage.child("drive", "asking-1")
    await child.says("started")
    async with Relight(stage.path, recovery_enabled=False) as rl:
        run = await rl.get("asking-1")
        await stage.until_waiting(run)
        owner = (await run.describe()).owner
        assert owner is not None
        result = asyncio.create_task(run.result(timeout="60s"))
        await run.signal("go", 10)
        assert await result == 13
        assert await run.result(timeout="60s") == 13  # a finished run at once
    await child.says("result asking-1 13")
    assert await child.ended() == 0
    assert stage.effects() == {"asking-1.1": 1, "asking-1.2": 1}
    assert LOCKED not in child.logged
    assert "[RUN_FENCED]" not in child.logged


async def test_one_process_cancels_a_run_that_another_drives(stage: Stage):
    child = await stage.child("drive", "asking-1", "guarded-1")
    await child.says("started")
    await until(lambda: stage.effects()["guarded-1.hang"])
    async with Relight(stage.path, recovery_enabled=False) as rl:
        for run_id in ("asking-1", "guarded-1"):
            run = await rl.get(run_id)
            await run.cancel("we changed our mind")
            with pytest.raises(RunCancelledError, match="we changed our mind"):
                await run.result(timeout="60s")
    await child.says("cancelled asking-1 we changed our mind")
    await child.says("cancelled guarded-1 we changed our mind")
    assert await child.ended() == 0
    assert "guarded-1.2" not in stage.effects()


async def test_one_process_pauses_and_resumes_a_run_that_another_drives(stage: Stage):
    child = await stage.child("drive", "asking-1")
    await child.says("started")
    async with Relight(stage.path, recovery_enabled=False) as rl:
        run = await rl.get("asking-1")
        await stage.until_waiting(run)
        await run.pause()

        async def paused() -> bool:
            return await run.status() is Status.PAUSED

        await until(paused)
        await run.signal("go", 10)
        assert await run.status() is Status.PAUSED
        await run.resume()
        assert await run.result(timeout="60s") == 13
    await child.says("result asking-1 13")
    assert stage.effects() == {"asking-1.1": 1, "asking-1.2": 1}


async def test_a_run_that_is_not_there_is_not_found_by_either(stage: Stage):
    child = await stage.child("drive", "asking-1")
    await child.says("started")
    async with Relight(stage.path, recovery_enabled=False) as rl:
        with pytest.raises(RunNotFoundError):
            await rl.get("asking-2")
        assert [row.id for row in (await rl.list()).runs] == ["asking-1"]


class Alone(NoLeases):
    """With these leases a process assumes that it is alone. Only the epoch protects the runs."""

    name = "store"


async def test_a_second_process_takes_the_runs_over_and_the_first_is_fenced(stage: Stage):
    child = await stage.child("drive", "guarded-1", "asking-1")
    await child.says("started")
    await until(lambda: stage.effects()["guarded-1.hang"])
    store = SqliteStore(stage.path, clock=SYSTEM_CLOCK)
    async with Relight(store=store, lease_manager=Alone()) as rl:
        await until(lambda: stage.effects()["guarded-1.hang"] == 2)  # in flight there: repeated here, once
        run = await rl.get("guarded-1")
        owner = (await run.describe()).owner
        assert owner == rl.services.owner
        before = await rl.services.store.latest_sequence("guarded-1")
        stage.gate.touch()  # both processes finish the step, but only one may record it
        assert await run.result(timeout="60s") == "hung"
        await child.logs("[RUN_FENCED] run guarded-1: another owner has claimed it")
        assert (await run.describe()).owner in (owner, None)
        asking = await rl.get("asking-1")
        await asking.signal("go", 10)
        assert await asking.result(timeout="60s") == 13
        entries = (await rl.services.store.read_from("guarded-1", before, 100)).entries
        assert len(entries) == 3  # hang, work, the run's end: all from here
    await child.says("result guarded-1 hung")
    await child.says("result asking-1 13")
    assert await child.ended() == 0
    effects = stage.effects()
    assert (effects["guarded-1.1"], effects["guarded-1.2"]) == (1, 1)
    assert (effects["asking-1.1"], effects["asking-1.2"]) == (1, 1)
    mine = [line for line in stage.ledger.read_text().splitlines() if line.endswith(f" {os.getpid()}")]
    assert f"guarded-1.2 {os.getpid()}" in mine


async def test_a_killed_process_leaves_its_runs_to_the_next(stage: Stage):
    child = await stage.child("drive", "guarded-1", "asking-1")
    await child.says("started")
    await until(lambda: stage.effects()["guarded-1.hang"] and stage.effects()["asking-1.1"])
    child.process.kill()
    await child.ended()
    stage.gate.touch()
    async with Relight(stage.path) as rl:
        assert await (await rl.get("guarded-1")).result(timeout="60s") == "hung"
        await (await rl.get("asking-1")).signal("go", 1)
        assert await (await rl.get("asking-1")).result(timeout="60s") == 4
    assert stage.effects()["guarded-1.hang"] == 2
    assert stage.effects()["guarded-1.1"] == stage.effects()["guarded-1.2"] == 1


async def test_heavy_load_from_both_is_never_refused(stage: Stage, caplog: pytest.LogCaptureFixture):
    runs, steps = 30, 15
    child = await stage.child("hammer", "there-", runs, steps)
    async with Relight(stage.path, recovery_enabled=False) as rl:
        handles = [await rl.start(flows.busy.with_id(f"here-{n}"), f"here-{n}", steps) for n in range(runs)]
        for _ in range(20):
            await rl.list(limit=100)
        results = await asyncio.gather(*(run.result(timeout="60s") for run in handles))
        assert results == [sum(range(steps))] * runs
        await child.says(f"done {runs}")
        page = await rl.list(status="completed", limit=1000)
        assert len(page.runs) == 2 * runs
    assert await child.ended() == 0
    for log in (child.logged, caplog.text):
        assert LOCKED not in log
        assert "[COMMIT_FAILED]" not in log
        assert "[RUN_FENCED]" not in log
    effects = stage.effects()
    assert len(effects) == 2 * runs * steps
    assert set(effects.values()) == {1}
