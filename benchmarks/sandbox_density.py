"""How many sandboxes live at once on this machine, and what each costs in memory.

Makes idle sandboxes until the wanted number lives (or the machine refuses), asks a sample of them for an `echo`,
destroys them all, and prints RESULT with `live` and `mib_each`. Needs root; about 0.6 MiB of memory each.

    python benchmarks/sandbox_density.py [--live 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from strop.sandboxes import Image, Limits, LocalPool, LocalSandbox, SandboxFailure


def available() -> float:
    """MiB of memory that could be had."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 1024


async def fill(pool: LocalPool, wanted: int) -> list[LocalSandbox]:
    """Make sandboxes, 64 at a time, until there are enough or one is refused."""
    made: list[LocalSandbox] = []
    while len(made) < wanted:
        results = await asyncio.gather(
            *(pool.create() for _ in range(min(64, wanted - len(made)))), return_exceptions=True
        )
        made += [result for result in results if not isinstance(result, BaseException)]
        refused = [result for result in results if isinstance(result, BaseException)]
        if refused:
            if not isinstance(refused[0], SandboxFailure):
                raise refused[0]
            print(f"refused at {len(made)}: {refused[0].reason}")
            break
        if len(made) % 1024 < 64:
            print(f"{len(made):6} live, {available():.0f} MiB available", flush=True)
    return made


async def run(wanted: int) -> dict[str, float]:
    async with LocalPool(Image.host(), limits=Limits(cpus=0), max_live=wanted) as pool:
        before, started = available(), time.monotonic()
        made = await fill(pool, wanted)
        creating = time.monotonic() - started
        await asyncio.sleep(1)
        each = (before - available()) / max(1, len(made))
        sample = made[:: max(1, len(made) // 100)]
        answers = await asyncio.gather(*(sandbox.exec("echo here", timeout=120) for sandbox in sample))
        assert all(answer.stdout == b"here\n" for answer in answers)
        started = time.monotonic()
        for first in range(0, len(made), 256):
            await asyncio.gather(*(sandbox.destroy() for sandbox in made[first : first + 256]))
        destroying = time.monotonic() - started
    print(f"{len(made)} made in {creating:.1f} s, {len(sample)} of them asked, destroyed in {destroying:.1f} s")
    return {
        "live": len(made),
        "mib_each": round(each, 3),
        "created_per_s": round(len(made) / creating),
        "destroyed_per_s": round(len(made) / destroying),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=10_000)
    print("RESULT " + json.dumps(asyncio.run(run(parser.parse_args().live))))


if __name__ == "__main__":
    main()
