"""A newer version of Relight, made from this one. As the next version may, it writes a kind of event, a kind of message
and a hold that this version does not know, encodes its checkpoints in another format, and has one more migration."""

from __future__ import annotations

import shutil
from pathlib import Path

import relight

_PACKAGE = Path(relight.__file__).parent


def build(folder: Path) -> Path:
    """Make the newer version. Returns the folder that has to come first in PYTHONPATH."""
    package = folder / "relight"
    # Copied with the bytecode: only the files that are changed below need compiling. Another process may be writing bytecode now.
    shutil.copytree(_PACKAGE, package, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, changes in _CHANGES.items():
        path = package / name
        text = path.read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    for backend, schema in (("sqlite", ""), ("postgres", "relight.")):
        migrations = package / "backends" / backend / "migrations"
        count = len(list(migrations.glob("*.sql")))
        script = f"-- compatible since {count:04}\n" + _MIGRATION.format(schema=schema)
        (migrations / f"{count + 1:04}_newer.sql").write_text(script, encoding="utf-8")
    return folder


_MIGRATION = """
ALTER TABLE {schema}runs ADD COLUMN newer text;
ALTER TABLE {schema}journal ADD COLUMN newer text;
ALTER TABLE {schema}inbox ADD COLUMN newer text;
CREATE TABLE {schema}newer (id integer PRIMARY KEY);
"""

_CHANGES: dict[str, list[tuple[str, str]]] = {
    "model/formats.py": [("FORMAT = 2 ", "FORMAT = 3 ")],
    "model/journal.py": [
        (
            "AnyEvent = (\n",
            'class Stamped(Event, tag="3:stamped"):\n    at: float = 0.0\n\n\nAnyEvent = (\n    Stamped |\n',
        )
    ],
    "model/tree.py": [
        ("    format: int = 1 ", "    stamps: int = 0\n    format: int = 1 "),
        (
            "_FOLD: dict[type[j.Event], Callable[[TreeState, int, Any], None]] = {\n",
            """\
def _stamped(s: TreeState, n: int, e: j.Stamped) -> None:
    s.stamps += 1
    s.format = 3


_FOLD: dict[type[j.Event], Callable[[TreeState, int, Any], None]] = {
    j.Stamped: _stamped,
""",
        ),
    ],
    "model/run.py": [
        ('    JOIN = "join"', '    POKE = "3:poke"\n    JOIN = "join"'),
        ('    UPGRADE = "upgrade"', '    QUOTA = "3:quota"\n    UPGRADE = "upgrade"'),
    ],
    "run/live_run.py": [
        (
            "        self.loop.driven = False\n        if self.replay is None:\n",
            "        self.loop.driven = False\n        self.when_live(self._stamp)\n        if self.replay is None:\n",
        ),
        (
            "    def wake(self) -> None:\n",
            """\
    def _stamp(self) -> None:
        from relight.model.journal import Stamped

        self.writer.note(Stamped("$stamp", self.now()))

    def wake(self) -> None:
""",
        ),
    ],
    "run/inbox.py": [
        (
            "def _hear(run: LiveRun, message: Message) -> None:\n",
            """\
def _hear(run: LiveRun, message: Message) -> None:
    if message.kind is MessageKind.POKE:
        message.kind = MessageKind.SIGNAL
""",
        )
    ],
    "run/leaving.py": [("hold=Hold.USER, reason=reason", "hold=Hold.QUOTA, reason=reason")],
    "handle.py": [
        (
            "    async def pause(self) -> None:\n",
            """\
    async def poke(self, name: str) -> None:
        await self._post(MessageKind.POKE, name, b'"poked"')

    async def pause(self) -> None:
""",
        )
    ],
}
