"""The group commit: many roots' commits in one transaction, which is one statement.

    every commit is one entry of a known root            → append_batch: fence and entries, all or nothing
    all other batches, or append_batch was refused       → commit_batch: fence, entries and the rest, commit by commit
    a commit was refused                                 → read what is stored: the same (an answer was lost), or not

Both are functions of the schema (migrations/0002_commit.sql): only arrays are sent, once. A batch with several commits
of one root is applied in waves, with one commit per root in each, inside one transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import asyncpg
import msgspec

from relight.backends.postgres.batch import Batch, generations, simple
from relight.backends.postgres.pool import Fetch, Pool
from relight.backends.rows import run_from
from relight.clock import Clock
from relight.errors import StoreUnavailableError
from relight.ports.store import KEPT_DEDUPS, Commit, CommitResult, Committed, Exists, Fenced

KEYS_PER_BLOCK = 1000  # the same as in the migrations
FENCED = "RL001"  # append_batch's own SQLSTATE

# Keys of ended and lost roots pile up until this bound, then all are forgotten. A forgotten key costs one more query.
MAX_KNOWN_KEYS = 100_000


class Refused(msgspec.Struct, gc=False):
    """A commit that wrote nothing: its position in the batch, and whether the same batch has created its root."""

    place: int
    commit: Commit
    created: bool = False


class Committer:
    """Applies batches. It remembers the keys of roots, and nothing else.

    Keys never change on one server. A standby that becomes the primary without all the data may give the same keys to
    other roots. A new connection may lead to such a server, so it makes this forget all keys.
    """

    def __init__(self, pool: Pool, sql: dict[str, str], sender: str, clock: Clock) -> None:
        self._pool = pool
        self._sql = sql
        self._sender = sender
        self._clock = clock
        self._keys: dict[str, int] = {}
        self._spare: list[int] = []  # keys for new runs, the next one last
        self._made = pool.made  # the number of connections made when the keys were learned

    def learn(self, keys: Iterable[tuple[str, int]]) -> None:
        """Remember the keys of roots for which commits are expected."""
        if len(self._keys) > MAX_KNOWN_KEYS:
            self._keys.clear()
        self._keys.update(keys)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """One transaction. If it fails, its outcome is unknown, and the caller may give the same batch again."""
        arguments = simple(commits, self._keys)
        if arguments is not None:
            try:
                if await self._pool.session(partial(self._append, arguments=arguments, made=self._made)):
                    return [Committed(sequence) for sequence in arguments[2]]
            except asyncpg.PostgresError as error:
                if error.sqlstate != FENCED:
                    raise
        results: list[CommitResult] = [Committed(commit.after + len(commit.entries)) for commit in commits]
        refused = await self._apply(commits)
        if refused:
            await self._answer(refused, results)
        return results

    async def _append(self, fetch: Fetch, arguments: Sequence[Any], made: int) -> bool:
        """False if a connection was made since the keys were used: they may be another server's."""
        self._forget_keys()
        if made != self._made:
            return False
        await fetch(self._sql["append_batch"], *arguments)
        return True

    def _forget_keys(self) -> None:
        """Forget all keys if there is a new connection."""
        if self._made != self._pool.made:
            self._made = self._pool.made
            self._keys.clear()
            self._spare.clear()

    async def _apply(self, commits: Sequence[Commit]) -> list[Refused]:
        waves = _waves(commits)
        new: dict[str, int] = {}
        alone = len(waves) == 1 and all(commit.next is None for commit in commits)
        one = self._pool.session if alone else self._pool.transaction
        refused = await one(partial(self._waves, waves=waves, new=new))
        self.learn(new.items())
        return refused

    async def _waves(
        self, fetch: Fetch, waves: Sequence[Sequence[tuple[int, Commit]]], new: dict[str, int]
    ) -> list[Refused]:
        self._forget_keys()
        new.clear()
        refused: list[Refused] = []
        for wave in waves:
            refused += await self._wave(fetch, wave, new)
        return refused

    async def _wave(self, fetch: Fetch, wave: Sequence[tuple[int, Commit]], new: dict[str, int]) -> list[Refused]:
        """At most one commit per root. Adds the keys of the roots it creates to `new`."""
        before = set(new)
        known = await self._root_keys(fetch, wave, new)
        await self._provide_keys(fetch, [commit for _, commit in wave])
        batch = Batch(self._spare.pop, self._clock.now())
        keys: dict[int, tuple[int, Commit]] = {}
        refused: list[Refused] = []
        for place, commit in wave:
            if commit.create is not None:
                key = batch.create(commit, commit.create)
            elif commit.root_id in known:
                key = known[commit.root_id]
                batch.append(commit, key)
            else:
                refused.append(Refused(place, commit))
                continue
            keys[key] = (place, commit)
        ((not_written,),) = await fetch(self._sql["commit_batch"], *batch.arguments(self._sender))
        for key in not_written:
            place, commit = keys.pop(key)
            refused.append(Refused(place, commit, commit.root_id in before))
        begun = generations({key: commit for key, (_, commit) in keys.items()})
        if begun is not None:
            await fetch(self._sql["begin_generations"], *begun, KEPT_DEDUPS)
        new.update({commit.root_id: key for key, (_, commit) in keys.items() if commit.create is not None})
        return refused

    async def _root_keys(self, fetch: Fetch, wave: Sequence[tuple[int, Commit]], new: dict[str, int]) -> dict[str, int]:
        """The keys of existing roots, in a dict of this batch's own. Another lane's new connection may make `_keys`
        empty at any moment, but this batch uses its own connection, for which the keys are right."""
        roots = [commit.root_id for _, commit in wave if commit.create is None]
        known = {root: new.get(root) or self._keys.get(root) for root in roots}
        unknown = [root for root, key in known.items() if key is None]
        if unknown:
            found = [(row[0], row[1]) for row in await fetch(self._sql["root_keys"], unknown)]
            self.learn(found)
            known.update(found)
        return {root: key for root, key in known.items() if key is not None}

    async def _provide_keys(self, fetch: Fetch, commits: Sequence[Commit]) -> None:
        """Get enough keys for all new runs of the batch. The caller must use them before it awaits anything."""
        needed = sum((commit.create is not None) + len(commit.extras.runs) for commit in commits)
        while len(self._spare) < needed:
            ((first,),) = await fetch(self._sql["next_keys"])
            self._spare[:0] = range(first + KEYS_PER_BLOCK - 1, first - 1, -1)

    # ---- answers that were lost, and refusals

    async def _answer(self, refused: Sequence[Refused], results: list[CommitResult]) -> None:
        """Answer refused commits by what is stored now. Epochs only rise and journals only grow: now is soon enough."""
        rows = await self._pool.fetch(self._sql["refused"], [one.commit.root_id for one in refused])
        found = {row[1]: row for row in rows}
        maybe: list[tuple[Refused, int]] = []
        stale: list[Refused] = []
        for one in refused:
            commit = one.commit
            row = found.get(commit.root_id)
            if row is None:
                if commit.create is not None:
                    raise StoreUnavailableError(f"run {commit.root_id!r} vanished while it was created: try again")
                results[one.place] = Fenced(None, None)
                continue
            run, key, last = run_from(row), row[0], row[-1]
            if commit.create is not None:
                results[one.place] = Exists(run)
                if not one.created and run == commit.create and last == commit.after + len(commit.entries):
                    maybe.append((one, key))
            elif not run.is_root:
                results[one.place] = Fenced(None, None)
            elif self._keys.get(commit.root_id, key) != key:
                self._keys[commit.root_id] = key  # the run was deleted, and a new one has its id
                stale.append(one)
            else:
                results[one.place] = Fenced(run.epoch, run.owner)
                if run.epoch == commit.epoch and last != commit.after and last >= commit.after + len(commit.entries):
                    maybe.append((one, key))
        await self._recognise(maybe, results)
        if stale:
            again = await self.commit([one.commit for one in stale])
            for one, result in zip(stale, again, strict=True):
                results[one.place] = result

    async def _recognise(self, maybe: Sequence[tuple[Refused, int]], results: list[CommitResult]) -> None:
        """If the journal has exactly the entries of a refused commit in their place, it was written before, and the
        answer was lost. Then it must not be applied again: later commits may have changed the same rows.
        """
        folded = {key: one for one, key in maybe if _state(one.commit) is not None}
        if folded:
            for key, sequence, state in await self._pool.fetch(self._sql["states"], list(folded)):
                commit = folded[key].commit
                if (sequence, state) == (commit.after + len(commit.entries), _state(commit)):
                    results[folded[key].place] = Committed(sequence)
        others = [(one, key) for one, key in maybe if _state(one.commit) is None]
        if others:
            afters = [one.commit.after for one, _ in others]
            ends = [one.commit.after + len(one.commit.entries) for one, _ in others]
            rows = await self._pool.fetch(self._sql["entries_between"], [key for _, key in others], afters, ends)
            for (one, _), end, row in zip(others, ends, rows, strict=True):
                if row[1] == one.commit.entries:
                    results[one.place] = Committed(end)


def _state(commit: Commit) -> bytes | None:
    """The checkpoint that a commit stores instead of its entries: a fork's, or the next generation's."""
    return commit.state if commit.next is None else commit.next.state


def _waves(commits: Sequence[Commit]) -> list[list[tuple[int, Commit]]]:
    """The commits with their positions, in waves. No root is twice in a wave, and its commits keep their order."""
    waves: list[list[tuple[int, Commit]]] = []
    seen: defaultdict[str, int] = defaultdict(int)
    for place, commit in enumerate(commits):
        wave = seen[commit.root_id]
        seen[commit.root_id] += 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append((place, commit))
    return waves
