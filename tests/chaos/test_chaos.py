"""The short form of the chaos suite: real runs are killed and resumed, and nothing is lost. `make chaos` is the long form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "checks" / "chaos.py"


@pytest.mark.timeout(1200)  # a minute, but not on a machine that is busy with other things
def test_killed_runs_end_as_if_they_had_not_been_killed():
    """In a process of its own: it forks, which a process with other tests' threads should not."""
    command = [sys.executable, str(SCRIPT), "--kills", "16"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["kills"] >= 16
    assert (result["attempts_lost"], result["trained_twice"], result["weights_equal"]) == (0, 0, True)
