"""Monthly billing, without any async: the flow, the steps and the program around them are plain functions.

python examples/billing.py
"""

from dataclasses import dataclass
from decimal import Decimal

from relight import Relight, Retry, current_step, now
from relight.sync import flow, foreach, parallel, sleep, step  # with the types that they have without async


@dataclass
class Invoice:
    customer: str
    amount: Decimal
    number: str


@step
def customers() -> list[str]:
    return ["Ada", "Grace", "Linus"]


@step
def usage(customer: str) -> Decimal:
    return Decimal(len(customer)) * Decimal("1.10")


@step
def discount(customer: str) -> Decimal:
    return Decimal("0.90") if customer.startswith("G") else Decimal(1)


@step(retry=Retry(attempts=3, delay="50ms", backoff="fibonacci", on=ConnectionError))
def send(invoice: Invoice) -> str:
    if current_step().attempt == 1 and invoice.customer == "Grace":
        raise ConnectionError("the mail server is asleep")
    print(f"sent {invoice.number} to {invoice.customer}: {invoice.amount}")
    return invoice.number


def bill(customer: str) -> str:
    amount, factor = parallel(lambda: usage(customer), lambda: discount(customer))
    invoice = Invoice(customer, (amount * factor).quantize(Decimal("0.01")), f"{now():%Y-%m}-{customer}")
    return send(invoice)


@flow(timeout="1d")
def billing(month: str) -> list[str]:
    sent = foreach(customers(), bill)
    sleep("100ms")  # a real one might wait for the payments: "14d", without holding a thread
    return sent


def main() -> None:
    with Relight("billing.db") as rl:
        run = rl.start(billing.with_id("billing-2026-11"), "2026-11")  # once per month, however often this is started
        print(f"{run.id}: {len(run.result())} invoices, {run.status()}")


if __name__ == "__main__":
    main()
