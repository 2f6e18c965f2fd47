"""Stopping while servers hang: an orchestrator that is told to stop ends soon after its grace, whatever the servers do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from tests.cluster.arena import Arena, flows
from tests.harness.cluster import until
from tests.servers.proxy import TcpProxy

TTL = 30.0  # as in production: closing must not wait for a part of it
GRACE = 1.0
MORE_SECONDS = (
    25.0  # for a commit, the end of the session and connections that do not answer: less than a statement's deadline
)


@pytest.fixture
def proxies(arena: Arena) -> Iterator[dict[str, TcpProxy]]:
    """Proxies between the node and each of its servers."""
    servers = {"postgres": arena.postgres, "etcd": arena.etcd}
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(TcpProxy("127.0.0.1", server.port))
            for name, server in servers.items()
            if server is not None
        }


@pytest.mark.parametrize(
    ("kind", "silent"),
    [
        pytest.param("postgres", ["postgres"], marks=pytest.mark.soak_ci),
        pytest.param("postgres+etcd", ["postgres"], marks=pytest.mark.soak_ci),
        pytest.param("postgres+etcd", ["etcd"], marks=pytest.mark.soak_ci),
        ("postgres+etcd", ["postgres", "etcd"]),
    ],
)
async def test_it_ends_although_no_server_answers(arena: Arena, proxies: dict[str, TcpProxy], silent: list[str]):
    assert arena.postgres is not None
    store = arena.store.replace(f":{arena.postgres.port}/", f":{proxies['postgres'].port}/")
    leases = arena.leases
    if arena.etcd is not None:
        leases = leases.replace(f":{arena.etcd.port}/", f":{proxies['etcd'].port}/")
    async with arena.opened(TTL, shutdown_grace=GRACE, park_after="1h") as (cluster, rl):
        await cluster.start("a", store=store, leases=leases)
        for n in range(5):
            await rl.start(flows.gated.with_id(f"held-{n}"), "never")
            await rl.start(flows.steps.with_id(f"busy-{n}"), 1000, 0.01)
            await rl.start(flows.asking.with_id(f"waiting-{n}"))
        await until(lambda: len(arena.begun()) == 15 and len(arena.notes(key="held")) == 5)
        for name in silent:
            proxies[name].stall()
        told = time.monotonic()
        cluster.terminate("a")
        assert await cluster.ended("a", within=60) == 0
        took = time.monotonic() - told
        print(f"\n{arena.kind}, {' and '.join(silent)} silent: ended {took:.1f} s after SIGTERM")
        assert took < GRACE + MORE_SECONDS
