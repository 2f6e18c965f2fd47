"""The runs that a dead orchestrator leaves behind, and the orchestrators that take them up. In these scenarios the
recovering process is killed.

The children that are killed import this module. In each scenario life 1 prepares the runs and dies. Life 2 recovers
them: it is killed at every operation on store and leases. Then another orchestrator brings every run to its end: life
3, or life 0. Life 0 is the witness, which was there all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from relight import Relight, RunCancelledError, RunStateError, flow, sleep, spawn, step, wait_for
from relight.backends.sqlite.store import SqliteStore
from relight.errors import ConflictError, StoreUnavailableError
from relight.model import journal as j
from relight.model.lease import Orphaned
from relight.model.run import Hold, Message, MessageKind, Run, RunChange, RunFilter, Status
from relight.orchestrator import waking
from relight.ports.store import Commit, Committed, Extras, Store
from relight.testing.crashpoints import patiently
from relight.testing.ledger import effect, ledger, note
from relight.testing.life import Life
from tests.harness.cluster import until

PREPARING, RECOVERING, WITNESS = 1, 2, 0
POLL_SECONDS = 0.005


# ---- the flows


@step
async def work(label: str) -> str:
    with effect(label):
        return label


@step
async def stuck(label: str) -> str:
    """In the first life it does not end: the process dies in this step."""
    with effect(label):
        book = ledger()
        if book is not None and book.life == PREPARING:
            await asyncio.Event().wait()
        return label


@flow
async def chain(who: str) -> list[str]:
    return [await work(f"{who} one"), await stuck(f"{who} two"), await work(f"{who} three")]


@flow(resumable=False)
async def only_once(who: str) -> list[str]:
    return [await work(f"{who} one"), await stuck(f"{who} two")]


@flow
async def leaf(who: str) -> str:
    return await work(f"{who} leaf")


@flow
async def branch(who: str) -> list[str]:
    return [await leaf(f"{who} first"), await stuck(f"{who} stuck"), await leaf(f"{who} second")]


@flow
async def tree(who: str) -> list[Any]:
    """Half done when its process dies: one child has ended, two are in the middle, one has not begun."""
    first = await leaf(f"{who} whole")
    halves = await asyncio.gather(branch(f"{who} left"), branch(f"{who} right"))
    return [first, *halves, await leaf(f"{who} last")]


@flow
async def parent(who: str) -> str:
    """Waits, parked, for a run that it has spawned."""
    spawned = await spawn(chain.with_id(f"{who}-spawned"), f"{who} spawned")
    try:
        found = await spawned
    except RunCancelledError:
        found = ["cancelled"]
    return await work(f"{who} joined {found[-1]}")


@flow
async def faithful(who: str) -> str:
    """Waits for a run that another caller has started. After a cancellation it waits again, until that run has completed."""
    awaited = await spawn(tree.with_id("given-up"), "given-up")
    while True:
        try:
            found = await awaited
        except RunCancelledError:
            await sleep("20ms")
        else:
            return await work(f"{who} joined {found[-1]}")


@flow
async def listening(who: str) -> str:
    """Waits for a signal, and stays in memory because a step is under way, too."""
    heard, _ = await asyncio.gather(wait_for("go", str), stuck(f"{who} busy"))
    return await work(f"{who} heard {heard}")


@flow
async def parked(who: str) -> str:
    heard = await wait_for("go", str)
    return await work(f"{who} heard {heard}")


@flow
async def napping(who: str) -> str:
    await sleep("0.2s")
    return await work(f"{who} awake")


@flow
async def failing(who: str) -> str:
    await work(f"{who} in vain")
    raise ValueError(who)


def _vanishing() -> None:
    """A flow that the dead process knew. The next process registers it late."""

    @flow(name="vanishing")
    async def vanishing(who: str) -> list[str]:
        return [await work(f"{who} one"), await stuck(f"{who} two")]


def _versioned(life: Life) -> None:
    """A flow with a step whose code was different in the dead process."""
    if life.number == PREPARING:

        @step(name="versioned_step")
        async def changing(label: str) -> str:
            with effect(label):
                return label

    else:

        @step(name="versioned_step")
        async def changing(label: str) -> str:
            with effect(f"{label} otherwise"):
                return label

    _kept.append(changing)

    @flow(name="versioned")
    async def versioned(who: str) -> list[str]:
        return [await changing(f"{who} one"), await stuck(f"{who} two")]


_kept: list[Any] = []  # the registry knows a step only as long as another reference to it exists


# ---- preparing


async def _has_begun(life: Life, *labels: str) -> None:
    """Wait until these effects have begun."""

    async def begun() -> bool:
        return set(labels) <= {line.label for line in life.facts("start")}

    await life.until(begun)


async def _row(store: Store, run_id: str) -> Run:
    row = await store.get_run(run_id)
    assert row is not None, run_id
    return row


async def _write(store: Store, run_id: str, *events: j.AnyEvent, changes: Sequence[RunChange] = ()) -> None:
    """Write entries as the owner of a run. The owner itself writes nothing meanwhile."""
    row = await _row(store, run_id)
    commit = Commit(
        root_id=run_id,
        epoch=row.epoch,
        after=await store.latest_sequence(run_id),
        entries=[j.encode_event(event) for event in events],
        extras=Extras(changes=changes),
    )
    (result,) = await store.commit([commit])
    assert isinstance(result, Committed), result


async def _damage(rl: Relight, life: Life, run_id: str) -> None:
    """Add a byte to the journal's last entry."""
    sequence = await life.store.latest_sequence(run_id)
    if isinstance(life.store, SqliteStore):
        import apsw

        db = apsw.Connection(str(life.store.path))
        db.execute(
            "UPDATE journal SET event = CAST(event || '!' AS BLOB)"
            " WHERE sequence = ? AND run = (SELECT key FROM runs WHERE id = ?)",
            (sequence, run_id),
        )
        db.close()
        return
    import asyncpg

    from relight.backends.postgres import PostgresStore

    assert isinstance(life.store, PostgresStore)
    url, schema = rl.config.store, life.store.schema
    connection = await asyncpg.connect(url)
    await connection.execute(
        f"UPDATE {schema}.journal SET event = event || '!'::bytea"
        f" WHERE sequence = $1 AND run = (SELECT key FROM {schema}.runs WHERE id = $2)",
        sequence,
        run_id,
    )
    await connection.close()


