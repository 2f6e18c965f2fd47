"""Calls to etcd with a deadline. If an endpoint does not answer, the call tries the next one.

Only the messages and stubs of aetcd are used, not its client: the client supports neither TLS nor a second endpoint,
and its watcher cannot distinguish a partition from an etcd without news.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc  # type: ignore[import-untyped]
from aetcd import rpc  # type: ignore[import-untyped]

from relight.backends.etcd.address import EtcdAddress
from relight.errors import LeasesUnavailableError

_OPTIONS = (
    # Without this, the channels of one process share their connections, and the pause after a failed connection: a new
    # channel to an etcd that is back would go on failing for seconds.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # Ten thousand runs of one dead owner are one message of the watch.
    ("grpc.max_receive_message_length", -1),
)

_WITH_LEADER = ("hasleader", "true")

# etcd refuses a JWT token with this message once users or roles have changed.
_OLD_TOKEN = "revision of auth store is old"

_NO_LEADER = "no leader"
ELECTION_PAUSE_SECONDS = 0.1

# After these codes another endpoint, or a new connection, may answer.
_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


class LeaseGoneError(LeasesUnavailableError):
    """etcd does not know this lease: it lapsed or was revoked, and the keys attached to it are deleted."""


class Link:
    """A channel to one endpoint, with the stubs and the token that belong to it."""

    def __init__(self, address: EtcdAddress, endpoint: str) -> None:
        self.endpoint = endpoint
        self._address = address
        self._token = ""
        if address.tls is None:
            self.channel = grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(
                endpoint, grpc.ssl_channel_credentials(*address.tls.read()), options=_OPTIONS
            )
        self.stubs = {
            "KV": rpc.KVStub(self.channel),
            "Lease": rpc.LeaseStub(self.channel),
            "Watch": rpc.WatchStub(self.channel),
        }

    async def metadata(self, seconds: float) -> tuple[tuple[str, str], ...]:
        """Sent with every call: the token, if there is a user, and `hasleader`. It makes a member that is cut off from
        its leader refuse the call. Such a member would keep a watch open for ever, without knowing of any change."""
        if not self._address.username:
            return (_WITH_LEADER,)
        if not self._token:
            request = rpc.AuthenticateRequest(name=self._address.username, password=self._address.password)
            answer = await rpc.AuthStub(self.channel).Authenticate(request, timeout=seconds)
            self._token = answer.token
        return _WITH_LEADER, ("token", self._token)

    def forget_token(self) -> None:
        """A token expires when it is not used for a while, or when etcd restarts."""
        self._token = ""


class Connection:
    """One channel at a time, made on demand. No call takes longer than `seconds`."""

    def __init__(self, address: EtcdAddress, seconds: float) -> None:
        self.revision = 0  # of etcd's data, the newest in any answer
        self.seconds = seconds
        self._address = address
        self._next = 0  # the endpoint to try
        self._link: Link | None = None
        self._closed = False
        self._closing: dict[asyncio.Task[None], Link] = {}

    async def close(self) -> None:
        self._closed = True
        links = [*self._closing.values(), *filter(None, [self._link])]
        self._link = None
        for link in links:
            await link.channel.close()
        await asyncio.gather(*self._closing)

    def link(self) -> Link:
        """The channel in use. gRPC connects by itself at the first call."""
        if self._closed:
            raise LeasesUnavailableError(f"the connection to {self._address!r} is closed")
        if self._link is None:
            self._link = Link(self._address, self._address.endpoints[self._next % len(self._address.endpoints)])
        return self._link

    def drop(self, link: Link) -> None:
        """This endpoint does not answer: the next call makes a new channel, to the next endpoint."""
        if self._link is not link:
            return  # another call has dropped it already
        self._link = None
        self._next += 1
        # To close it at once would cancel other calls that wait on this channel. Their deadlines end them.
        task = asyncio.get_running_loop().create_task(link.channel.close(grace=self.seconds))
        self._closing[task] = link
        task.add_done_callback(self._closing.pop)

    # ---- requests

    async def read(self, key: bytes, range_end: bytes = b"") -> list[Any]:
        """The key, or all keys from it up to `range_end`, with their values and leases."""
        answer = await self._call("KV", "Range", rpc.RangeRequest(key=key, range_end=range_end))
        return list(answer.kvs)

    async def transact(self, request: Any) -> Any:
        return await self._call("KV", "Txn", request)

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        await self._call("KV", "Put", rpc.PutRequest(key=key, value=value, lease=lease))

    async def grant(self, ttl_seconds: int) -> int:
        """A new lease."""
        answer = await self._call("Lease", "LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_seconds))
        lease: int = answer.ID
        return lease

    async def keep_alive(self, lease: int) -> bool:
        """Begin the lease's ttl again. False if the lease is gone."""
        try:
            answer = await self._call("Lease", "LeaseKeepAlive", rpc.LeaseKeepAliveRequest(ID=lease))
        except LeaseGoneError:
            return False
        alive: bool = answer.TTL > 0
        return alive

    async def revoke(self, lease: int) -> None:
        """End the lease and delete the keys attached to it, as one change."""
        with contextlib.suppress(LeaseGoneError):  # the lease has ended already
            await self._call("Lease", "LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease))

    async def time_to_live(self, lease: int) -> tuple[int, int]:
        """Seconds that are left, rounded down, and seconds that were granted. If the lease is gone: less than zero."""
        answer = await self._call("Lease", "LeaseTimeToLive", rpc.LeaseTimeToLiveRequest(ID=lease))
        return answer.TTL, answer.grantedTTL

    # ---- inside

    async def _call(self, service: str, method: str, request: Any) -> Any:
        """Calls every endpoint once at most. Only during an election, when all endpoints refuse at once, it tries again
        until its time is over. All requests are safe to repeat, because the first may have been executed."""
        silent = 0
        electing = False  # any endpoint has reported an election; a dead leader reports nothing
        until = asyncio.get_running_loop().time() + self.seconds
        share = self.seconds / len(self._address.endpoints)
        renewed = False
        while True:
            link = self.link()
            try:
                answer = await _invoke(link, service, method, request, share)
            except grpc.aio.AioRpcError as error:
                raise_if_cancelled()
                code = error.code()
                if code is grpc.StatusCode.NOT_FOUND:
                    raise LeaseGoneError(f"the session has lapsed or was ended: {error.details()}") from error
                if code in _NO_ANSWER:
                    self.drop(link)
                    silent += 1
                    electing |= _NO_LEADER in error.details()
                    again = silent < len(self._address.endpoints) or (electing and await _time_left(until))
                else:
                    again = not renewed and (code is grpc.StatusCode.UNAUTHENTICATED or _OLD_TOKEN in error.details())
                    renewed = True
                    link.forget_token()
                if not again:
                    raise _unavailable(self._address, error) from error
            except asyncio.CancelledError:
                raise_if_cancelled()
                # gRPC cancels the tasks that wait on a channel that is closed: the caller was not cancelled.
                raise LeasesUnavailableError(f"the connection to {self._address!r} was closed") from None
            else:
                self.revision = max(self.revision, answer.header.revision)
                return answer


async def _time_left(until: float) -> bool:
    """Whether there is time for another call, after a pause in which the election may end."""
    if asyncio.get_running_loop().time() + ELECTION_PAUSE_SECONDS >= until:
        return False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ELECTION_PAUSE_SECONDS):
            await asyncio.Event().wait()
    return True


