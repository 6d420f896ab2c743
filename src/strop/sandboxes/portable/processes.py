"""Finding and killing processes of this sandbox by descent, seen through its own /proc; helper/processes.c in Python."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence

from strop.sandboxes.wire import Kill

_ROUNDS = 1000


def _table() -> dict[int, tuple[int, str]]:
    """Parent and state of every process, by pid. A name may hold anything, so the last ")" ends it."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
            table[int(name)] = int(parent), state.decode()
        except (OSError, IndexError, ValueError):
            continue
    return table


def _descends(table: dict[int, tuple[int, str]], pid: int, root: int) -> bool:
    for _ in table:
        if pid not in table:
            return False
        pid = table[pid][0]
        if pid == root:
            return True
    return False


def _chosen(scope: Kill, main: int, spared: Sequence[int]) -> Iterator[tuple[int, str]]:
    """(pid, state) of what a kill reaches, the command's main process left out: it goes last, so that orphans stay
    below it."""
    table = _table()
    for pid, (_, state) in table.items():
        if scope is Kill.LEFTOVERS:
            if pid != 1 and not any(pid == other or _descends(table, pid, other) for other in spared):
                yield pid, state
        elif _descends(table, pid, main):
            yield pid, state


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_until_settled(scope: Kill, main: int, spared: Sequence[int], number: int) -> None:
    for _ in range(_ROUNDS):
        waiting = 0
        for pid, state in _chosen(scope, main, spared):
            if state not in "ZX":
                _send(pid, number)
                waiting += not (number == signal.SIGSTOP and state == "T")
        if not waiting:
            return
        time.sleep(0.0002)


def kill_processes(scope: Kill, main: int, spared: Sequence[int], number: int) -> None:
    """Send a signal to a command, or kill what the scope says.

    Args:
        scope: see `Kill`.
        main: the command's main process; 0 if it is gone.
        spared: main processes of other commands.
        number: the signal, where the scope is MAIN or ALL.
    """
    if scope is Kill.ALL:
        _send(-1, number)
        return
    if scope is Kill.MAIN:
        _send(main, number)
        return
    if scope is Kill.TREE:
        _send(main, signal.SIGSTOP)
    _signal_until_settled(scope, main, spared, signal.SIGSTOP)  # what is stopped can't fork
    _signal_until_settled(scope, main, spared, signal.SIGKILL)
    if scope is Kill.TREE:
        _send(main, signal.SIGKILL)
