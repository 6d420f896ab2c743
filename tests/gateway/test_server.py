"""The process that serves: when it collects garbage."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from strop.gateway import server


class Node:
    """Something that refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


async def test_full_collections_wait_until_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(server, "_YOUNG_SECONDS", 0.01)
    monkeypatch.setattr(server, "_GROWN", -(10**9))
    before, idle = gc.get_threshold(), False
    freed = asyncio.Event()
    async with server.unhurried_collection(lambda: idle):
        node = Node()
        weakref.finalize(node, freed.set)
        gc.collect(1)  # it is old now: the younger generations' collections pass it by
        del node
        gc.collect(1)
        await asyncio.sleep(0.05)
        assert not freed.is_set() and gc.get_threshold()[2] > 10**6
        idle = True
        await asyncio.wait_for(freed.wait(), 20)
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


async def test_a_gateway_that_is_never_idle_collects_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(server, "_YOUNG_SECONDS", 0.01)
    monkeypatch.setattr(server, "_GROWN", -(10**9))
    monkeypatch.setattr(server, "_LONGEST_SECONDS", 0.05)
    freed = asyncio.Event()
    async with server.unhurried_collection(lambda: False):
        node = Node()
        weakref.finalize(node, freed.set)
        gc.collect(1)
        del node
        gc.collect(1)
        await asyncio.wait_for(freed.wait(), 20)
        assert gc.get_threshold()[2] > 10**6  # not by Python's own full collection


async def test_what_is_new_is_collected_however_little_python_counts() -> None:
    """Allocations minus deallocations, which stand still where old attempts end while new ones begin."""
    before, freed = gc.get_threshold(), asyncio.Event()
    gc.set_threshold(10**9, *before[1:])
    try:
        async with server.unhurried_collection(lambda: False):
            node = Node()
            weakref.finalize(node, freed.set)
            del node
            await asyncio.wait_for(freed.wait(), 20)
            assert gc.get_threshold()[0] == 10**9  # not by Python's own collection
    finally:
        gc.set_threshold(*before)


async def test_nothing_is_collected_where_nothing_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(server, "_YOUNG_SECONDS", 0.01)
    async with server.unhurried_collection(lambda: True):
        before = gc.get_stats()[2]["collections"]
        await asyncio.sleep(0.2)
        assert gc.get_stats()[2]["collections"] == before
