"""Whatever is ready at once, a pass of the event loop is short, and everybody gets a turn."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from strop import loops


@pytest.fixture
def ready():
    """Sockets that have something to read: `ready(n)`."""
    with contextlib.ExitStack() as stack:

        def make(count: int) -> list[socket.socket]:
            found = []
            for _ in range(count):
                reading, writing = socket.socketpair()
                stack.callback(reading.close)
                stack.callback(writing.close)
                writing.send(b"x")
                found.append(reading)
            return found

        yield make


def test_no_pass_serves_more_than_a_few_and_all_are_served(ready):
    sockets = ready(5 * loops.AT_ONCE + 3)
    served, by_pass = set(), []

    async def main():
        loop, before = asyncio.get_running_loop(), 0
        for one in sockets:
            loop.add_reader(one, lambda one=one: (one.recv(1), served.add(one)))
        while len(served) < len(sockets):
            await asyncio.sleep(0)  # one pass
            by_pass.append(len(served) - before)
            before = len(served)

    loops.run(main())
    assert max(by_pass) <= loops.AT_ONCE and sum(by_pass) == len(sockets)


def test_what_is_always_ready_starves_nobody(ready):
    greedy, others, served = ready(2 * loops.AT_ONCE), ready(loops.AT_ONCE), set()

    async def main():
        loop = asyncio.get_running_loop()
        for one in greedy:
            loop.add_reader(one, lambda: None)  # is never read: ready for ever
        for one in others:
            loop.add_reader(one, lambda one=one: (one.recv(1), served.add(one)))
        for _ in range(10):
            await asyncio.sleep(0)

    loops.run(main())
    assert served == set(others)


def test_who_has_left_is_not_called(ready):
    """The number of a closed socket is given to the next one that is opened, which is another's."""
    sockets, called = ready(loops.AT_ONCE + 1), []

    async def main():
        loop, last = asyncio.get_running_loop(), sockets[-1]

        def first():
            loop.remove_reader(sockets[0])
            number = last.fileno()
            loop.remove_reader(last)
            last.close()
            reading, writing = socket.socketpair()
            assert number in (reading.fileno(), writing.fileno())
            quiet = reading if reading.fileno() == number else writing
            loop.add_reader(quiet, lambda: called.append("quiet"))
            loop.call_later(0.05, lambda: (loop.remove_reader(quiet), reading.close(), writing.close(), done.set()))

        done = asyncio.Event()
        loop.add_reader(sockets[0], first)
        for one in sockets[1:-1]:
            loop.add_reader(one, lambda one=one: loop.remove_reader(one))
        loop.add_reader(last, lambda: called.append("last"))
        await done.wait()

    loops.run(main())
    assert called == []


def test_a_loop_waits_for_what_comes_later():
    async def main():
        reading, writing = socket.socketpair()
        with reading, writing:
            reading.setblocking(False)
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, writing.send, b"late")
            async with asyncio.timeout(10):
                return await loop.sock_recv(reading, 4)

    assert loops.run(main()) == b"late"
