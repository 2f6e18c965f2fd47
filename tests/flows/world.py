"""The world of a behaviour test: one store, a clock that the test advances, and engines that close, crash and come back."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import apsw
import msgspec
import pytest

from relight import Handle, Relight, Run
from relight.backends.memory import MemoryStore
from relight.backends.postgres import PostgresStore
from relight.backends.sqlite.store import SqliteStore
from relight.clock import SYSTEM_ENTROPY
from relight.execution.body_tasks import Body
from relight.flow.registry import REGISTRY
from relight.model.journal import AnyEvent, Journal, decode_event
from relight.model.replay import TreeState, restore
from relight.model.run import News
from relight.process import mark_dead
from relight.run import leaving
from relight.run.phase import Phase
from relight.supervisor import Supervisor
from relight.testing.clock import FakeClock
from tests.servers.postgres import PostgresServer

_schemas = itertools.count(1)

DEADLINE_SECONDS = 60.0  # of every wait of a test; generous, since a test waits for so long only if it fails


async def until(condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> Any:
    """Call the condition again and again until its result is true, and return the result. Fail after the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f}s in vain for: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(0.001)


class MortalStore:
    """A store as one process sees it. When that process is dead, its calls have no effect any more."""

    def __init__(self, inner: Any, slow: dict[str, int]) -> None:
        self.inner = inner
        self.lanes = inner.lanes
        self.slow = slow
        self.dead = False

    def watch(self, changed: Callable[[News], None], supervisor: Supervisor | None = None) -> None:
        self.inner.watch(lambda news: None if self.dead else changed(news), supervisor)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        async def mortal(*args: Any, **kwargs: Any) -> Any:
            self._check()
            for _ in range(self.slow.get(name, 0)):
                await asyncio.sleep(0)
            result = await method(*args, **kwargs)
            self._check()  # the process died while the store worked: perhaps it has written, but the answer is lost
            return result

        return mortal

    def _check(self) -> None:
        if self.dead:
            raise asyncio.CancelledError


class WithoutClock(PostgresStore):
    """A store that does not tell the server's time: the world's clock decides, which tests advance."""

    async def now(self) -> None:  # type: ignore[override]
        return None


class FixedEntropy:
    """Ids are new each time. `random` returns the same number each time."""

    def __init__(self, number: float = 0.5) -> None:
        self.number = number

    def run_id(self) -> str:
        return SYSTEM_ENTROPY.run_id()

    def uuid(self) -> UUID:
        return SYSTEM_ENTROPY.uuid()

    def random(self) -> float:
        return self.number


