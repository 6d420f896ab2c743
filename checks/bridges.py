"""Other ecosystems' environments, as they are: which ran, how many rows, and how it went.

    python checks/bridges.py --tokenizer FOLDER --verifiers .peers/verifiers/bin/python [NAME[=OPTIONS] …]

Each environment runs in a worker of the Python that has it, over replies that play along (as in `clients.py`); without
names, the packages of `verifiers_packages/`, one of which is broken on purpose. Every attempt's tokens are compared
with what the sampler read and gave. An environment counts as run if at least one row was scored, or if it is the broken
one and its attempt failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from clients import Audit, PlayingSampler, wrong_tokens

from strop.agents.attempts import AttemptRunner
from strop.agents.own_harness import OwnHarness
from strop.costs import Ledger
from strop.environments.workers import WorkerEnvironment
from strop.errors import EnvironmentProblem
from strop.rollouts import Failed, FailureKind, Scored
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

PACKAGES = Path(__file__).parent / "verifiers_packages"
OURS = ("strop_check_single", "strop_check_tools", "strop_check_broken")


async def run(
    name: str, options: dict[str, Any], sampler: Any, renderer: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """Make attempts at an environment's first rows."""
    environment = WorkerEnvironment(name, str(args.verifiers.absolute()), "verifiers", options)
    runner = AttemptRunner(
        environment=environment,
        agent=OwnHarness(),
        sampler=sampler,
        renderer=renderer,
        params=SamplingParams(max_tokens=args.max_tokens),
        seconds=args.seconds,
        ledger=Ledger(),
        clock=time.monotonic,
    )
    try:
        tasks = environment.tasks("train") or environment.tasks("test")
        rows = [
            runner.run(f"{name}-{number}", 0, tasks[number], seed=1) for number in range(min(args.rows, len(tasks)))
        ]
        rollouts = await asyncio.gather(*rows)
    except EnvironmentProblem as error:
        return {"rows": 0, "outcome": str(error)[-200:]}
    finally:
        await environment.close()
    endings: Counter[str] = Counter()
    for rollout in rollouts:
        ending = rollout.ending
        endings["scored" if isinstance(ending, Scored) else f"failed: {ending.kind} ({ending.reason})"] += 1
    return {
        "rows": len(rollouts),
        "of": len(tasks),
        "scored": endings["scored"],
        "reward": sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts),
        "calls": sum(len(rollout.calls) for rollout in rollouts),
        "scorer_failed": sum(
            isinstance(rollout.ending, Failed) and rollout.ending.kind is FailureKind.SCORER for rollout in rollouts
        ),
        "rollouts": rollouts,
        "outcome": ", ".join(f"{count} {ending}" for ending, count in endings.items()),
    }


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(OURS), help="of environments, with options as JSON behind =")
    parser.add_argument("--verifiers", type=Path, default=Path(".peers/verifiers/bin/python"))
    parser.add_argument("--tokenizer", required=True, help="folder of a ChatML model")
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    if not args.verifiers.exists():
        print(f"skipped: there is no {args.verifiers}")
        return 0
    os.environ["PYTHONPATH"] = str(PACKAGES)  # workers inherit it
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    renderer = renderer_for(tokenizer, args.tokenizer)
    ran = wrong = 0
    print(f"{'environment':<28}{'rows':>5}{'of':>7}{'calls':>7}{'reward':>8}{'wrong':>7}  outcome")
    for spec in args.names:
        name, _, options = spec.partition("=")
        audit = Audit(PlayingSampler(tokenizer, 8192))
        found = await run(name, json.loads(options or "{}"), audit, renderer, args)
        rollouts = found.get("rollouts", [])
        bad = 0
        for rollout in rollouts:  # each rollout's calls, against everything that was sampled
            read = {tuple(rollout.branch_tokens(index)) for index in range(len(rollout.calls))}
            bad += len(read - {(*prompt, *tokens) for prompt, tokens, _ in audit.seen})
        if len(rollouts) == 1:
            bad += wrong_tokens(rollouts[0], audit.seen)
        bad += abs(sum(len(rollout.calls) for rollout in rollouts) - len(audit.seen))
        wrong += bad
        ran += bool(found.get("scored") or (name == OURS[-1] and found.get("scorer_failed") == found["rows"]))
        print(
            f"{name:<28}{found['rows']:>5}{found.get('of', 0):>7}{found.get('calls', 0):>7}"
            f"{found.get('reward', 0.0):>8.2f}{bad:>7}  {found['outcome']}"
        )
    print("RESULT " + json.dumps({"verifiers": ran, "wrong_tokens": wrong}))
    return 0 if ran == len(args.names) and not wrong else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
