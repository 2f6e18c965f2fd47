"""User code with mistakes: both checkers must report every line that says so, and no other. It is never run."""

from __future__ import annotations

import asyncio

from relight import Handle, Relight, Step, flow, foreach, parallel, sleep, spawn, step, wait_for
from relight.sync import flow as sync_flow
from relight.sync import foreach as sync_foreach
from relight.sync import parallel as sync_parallel
from relight.sync import spawn as sync_spawn
from relight.sync import step as sync_step
from relight.sync import wait_for as sync_wait_for


@step
def resize(image: str, width: int = 100) -> str:
    return image * width


@step
async def fetch(url: str, *, retries: int) -> bytes:
    return url.encode() * retries


@flow
async def album(images: list[str], title: str = "") -> int:
    return len(images) + len(title)


@flow(name="thumbnails")
def thumbnail(image: str) -> str:
    return image


@sync_step
def half(n: int) -> float:
    return n / 2


@sync_flow
def halves(count: int) -> float:
    return half(count)


def helper(image: str) -> str:
    return image


async def start(rl: Relight) -> None:
    await rl.start(album, ["a"], title="b")
    await rl.start(album, "a")  # error
    await rl.start(album, ["a"], 7)  # error
    await rl.start(album, images=[1])  # error
    await rl.start(album)  # error
    await rl.start(album, ["a"], "b", "c")  # error
    await rl.start(album, ["a"], size=7)  # error
    await rl.start(thumbnail, image="a")
    await rl.start(thumbnail, 7)  # error
    await rl.start(thumbnail)  # error
    await rl.start(thumbnail, "a", size=7)  # error
    await rl.start(halves, 7)
    await rl.start(halves, "7")  # error
    await rl.start(halves)  # error
    await rl.start(helper, "a")  # error
    await rl.start(resize, "a")  # error


async def start_with_an_id(rl: Relight) -> None:
    await rl.start(album.with_id("r"), ["a"], title="b")
    await rl.start(album.with_id("r"), "a")  # error
    await rl.start(album.with_id("r"), ["a"], title=7)  # error
    await rl.start(album.with_id("r"))  # error
    await rl.start(album.with_id("r"), ["a"], "b", "c")  # error
    await rl.start(album.with_id("r"), ["a"], size=7)  # error
    await rl.start(album, ["a"], id="r")  # error
    await rl.start(album.with_id(7), ["a"])  # error
    await rl.start(thumbnail.with_id("r"), "a")
    await rl.start(thumbnail.with_id("r"), 7)  # error
    await rl.start(thumbnail.with_id("r"))  # error
    await rl.start(thumbnail.with_id("r"), "a", size=7)  # error
    await rl.start(halves.with_id("r"), count=7)
    await rl.start(halves.with_id("r"), count="7")  # error
    await album.with_id("r")(["a"])  # error


async def run(rl: Relight) -> None:
    number: int = await rl.run(album, ["a"])
    text: str = await rl.run(album, ["a"])  # error
    text = await rl.run(thumbnail, "a")
    number = await rl.run(thumbnail, "a")  # error
    number = await rl.run(album.with_id("r"), ["a"])
    text = await rl.run(album.with_id("r"), ["a"])  # error
    await rl.run(album.with_id("r"), 7)  # error
    await rl.run(album, ["a"], size=7)  # error
    handle: Handle[int] = await rl.start(album, ["a"])
    other: Handle[str] = await rl.start(album, ["a"])  # error
    text = await handle.result()  # error
    await handle.signal(7)  # error
    print(number, text, other)


def blocking() -> None:
    with Relight("memory:") as rl:
        number: int = rl.run(album, ["a"])
        text: str = rl.run(album, ["a"])  # error
        number = rl.start(album.with_id("r"), ["a"]).result()
        text = rl.start(album.with_id("r"), ["a"]).result()  # error
        rl.start(album.with_id("r"), 7)  # error
        rl.start(album.with_id("r"))  # error
        rl.start(album.with_id("r"), ["a"], size=7)  # error
        rl.run(thumbnail, 7)  # error
        rl.run(halves, size=7)  # error
        print(number, text)


@flow
async def in_a_flow(images: list[str]) -> int:
    number: int = await album(images)
    text: str = await album(images)  # error
    await album(7)  # error
    text = await resize("a", 50)
    number = await resize("a", 50)  # error
    await resize(7)  # error
    await resize()  # error
    await resize("a", height=7)  # error
    await fetch("a", retries=1)
    await fetch("a")  # error
    await fetch("a", 1)  # error
    await thumbnail(7)  # error
    number = await thumbnail("a")  # error

    await sleep("1d")
    await sleep([])  # error
    agreed: bool = await wait_for("ok", bool)
    text = await wait_for("ok", bool)  # error
    text = await wait_for("ok", str, timeout="1h", default=None)  # error
    await wait_for(7, str)  # error

    texts: list[str] = await foreach(images, resize, concurrency=2)
    numbers: list[int] = await foreach(images, resize)  # error
    await foreach([1, 2], resize)  # error
    await foreach(images, fetch)  # error
    await foreach(7, resize)  # error

    spawned = await spawn(album, images)
    text = await spawned  # error
    await spawn(album, 7)  # error
    await spawn(album)  # error
    await spawn(album, images, size=7)  # error
    await spawn(album, images, "a", "b")  # error
    await spawn(helper, "a")  # error
    await spawn(album.with_id("r"), images, title="a")
    await spawn(album.with_id("r"), 7)  # error
    await spawn(album.with_id("r"))  # error
    await spawn(album.with_id("r"), images, size=7)  # error
    await spawn(album, images, id="r")  # error
    await spawn(thumbnail.with_id("r"), 7)  # error

    contents, title = await asyncio.gather(fetch("a", retries=1), album(images))
    text = title  # error
    text = contents  # error
    print(agreed, texts, numbers, number)
    return text  # error


@sync_flow
def in_a_sync_flow(images: list[str]) -> str:
    number: float = half(4)
    text: str = half(4)  # error
    half("4")  # error
    half()  # error
    text = sync_wait_for("ok", bool)  # error
    texts: list[str] = sync_foreach([1, 2], half)  # error
    sync_foreach(images, half)  # error
    texts = sync_parallel(lambda: half(1), lambda: half(2))  # error
    spawned = sync_spawn(halves, 4)
    text = spawned.result()  # error
    sync_spawn(halves, "4")  # error
    sync_spawn(halves.with_id("r"))  # error
    sync_spawn(halves.with_id("r"), 4, size=7)  # error
    parallel(half)  # error
    print(text, texts)
    return number  # error


@step(on_crash="explode")  # error
def exploding() -> None: ...


@step(retries=3)  # error
def retried() -> None: ...


@flow(resumable="no")  # error
async def odd() -> None: ...


bound: Step[[str, int], str] = resize
mistaken: Step[[int], str] = resize  # error
