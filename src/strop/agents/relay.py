"""A way out of a sandbox that has no network: a small program inside it listens on its loopback and carries each
connection over its standard input and output to one address of this machine. Nothing else can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from strop.errors import AttemptError
from strop.rollouts import FailureKind

if TYPE_CHECKING:
    from strop.sandboxes.sandbox import Process, Sandbox

_FRAME = struct.Struct("!II")  # number of the connection, length of what follows; length 0 closes it
_START_SECONDS = 20.0
_PIECE = 1 << 16

#: Runs inside, on the Python of the sandbox; frames as above. The first one holds the port.
_INSIDE = """
import asyncio, os, struct, sys
frame, open_ones, count = struct.Struct("!II"), {}, 0
async def main():
    loop = asyncio.get_running_loop()
    incoming = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(incoming), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    outgoing = asyncio.StreamWriter(transport, protocol, None, loop)
    async def serve(reader, writer):
        global count
        count += 1
        number = count
        open_ones[number] = writer
        while data := await reader.read(65536):
            outgoing.write(frame.pack(number, len(data)) + data)
            await outgoing.drain()
        outgoing.write(frame.pack(number, 0))
        open_ones.pop(number, None)
        writer.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    port = str(server.sockets[0].getsockname()[1]).encode()
    outgoing.write(frame.pack(0, len(port)) + port)
    while True:
        number, length = frame.unpack(await incoming.readexactly(8))
        data = await incoming.readexactly(length)
        writer = open_ones.get(number)
        if writer is None:
            continue
        if length:
            writer.write(data)
            await writer.drain()
        else:
            writer.close()
            open_ones.pop(number, None)
try:
    asyncio.run(main())
except asyncio.IncompleteReadError:
    pass
"""


class Relay:
    """Carries connections from inside a sandbox to one address of this machine.

    Attributes:
        url: what programs inside call.
    """

    def __init__(self, process: Process, host: str, port: int) -> None:
        self.url = ""
        self._process, self._target = process, (host, port)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._pumps: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, sandbox: Sandbox, url: str) -> Self:
        """Start one.

        Args:
            sandbox: where from.
            url: where to: scheme, host and port.

        Raises:
            AttemptError: there is no Python in the sandbox, or it did not start in time.
        """
        target = urlsplit(url)
        process = await sandbox.start(["python3", "-u", "-c", _INSIDE])
        relay = cls(process, target.hostname or "127.0.0.1", target.port or 80)
        try:
            async with asyncio.timeout(_START_SECONDS):
                port = await relay._ready
        except TimeoutError:
            await relay.close()
            raise AttemptError(
                FailureKind.SANDBOX, f"the relay to the gateway did not start within {_START_SECONDS:g} s"
            ) from None
        except AttemptError:
            await relay.close()
            raise
        relay.url = f"{target.scheme}://127.0.0.1:{port}"
        return relay

    async def close(self) -> None:
        """End it and every connection."""
        self._reading.cancel()
        for pump in self._pumps:
            pump.cancel()
        for writer in self._writers.values():
            writer.close()
        with contextlib.suppress(AttemptError):  # the sandbox may be gone already
            await self._process.kill()

    async def _read(self) -> None:
        """Frames from inside, until the relay ends."""
        buffer = bytearray()
        said = b""
        try:
            async for chunk in self._process:
                if chunk.stream == "stderr":
                    said = (said + chunk.data)[-500:]
                    continue
                buffer += chunk.data
                while len(buffer) >= _FRAME.size:
                    number, length = _FRAME.unpack_from(buffer)
                    if len(buffer) < _FRAME.size + length:
                        break
                    data = bytes(buffer[_FRAME.size : _FRAME.size + length])
                    del buffer[: _FRAME.size + length]
                    await self._take(number, data)
        finally:
            if not self._ready.done():
                reason = f"the relay to the gateway ended: {said.decode('utf-8', 'replace')}"
                self._ready.set_exception(AttemptError(FailureKind.SANDBOX, reason))

    async def _take(self, number: int, data: bytes) -> None:
        if number == 0:
            if not self._ready.done():
                self._ready.set_result(int(data))
            return
        writer = self._writers.get(number)
        if not data:
            if writer is not None:
                writer.close()
            return
        if writer is None:
            reader, writer = await asyncio.open_connection(*self._target)
            self._writers[number] = writer
            pump = asyncio.create_task(self._pump(number, reader))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def _pump(self, number: int, reader: asyncio.StreamReader) -> None:
        """What comes back on one connection."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_PIECE):
                await self._send(number, data)
        await self._send(number, b"")
        self._writers.pop(number).close()

    async def _send(self, number: int, data: bytes) -> None:
        async with self._sending:  # a frame is never cut in two by another
            await self._process.write(_FRAME.pack(number, len(data)) + data)
