"""A private etcd cluster for tests: three members on loopback, to be killed, frozen and restarted one by one.

    with EtcdCluster(folder, etcd_or_skip()) as cluster:
        leases = EtcdLeases(cluster.endpoints)
        cluster.leader().freeze()       # two are left, and elect another one
        for member in cluster.members[:2]:
            member.kill()               # no majority: nothing is answered
        cluster.heal()                  # dead and frozen members run again

The members are called after the first three letters. A client asks its first endpoint first.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any, Self

from relight.clock import SYSTEM_CLOCK, block
from tests.servers.etcd import POLL_SECONDS, START_SECONDS, EtcdServer, member_ports

NAMES = ("a", "b", "c")
ASK_SECONDS = 0.5


class EtcdCluster:
    """Members keep their ports and data over any number of lives. See `EtcdServer` about threads."""

    def __init__(self, directory: Path, program: Path) -> None:
        ports = member_ports(NAMES)
        self.members = [EtcdServer(directory / name, program, name=name, members=ports) for name in NAMES]

    def __enter__(self) -> Self:
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.stop()

    @property
    def endpoints(self) -> list[str]:
        """Where clients connect: host:port of every member."""
        return [member.endpoint for member in self.members]

    def heal(self) -> None:
        """Start dead members, thaw frozen ones, and wait until all of them follow one leader."""
        for member in self.members:
            if member.alive:
                member.thaw()
            else:
                member.launch()
        for member in self.members:
            member.wait()
        self.leader()

    def leader(self) -> EtcdServer:
        """The member that all answering members take for their leader. Waits until there is one. Do not call it when the majority
        is gone: then there is no leader."""
        deadline = SYSTEM_CLOCK.monotonic() + START_SECONDS
        while (found := self._leader()) is None:
            assert SYSTEM_CLOCK.monotonic() < deadline, "no leader is elected"
            block(POLL_SECONDS)
        return found

    def followers(self) -> list[EtcdServer]:
        """The members that are not the leader, in the order of the endpoints."""
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    # ---- inside

    def _leader(self) -> EtcdServer | None:
        told = [(member, status) for member in self.members if (status := _status(member)) is not None]
        named = {status.get("leader", "0") for _, status in told}
        if len(told) <= len(self.members) // 2 or len(named) != 1:
            return None
        return next((member for member, status in told if status["header"]["member_id"] in named), None)


def _status(member: EtcdServer) -> dict[str, Any] | None:
    """The status that a member reports. None: it does not answer."""
    try:
        request = urllib.request.Request(f"http://{member.endpoint}/v3/maintenance/status", b"{}")
        with urllib.request.urlopen(request, timeout=ASK_SECONDS) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except OSError:
        return None
