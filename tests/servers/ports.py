"""Ports for servers that get their port from a test, and keep it over several lives."""

from __future__ import annotations

import contextlib
import socket

from relight.clock import SYSTEM_ENTROPY

# Below the ports of outgoing connections: such a connection could take the port while its server is down.
FIRST, LAST = 15_000, 32_000
MAX_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Ports on which no process listens. They are kept open until all are chosen, or one could be chosen twice."""
    with contextlib.ExitStack() as held:
        return [_free_port(held) for _ in range(count)]


def _free_port(held: contextlib.ExitStack) -> int:
    for _ in range(MAX_TRIES):
        port = FIRST + int(SYSTEM_ENTROPY.random() * (LAST - FIRST))  # at random: several test processes choose at once
        with contextlib.suppress(OSError):
            held.enter_context(socket.create_server(("127.0.0.1", port)))
            return port
    raise RuntimeError(f"no port between {FIRST} and {LAST} is free")
