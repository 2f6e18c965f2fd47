"""A disk that fails on demand, under a real SQLite in this process."""

from __future__ import annotations

from typing import Any

import apsw

FULL = {"write": apsw.SQLITE_FULL}
NO_SYNC = {"sync": apsw.SQLITE_IOERR_FSYNC}
NO_WRITE = {"write": apsw.SQLITE_IOERR_WRITE}


class FaultyDisk(apsw.VFS):
    """The system's disk, while `faults` is empty. Else it says with which of SQLite's codes an operation fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: dict[str, int] = {}
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: Any) -> Any:  # noqa: N802 - SQLite's name
        return _File(self, name, flags)

    def check(self, operation: str) -> None:
        if operation in self.faults:
            raise apsw.exception_for(self.faults[operation])


class _File(apsw.VFSFile):
    def __init__(self, disk: FaultyDisk, name: Any, flags: Any) -> None:
        self._disk = disk
        super().__init__("", name, flags)

    def xSync(self, flags: int) -> None:  # noqa: N802 - SQLite's name
        self._disk.check("sync")
        super().xSync(flags)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802 - SQLite's name
        self._disk.check("write")
        super().xWrite(data, offset)
