"""The proxy breaks connections as networks do: loudly (cut) and silently (stall)."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading

import pytest

from tests.servers.proxy import TcpProxy

SECONDS = 60.0  # a test waits for so long only if it fails
SILENCE = 0.2  # long for a loopback, and the only way to see that nothing comes


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # how a client sees a cut
            while data := self.request.recv(65536):
                self.request.sendall(data)


@pytest.fixture
def echo():
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo):
    with TcpProxy("127.0.0.1", echo) as proxy:
        yield proxy


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), SECONDS)


def receive(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := client.recv(count - len(data))):
        data += more
    return data


def says(client: socket.socket, data: bytes = b"hello") -> bytes:
    client.sendall(data)
    return receive(client, len(data))


def test_it_forwards_both_ways(proxy):
    with connect(proxy) as one, connect(proxy) as two:
        assert says(one) == b"hello"
        assert says(two, b"there") == b"there"
        assert proxy.connections == 2
        assert proxy.address == f"127.0.0.1:{proxy.port}"


def test_much_data_and_the_end_of_a_stream_pass(proxy):
    data = bytes(range(256)) * 20_000
    with connect(proxy) as client:
        sender = threading.Thread(target=lambda: (client.sendall(data), client.shutdown(socket.SHUT_WR)))
        sender.start()
        assert receive(client, len(data)) == data
        assert client.recv(1) == b""
        sender.join()


def test_a_cut_resets_what_is_open_and_refuses_what_is_new(proxy):
    with connect(proxy) as client:
        assert says(client) == b"hello"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)


def test_after_a_cut_it_heals_on_the_same_port(proxy):
    address = proxy.address
    proxy.cut()
    proxy.cut()
    proxy.heal()
    assert proxy.address == address
    with connect(proxy) as client:
        assert says(client) == b"hello"


def test_a_stall_is_silent_and_what_it_held_back_arrives_late(proxy):
    with connect(proxy) as client:
        assert says(client) == b"hello"
        proxy.stall()
        client.sendall(b"late")
        client.settimeout(SILENCE)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(SECONDS)
        proxy.heal()
        assert receive(client, 4) == b"late"


def test_a_stalled_proxy_accepts_and_says_nothing(proxy):
    proxy.stall()
    with connect(proxy) as client:
        client.sendall(b"hello")
        client.settimeout(SILENCE)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(SECONDS)
        proxy.heal()
        assert receive(client, 5) == b"hello"


def test_a_stalled_proxy_can_be_cut(proxy):
    with connect(proxy) as client:
        proxy.stall()
        client.sendall(b"hello")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_a_server_that_is_down_ends_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with TcpProxy("127.0.0.1", port) as proxy, connect(proxy) as client:
        assert client.recv(1) == b""
