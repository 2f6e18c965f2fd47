"""What is stored in etcd, and the transactions on it.

    <prefix>sessions/<owner>   the owner's process, as JSON
    <prefix>runs/<run id>      the owner
    <prefix>since              when this list was begun, by the store's clock

The first two are attached to the owner's etcd lease: when it lapses or is revoked, etcd deletes all of them as one
change. So the owner of an existing key is alive, and the last value of a run's deleted key names its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aetcd import rpc  # type: ignore[import-untyped]

# etcd accepts 128 operations in one transaction, and also counts the deepest nesting below them, which is two here.
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
        """The owner of a session's key; None for other keys."""
        return key[len(self.sessions) :].decode() if key.startswith(self.sessions) else None

    def run_of(self, key: bytes) -> str | None:
        """The run id of a run's key; None for other keys."""
        return key[len(self.runs) :].decode() if key.startswith(self.runs) else None


def end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys with this prefix. It ends with a slash, which has a successor."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def acquire(keys: Sequence[bytes], owner: bytes, lease: int) -> Any:
    """For each key: create it if it does not exist, attach it to this lease if it is this owner's, else read it."""
    return rpc.TxnRequest(success=[_acquire(key, owner, lease) for key in keys])


def _acquire(key: bytes, owner: bytes, lease: int) -> Any:
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=owner, lease=lease))
    ours = rpc.TxnRequest(compare=[_value_is(key, owner)], success=[put], failure=[_read(key)])
    missing = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key, create_revision=0)
    return rpc.RequestOp(
        request_txn=rpc.TxnRequest(compare=[missing], success=[put], failure=[rpc.RequestOp(request_txn=ours)])
    )


def holders(answer: Any) -> list[Any]:
    """For each key of `acquire`: None if it is this owner's now, else the key with its value."""
    return [_holder(response.response_txn) for response in answer.responses]


def _holder(free: Any) -> Any:
    if free.succeeded:
        return None
    ours = free.responses[0].response_txn
    return None if ours.succeeded else ours.responses[0].response_range.kvs[0]


def put_once(key: bytes, value: bytes) -> Any:
    """Write the key, without a lease, unless it exists; read it in any case."""
    missing = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key, create_revision=0)
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value))
    return rpc.TxnRequest(compare=[missing], success=[put, _read(key)], failure=[_read(key)])


def release(key: bytes, owner: bytes) -> Any:
    """Delete the key if it is this owner's, else read it."""
    delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.TxnRequest(compare=[_value_is(key, owner)], success=[delete], failure=[_read(key)])


def _value_is(key: bytes, value: bytes) -> Any:
    return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VALUE, key=key, value=value)


def _read(key: bytes) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def watch_deletions(prefix: bytes, revision: int) -> Any:
    """All deletions below a prefix from that revision on, each with the deleted value."""
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
    """etcd answers this at once, also on a watch without news."""
    return rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
