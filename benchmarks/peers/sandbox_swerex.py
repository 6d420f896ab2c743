"""SWE-ReX's local deployment: start it, run `echo hi`, stop it. No isolation. Serves benchmarks/sandbox.py."""

import asyncio
import logging
import sys

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import Command

logging.disable(logging.CRITICAL)


async def cycle() -> None:
    deployment = LocalDeployment()
    await deployment.start()
    result = await deployment.runtime.execute(Command(command=["/bin/sh", "-c", "echo hi"]))
    assert result.stdout == "hi\n"
    await deployment.stop()


async def main() -> None:
    await cycle()
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            await cycle()
        print("done", flush=True)


asyncio.run(main())
