"""EtcdLeases: the whole LeaseManager protocol on etcd.

One etcd lease is one session. The heartbeat keeps it alive. At its end etcd deletes all keys attached to it, which
frees the runs, and notifies the watches of other orchestrators. As everywhere, a lease is a hint about liveness: it
stops no process from writing (a process may sleep past its end and wake up). The epoch in the store does.

etcd counts in whole seconds and raises a ttl that is shorter than one and a half of its election timeouts (by default:
than 2 s). So a session may live longer than the requested ttl, never shorter.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec

from relight.backends.etcd.address import DEFAULT_PREFIX, EtcdAddress, Tls
from relight.backends.etcd.connection import Connection
from relight.backends.etcd.keys import RUNS_PER_TRANSACTION, Keys, acquire, end_of, holders, put_once, release
from relight.backends.etcd.watch import OrphanWatch
from relight.clock import SYSTEM_CLOCK, Clock
from relight.errors import LeasesUnavailableError
from relight.model.lease import Acquired, Lease, NotOwner, Orphaned, OwnedBy, Process, Released, Session
from relight.supervisor import Supervisor

# A call may take this long at most, and this part of the ttl: a heartbeat that hangs must leave time for another.
MAX_CALL_SECONDS = 3.0
MAX_CALL_PART = 0.3
# Until the session has begun, no lease depends on a quick answer. A machine that is busy starting gets more time.
OPENING_SECONDS = 5.0
# How many ended sessions are remembered.
MAX_ENDED = 1000


class _Record(msgspec.Struct):
    """The value of a session's key."""

    process: Process = Process()
    started_at: float = 0.0
    lease: int = 0
    ttl: int = 0