async def _tell(store: Store, run_id: str, kind: MessageKind, payload: object = None, name: str = "") -> None:
    data = msgspec.json.encode(payload)
    await store.post([Message(run_id=run_id, kind=kind, name=name, payload=data, at=time.time())])


# ---- waiting, and looking


async def _all(store: Store) -> list[Run]:
    page = await store.list_runs(RunFilter(limit=1000))
    assert page.next_cursor is None
    return sorted(page.runs, key=lambda row: row.id)


def _settled(row: Run) -> bool:
    """No process has to do anything for this run, unless a person asks."""
    return row.status.terminal or (row.status is Status.PAUSED and row.owner is None)


async def _settle(life: Life, *ids: str) -> None:
    """Wait until no process has to do anything for these runs (or for any root)."""

    async def settled() -> bool:
        rows = [row for row in await _all(life.store) if row.is_root and (not ids or row.id in ids)]
        return all(_settled(row) for row in rows)

    await life.until(settled)


class _Ends:
    """The rows that are terminal when this is made. Later they must be the same, to the byte."""

    def __init__(self, rows: list[Run]) -> None:
        self.rows = {row.id: row for row in rows if row.status.terminal and row.hold is None}
        roots = {row.id for row in rows if row.is_root and row.id in self.rows}
        self.rows = {run_id: row for run_id, row in self.rows.items() if row.root_id in roots}

    def check(self, rows: list[Run]) -> None:
        now = {row.id: row for row in rows}
        for run_id, row in self.rows.items():
            assert now.get(run_id) == row, f"{run_id} had ended as {row}, and is now {now.get(run_id)}"


async def _outcome(life: Life) -> dict[str, list[Any]]:
    """The state of every run, root or child. An unfinished root must not have an owner any more."""
    rows = await _all(life.store)
    for row in rows:
        assert _settled(row) or not row.is_root, f"left behind: {row}"
    return {row.id: [row.status.value, row.hold and row.hold.value, _text(row.output), _error(row)] for row in rows}


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()


def _error(row: Run) -> str | None:
    return None if row.error is None else msgspec.json.decode(row.error)["message"]


