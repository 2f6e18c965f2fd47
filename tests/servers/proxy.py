"""A TCP proxy that breaks. Put it between one process and its server, and cut that process off while all others go on.

    with TcpProxy("127.0.0.1", server.port) as proxy:
        leases = EtcdLeases([proxy.address])
        proxy.stall()   # a silent partition: everything stays open, nothing arrives
        proxy.cut()     # connections are reset, new ones are refused
        proxy.heal()    # as before
        proxy.switch("127.0.0.1", other.port)   # the address leads to another server from now on

It has an event loop in a thread of its own. So it goes on forwarding while the test's loop is blocked: some tests block it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Self

CHUNK = 65_536
COMMAND_SECONDS = 60.0
_RESET = struct.pack("ii", 1, 0)  # linger for no time: unsent data is thrown away


class TcpProxy:
    """Forwards from a loopback port of its own to `host`:`port`. The commands take effect before they return."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._port = 0  # chosen at the first start, and the same after cuts
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._flowing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relight-proxy", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where to connect: host:port."""
        return f"127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        return len(self._connections)

    def start(self) -> None:
        self._thread.start()
        self.heal()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._do(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Reset all connections and refuse new ones."""
        self._do(self._cut())

    def stall(self) -> None:
        """Forward nothing more, in either direction. Connections stay open and new ones are accepted. Clients notice by
        deadlines only."""
        self._do(self._stall())

    def heal(self) -> None:
        """Forward again. Data that a stall held back arrives late, as when TCP sends it again."""
        self._do(self._heal())

    def switch(self, host: str, port: int) -> None:
        """Lead new connections elsewhere. Open connections stay where they are, as with most balancers. `cut` ends
        them. A floating address is a cut, a switch and a heal."""
        self._target = (host, port)

    def _do(self, command: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(command, self._loop).result(COMMAND_SECONDS)

    # ---- on the thread

    async def _heal(self) -> None:
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _stall(self) -> None:
        self._flowing.clear()

    async def _cut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = list(self._connections)
        for task in tasks:
            for writer in self._connections[task]:
                with contextlib.suppress(OSError):  # closed already
                    # A reset: a plain close would look like an orderly end.
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        writers = self._connections[task] = [writer]
        try:
            await self._flowing.wait()
            there_reader, there = await asyncio.open_connection(*self._target)
            writers.append(there)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, there))
                both.create_task(self._pump(there_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # the server is down, a peer has reset, or `cut` was called: each ends this connection and nothing else
        finally:
            del self._connections[task]
            for one in writers:
                one.close()  # unlike a cut, after the data that is still to be sent

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        await self._flowing.wait()
        with contextlib.suppress(OSError):  # the other side is gone, too
            writer.write_eof()
