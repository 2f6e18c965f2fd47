"""An agent: it thinks, calls tools, asks a person, and remembers all of it across crashes.

python examples/agent.py

Each call of the model and of a tool is a step: paid for once, however often the process dies. A person's answers
are signals. The model here is a list of canned replies, so that the example runs anywhere.
"""

import asyncio
from typing import Literal

import msgspec

from relight import Relight, Retry, flow, now, spawn, step, wait_for


class Reply(msgspec.Struct):
    """What the model wants next."""

    action: Literal["search", "ask", "research", "answer"]
    text: str


class Note(msgspec.Struct):
    """One turn of the conversation."""

    who: str
    text: str


SCRIPT = [
    Reply("search", "trains to Vienna"),
    Reply("ask", "Which day?"),
    Reply("research", "hotels in Vienna"),
    Reply("answer", "Train at 9:12, and a hotel near the station."),
]


# The conversation grows with every turn, and follows from the results so far: replay need not compare it each time.
@step(
    retry=Retry(attempts=4, delay="100ms", backoff="exponential", on=ConnectionError),
    timeout="2m",
    volatile=("conversation",),
)
async def think(conversation: list[Note]) -> Reply:
    turns = sum(note.who == "model" for note in conversation)
    return SCRIPT[turns]


@step(timeout="30s")
async def search(query: str) -> str:
    return f"3 results for {query!r}"


@flow
async def research(topic: str) -> str:
    """A run of its own: it goes on even if the conversation is over first."""
    return f"report on {topic}: {await search(topic)}"


@flow
async def agent(task: str) -> list[Note]:
    conversation = [Note("person", task), Note("clock", f"it is {now():%A}")]
    while True:
        reply = await think(conversation)
        conversation.append(Note("model", f"{reply.action}: {reply.text}"))
        match reply.action:
            case "search":
                conversation.append(Note("search", await search(reply.text)))
            case "ask":
                # It may take the person a week: the run leaves memory until then.
                conversation.append(Note("person", await wait_for("answer", str, timeout="7d", default="never mind")))
            case "research":
                report = await spawn(research, reply.text)
                conversation.append(Note("research", await report))
            case "answer":
                return conversation


async def main() -> None:
    async with Relight("agent.db") as rl:
        run = await rl.start(agent.with_id("trip-1"), "Plan a trip to Vienna.")
        if not (await run.status()).terminal:
            await run.signal("answer", "On Friday.", id="first answer")
        for note in await run.result():
            print(f"{note.who:>8}  {note.text}")


if __name__ == "__main__":
    asyncio.run(main())