async def _stand_by(life: Life) -> None:
    """The witness: it runs, and all processes see that it is alive, but it does nothing until all other lives are over."""
    note("ready")
    while not life.facts("over"):
        time.sleep(POLL_SECONDS)  # noqa: ASYNC251 - its event loop stands still, its heartbeat thread's does not


# ---- 1, 2, 6, 7: everything that an orchestrator can leave; the next one takes it over

PARKED = ["grieving", "mother", "parked"]


async def estate(rl: Relight, life: Life) -> Any:
    _versioned(life)
    if life.number == PREPARING:
        _vanishing()
        await _leave_everything(rl, life)
    if life.number == WITNESS:
        await _stand_by(life)
    if life.number == RECOVERING:
        await _settle(life)
        life.again()
        return None
    ends = _Ends(await _all(life.store))
    await _settle(life)
    _vanishing()
    await rl.resume("poisoned")
    await (await rl.get("corrupt")).cancel("hopeless")
    await life.until(lambda: _have_ended(life, "vanished", "poisoned", "corrupt"))
    ends.check(await _all(life.store))
    return await _outcome(life)


async def _have_ended(life: Life, *ids: str) -> bool:
    return sum(row.status.terminal for row in await life.store.get_runs(ids)) == len(ids)


async def _leave_everything(rl: Relight, life: Life) -> None:
    store = life.store
    for run_id, flow_name in (
        ("plain", "chain"),
        ("once", "only_once"),
        ("tree", "tree"),
        ("mother", "parent"),
        ("poisoned", "chain"),
        ("ended", "chain"),
        ("corrupt", "chain"),
        ("grieving", "parent"),
        ("listening", "listening"),
        ("vanished", "vanishing"),
        ("versioned", "versioned"),
        ("parked", "parked"),
        ("napping", "napping"),
        ("failed", "failing"),
        ("completed", "leaf"),
        ("cancelled", "parked"),
    ):
        await rl.start(flow_name, run_id, id=run_id)
    await (await rl.get("cancelled")).cancel("enough")
    busy = ("plain", "once", "poisoned", "ended", "corrupt", "vanished", "versioned")
    spawned = ("mother spawned", "grieving spawned")
    await _has_begun(life, *(f"{who} two" for who in busy + spawned))
    await _has_begun(life, "listening busy", "tree left stuck", "tree right stuck")

    async def quiet() -> bool:
        rows = {row.id: row for row in await store.get_runs([*PARKED, "failed", "completed", "cancelled"])}
        parked = all(rows[who].status is Status.WAITING and rows[who].owner is None for who in PARKED)
        return parked and all(rows[who].status.terminal for who in ("failed", "completed", "cancelled"))

    await life.until(quiet)
    now = time.time()
    await _write(store, "poisoned", *(j.RunRecovered("", "x#1", "y#1", now, alone=True) for _ in range(10)))
    output = msgspec.Raw(b'["journaled"]')
    await _write(store, "ended", j.RunCompleted("", output, "", now))
    for run_id in ("listening", "parked"):
        await _tell(store, run_id, MessageKind.SIGNAL, "now", "go")
    await _tell(store, "grieving-spawned", MessageKind.CANCEL, "no use")
    for run_id in ("corrupt", "grieving-spawned"):
        await _damage(rl, life, run_id)
    life.die()


# ---- 6: recovery gives everything up


async def given_up(rl: Relight, life: Life) -> Any:
    """With auto_resume off. A run that recovery gave up on comes back when a person resumes it."""
    if life.number == PREPARING:
        for run_id, flow_name in (("plain", "chain"), ("tree", "tree"), ("once", "only_once")):
            await rl.start(flow_name, run_id, id=run_id)
        await _has_begun(life, "plain two", "once two", "tree left stuck", "tree right stuck")
        life.die()
    if life.number == WITNESS:
        await _stand_by(life)
    await _settle(life)
    if life.number == RECOVERING:
        life.again()
        return None
    rows = {row.id: row for row in await _all(life.store)}
    assert rows["plain"].status is rows["tree"].status is Status.CANCELLED, rows
    assert rows["plain"].hold is rows["tree"].hold is Hold.RECOVERY
    assert all(row.status.terminal for row in rows.values()), rows
    for run_id in ("plain", "tree"):
        await rl.resume(run_id)
    await _settle(life)
    return await _outcome(life)


