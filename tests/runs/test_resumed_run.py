"""What a resumed run knows of its earlier processes, and says of them."""

from __future__ import annotations

import math

from strop.config import parse_recipe
from strop.runs.reading import RunRecord
from strop.runs.run import Run

RECIPE = parse_recipe(
    {
        "name": "test",
        "environment": {"name": "arithmetic"},
        "stages": [{"kind": "rl", "name": "rl", "steps": 4, "schedule": {"learning_rate": 1e-5}}],
    }
)


def test_seconds_that_a_killed_process_did_not_account_for_are_booked_as_lost(tmp_path):
    run = Run.create(tmp_path / "r", RECIPE)
    run.log("cost", ledger={"accounts": {"rl": {"sampler": 30.0}}, "tokens": {}})
    run._began -= 50  # it worked for 50 s more, and was killed before it said what for
    run.log("run", what="ready")
    run.close()
    again = Run.resume(tmp_path / "r")
    snapshot = again.ledger.snapshot()["accounts"]
    assert snapshot["rl"] == {"sampler": 30.0} and 19.9 < snapshot["killed"]["lost"] < 21
    assert math.isclose(again.ledger.seconds, again.clock, abs_tol=0.1)
    again.log("cost", ledger=again.ledger.snapshot())
    again.close()
    third = Run.resume(tmp_path / "r")
    assert third.ledger.snapshot()["accounts"]["killed"]["lost"] < 21  # and not a second time
    third.close()


def test_a_step_that_is_replayed_is_compared_and_not_logged_again(tmp_path):
    run = Run.create(tmp_path / "r", RECIPE)
    run.log_step("rl", 0, {"loss": 0.1 + 0.2, "reward": 1.0})
    run.log_step("rl", 1, {"reward": 1.0})
    run.close()
    again = Run.resume(tmp_path / "r")
    again.log_step("rl", 0, {"loss": 0.1 + 0.2, "reward": 1.0})
    again.log_step("rl", 1, {"reward": 1.0})
    assert RunRecord(again.path).of_kind("warning") == []
    again.log_step("rl", 0, {"loss": 0.3, "reward": 1.0})  # one bit of difference
    again.log_step("rl", 2, {"loss": 0.5})
    again.close()
    record = RunRecord(again.path)
    (warning,) = record.of_kind("warning")
    assert "rl step 1 gave a loss of 0.3 when it was replayed, and 0.30000000000000004 before" in warning["message"]
    assert [event["step"] for event in record.of_kind("step")] == [0, 1, 2]
