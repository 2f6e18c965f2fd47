"""An order is charged, waits for approval, and ships; cancelled or refused, it is refunded.

python examples/checkout.py             approves the order
python examples/checkout.py --refuse    refuses another one
"""

import asyncio
import sys
from dataclasses import dataclass

from relight import Relight, Retry, RunCancelled, current_step, flow, foreach, step, wait_for


@dataclass
class Order:
    id: str
    items: list[str]
    cents: int


@dataclass
class Decision:
    approved: bool
    by: str


@step(retry=Retry(attempts=5, delay="200ms", backoff="exponential", jitter=0.2), timeout="10s")
async def charge(order: Order) -> str:
    # A real payment service takes the key and recognises a repetition: charged once, however often this runs.
    return f"charge {current_step().idempotency_key}"


@step
async def refund(charge_id: str) -> None:
    print(f"refunding {charge_id}")


@step
async def ship(item: str) -> str:
    print(f"shipping {item}")
    return f"parcel with {item}"


@flow
async def checkout(order: Order) -> str:
    charge_id = await charge(order)
    try:
        decision = await wait_for("decision", Decision, timeout="7d", default=Decision(False, "nobody, in a week"))
    except RunCancelled:
        await refund(charge_id)
        raise
    if not decision.approved:
        await refund(charge_id)
        return f"refused by {decision.by}"
    parcels = await foreach(order.items, ship)
    return f"approved by {decision.by}: {len(parcels)} parcels"


async def main(*, approve: bool) -> None:
    order = Order(id=f"order-{'1' if approve else '2'}", items=["tea", "cup", "spoon"], cents=2390)
    async with Relight("checkout.db") as rl:
        run = await rl.start(checkout.with_id(order.id), order)
        if not (await run.status()).terminal:
            # Usually another process does this, days later: a web handler, or a colleague's script.
            await run.signal("decision", Decision(approve, "Grace"), id="the decision")
        print(f"{run.id}: {await run.result()}")


if __name__ == "__main__":
    asyncio.run(main(approve="--refuse" not in sys.argv))
