"""Reinforcement learning on an outside agent, unmodified: mini-swe-agent at twenty small coding tasks in sandboxes, by
`recipes/mini_swe_agent.toml`; then `strop verify` on what was recorded.

    python checks/outside_agent.py --python .peers/clients/bin/python [--steps 2]

`--python` is the interpreter beside which mini-swe-agent is installed; sandboxes get to see its folder and that of the
Python it was made from. Ends with `RESULT` and what was recorded and trained; exit code 1 if anything is not right.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from strop.rollouts import Failed, Scored
from strop.runs.reading import open_run
from strop.runs.store import read_groups

RECIPE = Path(__file__).parents[1] / "recipes" / "mini_swe_agent.toml"


def folders_of(python: Path) -> list[str]:
    """What a sandbox has to see for that Python to run."""
    code = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
    found = json.loads(subprocess.run([str(python), "-c", code], capture_output=True, check=True, text=True).stdout)
    return list(dict.fromkeys(["/usr", *(folder for folder in found if not folder.startswith("/usr"))]))


def strop(*arguments: str) -> int:
    """Run a command of strop's, its output as it comes."""
    return subprocess.run(
        [sys.executable, "-c", "from strop.cli import main; main()", *arguments], cwd=RECIPE.parents[1]
    ).returncode


def recorded(run: Path) -> dict[str, float]:
    """What the run's batches hold."""
    found = dict.fromkeys(("attempts", "scored", "failed", "calls", "sampled_tokens", "forks", "trained_groups"), 0)
    for batch in sorted((run / "rollouts").glob("*.parquet")):
        for group, used in read_groups(batch):
            found["trained_groups"] += used == "trained"
            for rollout in group.rollouts:
                found["attempts"] += 1
                found["scored"] += isinstance(rollout.ending, Scored)
                found["failed"] += isinstance(rollout.ending, Failed)
                found["calls"] += len(rollout.calls)
                found["sampled_tokens"] += rollout.sampled_tokens
                found["forks"] += rollout.forks
    return {name: float(value) for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(".peers/clients/bin/python"), help="beside mini-swe-agent")
    parser.add_argument("--runs", type=Path, help="folder of the run; a temporary one if not given")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--groups", type=int, default=10, help="tasks of one step")
    args = parser.parse_args()
    python = args.python.absolute()
    if not (python.parent / "mini").exists():
        print(f"There is no mini-swe-agent beside {python}: pip install mini-swe-agent")
        return 1
    folder = args.runs or Path(tempfile.mkdtemp(prefix="strop-outside-agent-"))
    settings = {
        "environment.options.allow": json.dumps(folders_of(python)),
        "environment.agent.variables.PATH": json.dumps(f"{python.parent}:/usr/local/bin:/usr/bin:/bin"),
        "stages.rl.steps": str(args.steps),
        "stages.rl.collect.groups": str(args.groups),
    }
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    trained = strop("train", str(RECIPE), "--runs", str(folder), *options) == 0
    verified = trained and strop("verify", "mini-swe-agent", "--runs", str(folder)) == 0
    found = recorded(open_run("mini-swe-agent", folder).path)
    good = verified and found["calls"] > 0 and found["trained_groups"] > 0
    print("RESULT " + json.dumps({"trained": trained, "verified": verified, **found}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
