"""Hypothesis strategies for journals: every kind of event, under keys that nest as real ones do."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from msgspec import Raw

from relight.model import journal as j
from relight.model.replay import item_scope

_FOREACHES = ("each#1", "sub#1/each#1")
_times = st.floats(min_value=0, max_value=2e9)
_microseconds = st.integers(0, 2 * 10**15)
_digests = st.sampled_from(["", "d1", "d2"])
_blobs = st.sampled_from(["", "blob"])
_attempts = st.integers(1, 4)
_payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
).map(lambda value: Raw(msgspec.json.encode(value)))


@st.composite
def _scopes(draw: st.DrawFn) -> str:
    """The scope of the root, of a child run or of a foreach item, with the slash at its end."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return ""
    if kind == 1:
        return "sub#1/"
    index, digest = draw(st.integers(0, 3)), draw(st.sampled_from(["d1", "d2"]))
    return item_scope(_FOREACHES[kind - 2], index, digest) + "/"


def _keys(*names: str) -> st.SearchStrategy[str]:
    return st.builds(
        lambda scope, name, ordinal: f"{scope}{name}#{ordinal}",
        _scopes(),
        st.sampled_from(names),
        st.integers(1, 2),
    )


_errors = st.builds(
    j.ErrorRecord,
    type=st.just("builtins:ValueError"),
    message=st.text(max_size=5),
    traceback=st.sampled_from(["", "Traceback…"]),
    args=st.none() | st.lists(st.integers() | st.text(max_size=3), max_size=2),
    attributes=st.none() | st.just({"code": 7}),
    notes=st.none() | st.lists(st.text(max_size=3), max_size=2),
)
_steps = _keys("charge", "ship")
_runs = st.just("") | _keys("sub")
_waits = _keys("sleep", "signal", "join")
_operations = st.one_of(_steps, _waits, _keys("sub"))


def _created(key: st.SearchStrategy[str]) -> st.SearchStrategy[j.RunCreated]:
    return st.builds(
        j.RunCreated,
        key=key,
        flow=st.sampled_from(["checkout", "sub"]),
        flow_hash=_digests,
        input=_payloads,
        input_blob=_blobs,
        at=_times,
        parent=st.none() | st.just("parent"),
        forked_from=st.none() | st.just("original"),
    )


@st.composite
def _items(draw: st.DrawFn) -> j.ItemCompleted:
    foreach, index = draw(st.sampled_from(_FOREACHES)), draw(st.integers(0, 3))
    digest = draw(st.sampled_from(["d1", "d2"]))
    key = item_scope(foreach, index, digest)
    return j.ItemCompleted(key, foreach, index, digest, draw(_payloads), draw(_blobs), draw(_times))


_EVENTS: dict[type[j.Event], st.SearchStrategy[j.AnyEvent]] = {
    j.RunCreated: _created(_keys("sub")),
    j.RunCompleted: st.builds(j.RunCompleted, key=_runs, output=_payloads, blob=_blobs, at=_times),
    j.RunFailed: st.builds(j.RunFailed, key=_runs, error=_errors, at=_times),
    j.RunCancelled: st.builds(j.RunCancelled, key=_runs, reason=st.text(max_size=3), at=_times),
    j.RunContinued: st.builds(
        j.RunContinued, key=st.just(""), flow_hash=_digests, input=_payloads, input_blob=_blobs, at=_times
    ),
    j.RunRetrying: st.builds(j.RunRetrying, key=_runs, attempt=_attempts, error=_errors, until=_times, at=_times),
    j.RunResumed: st.builds(j.RunResumed, key=st.just(""), at=_times),
    j.RunRecovered: st.builds(
        j.RunRecovered,
        key=st.just(""),
        owner=st.just("me"),
        previous_owner=st.none() | st.just("you"),
        at=_times,
        alone=st.booleans(),
        tried_with=st.integers(0, 3),
        trial_seconds=st.sampled_from([0.0, 5.0]),
        died=st.booleans(),
    ),
    j.CancelRequested: st.builds(j.CancelRequested, key=st.just(""), reason=st.text(max_size=3), at=_times),
    j.Deadlocked: st.builds(j.Deadlocked, key=st.just(""), at=_times),
    j.StepStarted: st.builds(
        j.StepStarted,
        key=_steps,
        attempt=_attempts,
        at=_times,
        deadline=st.none() | _times,
        fatal=st.booleans(),
    ),
    j.StepRetrying: st.builds(
        j.StepRetrying,
        key=_steps,
        attempt=_attempts,
        error=_errors,
        until=_times,
        at_us=_microseconds,
        took_us=_microseconds,
    ),
    j.StepCompleted: st.builds(
        j.StepCompleted,
        key=_steps,
        output=_payloads,
        blob=_blobs,
        fingerprint=_digests,
        digest=_digests,
        attempt=_attempts,
        at_us=_microseconds,
        took_us=_microseconds,
    ),
    j.StepFailed: st.builds(
        j.StepFailed,
        key=_steps,
        error=_errors,
        fingerprint=_digests,
        digest=_digests,
        attempt=_attempts,
        at_us=_microseconds,
        took_us=_microseconds,
    ),
    j.OperationCancelled: st.builds(j.OperationCancelled, key=_operations, by_flow=st.booleans(), at=_times),
    j.ValueRecorded: st.builds(j.ValueRecorded, key=_keys("now", "random"), value=_payloads, at=_times),
    j.WaitStarted: st.builds(
        j.WaitStarted,
        key=_waits,
        what=st.sampled_from(["sleep", "signal", "run"]),
        name=st.sampled_from(["", "approval"]),
        until=st.none() | _times,
        at=_times,
    ),
    j.TimerFired: st.builds(j.TimerFired, key=_waits, timed_out=st.booleans(), at=_times),
    j.SignalReceived: st.builds(
        j.SignalReceived, key=_waits, payload=_payloads, blob=_blobs, message_id=st.integers(1, 9), at=_times
    ),
    j.RunSpawned: st.builds(j.RunSpawned, key=_keys("spawn"), run_id=st.sampled_from(["s1", "s2"])),
    j.RunJoined: st.builds(
        j.RunJoined,
        key=_waits,
        output=_payloads,
        blob=_blobs,
        error=st.none() | _errors,
        message_id=st.integers(1, 9),
    ),
    j.ItemCompleted: _items(),
    j.ForeachCut: st.builds(j.ForeachCut, key=st.sampled_from(_FOREACHES), index=st.integers(0, 4)),
}


def kinds() -> set[type[j.Event]]:
    """The kinds of events that `journals` may contain."""
    return set(_EVENTS)


def journals(max_size: int = 25) -> st.SearchStrategy[list[j.AnyEvent]]:
    """A journal's events: the root's creation, then anything."""
    first = _created(st.just(""))
    rest = st.lists(st.one_of(*_EVENTS.values()), max_size=max_size)
    return st.builds(lambda head, tail: [head, *tail], first, rest)
