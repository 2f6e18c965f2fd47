"""Health: the state of this process, for monitoring; and what it does when a part of it cannot be kept alive."""

from __future__ import annotations

import logging
from collections.abc import Sized

import msgspec

from relight.errors import StoreError, StoreUnavailableError
from relight.model.text import shown
from relight.ownership.heartbeats import Heartbeats
from relight.run.services import Services
from relight.supervisor import Part, PartHealth, Supervisor
from relight.telemetry import Token, log

_damaged: set[str] = set()  # what was logged as an error: a damaged store, by what it says


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine. An alert should look at `ok`."""

    ok: bool  # it may drive runs (or is a client), the store takes commits, threads can be had, and no part is failing
    owner: str
    holds_lease: bool  # a client has none
    fault: str | None  # why nothing is being committed right now
    runs_in_memory: int
    abandoned_threads: int  # sync steps past their timeout, or cancelled, whose code does not end
    waiting_for_threads: int  # sync flows and steps for which the system has no thread right now
    parts: list[PartHealth]  # the long-lived tasks, by name


def health_of(services: Services, live: Sized) -> Health:
    """The health as of now. It reads memory only, so it works also when the store does not answer; from any thread."""
    parts = sorted((part.health for part in list(services.supervisor.parts.values())), key=lambda part: part.name)
    may_drive, fault, refused = services.heartbeats.may_drive, services.recorder.fault, services.threads.refused
    able = fault is None and not refused and not any(part.failing or part.broken for part in parts)
    return Health(
        ok=(may_drive or not services.config.drive) and able,
        owner=services.owner,
        holds_lease=may_drive,
        fault=fault,
        runs_in_memory=len(live),
        abandoned_threads=services.threads.abandoned,
        waiting_for_threads=refused,
        parts=parts,
    )


def report_failure(part: Part, error: Exception, pause_seconds: float) -> None:
    """Log why a part failed: an outage as a warning, once, when it begins, or a damaged store as an error; anything else
    as a bug."""
    if isinstance(error, StoreError):
        level = logging.WARNING if part.outages == 1 else logging.DEBUG
        if isinstance(error, StoreUnavailableError) and error.damaged and str(error) not in _damaged:
            level = logging.ERROR  # once for each store, not for each part: only a person can help
            _damaged.add(str(error))
        log(level, _outage_of(part), f"{part.name}: {error}; trying again until it answers")
    else:
        log(
            logging.CRITICAL,
            Token.INTERNAL_ERROR,
            f"{part.name} broke ({part.failures} times by now): {shown(error)}; it starts again in {pause_seconds:.2g}s",
            error,
        )


def _outage_of(part: Part) -> Token:
    """The token of an outage, from its first line to its last: without a part that is not essential, recovery is only slower."""
    return Token.RECOVERY_FAILED if part.essential else Token.WATCH_FAILED


def let_go_when_broken(supervisor: Supervisor, heartbeats: Heartbeats) -> None:
    """A process that cannot do its work gives its lease away, so that other processes can drive its runs."""

    def broken(part: Part) -> None:
        log(
            logging.CRITICAL,
            Token.INTERNAL_ERROR,
            f"{part.name} cannot be kept alive: this process lets go of its lease",
        )
        heartbeats.give_lease_away(supervisor.trouble)

    def mended(part: Part) -> None:
        log(logging.WARNING, Token.LEASE_REGAINED, f"{part.name} works again: this process takes up runs again")
        heartbeats.go_on()

    def back(part: Part) -> None:
        log(logging.WARNING, _outage_of(part), f"{part.name} gets answers again, after {part.outages} tries")

    supervisor.on_broken, supervisor.on_mended, supervisor.on_back = broken, mended, back