class EtcdLeases:
    """`endpoints` are host:port. All keys are below `prefix`, so that several stores may share one etcd.

    etcd has no clock that can be read, only the seconds that are left of a lease. The times given here are those
    seconds added to `clock`, read at the same moment. (A session's `started_at` is by the clock of its own process.)

    etcd forgets a session when it ends. A session whose end a watch of this process has received is remembered here and
    listed as lapsed: it expired when the watch received its end, and its last heartbeat was one ttl earlier. An
    orchestrator that opens later does not know of that session, and reads the store.

    An etcd that has lost its data looks as if every orchestrator had died: `listed_since` says how old its list is.
    """

    in_store = False

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str = DEFAULT_PREFIX,
        *,
        username: str = "",
        password: str = "",
        tls: Tls | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        prefix = prefix if prefix.endswith("/") else prefix + "/"
        self._address = EtcdAddress(tuple(endpoints), prefix, username, password, tls)
        self.name = repr(self._address)
        self._keys = Keys(prefix)
        self._clock = clock
        self._connection: Connection | None = None
        self._watches: list[OrphanWatch] = []
        self._owner = ""
        self._process = Process()
        self._record = _Record()  # the stored value of the session's key
        self._ttl_seconds = 0
        self._call_seconds = 0.0
        self._lease = 0  # of the session; 0: it has not begun
        self._beginning = asyncio.Lock()
        self._ended: dict[str, Session] = {}  # ended sessions of others that may still own runs in the store

    # ---- the session

    async def open(self, owner: str, process: Process, ttl_seconds: float) -> None:
        await self.close()
        self._owner, self._process = owner, process
        self._ttl_seconds = max(1, math.ceil(ttl_seconds))
        self._call_seconds = min(MAX_CALL_SECONDS, ttl_seconds * MAX_CALL_PART)
        self._lease = 0
        self._beginning = asyncio.Lock()  # a Lock belongs to one loop: this is the loop that opens the leases
        self._ended.clear()
        self._connection = Connection(self._address, OPENING_SECONDS)
        try:
            await self._connection.read(self._keys.session(owner))  # its answer has the revision where watches begin
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        watches, self._watches = self._watches, []
        for watch in watches:
            await watch.aclose()
        if connection is not None:
            await connection.close()

    def report(self, trouble: str) -> None:
        self._process = msgspec.structs.replace(self._process, trouble=trouble)

    async def heartbeat(self) -> bool:
        async with self._beginning:
            if self._lease and await self._etcd.keep_alive(self._lease):
                if self._process != self._record.process:
                    await self._put(msgspec.structs.replace(self._record, process=self._process))
                return False
            await self._begin()
            self._etcd.seconds = self._call_seconds  # from now on the leases of runs depend on quick answers
            return True

    async def _begin(self) -> None:
        """Make a new etcd lease, and attach the session's key to it. Without its key, the lease just lapses."""
        self._lease = 0
        etcd = self._etcd
        lease = await etcd.grant(self._ttl_seconds)
        await self._put(_Record(self._process, self._clock.now(), lease, self._ttl_seconds))
        await etcd.transact(put_once(self._keys.since, b"%.3f" % self._clock.now()))
        self._lease = lease

    async def _put(self, record: _Record) -> None:
        await self._etcd.put(self._keys.session(self._owner), msgspec.json.encode(record), record.lease)
        self._record = record

    async def release_all(self) -> None:
        async with self._beginning:
            if self._lease:
                await self._etcd.revoke(self._lease)
                self._lease = 0

    async def end_session(self, owner: str) -> None:
        for found in await self._etcd.read(self._keys.session(owner)):
            await self._etcd.revoke(found.lease)

    async def forget_session(self, owner: str) -> None:
        self._ended.pop(owner, None)

    async def listed_since(self) -> float:
        """The first orchestrator that came to an etcd without data has written this time. If none came: now."""
        found = await self._etcd.read(self._keys.since)
        try:
            return float(found[0].value)
        except (IndexError, ValueError):
            return self._clock.now()

    def _has_ended(self, owner: str, value: bytes) -> None:
        """A watch has received the end of a session. `value` was the value of its key."""
        record, now = _record(value), self._clock.now()
        self._ended[owner] = Session(
            owner=owner,
            process=record.process,
            started_at=record.started_at,
            heartbeat_at=now - record.ttl,
            expires_at=now,
            fresh=False,
        )
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    # ---- runs

    async def acquire_lease(self, run_ids: Sequence[str]) -> dict[str, Acquired | OwnedBy]:
        wanted = list(dict.fromkeys(run_ids))
        batches = [wanted[at : at + RUNS_PER_TRANSACTION] for at in range(0, len(wanted), RUNS_PER_TRANSACTION)]
        found = dict(zip(wanted, [kv for batch in batches for kv in await self._acquire(batch)], strict=True))
        others = {kv.lease for kv in found.values() if kv is not None}
        expiry = await self._expiry(others)
        return {
            run_id: Acquired() if kv is None else OwnedBy(kv.value.decode(), expiry.get(kv.lease, self._clock.now()))
            for run_id, kv in found.items()
        }

    async def _acquire(self, run_ids: Sequence[str]) -> list[Any]:
        if not self._lease:
            raise LeasesUnavailableError(f"{self._owner} has no session: it begins with the first heartbeat")
        keys = [self._keys.run(run_id) for run_id in run_ids]
        return holders(await self._etcd.transact(acquire(keys, self._owner.encode(), self._lease)))

    async def release_lease(self, run_id: str) -> Released | NotOwner:
        answer = await self._etcd.transact(release(self._keys.run(run_id), self._owner.encode()))
        if answer.succeeded:
            return Released()
        found = answer.responses[0].response_range.kvs
        return NotOwner(found[0].value.decode() if found else None)

    async def get_lease(self, run_id: str) -> Lease | None:
        for found in await self._etcd.read(self._keys.run(run_id)):
            expiry = await self._expiry([found.lease])
            if found.lease in expiry:
                return Lease(run_id, found.value.decode(), expiry[found.lease])
        return None

    # ---- all sessions

    async def list_orchestrators(self) -> list[Session]:
        found = await self._etcd.read(self._keys.sessions, end_of(self._keys.sessions))
        left = await self._time_to_live({kv.lease for kv in found})
        sessions: list[Session] = []
        for kv in found:
            if kv.lease not in left:
                continue  # the session has ended since its key was read
            expires_at, granted = left[kv.lease]
            record = _record(kv.value)
            sessions.append(
                Session(
                    owner=kv.key[len(self._keys.sessions) :].decode(),
                    process=record.process,
                    started_at=record.started_at,
                    heartbeat_at=expires_at - granted,
                    expires_at=expires_at,
                    fresh=True,  # otherwise etcd would have deleted the key
                )
            )
            self._ended.pop(sessions[-1].owner, None)  # this owner's session has begun again
        return sessions + list(self._ended.values())

    def watch_orphans(self, supervisor: Supervisor | None = None) -> AsyncIterator[Orphaned]:
        # The watch begins at the newest known revision, so that nothing is missed while the stream is set up. That
        # revision may be a heartbeat old, so the watch may also report an owner that died shortly before.
        revision = max([self._etcd.revision, *(watch.revision for watch in self._watches)])
        own = Connection(self._address, self._call_seconds)
        watch = OrphanWatch(own, self._keys, self._owner, revision, self._ttl_seconds / 3, self._has_ended)
        self._watches.append(watch)
        return watch

    # ---- inside

    @property
    def _etcd(self) -> Connection:
        if self._connection is None:
            raise LeasesUnavailableError(f"{self._address!r} is not open")
        return self._connection

    async def _expiry(self, leases: Iterable[int]) -> dict[int, float]:
        return {lease: expires_at for lease, (expires_at, _) in (await self._time_to_live(leases)).items()}

    async def _time_to_live(self, leases: Iterable[int]) -> dict[int, tuple[float, int]]:
        """When each of these etcd leases ends, and its ttl. Leases that are gone are left out."""
        wanted = list(leases)
        answers = await asyncio.gather(*(self._etcd.time_to_live(lease) for lease in wanted))
        now = self._clock.now()
        # etcd rounds the seconds down. With one second more, but at most the whole ttl, the end is never too early.
        return {
            lease: (now + min(left + 1, granted), granted)
            for lease, (left, granted) in zip(wanted, answers, strict=True)
            if left >= 0
        }


def _record(value: bytes) -> _Record:
    """The record in a session's key. If another version has written it in another form, its session still counts."""
    try:
        return msgspec.json.decode(value, type=_Record)
    except msgspec.DecodeError:
        return _Record()
