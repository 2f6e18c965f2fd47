"""Two versions of Relight on one store, in real processes. They take runs from each other in both directions. The older version
leaves to the newer what it does not understand."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import relight
from relight import Handle, Relight, Run, Status
from relight.model.run import Hold
from tests import shown_passwords
from tests.recovery.engines import make_database
from tests.upgrade import flows, newer

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 90.0  # a test waits for so long only if it fails
_schemas = itertools.count(1)

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("rolling-upgrade")]  # all these tests share a build


@pytest.fixture(scope="module")
def newer_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return newer.build(tmp_path_factory.mktemp("newer"))


class Stage:
    """A store, and the processes of both versions on it."""

    def __init__(self, folder: Path, store: str, newer_build: Path, environ: dict[str, str]) -> None:
        self.store = store
        self.folder = folder
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self._builds = {"older": Path(relight.__file__).parents[1], "newer": newer_build}
        self._environ = environ
        self._processes: list[subprocess.Popen[str]] = []

    def environ(self, version: str) -> dict[str, str]:
        path = os.pathsep.join([str(self._builds[version]), str(ROOT)])
        return {**os.environ, **self._environ, "PYTHONPATH": path, "LEDGER": str(self.ledger), "VERSION": version}

    async def drive(self, version: str) -> subprocess.Popen[str]:
        """Start an orchestrator, and wait until it drives runs. This is done in a thread. The client must go on meanwhile, or the
        process that migrates the store would wait for a transaction of the client."""
        return await asyncio.to_thread(self._drive, version)

    def _drive(self, version: str) -> subprocess.Popen[str]:
        with (self.folder / f"{version}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.upgrade.node", self.store, "drive", version],
                cwd=ROOT,
                env=self.environ(version),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", self.log(version)
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(DEADLINE_SECONDS)

    async def tell(self, version: str, what: str, run: str) -> None:
        await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "tests.upgrade.node", self.store, what, run],
            cwd=ROOT,
            env=self.environ(version),
            timeout=DEADLINE_SECONDS,
            check=True,
        )

    async def command(self, version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "relight.cli.main", *arguments, "--db", self.store],
            cwd=self.folder,
            env=self.environ(version),
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert not shown_passwords.shown(done.stdout + done.stderr, " ".join(arguments))
        return done

    def log(self, version: str) -> str:
        path = self.folder / f"{version}.log"
        return path.read_text() if path.exists() else ""

    def done(self, name: str = "") -> Counter[tuple[str, str]]:
        """How often each step of these runs was executed."""
        lines = (line.split() for line in self.ledger.read_text().splitlines())
        return Counter((run, n) for run, n, _ in lines if run.startswith(name))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(DEADLINE_SECONDS)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(params=["sqlite", "postgres"])
def stage(request: pytest.FixtureRequest, tmp_path: Path, newer_build: Path) -> Iterator[Stage]:
    environ = {}
    store = str(tmp_path / "relight.db")
    if request.param == "postgres":
        store = request.getfixturevalue("postgres_server").url()
        environ["RELIGHT_DB_SCHEMA"] = f"upgrade_{next(_schemas)}"
    made = Stage(tmp_path, store, newer_build, environ)
    yield made
    made.end()


# `make soak-ci` has these on PostgreSQL, too. `make test` has the test of runs that go from one version to the other on both.
FIRST_ON_SQLITE = pytest.mark.parametrize(
    "stage", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak_ci)], indirect=True
)


@pytest.fixture
async def client(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Relight]:
    """A client of this version, the older one, for as long as the test lasts."""
    for name, value in stage.environ("older").items():
        if name.startswith("RELIGHT_"):
            monkeypatch.setenv(name, value)
    if "://" not in stage.store:
        await make_database(Path(stage.store))
    async with Relight(stage.store, drive=False) as rl:
        yield rl


async def until(condition: Callable[[], Awaitable[Any]], stage: Stage) -> Any:
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                found = await condition()
                if found:
                    return found
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"older:\n{stage.log('older')}\nnewer:\n{stage.log('newer')}") from None


async def rows(handles: list[Handle[Any]]) -> list[Run]:
    return [await one._relight.row(one.id) for one in handles]


def is_held(row: Run) -> bool:
    return (row.status, row.hold, row.owner) == (Status.PAUSED, Hold.UPGRADE, None)


async def start(rl: Relight, name: str, count: int, steps: int, seconds: float) -> list[Handle[Any]]:
    ids = [f"{name}-{n}" for n in range(count)]
    return [await rl.start(flows.upgrade_job.with_id(run_id), run_id, steps, seconds) for run_id in ids]


async def test_runs_go_from_each_version_to_the_other(stage: Stage, client: Relight):
    """The older version opens a store that the newer one has migrated. It holds the runs that the newer version has written to,
    drives its own, and loses nothing. The newer version takes up both kinds."""
    new = await stage.drive("newer")
    first = await start(client, "first", 4, 20, 0.05)
    told = await client.start(flows.upgrade_told.with_id("told"), "told")
    await until(lambda: _each_has_done(stage, first, 3), stage)
    await until(lambda: _is(told, Status.WAITING), stage)
    stage.kill(new)

    old = await stage.drive("older")
    await until(lambda: _all(first, is_held), stage)
    for row in await rows(first):
        assert "of format 3" in row.reason
        assert "was written by a newer version of Relight" in row.reason
    epochs = [row.epoch for row in await rows(first)]
    own = await start(client, "own", 3, 5, 0.0)
    assert [await one.result(timeout="60s") for one in own] == [10] * 3
    assert old.poll() is None
    again = await stage.drive(
        "older"
    )  # another process of the older version does not understand the run either: neither takes it from the other
    await asyncio.gather(*(one.result(timeout="60s") for one in await start(client, "more", 3, 5, 0.0)))
    assert [row.epoch for row in await rows(first)] == epochs
    stage.kill(again)

    await told.signal("go", "on")  # the older version takes it up for that, and leaves it to the newer
    await until(lambda: _all([told], is_held), stage)

    new = await stage.drive("newer")
    assert [await one.result(timeout="60s") for one in first] == [190] * 4
    assert await told.result(timeout="60s") == "on"

    stage.kill(new)
    back = await start(client, "back", 4, 20, 0.05)
    await until(lambda: _each_has_done(stage, back, 3), stage)
    new = await stage.drive("newer")
    stage.kill(old)
    assert [await one.result(timeout="60s") for one in back] == [190] * 4

    repeated = {step: times for step, times in stage.done().items() if times > 1}
    assert all(times == 2 for times in repeated.values()), repeated  # only what was in flight at a kill, once
    assert Counter(name for name, _ in repeated) <= Counter(
        [f"{kind}-{n}" for kind in ("first", "back") for n in range(4)]
    )
    for version in ("older", "newer"):
        assert "INTERNAL_ERROR" not in stage.log(version)
        assert "Traceback" not in stage.log(version)


async def _each_has_done(stage: Stage, runs: list[Handle[Any]], steps: int) -> bool:
    done = stage.done()
    return all(done[one.id, str(steps)] for one in runs)


async def _is(run: Handle[Any], status: Status) -> bool:
    return await run.status() is status


async def _all(runs: list[Handle[Any]], condition: Callable[[Run], bool]) -> bool:
    return all(condition(row) for row in await rows(runs))


@FIRST_ON_SQLITE
async def test_a_message_of_a_newer_kind_is_neither_lost_nor_touched(stage: Stage, client: Relight):
    await stage.drive("older")
    stage.kill(await stage.drive("newer"))  # which has migrated the store that the older version uses
    waiting = await client.start(flows.upgrade_told.with_id("waiting"), "waiting")
    await until(lambda: _is(waiting, Status.WAITING), stage)
    await stage.tell("newer", "poke", "waiting")
    await until(lambda: _all([waiting], is_held), stage)
    row = await waiting.describe()
    assert "a '3:poke' of format 3 was written by a newer version of Relight" in row.reason
    explained = await client.explain("waiting")
    assert explained.sentence.startswith("Run waiting is held for a newer version of Relight: message ")
    assert (await client.start(flows.upgrade_job.with_id("x"), "x", 3, 0.0)).id == "x"
    assert await (await client.get("x")).result(timeout="60s") == 3
    await stage.drive("newer")
    assert await waiting.result(timeout="60s") == "poked"
    assert max(stage.done().values()) == 1
    assert "INTERNAL_ERROR" not in stage.log("older")


@FIRST_ON_SQLITE
async def test_a_hold_of_a_newer_kind_is_shown_and_left_alone(stage: Stage, client: Relight):
    new = await stage.drive("newer")
    paused = await client.start(flows.upgrade_told.with_id("paused"), "paused")
    await until(lambda: _is(paused, Status.WAITING), stage)
    await stage.tell("newer", "pause", "paused")
    await until(lambda: _all([paused], lambda row: bool(row.newer)), stage)
    stage.kill(new)
    await stage.drive("older")
    other = (await start(client, "other", 1, 5, 0.0))[0]
    assert await other.result(timeout="60s") == 10
    row = await paused.describe()
    assert (row.status, row.hold) == (Status.PAUSED, Hold.UPGRADE)
    assert "its hold '3:quota' of format 3 was written by a newer version of Relight" in row.reason
    assert "resume() frees it" in row.reason  # what the newer version says about the hold
    listed = json.loads((await stage.command("older", "runs", "--json")).stdout)
    assert [(one["id"], one["hold"]) for one in listed if one["id"] == "paused"] == [("paused", "upgrade")]
    explained = await stage.command("older", "explain", "paused")
    assert "is held for a newer version of Relight" in explained.stdout, explained.stderr
    shown = await stage.command("older", "show", "paused")
    assert "its journal cannot be read" in shown.stdout, shown.stderr
    await stage.drive("newer")
    await paused.resume()
    await paused.signal("go", "on")
    assert await paused.result(timeout="60s") == "on"
    assert "INTERNAL_ERROR" not in stage.log("older")


@FIRST_ON_SQLITE
async def test_migrate_check_says_whether_the_store_is_up_to_date(stage: Stage, newer_build: Path):
    missing = await stage.command("older", "migrate", "--check", "--json")
    assert missing.returncode == 1, missing.stderr
    found = json.loads(missing.stdout)
    assert (found["version"], found["up_to_date"]) == (0, False)
    newest = found["newest"]
    assert "has no tables yet" in (await stage.command("older", "migrate", "--check")).stdout
    assert (await stage.command("older", "migrate")).returncode == 0
    current = await stage.command("older", "migrate", "--check", "--json")
    assert current.returncode == 0
    assert json.loads(current.stdout) == {"version": newest, "newest": newest, "up_to_date": True}
    behind = await stage.command("newer", "migrate", "--check")
    assert behind.returncode == 1
    assert f"has version {newest} of {newest + 1}" in behind.stdout
    assert (await stage.command("newer", "migrate")).returncode == 0
    ahead = await stage.command("older", "migrate", "--check")
    assert ahead.returncode == 0
    assert f"has version {newest + 1}, this Relight knows {newest}, and can go on with it" in ahead.stdout
