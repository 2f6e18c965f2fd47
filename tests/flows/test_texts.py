"""Names, ids and filters that no store can keep or compare: the public API raises the same error on every backend."""

from __future__ import annotations

import os
from typing import Any

import pytest

from relight import Relight, flow, step, wait_for
from relight.errors import ConfigError, DefinitionError, PayloadError, RunCancelledError, RunNotFoundError
from relight.flow.definitions import Flow
from relight.model.run import Status

UNSTORABLE = ("a\0b", "\0", "a\ud800")


@pytest.fixture
def waits() -> Flow[[], Any]:
    @flow(name="texts-wait")
    async def waits() -> Any:
        return await wait_for("go")

    return waits


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "memory":
        return "memory:"
    if request.param == "sqlite":
        return str(tmp_path / "app.db")
    created: str = request.getfixturevalue("postgres_server").create_database()
    return created


async def test_what_no_store_can_keep_is_refused_and_breaks_nothing(url: str, waits: Flow[[], Any]):
    async with Relight(url) as rl:
        run = await rl.start(waits.with_id("r"))
        for text in UNSTORABLE:
            with pytest.raises(DefinitionError, match="cannot be a run id"):
                await rl.start(waits.with_id(text))
            with pytest.raises(PayloadError, match="signal name"):
                await run.signal(text)
            with pytest.raises(PayloadError, match="signal id"):
                await run.signal("go", id=text)
            for ask in (rl.get, rl.explain, rl.resume, rl.fork):
                with pytest.raises(RunNotFoundError, match="no run has the id"):
                    await ask(text)
            assert await rl.items(text) == []
            with pytest.raises(PayloadError, match=r"list\(flow=\)"):
                await rl.list(flow=text)
            with pytest.raises(PayloadError, match=r"list\(parent=\)"):
                await rl.list(parent=text)
        with pytest.raises(PayloadError, match="1 to 255 characters"):
            await run.signal("go", id="x" * 3000)  # on PostgreSQL it would not fit into the index
        for since in ("1d", float("nan")):
            with pytest.raises(ConfigError, match=r"list\(since="):
                await rl.list(since=since)  # type: ignore[arg-type]  # that is the mistake
        assert [row.id for row in (await rl.list()).runs] == ["r"]
        await run.cancel("he said \0 and \ud800")
        with pytest.raises(RunCancelledError, match="he said "):
            await run.result(timeout="60s")
        assert await run.status() is Status.CANCELLED


@pytest.mark.parametrize("name", [*UNSTORABLE, "\x01a"], ids=ascii)
def test_names_of_flows_steps_and_signals(name: str):
    async def function() -> None: ...

    for decorate in (flow, step):
        with pytest.raises(DefinitionError, match="no control characters"):
            decorate(name=name)(function)
    if name in UNSTORABLE:
        with pytest.raises(DefinitionError, match="signal name"):
            wait_for(name)


async def test_an_error_that_quotes_such_a_text_ends_its_run_and_nothing_else(url: str):
    @step
    async def quotes() -> None:
        raise ValueError("it sent \0 and \ud800")

    @flow(name="texts-quotes")
    async def fails() -> None:
        await quotes()

    async with Relight(url) as rl:
        run = await rl.start(fails.with_id("r"))
        with pytest.raises(Exception, match="it sent"):
            await run.result(timeout="60s")
        assert await run.status() is Status.FAILED
        assert "it sent" in (await rl.explain("r")).sentence


@pytest.mark.parametrize("schema", ["order", "user", "select", "table"])
async def test_a_schema_may_have_the_name_of_a_word_of_sql(schema: str, postgres_server, waits: Flow[[], Any]):
    url = postgres_server.create_database()
    async with Relight(url, db_schema=schema) as rl, Relight(url, db_schema=schema, drive=False) as client:
        run = await client.start(waits.with_id("r"))
        await (await rl.get("r")).signal("go", 7)
        assert await run.result(timeout="60s") == 7


async def test_a_new_database_file_is_readable_by_its_owner_only(tmp_path, waits: Flow[[], Any]):
    old = os.umask(0o022)
    try:
        async with Relight(tmp_path / "app.db") as rl:
            run = await rl.start(waits.with_id("r"))
            await run.signal("go")
            await run.result(timeout="60s")
            modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    finally:
        os.umask(old)
    assert modes == {"app.db": 0o600, "app.db-wal": 0o600, "app.db-shm": 0o600}


async def test_a_file_that_is_there_keeps_its_permissions(tmp_path):
    path = tmp_path / "app.db"
    path.touch(mode=0o644)
    path.chmod(0o644)
    async with Relight(path):
        assert path.stat().st_mode & 0o777 == 0o644
