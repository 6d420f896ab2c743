"""Chaos: real small training runs, killed at random moments and at the worst ones, resumed until done, and compared.

    python checks/chaos.py --kills 200        # make chaos
    python checks/chaos.py --kills 20         # the short form, which CI runs

Every fourth run is a chain with everything in it: mixed environments, a curriculum, gates, distillation.
In synchronous runs the final weights must be, bit for bit, those of the run that was not killed. In asynchronous ones
(another fourth) they must be those that the run's stored batches make when they are trained on once each, in order.
Every finished run must pass `strop verify`. Ends with a RESULT line; the exit status is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "chaos")]

from harness import POINTS, Chaos, Plan, chain, recipe, warm_up  # noqa: E402
from tiny import make_model  # noqa: E402

#: Kills of one run before it may live to its end.
KILLS_A_RUN = 8


class Plans:
    """How the lives of a run end: half of them anywhere in time, half at the next of the points, in a drawn order.

    Args:
        draw: where chance comes from.
        reference: of a run that is not killed: how long it takes and how often it passes each point.
    """

    def __init__(self, draw: random.Random, reference: dict[str, Any]) -> None:
        self.draw, self.reference = draw, reference
        self.points: list[str] = []
        self.left = KILLS_A_RUN

    def __call__(self) -> Plan | None:
        if self.left == 0:
            self.left = KILLS_A_RUN
            return None
        self.left -= 1
        scorer = self.draw.choice([0, 0, self.draw.randint(1, 12)])
        if self.draw.random() < 0.5:
            return Plan(seconds=self.draw.uniform(0.02, self.reference["seconds"]), scorer=scorer)
        if not self.points:
            self.points = self.draw.sample(list(POINTS), len(POINTS))
        point = self.points.pop()
        passages = self.reference["passages"].get(point, 1)
        # A resumed life has less to do than a whole one: a late passage would not come any more.
        return Plan(point, self.draw.randint(1, max(1, passages // 3)), scorer=scorer)


def main() -> int:
    """Kill until there were enough, then say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="at least so many")
    parser.add_argument("--seed", type=int, default=0, help="of the plans")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="strop-chaos-") as folder:
        root = Path(folder)
        warm_up(root / "warm", make_model(root / "model"))
        chaos = Chaos(root, draw)
        began = time.monotonic()
        plans = Plans(draw, chaos.reference(recipe(root / "model")))
        while sum(chaos.kills.values()) < asked.kills:
            asynchronous = chaos.runs % 4 == 3
            if chaos.runs % 4 == 1:
                chaos.run(chain(root / "model"), plans)
            else:
                chaos.run(recipe(root / "model", staleness=1 + chaos.runs % 2 if asynchronous else 0), plans)
            print(f"{chaos.runs:3} runs  {json.dumps(chaos.result())}  {time.monotonic() - began:.0f} s", flush=True)
    for where, count in sorted(chaos.kills.items(), key=lambda item: -item[1]):
        print(f"{count:5}  {where}")
    for problem in chaos.problems:
        print(f"problem: {problem}")
    result = chaos.result()
    print("RESULT", json.dumps(result))
    return int(
        not result["weights_equal"] or bool(chaos.problems or result["attempts_lost"] or result["trained_twice"])
    )


if __name__ == "__main__":
    sys.exit(main())