class World:
    """One store (`kind` is "memory", "sqlite" or "postgres"), and the engines that a test opens on it, one after the other."""

    def __init__(self, kind: str, folder: Path, server: PostgresServer | None = None) -> None:
        self.kind = kind
        self.server = server
        self.schema = f"world_{next(_schemas)}"
        self.path = folder / "relight.db"
        self.clock = FakeClock()
        self.entropy = FixedEntropy()
        self.slow: dict[str, int] = {}  # methods of the store, and how many turns of the loop longer they take
        self.trouble: list[str] = []  # what the event loop complained about: lost exceptions, lost tasks
        self._memory = MemoryStore(clock=self.clock)
        self._engines: dict[Relight, MortalStore] = {}
        self._config: dict[str, Any] = {}
        self._current: Relight | None = None

    @property
    def rl(self) -> Relight:
        """The engine that was opened last."""
        assert self._current is not None, "open one first"
        return self._current

    async def open(self, **config: Any) -> Relight:
        """Open an engine on the store. Other open engines go on beside it."""
        store = MortalStore(self._store(), self.slow)
        rl = Relight(store=store, clock=self.clock, entropy=self.entropy, **config)  # type: ignore[arg-type]
        asyncio.get_running_loop().set_exception_handler(self._on_trouble)
        await rl.open()
        self._engines[rl] = store
        self._current, self._config = rl, config
        return rl

    def _store(self) -> Any:
        if self.kind == "memory":
            return self._memory
        if self.server is not None:
            return WithoutClock(self.server.url(), clock=self.clock, schema=self.schema)
        return SqliteStore(self.path, clock=self.clock)

    async def close(self, rl: Relight | None = None) -> None:
        """End an engine gracefully."""
        engine = rl or self.rl
        del self._engines[engine]
        await engine.close()

    async def crash(self, rl: Relight | None = None) -> None:
        """End an engine like a process that dies: from now on it cannot reach the store, and all its code has ended.

        (The code ends by cancellation, so plain `finally` blocks run. A thread in a step's body goes on, and its
        outcome is ignored.)
        """
        engine = rl or self.rl
        store = self._engines.pop(engine)
        store.dead = True
        services, orchestrator = engine.services, engine.orchestrator
        orchestrator.memory.stopping = True
        services.heartbeats.stop_now()
        mark_dead(services.owner)
        with contextlib.suppress(ValueError):
            REGISTRY.unlisten(orchestrator.waker.flow_registered)
        tasks: list[asyncio.Task[Any]] = [*services.background._tasks, *services.bodies.tasks]
        for run in orchestrator.live.values():
            run.writer.drop()  # whatever its last commit does, nothing follows from it
            run.stopping, run.phase = "crashed", Phase.LEAVING
            leaving.stop_bodies(run)
            run.loop.unwind("crashed")
            run.turns.unwind("crashed")
        for work in services.bodies.queue:
            if isinstance(work, Body):
                work.drop()  # otherwise Python warns in a later test that it was never awaited
        services.bodies.queue.clear()
        for task in tasks:
            task.cancel()
        await services.supervisor.stop()
        left = {task for task in tasks if not task.done()}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (
            left and time.monotonic() < deadline
        ):  # more than once: code in a thread ends only if it is cancelled again
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=0.05)
        await store.inner.close()
        services.watch.stop()
        engine._services = engine._orchestrator = engine._recovery = None

    async def crash_and_reopen(self, **config: Any) -> Relight:
        await self.crash()
        return await self.open(**{**self._config, **config})

    async def close_and_reopen(self, **config: Any) -> Relight:
        await self.close()
        return await self.open(**{**self._config, **config})

    async def end(self) -> None:
        for engine in list(self._engines):
            # Closing does not wait for steps that a test has left under way.
            engine.config = msgspec.structs.replace(engine.config, shutdown_grace_seconds=0.0)
            await self.close(engine)
        # Because of the handler, the engines would outlive the test. The garbage collector would go through a thousand of them.
        asyncio.get_running_loop().set_exception_handler(None)
        assert not self.trouble, self.trouble

    def _on_trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.trouble.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ---- what the store has

    async def row(self, run_id: str) -> Run:
        return await self.rl.row(run_id)

    async def is_(self, status: str, run: Handle[Any]) -> bool:
        return await run.status() == status

    async def until_status(self, status: str, run: Handle[Any]) -> Run:
        await until(lambda: self.is_(status, run))
        return await self.row(run.id)

    async def asleep(self, run: Handle[Any]) -> Run | None:
        """The run's row, if it waits for a time that has not come."""
        row = await self.row(run.id)
        due = row.wake_at or 0.0
        return row if row.status == "waiting" and due > self.clock.now() else None

    async def park(self, run: Handle[Any]) -> Run:
        """Wait until the run waits. Then let time pass until it has left memory."""
        await until(lambda: self.is_("waiting", run))
        await until(lambda: self._parked(run))
        return await self.row(run.id)

    async def _parked(self, run: Handle[Any]) -> bool:
        live = self.rl.orchestrator.live.get(run.id)
        if live is not None:
            if live.departure.park_armed:  # otherwise it is leaving, and others would fall due meanwhile
                self.clock.advance(self.rl.config.park_after_seconds)
            return False
        return (await self.row(run.id)).owner is None

    async def journal(self, run_id: str) -> Journal:
        (journal,) = await self.rl.services.store.read([run_id])
        assert isinstance(journal, Journal)
        return journal

    async def events(self, run_id: str) -> list[AnyEvent]:
        return [decode_event(entry.event) for entry in (await self.journal(run_id)).entries]

    async def state(self, run_id: str) -> TreeState:
        return restore(await self.journal(run_id))

    async def recorded(self, run_id: str) -> list[str]:
        """The keys of the operations that have ended in a run, in the order of its journal."""
        return list((await self.state(run_id)).outcomes)

    def rows_in(self, table: str) -> int:
        """How many rows a table of the store has: "runs", "journal" or "blobs"."""
        if self.kind == "memory":
            memory = self._memory
            return {
                "runs": len(memory.runs),
                "journal": sum(len(tree.entries) for tree in memory.trees.values()),
                "blobs": len(memory._blobs),
            }[table]
        if self.server is not None:
            return int(self.server.sql(f"SELECT count(*) FROM {self.schema}.{table}"))
        # apsw and not sqlite3: two SQLite libraries in one process would drop each other's file locks.
        with contextlib.closing(apsw.Connection(str(self.path))) as db:
            count: Any = db.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]
            return int(count)

    def remembered(self, run_id: str) -> int:
        """Of how many signals that the run has taken the store still knows the dedup."""
        if self.kind == "memory":
            return len(self._memory.trees[run_id].by_dedup)
        where = f"consumed AND run = (SELECT key FROM %s WHERE id = '{run_id}')"
        if self.server is not None:
            return int(
                self.server.sql(f"SELECT count(*) FROM {self.schema}.inbox WHERE {where % f'{self.schema}.runs'}")
            )
        with contextlib.closing(apsw.Connection(str(self.path))) as db:
            count: Any = db.execute(f"SELECT count(*) FROM inbox WHERE {where % 'runs'}").fetchall()[0][0]
            return int(count)

    def damage(self, run_id: str, sequence: int, data: bytes = b'["step"') -> None:
        """Overwrite an entry of a journal, as a failing disk would."""
        if self.kind == "memory":
            tree = self._memory.trees[run_id]
            tree.entries[sequence - tree.base - 1].data = data
        elif self.server is not None:
            self._update("journal", "event", data, f"sequence = {sequence} AND ", run_id)
        else:
            self._execute(
                "UPDATE journal SET event = ? WHERE sequence = ? AND run = (SELECT key FROM runs WHERE id = ?)",
                (data, sequence, run_id),
            )

    def lose(self, run_id: str, sequence: int) -> None:
        """Delete an entry from the middle of a journal. Not in memory: a list has no gaps."""
        if self.server is not None:
            self._on_server(f"DELETE FROM {self.schema}.journal WHERE sequence = {sequence} AND ", run_id)
        else:
            self._execute(
                "DELETE FROM journal WHERE sequence = ? AND run = (SELECT key FROM runs WHERE id = ?)",
                (sequence, run_id),
            )

    def lose_blobs(self, spoilt: bytes | None = None) -> None:
        """Delete all blobs of the store, or give all of them this content, whatever their digest is."""
        if self.kind == "memory":
            blobs = self._memory._blobs
            for digest in list(blobs):
                if spoilt is None:
                    del blobs[digest]
                else:
                    blobs[digest] = spoilt
        elif self.server is not None:
            table = f"{self.schema}.blobs"
            data = f"'\\x{(spoilt or b'').hex()}'::bytea"
            self.server.sql(f"DELETE FROM {table}" if spoilt is None else f"UPDATE {table} SET data = {data}")
        else:
            with contextlib.closing(apsw.Connection(str(self.path))) as db:
                db.set_busy_timeout(5000)
                if spoilt is None:
                    db.execute("DELETE FROM blobs")
                else:
                    db.execute("UPDATE blobs SET data = ?", (spoilt,))

    def _update(self, table: str, column: str, data: bytes, where: str, run_id: str) -> None:
        value = f"'\\x{data.hex()}'::bytea"
        self._on_server(f"UPDATE {self.schema}.{table} SET {column} = {value} WHERE {where}", run_id)

    def _on_server(self, statement: str, run_id: str) -> None:
        """Execute a statement on exactly one row of a run."""
        assert self.server is not None
        run = f"(SELECT key FROM {self.schema}.runs WHERE id = '{run_id}')"
        assert self.server.sql(f"{statement}run = {run} RETURNING 1") == "1"

    def damage_checkpoint(self, run_id: str, data: bytes = b"{") -> None:
        if self.kind == "memory":
            state = self._memory.trees[run_id].state
            assert state is not None
            state.data = data
        elif self.server is not None:
            self._update("checkpoints", "state", data, "", run_id)
        else:
            self._execute(
                "UPDATE checkpoints SET state = ? WHERE run = (SELECT key FROM runs WHERE id = ?)", (data, run_id)
            )

    def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        with contextlib.closing(apsw.Connection(str(self.path))) as db:
            db.set_busy_timeout(5000)
            db.execute(statement, values).fetchall()
            assert db.changes() == 1
