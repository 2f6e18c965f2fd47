"""Health: how this process is, for whoever watches over it; and what it does when a part of it cannot be kept alive."""

from __future__ import annotations

import logging
from collections.abc import Sized

import msgspec

from relight.errors import StoreError
from relight.ownership.heartbeats import Heartbeats
from relight.run.services import Services
from relight.supervisor import Part, PartHealth, Supervisor
from relight.telemetry import Token, log


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is. `ok` is what an alert should look at."""

    ok: bool  # it drives runs (or is a client), commits are taken, threads can be had, and no part of it is failing
    owner: str
    holds_lease: bool  # a client has none
    fault: str | None  # why nothing is being committed right now
    runs_in_memory: int
    abandoned_threads: int  # sync steps past their timeout, or cancelled, whose code does not end
    waiting_for_threads: int  # sync flows and steps for which the system has no thread right now
    parts: list[PartHealth]  # the long-lived tasks, by name


def health_of(services: Services, live: Sized) -> Health:
    """As of now. It reads memory only, so it answers also when the store does not; from any thread."""
    parts = sorted((part.health for part in list(services.supervisor.parts.values())), key=lambda part: part.name)
    held, fault, refused = services.heartbeats.may_drive, services.recorder.fault, services.threads.refused
    able = fault is None and not refused and not any(part.failing for part in parts)
    return Health(
        ok=(held or not services.config.drive) and able,
        owner=services.owner,
        holds_lease=held,
        fault=fault,
        runs_in_memory=len(live),
        abandoned_threads=services.threads.abandoned,
        waiting_for_threads=refused,
        parts=parts,
    )


def report_failure(part: Part, error: Exception, pause_seconds: float) -> None:
    """An outage is said as one, when it begins; anything else is a bug."""
    if isinstance(error, StoreError):
        token = Token.RECOVERY_FAILED if part.essential else Token.WATCH_FAILED
        level = logging.WARNING if part.outages == 1 else logging.DEBUG
        log(level, token, f"{part.name}: {error}; trying again until it answers")
    else:
        log(
            logging.CRITICAL,
            Token.INTERNAL_ERROR,
            f"{part.name} broke ({part.failures} times by now): {error!r}; it is begun again in {pause_seconds:.2g}s",
            error,
        )


def let_go_when_broken(supervisor: Supervisor, heartbeats: Heartbeats) -> None:
    """A process that cannot do its work must not keep others from doing it."""

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
        log(logging.WARNING, Token.RECOVERY_FAILED, f"{part.name} is answered again, after {part.outages} tries")

    supervisor.on_broken, supervisor.on_mended, supervisor.on_back = broken, mended, back
