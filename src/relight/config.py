"""Configuration: one immutable `Config`, made once from defaults, environment and keyword arguments.

Every key can be set in each of these ways; a later way overrides an earlier one:

    default             recovery.max_attempts is 10
    environment         RELIGHT_RECOVERY_MAX_ATTEMPTS=3
    keyword argument    Relight(..., recovery={"max_attempts": 3}) or Relight(..., recovery_max_attempts=3)

The structs below are the only list of the keys: names, types, defaults and limits are read from them. A field
called `park_after_seconds` is the key `park_after`: written as a duration ("1s"), kept in seconds.

This module decides nothing: it does not open the store, import the modules or read files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from relight.durations import ACCEPTED as DURATION_ACCEPTED
from relight.durations import parse_duration
from relight.errors import ConfigError
from relight.store_url import ACCEPTED as STORE_ACCEPTED
from relight.store_url import printable_url

# The description is what an error message says is accepted.
Flag = Annotated[bool, msgspec.Meta(description="true or false")]
Count = Annotated[int, msgspec.Meta(ge=1, description="a whole number, at least 1")]
Bytes = Annotated[int, msgspec.Meta(ge=1, description="a whole number of bytes, at least 1")]
Seconds = Annotated[float, msgspec.Meta(ge=0, description=DURATION_ACCEPTED)]
Name = Annotated[str, msgspec.Meta(min_length=1, description="a text that is not empty")]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all parts of the configuration have in common."""


class Recovery(_Section, frozen=True):
    """What happens to unfinished runs whose owner has died."""

    enabled: Flag = True
    """False: no run is recovered automatically; runs can still be listed and resumed by hand."""
    auto_resume: Flag = True
    """False: runs whose owner has died are cancelled with that reason. A person may resume them."""
    stale_timeout_seconds: Seconds = 0.0
    """How long after an owner's last heartbeat its runs count as stale; 0: as soon as its lease has lapsed."""
    max_resume_age_seconds: Seconds = 0.0
    """Runs started longer ago are cancelled instead of resumed; 0: no limit."""
    lease_ttl_seconds: Annotated[
        float, msgspec.Meta(ge=0.1, description="a duration of at least 0.1s, such as 30s")
    ] = 30.0
    """How long an orchestrator may be silent before others claim its runs. It sends three heartbeats in this time."""
    check_interval_seconds: Annotated[
        float, msgspec.Meta(ge=0.1, description="a duration of at least 0.1s, such as 30s")
    ] = 30.0
    """Between two searches for orphans, while the lease manager pushes nothing."""
    max_startup_recovery: Count = 100
    """Runs taken up in one pass at start. The next pass follows a full one at once: only the burst is bounded."""
    max_claims_per_check: Count = 100
    """Orphans of others claimed in one pass. The next pass follows a full one at once: only the burst is bounded."""
    max_attempts: Count = 10
    """Crashes in a row without progress of a run, while it is the only suspect, before it is held as poison."""
    version_mismatch: Annotated[
        Literal["warn", "rerun", "fail"], msgspec.Meta(description='"warn", "rerun" or "fail"')
    ] = "warn"
    """For a finished step whose code has changed: reuse its result and log, run it again, or hold the run."""


class Checkpoint(_Section, frozen=True):
    """When a journal is snapshotted and compacted."""

    every: Count = 1000
    """Entries of one journal between two checkpoints."""


class Payload(_Section, frozen=True):
    """How large one argument, result or signal may be, encoded."""

    blob_threshold: Bytes = 65_536
    """Larger payloads are stored once, by content, beside the journal."""
    max_bytes: Bytes = 16_777_216
    """Larger payloads are refused."""


