"""The steps that programs are made of. Each call of a body has its own nonce, which shows which call's outcome a flow was told.

The arguments of a step are its `spec` (see generate.py) and a number `x`. The number follows from what the flow knows at that
moment, so a flow that goes another way on replay asks with another number.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import zlib
from typing import Any, Self

from relight import Retry, current_step, step
from tests.random.book import Line, book


class Boom(Exception):  # noqa: N818 - what a step raises on purpose
    """A step or a flow fails because its program says so."""


_nonces = itertools.count(1)


def _nonce() -> str:
    return f"{os.getpid():x}.{next(_nonces)}"


def answer(spec: dict[str, Any], x: int) -> int:
    """The result of a step with these arguments, if nothing is left to chance."""
    return zlib.crc32(f"{spec['id']}:{x}".encode()) % 10


class _Body:
    """Used around a body: writes down when it begins and how it ends."""

    def __init__(self, spec: dict[str, Any], x: int) -> None:
        info = current_step()
        self.spec, self.x, self.attempt = spec, x, info.attempt
        self.nonce = _nonce()
        run = info.idempotency_key.removesuffix("/" + info.step)
        text = f"{spec['id']}({x})"
        self._line = Line(
            "begin", book().life, run, text=text, key=info.step, attempt=info.attempt, nonce=self.nonce, box=info.run_id
        )

    def __enter__(self) -> Self:
        book().write(self._line)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._line.what = "end"
        ended = "ok" if error is None else "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
        self._line.kind = ended
        book().write(self._line)

    def result(self) -> list[Any]:
        """What the step returns or raises."""
        fate = self.spec["fate"]
        dice = zlib.crc32(self.nonce.encode())
        fails = (
            fate == "fail"
            or (fate == "flaky" and self.attempt <= self.spec["times"])
            or (fate == "moody" and dice % 2 == 0)
        )
        if fails:
            raise Boom(f"{self.spec['id']} {self.nonce}")
        return [dice % 10 if fate == "dice" else answer(self.spec, self.x), self.nonce]


async def _async_body(spec: dict[str, Any], x: int) -> list[Any]:
    with _Body(spec, x) as body:
        if spec["ms"] > 0:
            await asyncio.sleep(spec["ms"] / 1000)
        elif spec["ms"] < 0:  # several turns of the loop, but no time
            for _ in range(-spec["ms"]):
                await asyncio.sleep(0)
        try:
            return body.result()
        finally:
            if spec.get("lingers"):  # its clean-up takes time, too
                await asyncio.sleep(0.001)


def _sync_body(spec: dict[str, Any], x: int) -> list[Any]:
    with _Body(spec, x) as body:
        if spec["ms"] > 0:
            time.sleep(spec["ms"] / 1000)
        return body.result()


@step
async def work(spec: dict[str, Any], x: int) -> list[Any]:
    return await _async_body(spec, x)


@step
def sync_work(spec: dict[str, Any], x: int) -> list[Any]:
    return _sync_body(spec, x)


@step(retry=Retry(attempts=3, delay="1ms"))
async def retried(spec: dict[str, Any], x: int) -> list[Any]:
    return await _async_body(spec, x)


@step(retry=Retry(attempts=3))
async def retried_at_once(spec: dict[str, Any], x: int) -> list[Any]:
    return await _async_body(spec, x)


@step(retry=Retry(attempts=3, delay="2ms"))
def sync_retried(spec: dict[str, Any], x: int) -> list[Any]:
    return _sync_body(spec, x)


@step(timeout="4ms")
async def limited(spec: dict[str, Any], x: int) -> list[Any]:
    return await _async_body(spec, x)


@step(on_crash="fail")
async def fatal(spec: dict[str, Any], x: int) -> list[Any]:
    return await _async_body(spec, x)


@step
async def each_step(item: list[Any]) -> list[Any]:
    """A step with one argument, for foreach."""
    return await _async_body(item[0], item[1])


ASYNC = {
    "work": work,
    "sync_work": sync_work,
    "retried": retried,
    "retried_at_once": retried_at_once,
    "sync_retried": sync_retried,
    "limited": limited,
    "fatal": fatal,
}