def raise_if_cancelled() -> None:
    """gRPC loses a cancellation that comes together with the end of a call: it raises the call's error instead. A task
    that tries again after errors would never end."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise asyncio.CancelledError


async def _invoke(link: Link, service: str, method: str, request: Any, seconds: float) -> Any:
    metadata = await link.metadata(seconds)
    call = getattr(link.stubs[service], method)
    if method != "LeaseKeepAlive":
        return await call(request, timeout=seconds, metadata=metadata)
    stream = call(timeout=seconds, metadata=metadata)
    try:
        with contextlib.suppress(asyncio.InvalidStateError):  # the stream has failed already: read() raises the cause
            await stream.write(request)
        answer = await stream.read()
    finally:
        stream.cancel()
    if answer is grpc.aio.EOF:
        raise LeasesUnavailableError(f"{link.endpoint} ended the heartbeat's stream without an answer")
    return answer


def _unavailable(address: EtcdAddress, error: Any) -> LeasesUnavailableError:
    cause = f"{error.code().name}: {error.details()}"
    return LeasesUnavailableError(f"{address!r} does not serve leases: {cause}{_advice(address, error.details())}")


# What gRPC and etcd say, and what to do about it. With TLS, and without.
_TLS_ADVICE = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by {ca}; give the file of the authority that signed it as ca=",
    "Hostname Verification": "its certificate was issued for other hosts; name it as the certificate does",
    "Unwrap failed": "{cert}; give as cert= and key= what was signed by an authority of etcd's --trusted-ca-file",
    "create security handshaker": "the files of ca=, cert= and key= must be PEM, and the key that of the certificate",
    "Handshake read failed": "if it does not speak TLS, leave tls=, ca=, cert= and key= out",
}
_PLAIN_ADVICE = {"Socket closed": "if it speaks TLS, add ?tls=true to the URL, or ?ca=FILE"}
_USER_ADVICE = {
    "user name is empty": "it wants a user: etcd://user:password@host",
    "invalid user ID or password": "check both in the URL; in a password, / @ : ? # and % are written as %2F %40 %3A %3F %23 %25",
    "authentication is not enabled": "leave user and password out, or turn it on: etcdctl auth enable",
    "permission denied": "allow it: etcdctl role grant-permission ROLE readwrite --prefix=true {prefix}",
}


def _advice(address: EtcdAddress, details: str) -> str:
    tls = address.tls
    table = _USER_ADVICE | (_PLAIN_ADVICE if tls is None else _TLS_ADVICE)
    found = next((advice for pattern, advice in table.items() if pattern in details), "")
    return found and "; " + found.format(
        prefix=address.prefix,
        ca=tls.ca if tls is not None and tls.ca else "any authority that this system trusts",
        cert=f"it does not accept {tls.cert}" if tls is not None and tls.cert else "it requires a client certificate",
    )
