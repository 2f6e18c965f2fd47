"""`relight recovery`, `explain` and `migrate`, on a database whose orchestrator was killed in the middle."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from relight import Relight, RunCancelledError
from tests.cli import shop
from tests.cli.shop import MODULE, marks, open_gate, orchestrator, relight, statuses, until
from tests.harness import cluster

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("cli-recovery")]  # all these tests share a scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Path:
    """Runs of an orchestrator that was killed: one has ended, one waits, three were in a step."""
    folder = tmp_path_factory.mktemp("scene")
    process = orchestrator(folder, "--id", "one")

    async def start() -> None:
        async with Relight(folder / "relight.db", drive=False) as rl:
            await rl.start(shop.shop_wait.with_id("ended"))
            await (await rl.get("ended")).signal("go", "now")
            assert await (await rl.get("ended")).result(timeout="60s") == "now"
            for what, run_id in ((shop.shop_wait, "waits"), (shop.shop_fragile, "fragile"), (shop.shop_vend, "vend")):
                await rl.start(what.with_id(run_id))
            await rl.start(shop.shop_order.with_id("order"), 3)
            waits = await rl.get("waits")

            async def is_parked() -> bool:
                row = await waits.describe()
                return row.status == "waiting" and row.owner is None

            await cluster.until(is_parked, "it to be parked")

    try:
        asyncio.run(start())
        until(lambda: marks(folder, "gate") == 3)
    finally:
        process.kill()
        process.wait()
    return folder


@pytest.fixture
def folder(scene, tmp_path) -> Path:
    """A copy of the scene that a test may change."""
    for name in ("relight.db", "relight.db-wal", "marks"):
        if (scene / name).exists():  # the last command that looked has removed the WAL
            shutil.copy(scene / name, tmp_path / name)
    return tmp_path


def answer(*arguments: str, cwd: Path, **environ: str) -> Any:
    done = relight(*arguments, "--json", cwd=cwd, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(*arguments: str, cwd: Path) -> str:
    """Why a command could not be done: one line, exit code 2, nothing on stdout."""
    done = relight(*arguments, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.removeprefix("relight: ").strip()


# ---- incomplete


def test_incomplete_lists_what_is_unfinished_newest_first(scene):
    done = relight("recovery", "incomplete", cwd=scene)
    assert done.returncode == 0, done.stderr
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["run", "flow", "status", "owner", "created", "due"]
    assert [line.split()[0] for line in lines] == ["order", "vend", "fragile", "waits"]
    found = answer("recovery", "incomplete", cwd=scene)
    assert [run["id"] for run in found] == ["order", "vend", "fragile", "waits"]
    assert found[0]["owner"].startswith("one#")
    assert found[3]["owner"] is None


def test_nothing_unfinished_is_said_so(tmp_path):
    relight("migrate", cwd=tmp_path)
    for command in ("incomplete", "plan"):
        assert relight("recovery", command, cwd=tmp_path).stdout == "nothing is unfinished\n"
        assert answer("recovery", command, cwd=tmp_path) == []
    assert relight("recovery", "plan", "--check", cwd=tmp_path).returncode == 0


# ---- plan


def test_plan_says_what_recovery_would_do(scene):
    found = {one["run"]: one for one in answer("recovery", "plan", "--module", MODULE, cwd=scene)}
    assert list(found) == ["order", "vend", "fragile", "waits"]
    assert {run: (one["action"], one["stuck"]) for run, one in found.items()} == {
        "order": ("resume", False),
        "vend": ("resume", False),
        "fragile": ("fail", True),
        "waits": ("leave", False),
    }
    assert "its owner died" in found["order"]["reason"]
    # The step was in flight. It is announced after a second: whether it took so long depends on the machine.
    assert found["order"]["resumes_at"] in ("what follows shop_price", "step shop_gate")
    assert found["vend"]["resumes_at"] == "step shop_coins"
    assert found["vend"]["repeats"] == [], "on_crash='fail' is never repeated"
    assert "resumable=False" in found["fragile"]["reason"]
    assert found["waits"]["until"] is not None
    assert found["waits"]["verdict"] == "resume"
    for one in found.values():
        assert set(one) == {
            *("run", "flow", "status", "owner", "action", "reason", "until", "verdict", "verdict_reason"),
            *("resumes_at", "repeats", "changed_steps", "stuck", "trouble"),
        }


def test_plan_for_people(scene):
    done = relight("recovery", "plan", "--module", MODULE, cwd=scene)
    assert done.returncode == 0, done.stderr
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["run", "flow", "status", "recovery", "would", "at", "reason"]
    assert [line.split()[:4] for line in lines] == [
        ["order", "shop_order", "running", "resume"],
        ["vend", "shop_vend", "running", "resume"],
        ["fragile", "shop_fragile", "running", "fail"],
        ["waits", "shop_wait", "waiting", "leave"],
    ]


def test_plan_changes_nothing(scene):
    before = statuses(scene)
    relight("recovery", "plan", "--module", MODULE, cwd=scene)
    assert statuses(scene) == before


def test_check_exits_with_1_if_a_run_would_not_go_on(scene):
    done = relight("recovery", "plan", "--module", MODULE, "--check", cwd=scene)
    assert done.returncode == 1
    assert done.stderr == "relight: 1 of 4 unfinished runs would not go on\n"
    assert "resumable=False" in done.stdout
    unknown = relight("recovery", "plan", "--check", "--json", cwd=scene)
    assert unknown.returncode == 1, "flows that are not known here would hold their runs"
    assert {one["verdict"] for one in json.loads(unknown.stdout)} == {"hold-definition"}
    waits = relight("recovery", "plan", cwd=scene).stdout.splitlines()[-1]
    assert "but when it goes on: flow 'shop_wait' is not registered" in waits  # it has no owner that could stop
    policy = relight("recovery", "plan", "--module", MODULE, "--json", cwd=scene, RELIGHT_RECOVERY_AUTO_RESUME="false")
    actions = {one["run"]: one["action"] for one in json.loads(policy.stdout)}
    assert (actions["order"], actions["fragile"]) == ("cancel", "fail")


def test_check_is_about_the_code_here_also_while_an_orchestrator_lives(tmp_path):
    process = orchestrator(tmp_path, "--id", "one")
    try:
        _start(tmp_path, "order")
        until(lambda: marks(tmp_path, "gate") == 1)
        (alive,) = answer("recovery", "plan", "--module", MODULE, cwd=tmp_path)
        assert (alive["action"], alive["verdict"], alive["stuck"]) == ("leave", "resume", False)
        assert relight("recovery", "plan", "--check", "--module", MODULE, cwd=tmp_path).returncode == 0
        # Code that does not know the flow, like a deployment that has lost a module.
        without = relight("recovery", "plan", "--check", cwd=tmp_path)
        assert without.returncode == 1
        assert "but if its owner stopped: flow 'shop_order' is not registered" in without.stdout
    finally:
        process.kill()
        process.wait()


# ---- resume


def _start(folder: Path, run_id: str) -> None:
    async def start() -> None:
        async with Relight(folder / "relight.db", drive=False) as rl:
            await rl.start(shop.shop_order.with_id(run_id), 3)

    asyncio.run(start())


def test_resume_of_a_run_that_recovery_gave_up_on(folder):
    giving_up = orchestrator(folder, "--id", "two", RELIGHT_RECOVERY_AUTO_RESUME="false")
    until(lambda: shop.count_lines(folder / "log", "[RUN_GIVEN_UP]") == 2)
    giving_up.terminate()
    assert giving_up.wait(timeout=60) == 0
    found = statuses(folder)
    assert found["order"] == found["vend"] == ("cancelled", "recovery")
    assert found["fragile"] == ("failed", None)
    sentence = answer("explain", "order", cwd=folder)["sentence"]
    assert sentence.count("`relight recovery resume` brings it back") == 1

    done = relight("recovery", "resume", "order", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "run order is free: an orchestrator that knows its flow 'shop_order' takes it up\n"
    assert statuses(folder)["order"] == ("pending", None)
    assert "resumed by hand" in answer("explain", "order", cwd=folder)["sentence"]
    assert answer("recovery", "resume", "vend", cwd=folder)["status"] == "pending"

    open_gate(folder)
    process = orchestrator(folder, "--id", "three")
    until(lambda: {statuses(folder)[run_id][0] for run_id in ("order", "vend")} <= {"completed", "failed"})
    process.terminate()
    assert process.wait(timeout=60) == 0
    runs = {run["id"]: run for run in answer("runs", cwd=folder)}
    assert (runs["order"]["status"], runs["order"]["output"]) == ("completed", "3 open")
    assert runs["vend"]["status"] == "failed"
    assert "StepInterruptedError" in runs["vend"]["error"]["type"], "coins must not drop twice"
    assert marks(folder, "price") == 2, "one of each run: what was committed is not executed again"
    assert marks(folder, "coins") == 1


def test_resume_of_an_orphan_before_recovery_gives_up_on_it(folder):
    assert answer("recovery", "resume", "order", cwd=folder)["status"] == "pending"
    open_gate(folder)
    process = orchestrator(folder, "--id", "two", RELIGHT_RECOVERY_AUTO_RESUME="false")
    until(lambda: marks(folder, "gate") == 4)
    until(lambda: statuses(folder)["order"] == ("completed", None))
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert [event["token"] for event in answer("explain", "order", cwd=folder)["events"]] == ["RUN_RESUMED"]


def test_resume_frees_a_run_that_was_held(folder):
    async def pause() -> None:
        async with Relight(folder / "relight.db", drive=False) as rl:
            await (await rl.get("waits")).pause()

    asyncio.run(pause())
    process = orchestrator(folder, "--id", "two")
    try:
        until(lambda: statuses(folder)["waits"] == ("paused", "user"))
        assert relight("recovery", "resume", "waits", cwd=folder).returncode == 0
        until(lambda: statuses(folder)["waits"] == ("waiting", None))
    finally:
        process.kill()
        process.wait()


def test_resume_refuses_what_there_is_nothing_to_resume_of(folder):
    assert refusal("recovery", "resume", "nobody", cwd=folder) == "no run has the id 'nobody'"
    assert "run 'ended' is completed: it has ended" in refusal("recovery", "resume", "ended", cwd=folder)
    assert "there is nothing to resume: Run waits waits, out of memory" in refusal(
        "recovery", "resume", "waits", cwd=folder
    )

    async def cancel() -> None:
        async with Relight(folder / "relight.db", recovery={"enabled": False}) as rl:
            run = await rl.start(shop.shop_wait.with_id("unwanted"))
            await run.cancel("by request")
            with pytest.raises(RunCancelledError):
                await run.result(timeout="60s")

    asyncio.run(cancel())
    refused = refusal("recovery", "resume", "unwanted", cwd=folder)
    assert "run 'unwanted' is cancelled: it was cancelled by request, not by recovery" in refused


def test_resume_reaches_an_orchestrator_whose_recovery_is_off(folder):
    off = {"RELIGHT_RECOVERY_ENABLED": "false"}
    open_gate(folder)
    process = orchestrator(folder, "--id", "two", **off)
    try:
        explained = answer("explain", "order", cwd=folder, **off)
        assert "recovery leaves it alone: recovery is off" in explained["sentence"]
        assert relight("recovery", "plan", "--check", "--module", shop.MODULE, cwd=folder, **off).returncode == 1
        done = relight("recovery", "resume", "order", "--module", shop.MODULE, cwd=folder, **off)
        assert done.returncode == 0, done.stderr
        until(lambda: statuses(folder)["order"] == ("completed", None))
        assert statuses(folder)["vend"] == ("running", None), "nobody has resumed that one"
    finally:
        process.kill()
        process.wait()


def test_plan_and_incomplete_show_as_many_as_are_asked_for(folder):
    for command in ("plan", "incomplete"):
        done = relight("recovery", command, "--limit", "1", "--json", cwd=folder)
        assert (done.returncode, len(json.loads(done.stdout))) == (0, 1)
        assert done.stderr == "relight: more than 1: raise --limit to see them\n"
        done = relight("recovery", command, "--limit", "1000", "--json", cwd=folder)
        assert (done.stderr, len(json.loads(done.stdout)) > 1) == ("", True)
    checked = relight("recovery", "plan", "--limit", "1", "--check", "--json", cwd=folder)
    assert checked.returncode == 1, "of those that are not shown, none counts"
    assert [one["stuck"] for one in json.loads(checked.stdout)] == [True]


def test_resume_refuses_a_run_that_is_alive(tmp_path):
    process = orchestrator(tmp_path, "--id", "one")
    try:
        _start(tmp_path, "order")
        until(lambda: marks(tmp_path, "gate") == 1)
        refused = refusal("recovery", "resume", "order", cwd=tmp_path)
        assert refused.startswith("run 'order' is alive: one#")
        assert "drives it" in refused
    finally:
        process.kill()
        process.wait()


# ---- explain


def test_explain_tells_people(scene):
    done = relight("explain", "order", "--module", MODULE, cwd=scene)
    assert done.returncode == 0, done.stderr
    sentence, empty, *facts = done.stdout.splitlines()
    assert sentence.startswith("Run order is running and was driven by one#")
    assert "recovery will resume it: its owner died" in sentence
    assert empty == ""
    found = dict(line.strip().split("  ", 1) for line in facts if line.strip())
    assert found["flow"].strip() == "shop_order"
    assert found["owner"].strip().endswith("(not alive)")
    assert found["recovery would"].strip().startswith("resume: its owner died")
    assert {"last heartbeat", "lease until", "epoch", "last entry", "at"} <= set(found)


def test_explain_says_of_a_run_that_has_ended_nothing_of_what_comes_next(scene):
    done = relight("explain", "ended", cwd=scene)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:] if line.strip()]
    assert ["owner", "none"] in rows
    assert not {"recovery", "at"} & {row[0] for row in rows}


def test_explain_gives_json(scene):
    found = answer("explain", "order", "--module", MODULE, cwd=scene)
    assert set(found) == {
        *("run", "sentence", "status", "flow", "owner", "owner_alive", "last_heartbeat", "lease_expires_at"),
        *("owner_trouble", "generation", "input"),
        *("epoch", "created_at", "updated_at", "last_entry", "last_operation", "waits_for", "unread", "steps", "plan"),
        "events",
    }
    assert (found["run"], found["status"], found["owner_alive"]) == ("order", "running", False)
    assert found["last_operation"] == "shop_price"
    assert found["plan"]["action"] == "resume"
    assert found["last_heartbeat"].endswith("+00:00")
    waits = answer("explain", "waits", cwd=scene)
    assert (waits["owner"], waits["owner_alive"]) == (None, False)
    assert waits["waits_for"] == [waits["waits_for"][0]]
    assert waits["waits_for"][0].startswith("signal 'go' until ")
    assert answer("explain", "ended", cwd=scene)["sentence"].startswith("Run ended completed at ")


def test_explain_has_every_recovery(folder):
    open_gate(folder)
    process = orchestrator(folder, "--id", "two")
    until(lambda: statuses(folder)["order"] == ("completed", None))
    process.terminate()
    assert process.wait(timeout=60) == 0
    recovered, repeated = answer("explain", "order", cwd=folder)["events"]
    assert recovered["token"] == "RUN_RESUMED"
    assert "claimed from one#" in recovered["text"]
    assert " by two#" in recovered["text"]
    assert repeated["token"] == "STEP_REPEATED"
    assert "'shop_gate'" in repeated["text"]
    text = relight("explain", "order", cwd=folder).stdout
    assert "[RUN_RESUMED] claimed from one#" in text
    assert "[STEP_REPEATED] step 'shop_gate'" in text
    fragile = answer("explain", "fragile", cwd=folder)
    assert "failed at" in fragile["sentence"]
    assert [event["token"] for event in fragile["events"]] == ["RUN_NOT_RESUMABLE"]


@pytest.mark.parametrize("command", [["explain", "order"], ["recovery", "plan"], ["recovery", "plan", "--check"]])
def test_a_module_that_cannot_be_imported_is_one_line(scene, command):
    assert "No module named 'no_such_module'" in refusal(*command, "--module", "no_such_module", cwd=scene)


@pytest.mark.parametrize(
    "command", [["explain", "x"], ["recovery", "plan"], ["recovery", "incomplete"], ["recovery", "resume", "x"]]
)
def test_a_missing_database_is_one_line_and_no_file(tmp_path, command):
    assert refusal(*command, "--db", "none.db", cwd=tmp_path).startswith("there is no database none.db")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_run_is_one_line(scene):
    assert refusal("explain", "nobody", cwd=scene) == "no run has the id 'nobody'"


# ---- migrate


def test_migrate_makes_the_tables_and_may_be_run_again(tmp_path):
    for _ in range(2):
        done = relight("migrate", "--db", "new.db", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "the store is up to date\n"), done.stderr
    assert answer("migrate", "--db", "new.db", cwd=tmp_path) == {"migrated": True}
    assert answer("runs", "--db", "new.db", cwd=tmp_path) == []


def test_migrate_keeps_what_is_there(folder):
    before = statuses(folder)
    assert relight("migrate", cwd=folder).returncode == 0
    assert statuses(folder) == before


def test_migrate_refuses_what_is_no_store(tmp_path):
    (tmp_path / "text.txt").write_text("no database at all, but long enough to be looked at by SQLite" * 40)
    assert "is not a Relight database" in refusal("migrate", "--db", "text.txt", cwd=tmp_path)
    assert "memory: has no tables" in refusal("migrate", "--db", "memory:", cwd=tmp_path)
    assert "make the folder" in refusal("migrate", "--db", "missing/app.db", cwd=tmp_path)
