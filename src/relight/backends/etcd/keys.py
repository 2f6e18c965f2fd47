"""What stands in etcd, and the transactions over it.

    <prefix>sessions/<owner>   who that is, as JSON
    <prefix>runs/<run id>      the owner
    <prefix>since              when this list was begun, by the store's clock

The first two hang on the owner's etcd lease: when it lapses or is revoked, etcd deletes all of them as one change. So a key that
exists is held by somebody alive, and the last value of a run's deleted key tells whose it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aetcd import rpc  # type: ignore[import-untyped]

# etcd takes 128 operations in one transaction, and counts the deepest nesting below them as well: two more here.
RUNS_PER_TRANSACTION = 100


class Keys:
    """Names below one prefix."""

    def __init__(self, prefix: str) -> None:
        self.all = prefix.encode()
        self.sessions = self.all + b"sessions/"
        self.runs = self.all + b"runs/"
        self.since = self.all + b"since"

    def session(self, owner: str) -> bytes:
        return self.sessions + owner.encode()

    def run(self, run_id: str) -> bytes:
        return self.runs + run_id.encode()

    def owner_of(self, key: bytes) -> str | None:
        """Whose session this key is, if it is one."""
        return key[len(self.sessions) :].decode() if key.startswith(self.sessions) else None

    def run_of(self, key: bytes) -> str | None:
        """Which run's this key is, if it is one's."""
        return key[len(self.runs) :].decode() if key.startswith(self.runs) else None


def end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin so. Prefixes end with a slash, which has a successor."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def acquire(keys: Sequence[bytes], owner: bytes, lease: int) -> Any:
    """For each key by itself: take it if nobody has it, attach it to this lease if it is ours, else read whose it is."""
    return rpc.TxnRequest(success=[_acquire(key, owner, lease) for key in keys])


def _acquire(key: bytes, owner: bytes, lease: int) -> Any:
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=owner, lease=lease))
    ours = rpc.TxnRequest(compare=[_value_is(key, owner)], success=[put], failure=[_read(key)])
    nobody = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key, create_revision=0)
    return rpc.RequestOp(
        request_txn=rpc.TxnRequest(compare=[nobody], success=[put], failure=[rpc.RequestOp(request_txn=ours)])
    )


def holders(answer: Any) -> list[Any]:
    """Of each key in `acquire`: None if it is ours now, else the key as it stands."""
    return [_holder(response.response_txn) for response in answer.responses]


def _holder(free: Any) -> Any:
    if free.succeeded:
        return None
    ours = free.responses[0].response_txn
    return None if ours.succeeded else ours.responses[0].response_range.kvs[0]


def put_once(key: bytes, value: bytes) -> Any:
    """Write the key, for good, unless it is there; read it in any case."""
    nobody = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key, create_revision=0)
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value))
    return rpc.TxnRequest(compare=[nobody], success=[put, _read(key)], failure=[_read(key)])


def release(key: bytes, owner: bytes) -> Any:
    """Delete the key if it is ours, else read whose it is."""
    delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.TxnRequest(compare=[_value_is(key, owner)], success=[delete], failure=[_read(key)])


def _value_is(key: bytes, value: bytes) -> Any:
    return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VALUE, key=key, value=value)


def _read(key: bytes) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def watch_deletions(prefix: bytes, revision: int) -> Any:
    """All deletions below a prefix from that revision on, each with what was deleted."""
    return rpc.WatchRequest(
        create_request=rpc.WatchCreateRequest(
            key=prefix,
            range_end=end_of(prefix),
            start_revision=revision,
            prev_kv=True,
            filters=[rpc.WatchCreateRequest.FilterType.NOPUT],
        )
    )


def ask_progress() -> Any:
    """etcd answers this at once on a watch that has nothing to tell."""
    return rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
