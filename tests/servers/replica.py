"""Failover between real PostgreSQL servers: a standby that follows a private server by streaming replication.

    with Pair(server) as pair:          # commits wait for the standby's disk: synchronous replication
        url = pair.create_database()    # names both servers
        pair.primary.kill()             # the standby goes on answering, and takes no writes
        pair.standby.promote()          # until now

A standby that is stopped gets nothing more. With `synchronous=False` the primary still acknowledges commits, which the standby
will miss. Otherwise its commits wait until the standby is started again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from tests.servers.postgres import POLL_SECONDS, START_SECONDS, PostgresServer

NAME = "standby"  # the name in synchronous_standby_names


class Standby(PostgresServer):
    """A copy of a running primary, made at the first start. It follows the primary until it is promoted."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self._primary = primary

    def _create(self) -> None:
        source = f"host={self._primary.socket_folder} port={self._primary.port} user=postgres application_name={NAME}"
        options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        self._run(["pg_basebackup", "-D", str(self.data), "-d", source, *options])

    def promote(self) -> None:
        """Promote the standby. Returns when it takes writes."""
        self._run(["pg_ctl", "promote", "-D", str(self.data), "--wait", "-t", str(int(START_SECONDS))])


class Pair:
    """`primary` is a running server. At the end it is as it was, whatever happened to it. The standby is made, and
    deleted at the end."""

    def __init__(self, primary: PostgresServer, *, synchronous: bool = True) -> None:
        self.primary = primary
        self.standby = Standby(primary)
        self._synchronous = synchronous

    def __enter__(self) -> Self:
        try:
            self.standby.start()
            if self._synchronous:
                # Set after the copy was made: a promoted standby must not wait for a standby.
                set_option(self.primary, "synchronous_standby_names", NAME)
                _until(lambda: self.replication("sync_state") == "sync")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.standby.close()
        if not self.primary.running:
            self.primary.start()
        self.primary.sql("alter system reset all")
        self.primary.sql("select pg_reload_conf()")

    def create_database(self) -> str:
        """The URL of a new database, on both servers. The primary is named first."""
        url = self.primary.create_database()
        self.until_level()
        return self.both(url)

    def both(self, url: str) -> str:
        """The primary's URL, with the standby's address after the primary's."""
        address = f"127.0.0.1:{self.primary.port}"
        return url.replace(address, f"{address},127.0.0.1:{self.standby.port}")

    def replication(self, column: str) -> str:
        """What the primary knows of its standby. Empty: the standby does not follow."""
        return self.primary.sql(f"select {column} from pg_stat_replication where application_name = '{NAME}'")

    def until_level(self) -> None:
        """Wait until the standby has, and shows, what the primary has now. A commit waits only until it is on the
        standby's disk."""
        now = self.primary.sql("select pg_current_wal_flush_lsn()")
        _until(lambda: self.replication(f"replay_lsn >= '{now}'") == "t")


def set_option(server: PostgresServer, name: str, value: str) -> None:
    """Set it for all sessions. Each takes it over when it looks."""
    server.sql(f"alter system set {name} = '{value}'")
    server.sql("select pg_reload_conf()")


def _until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(START_SECONDS / POLL_SECONDS)):
        if condition():
            return
        pause.wait(POLL_SECONDS)
    raise RuntimeError("the standby does not follow its primary")
