"""User code with sync flows that takes everything from `relight`, because async flows use it, too. Checkers do not check what a
sync flow calls, but they refuse no correct line. They check the arguments and results of `start` and `run` in any case."""

from __future__ import annotations

from typing import assert_type

from relight import Relight, flow, foreach, parallel, sleep, spawn, step, wait_for


@step
def square(n: int) -> int:
    return n * n


@flow
def one(n: int) -> int:
    return square(n) + 1


@flow
def several(count: int) -> int:
    sleep("1ms")
    go: bool = wait_for("go", bool)
    squares: list[int] = foreach(range(count), square)
    first, second = parallel(lambda: square(2), lambda: one(3))
    spawned = spawn(one, 4)
    total: int = sum(square(n) for n in range(count)) + first + second + spawned.result()
    if square(2) > 3 and go:
        total += len(squares)
    return total


@flow
async def awaited(n: int) -> int:
    return await square(n) + await one(n) + sum(await foreach(range(n), square))


def main() -> None:
    with Relight("memory:") as rl:
        run = rl.start(several.with_id("r"), 3)
        run.signal("go", True)
        assert_type(run.result("1m"), int)
        assert_type(rl.run(one, 2), int)
        assert_type(rl.run(awaited, n=2), int)
        print(run.result(), rl.run(one, 2), rl.run(awaited, 2))


if __name__ == "__main__":
    main()
