"""A subscription that lives for as long as the customer stays: every month is a generation of one run, which does not grow.

python examples/subscription.py
"""

import asyncio

from relight import Relight, continue_as, current_step, flow, step, wait_for

MONTH = "200ms"  # "30d" in real life


@step
async def charge(customer: str, plan: str) -> str:
    print(f"charging {customer} for {plan}, idempotency key {current_step().idempotency_key}")
    return plan


@step
async def say_goodbye(customer: str, months: int) -> str:
    print(f"goodbye, {customer}")
    return f"{customer} stayed for {months} months"


@flow
async def subscription(customer: str, plan: str, months: int = 0) -> str:
    await charge(customer, plan)
    wish = await wait_for("wish", str, timeout=MONTH, default="")
    if wish == "leave":
        return await say_goodbye(customer, months + 1)
    return continue_as(customer, wish or plan, months + 1)


async def main() -> None:
    async with Relight("subscription.db") as rl:
        run = await rl.start(subscription.with_id("ada"), "Ada", "basic")
        if not (await run.status()).terminal:
            await run.signal("wish", "gold", id="upgrade")
            await run.signal("wish", "leave", id="notice")  # taken by a later generation than the first signal
        print(await run.result())
        print(f"the run is in generation {(await rl.explain('ada')).generation}")


if __name__ == "__main__":
    asyncio.run(main())
