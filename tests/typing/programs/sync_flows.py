# pyright: strict
"""User code without async: with the names of `relight.sync` everything has its real type, for both checkers, and when it runs."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, assert_type

from relight import Relight, Retry
from relight.sync import Flow, SpawnedRun, flow, foreach, parallel, sleep, spawn, step, wait_for


@step
def usage(customer: str) -> Decimal:
    return Decimal(len(customer))


@step(retry=Retry(attempts=2))
def discount(customer: str, *, year: int = 2026) -> float:
    return 0.5 if year else 1.0


@step
async def notify(customer: str) -> bool:
    return bool(customer)


@flow
def invoice(customer: str) -> Decimal:
    amount = usage(customer)
    assert_type(amount, Decimal)
    assert_type(discount(customer, year=2025), float)
    assert_type(notify(customer), bool)
    return amount


@flow(name="bills", timeout="1d")
def bill(customers: list[str]) -> str:
    sleep("1ms")
    go = wait_for("go", bool)
    assert_type(go, bool)
    note = wait_for("note", str, timeout="1ms", default=None)
    assert_type(note, str | None)

    amounts = foreach(customers, invoice)
    assert_type(amounts, list[Decimal])
    lengths = foreach(customers, len, concurrency=2)
    assert_type(lengths, list[int])

    same = parallel(lambda: usage("a"), lambda: usage("b"))
    assert_type(same, list[Decimal])
    mixed = parallel(lambda: usage("a"), lambda: notify("b"))
    assert_type(mixed, list[Decimal | bool])
    many = parallel(*(lambda name=name: usage(name) for name in customers))
    assert_type(many, list[Decimal])

    spawned = spawn(invoice, customers[0])
    assert_type(spawned, SpawnedRun[Decimal])
    assert_type(spawned.result(), Decimal)
    assert_type(spawn(invoice.with_id("again"), customer="Ada").result(), Decimal)
    found = [usage(name) for name in customers]
    found.append(Decimal(1))
    return f"{go} {note} {sum(found)} {len(amounts) + len(lengths) + len(same) + len(mixed) + len(many)}"


def takes_a_flow(one: Flow[[list[str]], Any]) -> str:
    return one.name


def main() -> None:
    with Relight("memory:") as rl:
        run = rl.start(bill.with_id("bill-1"), ["Ada", "Grace"])
        run.signal("go", True)
        assert_type(run.result(timeout="1m"), str)
        print(run.result())
        assert_type(rl.run(invoice, "Ada"), Decimal)
        assert_type(rl.run(invoice.with_id("invoice-1"), customer="Ada"), Decimal)
    print(invoice.name, takes_a_flow(bill), usage("Ada"))


if __name__ == "__main__":
    main()
