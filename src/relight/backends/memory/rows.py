"""What belongs to one root: its journal and its inbox."""

from __future__ import annotations

from collections.abc import Container, Sequence
from zlib import crc32

import msgspec

from relight.backends.rows import damaged
from relight.model.journal import Checkpoint, Entry, Journal
from relight.model.run import Message, MessageKind
from relight.ports.store import KEPT_DEDUPS, Commit


class StoredRow(msgspec.Struct):
    """Bytes and the checksum they were stored with."""

    data: bytes
    crc: int

    @classmethod
    def of(cls, data: bytes) -> StoredRow:
        return cls(data, crc32(data))

    def checked(self, what: str, root_id: str, sequence: int) -> bytes:
        if crc32(self.data) != self.crc:
            raise damaged(what, root_id, sequence)
        return self.data


class Tree(msgspec.Struct):
    """The entries after the checkpoint, and the messages that were not consumed yet, oldest first."""

    root_id: str
    base: int = 0  # sequence of the checkpoint
    state: StoredRow | None = None
    entries: list[StoredRow] = []
    inbox: list[Message] = []
    by_dedup: dict[str, int] = {}  # message ids; also of consumed messages, until the run ends or they are trimmed
    signals: set[str] = set()  # the dedups of signals

    @property
    def last(self) -> int:
        return self.base + len(self.entries)

    def append(self, events: Sequence[bytes]) -> None:
        entries = self.entries
        for event in events:
            entries.append(StoredRow(event, crc32(event)))

    def holds(self, after: int, events: Sequence[bytes]) -> bool:
        """Whether the entries after the sequence `after` are exactly these events."""
        start = after - self.base
        end = start + len(events)
        if start < 0 or end > len(self.entries):
            return False
        return [row.data for row in self.entries[start:end]] == list(events)

    def continued(self, commit: Commit) -> bool:
        """Whether this commit has begun the generation to which the checkpoint belongs."""
        assert commit.next is not None
        end = commit.after + len(commit.entries)
        return self.base == end and self.state is not None and self.state.data == commit.next.state

    def trim(self, unfinished: Container[str]) -> None:
        """Delete the dedups of consumed messages, except those of the newest signals, and the joins of ended runs."""
        self.inbox = [one for one in self.inbox if one.kind is not MessageKind.JOIN or one.name in unfinished]
        unread = {message.dedup for message in self.inbox}
        consumed = [dedup for dedup in self.by_dedup if dedup not in unread]
        signals = [dedup for dedup in consumed if dedup in self.signals]
        for dedup in {*consumed} - {*signals[-KEPT_DEDUPS:]}:
            del self.by_dedup[dedup]
            self.signals.discard(dedup)

    def compact(self, sequence: int, state: bytes) -> None:
        """Replace the entries up to `sequence` by `state`."""
        del self.entries[: sequence - self.base]
        self.base, self.state = sequence, StoredRow.of(state)

    def journal(self) -> Journal:
        checkpoint = None
        if self.state is not None:
            checkpoint = Checkpoint(self.base, self.state.checked("checkpoint", self.root_id, self.base))
        return Journal(self.root_id, checkpoint, self.read(self.base, len(self.entries)))

    def read(self, sequence: int, limit: int) -> list[Entry]:
        """Up to `limit` entries with a greater sequence."""
        start = max(sequence - self.base, 0)
        return [
            Entry(number, row.checked("entry", self.root_id, number))
            for number, row in enumerate(self.entries[start : start + limit], start=self.base + start + 1)
        ]