# ---- 3: a person resumes runs by hand, through a process that drives nothing

ASKED = ["orphan", "given-up", "paused"]


async def resumed_by_hand(rl: Relight, life: Life) -> Any:
    if life.number == PREPARING:
        await _leave_to_be_resumed(rl, life)
    if life.number == WITNESS:
        await _stand_by(life)
    if life.number == RECOVERING:
        life.begins()
        for run_id in ASKED:
            await _ask(rl, run_id)
        life.again()
        return None
    heard = {line.run for what in ("posted", "resumed") for line in life.facts(what) if line.life == RECOVERING}
    alone = {"orphan", *heard}  # for these no person has to ask again
    await life.until(lambda: _have_ended(life, *alone))
    for run_id in set(ASKED) - alone:
        row = await _row(life.store, run_id)
        assert (row.status, row.owner) in ((Status.CANCELLED, None), (Status.PAUSED, None)), f"in between: {row}"
        await rl.resume(run_id)
    await life.until(lambda: _completed(life, *ASKED, "faithful"))
    return await _outcome(life)


async def _completed(life: Life, *ids: str) -> bool:
    return sum(row.status is Status.COMPLETED for row in await life.store.get_runs(ids)) == len(ids)


async def _ask(rl: Relight, run_id: str) -> None:
    """Resume as a person does that gets no answer: again, until the answer is that there is nothing to do."""
    try:
        await patiently(lambda: rl.resume(run_id))
    except (RunStateError, ConflictError):
        row = await rl.row(run_id)
        assert row.status in (Status.PENDING, Status.RUNNING) or row.status is Status.COMPLETED, row


async def _leave_to_be_resumed(rl: Relight, life: Life) -> None:
    store = life.store
    await rl.start("chain", "orphan", id="orphan")
    await rl.start("tree", "given-up", id="given-up")
    await rl.start("parked", "paused", id="paused")
    await _has_begun(life, "orphan two", "given-up left stuck", "given-up right stuck")
    await rl.start("faithful", "faithful", id="faithful")
    await life.reached("faithful", Status.WAITING)
    await (await rl.get("paused")).pause()
    await life.reached("paused", Status.PAUSED)
    await _tell(store, "paused", MessageKind.SIGNAL, "now", "go")
    now = time.time()
    gone = [row.id for row in await _all(store) if row.root_id == "given-up" and not row.status.terminal]
    changes = [
        RunChange(run_id=run_id, status=Status.CANCELLED, hold=Hold.RECOVERY if run_id == "given-up" else None)
        for run_id in gone
    ]
    await _write(store, "given-up", j.RunCancelled("", "its owner died", now), changes=changes)
    life.die()


# ---- 4: an orderly end during which the process dies


async def closing(rl: Relight, life: Life) -> Any:
    """The first life closes, and dies while it does. The run in the next process is told again what it may not have received."""
    if life.number == WITNESS:
        await _stand_by(life)
    names = {"plain": "chain", "tree": "tree", "listening": "listening", "parked": "parked", "napping": "napping"}
    for run_id, flow_name in names.items():
        await patiently(lambda run_id=run_id, flow_name=flow_name: rl.start(flow_name, run_id, id=run_id))  # type: ignore[misc]
    if life.number == PREPARING:
        await _has_begun(life, "plain two", "listening busy", "tree left stuck", "tree right stuck")
    for run_id in ("listening", "parked"):
        with contextlib.suppress(RunStateError):  # the run has received it in an earlier life, and ended
            await (await rl.get(run_id)).signal("go", "now", id="go")
    if life.number == PREPARING:
        life.begins()
        life.again()
        return None
    await _settle(life)
    return await _outcome(life)


# ---- a run gets a message in the moment in which its owner pauses it, and the owner dies


@step
async def slow(label: str) -> str:
    """Ends when the witness has posted the message to its run. So the message comes while this step is under way."""
    with effect(label):
        book = ledger()
        assert book is not None
        told = book.path.parent / "told"
        await until(told.exists, "the witness to tell it", poll=POLL_SECONDS)
        return label


