"""The worker's side of the protocol: a file of the standard library alone, run by whatever Python the environment needs.

    PYTHON worker.py ADAPTER.py:CLASS NAME OPTIONS_AS_JSON

Reads one JSON message a line from standard input and writes one a line to standard output, until its input ends.
Everything else that is printed goes to standard error. Many attempts run at once, all in this one process.

    in   {"v": 1, "id": 1, "op": "tasks", "split": "train", "start": 0, "count": 100}
         {"v": 1, "id": 2, "op": "attempt", "split": "train", "index": 7, "seed": 5, "model": {"url", "key", "name", …}}
         {"v": 1, "id": 2, "op": "cancel"}
    out  {"v": 1, "ready": {"environment": "…", "sizes": {"train": 100, "test": 10}}}
         {"v": 1, "id": 1, "ok": …}
         {"v": 1, "id": 2, "failed": {"kind": "scorer", "reason": "…"}}
         {"v": 1, "beat": 12}

An adapter is a class: `Adapter(name, options)` with `sizes`, `task(split, index)` (id, messages, labels) and
`async attempt(split, index, model, seed)`, which acts through the model's URL with its key, scores, and returns
{"reward", "metrics", "solved"}. It raises `Failure(kind, reason)` where the system failed; any other exception is a
failure of the environment. Nothing that fails is ever a reward.
"""

import asyncio
import functools
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

VERSION = 1
BEAT_SECONDS = 1.0


class Failure(Exception):
    """The system failed the attempt; the kinds are those of strop.rollouts.FailureKind."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Worker:
    """Answers messages over an adapter."""

    def __init__(self, adapter: Any, send: Callable[[dict[str, Any]], None]) -> None:
        self.adapter, self.send = adapter, send
        self.running: dict[int, asyncio.Future[None]] = {}

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Until the input ends; then attempts under way are cancelled."""
        beating = asyncio.ensure_future(self.beat())
        while line := await lines.readline():
            message = json.loads(line)
            if message["op"] == "cancel":
                task = self.running.get(message["id"])
                if task is not None:
                    task.cancel()
                continue
            task = asyncio.ensure_future(self.answer(message))
            self.running[message["id"]] = task
            task.add_done_callback(functools.partial(self.forget, message["id"]))
        beating.cancel()
        for task in list(self.running.values()):
            task.cancel()

    def forget(self, number: int, _: "asyncio.Future[None]") -> None:
        """An attempt ended."""
        self.running.pop(number, None)

    async def answer(self, message: dict[str, Any]) -> None:
        """Do what a message asks and say how it went."""
        number = message["id"]
        try:
            if message["v"] != VERSION:
                raise Failure("environment", f"the worker speaks version {VERSION}, not {message['v']}")
            if message["op"] == "tasks":
                stop = min(message["start"] + message["count"], self.adapter.sizes[message["split"]])
                done = [self.adapter.task(message["split"], index) for index in range(message["start"], stop)]
            else:
                done = await self.adapter.attempt(message["split"], message["index"], message["model"], message["seed"])
            self.send({"v": VERSION, "id": number, "ok": done})
        except asyncio.CancelledError:
            self.send({"v": VERSION, "id": number, "failed": {"kind": "cancelled", "reason": "it was cancelled"}})
        except Failure as failure:
            self.send({"v": VERSION, "id": number, "failed": {"kind": failure.kind, "reason": failure.reason}})
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            self.send({"v": VERSION, "id": number, "failed": {"kind": "environment", "reason": reason[:500]}})

    async def beat(self) -> None:
        """Say that the event loop turns."""
        count = 0
        while True:
            count += 1
            self.send({"v": VERSION, "beat": count})
            await asyncio.sleep(BEAT_SECONDS)


def load(spec: str) -> Any:
    """The class that "path/to/file.py:Class" names."""
    path, name = spec.rsplit(":", 1)
    sys.modules.setdefault("strop_worker", sys.modules[__name__])  # so that adapters can raise `Failure`
    found = importlib.util.spec_from_file_location("strop_adapter", path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules["strop_adapter"] = module
    found.loader.exec_module(module)
    return getattr(module, name)


async def main(spec: str, name: str, options: str) -> None:
    """Make the adapter and serve."""
    outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever the environment prints is no message

    def send(message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[outgoing.write(data) :]

    adapter = load(spec)(name, json.loads(options))
    send({"v": VERSION, "ready": {"environment": name, "sizes": adapter.sizes}})
    lines = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await Worker(adapter, send).serve(lines)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
