"""Thousands may be ready at once, and the event loop still turns between them."""

from __future__ import annotations

import asyncio

from strop.gateway.turnstile import Turnstile


async def test_a_few_go_on_in_each_pass_in_their_order() -> None:
    turnstile = Turnstile(width=3)
    passes, order = [0], []

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            passes[0] += 1

    async def worker(number: int) -> None:
        await turnstile.enter()
        order.append((passes[0], number))

    counting = asyncio.create_task(count())
    await asyncio.gather(*(worker(number) for number in range(30)))
    counting.cancel()
    assert [number for _, number in order] == list(range(30))
    in_a_pass = [sum(at == one for at, _ in order) for one in {at for at, _ in order}]
    assert max(in_a_pass) <= 6 and len(in_a_pass) >= 5  # the counter and the turnstile need not turn in step


async def test_whoever_is_cancelled_takes_no_place() -> None:
    turnstile = Turnstile(width=1)
    await turnstile.enter()
    waiting = [asyncio.create_task(turnstile.enter()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting[:4]:
        task.cancel()
    await asyncio.wait_for(waiting[4], 5)
    await asyncio.wait_for(turnstile.enter(), 5)
    assert sum(task.cancelled() for task in waiting) >= 3  # the first may have been let in before