@flow
async def interrupted(who: str) -> list[str]:
    return [await slow(f"{who} slow"), await work(f"{who} after")]


async def told_while_paused(rl: Relight, life: Life) -> Any:
    """Life 1 drives a run and pauses it. Meanwhile the witness cancels or resumes the run (`life.arguments`). It reads
    its own message and delivers it to no run, because the run is in the memory of life 1. After that it looks for
    orphans."""
    if life.number == WITNESS:
        return await _tell_and_take_over(rl, life)
    handle = await life.start(rl, interrupted, "r", id="r")
    await _has_begun(life, "r slow")
    life.begins()
    await patiently(handle.pause)
    run = rl.orchestrator.live["r"]

    async def pausing() -> bool:
        return run.stopping is not None

    async def gone() -> bool:
        return "r" not in rl.orchestrator.live

    await life.until(pausing)
    note("pausing")
    await life.until(gone)
    life.again()
    return None


async def _tell_and_take_over(rl: Relight, life: Life) -> Any:
    (kind,) = life.arguments
    note("ready")

    async def pausing_or_over() -> bool:
        return bool(life.facts("pausing") or life.facts("over"))

    async def over() -> bool:
        return bool(life.facts("over"))

    await life.until(pausing_or_over)
    if await life.store.get_run("r") is None:
        return "it was never started"
    (told,) = await life.store.post(
        [Message(run_id="r", kind=MessageKind(kind), payload=b'"enough"', dedup=kind, at=time.time())]
    )
    assert told is not None
    rl.orchestrator.look_for_messages()

    async def routed() -> bool:  # or life 1 has consumed it before another process could read it
        unread = [message.id for message in await life.store.messages_after(told - 1, 1)]
        return rl.orchestrator.delivery._last >= told or told not in unread

    await life.until(routed)
    (life.directory / "told").touch()
    await life.until(over)
    assert rl._recovery is not None
    rl._recovery.orphans(Orphaned("life 1"))
    await life.until(lambda: _have_ended(life, "r"))
    return await _outcome(life)


# ---- 5: the row names another owner than the lease


async def wrong_owner(rl: Relight, life: Life) -> Any:
    """Leases are kept apart from the store. The witness has acquired the leases of the dead process's runs, and cannot
    claim the runs, because its store fails. Life 2 notices that and corrects the rows. Then the witness's store works
    again."""
    if life.number == WITNESS:
        # It finds the corrected rows when it looks for lost runs: here at once, not half a minute later.
        waking.CHECK_SECONDS = waking.LOST_SECONDS = 0.1
        _fail_to_claim(rl, life)
        note("ready")
        await life.until(lambda: _completed(life, *WRONG))
        return await _outcome(life)
    if life.number == PREPARING:
        for run_id, flow_name in zip(WRONG, ("chain", "tree"), strict=True):
            await rl.start(flow_name, run_id, id=run_id)
        await _has_begun(life, "plain two", "tree left stuck", "tree right stuck")
        life.die()
    await life.until(lambda: _corrected(life))
    life.again()
    return None


WRONG = ["plain", "tree"]


def _fail_to_claim(rl: Relight, life: Life) -> None:
    """The witness's first claim fails. With `claim` it learns that only when the other lives are over. With `owners` it
    learns that at once, and sees that it does not own the runs; before its next round the rows are corrected and name
    it."""
    (when,) = life.arguments
    store: Any = rl.services.store
    inner = store.owners

    async def claim(epochs: dict[str, int], owner: str) -> dict[str, int]:
        del store.claim
        if when == "owners":
            store.owners = owners
        else:
            _stand_still(life)
        raise StoreUnavailableError("the witness's store fails")

    async def owners() -> list[str]:
        del store.owners

        async def looked() -> bool:
            return not any(rl.orchestrator.has(run_id) for run_id in WRONG)

        await life.until(looked)
        _stand_still(life)
        return await inner()  # type: ignore[no-any-return]

    store.claim = claim


def _stand_still(life: Life) -> None:
    """The process's event loop stands still until all other lives are over. The loop of its heartbeat thread does not."""
    note("claiming")
    while not life.facts("over"):
        time.sleep(POLL_SECONDS)


async def _corrected(life: Life) -> bool:
    return all((row.owner or "").startswith("c#") for row in await life.store.get_runs(WRONG))
