"""inspect_ai's local sandbox: make it, run `echo hi`, clean it up. No isolation. Serves benchmarks/sandbox.py."""

import asyncio
import sys

from inspect_ai.util._sandbox.local import LocalSandboxEnvironment


async def cycle() -> None:
    made = await LocalSandboxEnvironment.sample_init("echo", None, {})
    result = await made["default"].exec(["/bin/sh", "-c", "echo hi"])
    assert result.stdout == "hi\n"
    await LocalSandboxEnvironment.sample_cleanup("echo", None, made, False)


async def main() -> None:
    await cycle()
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            await cycle()
        print("done", flush=True)


asyncio.run(main())
