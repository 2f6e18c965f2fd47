"""The oracle's steps: what a step of a `certain` program returns or raises, without executing the step."""

from __future__ import annotations

from typing import Any

from relight.errors import StepTimeoutError
from tests.random.steps import Boom, answer


def outcome(name: str, spec: dict[str, Any], x: int) -> list[Any]:
    fate = spec["fate"]
    if name == "limited" and spec["ms"] > 100:
        raise StepTimeoutError(spec["id"])
    if fate == "fail" or (fate == "flaky" and spec["times"] >= (3 if "retried" in name else 1)):
        raise Boom(spec["id"])
    assert fate in ("ok", "flaky"), f"{fate} is left to chance"
    return [answer(spec, x), ""]


async def plain_step(name: str, spec: dict[str, Any], x: int) -> list[Any]:
    return outcome(name, spec, x)