class Config(_Section, frozen=True):
    """Everything that can be configured. Made by `load_config`; the constructor checks nothing."""

    store: Annotated[Name, msgspec.Meta(description=STORE_ACCEPTED)] = "sqlite:///relight.db"
    """The URL of the store. This module does not parse it; the engine does."""
    db_schema: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^(?!pg_)[a-z_][a-z0-9_]{0,30}\Z",
            description="a name of lower-case letters, digits and _, without pg_ before it",
        ),
    ] = "relight"
    """PostgreSQL only: the schema that Relight has to itself for its tables."""
    migrate: Flag = True
    """False: opening a store neither creates nor upgrades its tables; `relight migrate` does."""
    leases: Annotated[Name, msgspec.Meta(description='"store", "none" or "etcd://host:port,…"')] = "store"
    """The lease manager: the store itself, none (for one process only), or etcd."""
    drive: Flag = True
    """False: this process starts, signals and looks at runs, and leaves driving them to others."""
    modules: Annotated[
        tuple[Name, ...],
        msgspec.Meta(description="a list of module names (in the environment, separated by commas)"),
    ] = ()
    """Imported at start, so that their flows are registered before anything is recovered."""
    orchestrator_id: Annotated[
        Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f\ud800-\udfff#]{1,255}\Z")] | None,
        msgspec.Meta(
            description="a text that is not empty, of at most 255 characters, no control characters and no # among them"
        ),
    ] = None
    """Stable across restarts, so that an orchestrator knows its own runs again. None: the name of the machine. A session
    is called by this name, # and a token."""
    recovery: Recovery = Recovery()
    checkpoint: Checkpoint = Checkpoint()
    payload: Payload = Payload()
    park_after_seconds: Seconds = 1.0
    """A run that waits longer than this for a timer or a signal leaves memory."""
    cancel_grace_seconds: Seconds = 30.0
    """How long a cancelled run may clean up."""
    shutdown_grace_seconds: Seconds = 10.0
    """How long steps in flight may finish when Relight stops."""
    max_concurrent_runs: Count = 1000
    """Runs in memory at once; other runs wait in the store."""
    max_threads: Count = 64
    """Threads for sync flows and steps."""

    def __repr__(self) -> str:
        """As Python writes it, without the passwords in URLs: a configuration ends up in logs and bug reports."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown |= {name: printable_url(shown[name]) for name in ("store", "leases")}
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class _Key(msgspec.Struct, frozen=True):
    """One configurable value: `section` is "" at the top, `field` is its name in the struct."""

    section: str
    field: str
    type: Any

    @property
    def is_duration(self) -> bool:
        return self.field.endswith("_seconds")

    @property
    def dotted(self) -> str:
        name = self.field.removesuffix("_seconds")
        return f"{self.section}.{name}" if self.section else name

    @property
    def flat(self) -> str:
        return self.dotted.replace(".", "_")

    @property
    def variable(self) -> str:
        return _PREFIX + self.flat.upper()


_PREFIX = "RELIGHT_"

# Variables with Relight's prefix that are not Relight's: those of test harnesses, and those that
# Kubernetes sets in every container beside a service called "relight" (RELIGHT_PORT_7070_TCP_ADDR, …).
_FOREIGN = re.compile(r"RELIGHT_(TEST_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP).*)?))")


def _fields(struct: type[_Section]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


# A field whose type is a class is a section: the types of all other fields are Annotated, which is no class.
_SECTIONS: dict[str, type[_Section]] = {name: kind for name, kind in _fields(Config).items() if isinstance(kind, type)}
_KEYS = [_Key("", field, kind) for field, kind in _fields(Config).items() if field not in _SECTIONS] + [
    _Key(section, field, kind) for section in _SECTIONS for field, kind in _fields(_SECTIONS[section]).items()
]
_BY_DOTTED = {key.dotted: key for key in _KEYS}
_BY_FLAT = {key.flat: key for key in _KEYS}
_BY_VARIABLE = {key.variable: key for key in _KEYS}


def load_config(url: str | None, overrides: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Merge defaults, `RELIGHT_*` of `environ`, and the keyword arguments `url` (the store) and `overrides`.

    Raises ConfigError for an unknown key, a value of the wrong type or out of range, and a key that is given
    twice as a keyword. The error names the key, the value and what is accepted.
    """
    values = {key: _convert_text(key, text) for key, text in _from_environ(environ)}
    values |= {key: _convert(key, value, key.dotted) for key, value in _from_overrides(url, overrides).items()}

    def fields_of(section: str) -> dict[str, Any]:
        return {key.field: value for key, value in values.items() if key.section == section}

    sections: dict[str, Any] = {name: struct(**fields_of(name)) for name, struct in _SECTIONS.items()}
    return Config(**fields_of(""), **sections)


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[_Key, str]]:
    for variable, text in environ.items():
        key = _BY_VARIABLE.get(variable)
        if key is not None:
            yield key, text
        elif variable.startswith(_PREFIX) and not _FOREIGN.fullmatch(variable):
            # If this were ignored, a misspelt RELIGHT_RECOVERY_ENABLED=false would resume what must not be resumed.
            raise _unknown("environment variable", variable, _BY_VARIABLE)


def _from_overrides(url: str | None, overrides: Mapping[str, Any]) -> dict[_Key, Any]:
    values: dict[_Key, Any] = {}

    def put(key: _Key, value: Any) -> None:
        if key in values:
            raise ConfigError(f"{key.dotted}: given twice, in two spellings; expected once")
        values[key] = value

    if url is not None:
        put(_BY_DOTTED["store"], url)
    for name, value in overrides.items():
        if name in _SECTIONS:
            for key, inner in _from_section(name, value):
                put(key, inner)
        elif name in _BY_FLAT:
            put(_BY_FLAT[name], value)
        else:
            raise _unknown("key", name, [*_BY_FLAT, *_SECTIONS])
    return values


def _from_section(section: str, values: object) -> Iterator[tuple[_Key, Any]]:
    known = [key.dotted for key in _KEYS if key.section == section]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section}: {values!r} is not accepted; expected a dict with keys of {', '.join(known)}")
    for name, value in values.items():
        dotted = f"{section}.{name}"
        if dotted not in _BY_DOTTED:
            raise _unknown("key", dotted, known)
        yield _BY_DOTTED[dotted], value


def _convert_text(key: _Key, text: str) -> Any:
    what = f"{key.dotted} (from {key.variable})"
    if key.dotted == "modules":
        return _convert(key, [name.strip() for name in text.split(",") if name.strip()], what)
    return _convert(key, text.strip(), what, strict=False)


def _convert(key: _Key, value: Any, what: str, *, strict: bool = True) -> Any:
    """The value in the type of its field. Not `strict`: "3" is a number, as in an environment variable."""
    if key.is_duration:
        value = parse_duration(value, what)
    try:
        return msgspec.convert(value, key.type, strict=strict)
    except msgspec.ValidationError:
        # msgspec's message names its types ("Expected `int`"); the description is written for the user who set the key.
        accepted = key.type.__metadata__[-1].description
        raise ConfigError(f"{what}: {value!r} is not accepted; expected {accepted}") from None


def _unknown(noun: str, name: str, known: Iterable[str]) -> ConfigError:
    """The message does not show the value: it would not help, and it may be a password."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"
    return ConfigError(f"{name}: unknown {noun}; {hint}")
