"""The rows of one transaction, gathered by table and written with few statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import apsw
import msgspec

from relight.backends.rows import checksum, item_columns, message_columns, run_columns
from relight.backends.sqlite import read
from relight.backends.sqlite.queries import SQL, many, most
from relight.backends.sqlite.rows import change_row, json_array, log_row
from relight.model.run import ItemResult, LogLine, Message, Run, RunChange
from relight.ports.store import KEPT_DEDUPS, NextGeneration


class Writes:
    """What a transaction will write.

    The order of `flush` matters: new runs come before the messages to them, and messages before the changes that end
    runs and drop their inboxes, so that no message outlives its run.
    """

    def __init__(self, connection: apsw.Connection, now: float) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._now = now
        self._next_key = 0
        self._runs: list[Any] = []
        self._entries: list[Any] = []
        self._checkpoints: list[Any] = []
        self._blobs: list[Any] = []
        self._items: list[Any] = []
        self._log: list[Any] = []
        self._messages: list[Any] = []
        self._cancels: list[dict[str, Any]] = []
        self._changes: dict[str, tuple[RunChange, str, bool]] = {}  # with the root, and `reopen`
        self._consumed: list[tuple[int, int]] = []  # message id, root's key
        self._generations: list[
            tuple[int, str, str, int]
        ] = []  # root's key and id, how its children's begin, last sequence
        self._trimmed: list[int] = []  # keys of roots
        self._over: list[int] = []  # keys of roots that have ended
        self._ended: list[int] = []  # keys of roots that have ended and cannot be resumed

    def run(self, run: Run) -> int:
        """Add a run. Returns its key."""
        if not self._next_key:
            self._next_key = read.value(self._connection, "next_key")
        key = self._next_key
        self._next_key = key + 1
        self._runs += (key, *run_columns(run))
        return key

    def entries(self, key: int, after: int, events: Sequence[bytes]) -> int:
        """Add entries. Returns the sequence of the last one."""
        rows = self._entries
        for event in events:
            after += 1
            rows += (key, after, event, crc32(event, after))
        return after

    def checkpoint(self, key: int, sequence: int, state: bytes) -> None:
        self._checkpoints += (key, sequence, state, checksum(sequence, state))

    def generation(self, key: int, root_id: str, sequence: int, begun: NextGeneration) -> None:
        """The root begins its next generation after this sequence."""
        self.checkpoint(key, sequence, begun.state)
        self._generations.append((key, root_id, begun.children, sequence))
        if begun.trim_inbox:
            self._trimmed.append(key)

    def blobs(self, blobs: Mapping[str, bytes]) -> None:
        for blob in blobs.items():
            self._blobs += blob

    def items(self, items: Sequence[ItemResult]) -> None:
        for item in items:
            self._items += item_columns(item)

    def cut_items(self, cuts: Sequence[tuple[str, str, int]]) -> None:
        """Delete items at once: after the items of earlier commits and before those of this commit. This is rare: it
        happens when a foreach is cut."""
        self._insert("put_items", 6, self._items)
        self._execute(SQL["cut_items"], (json_array(cuts),))

    def log(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            self._log += log_row(line)

    def messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._messages += message_columns(message)

    def cancel_spawned(self, root_id: str, reason: str) -> None:
        self._cancels.append({"root_id": root_id, "payload": msgspec.json.encode(reason), "at": self._now})

    def change(self, change: RunChange, root_id: str, *, reopen: bool = False) -> None:
        """Change a row; its last change counts. `reopen`: the row may be that of a root that recovery gave up on."""
        earlier = self._changes.get(change.run_id)
        if earlier is not None:
            reopen = reopen or earlier[2]  # the row in the file is still the terminal one that `earlier` reopens
        self._changes[change.run_id] = (change, root_id, reopen)

    def end(self, key: int, *, for_good: bool) -> None:
        """A root has ended: post its end to the runs that joined it. If `for_good`, delete its inbox."""
        self._over.append(key)
        if for_good:
            self._ended.append(key)

    def consume(self, key: int, message_ids: Sequence[int]) -> None:
        self._consumed += [(message_id, key) for message_id in message_ids]

    def flush(self) -> None:
        """Write everything. There is no statement for a kind of row of which there is none."""
        self._insert("insert_runs", 19, self._runs)
        self._insert("append_entries", 4, self._entries)
        self._insert("put_checkpoints", 4, self._checkpoints)
        self._insert("put_blobs", 2, self._blobs)
        self._insert("put_items", 6, self._items)
        self._insert("put_log", 5, self._log)
        self._insert("put_messages", 7, self._messages)
        for cancel in self._cancels:
            self._execute(SQL["cancel_spawned"], cancel)
        self._cancels.clear()
        rows: list[Any] = []
        for change, root_id, reopen in self._changes.values():
            rows += change_row(change, root_id, self._now, reopen)
        self._insert("change_runs", 13, rows)
        self._changes.clear()
        if self._consumed:
            self._execute(SQL["consume_messages"], (json_array(self._consumed),))
            self._consumed.clear()
        if self._generations:
            self._drop_generations()
        if self._over:
            self._execute(SQL["post_ends"], (json_array(self._over), self._now))
            self._over.clear()
        if self._ended:
            self._execute(SQL["drop_inboxes"], (json_array(self._ended),))
            self._ended.clear()

    def _drop_generations(self) -> None:
        """Delete what is left of the generations that have ended, including rows that this transaction wrote."""
        ended = json_array(self._generations)
        for name in (
            "drop_generation_entries",
            "drop_generation_items",
            "drop_generation_logs",
            "drop_generation_runs",
        ):
            self._execute(SQL[name], (ended,))
        for key in self._trimmed:
            self._execute(SQL["trim_inbox"], {"run": key, "kept": KEPT_DEDUPS})
        self._generations.clear()
        self._trimmed.clear()

    def _insert(self, name: str, width: int, values: list[Any]) -> None:
        """Write `values`, a flat list of rows, and empty it.

        The last statement is filled up with NULL rows to a power of two. So there are few statements for any number of
        rows, and so few different ones that all stay in the statement cache.
        """
        full = most(name) * width
        for start in range(0, len(values), full):
            part = values[start : start + full]
            rows = 1 << (len(part) // width - 1).bit_length()
            part.extend([None] * (rows * width - len(part)))
            self._execute(many(name, rows), part)
        values.clear()
