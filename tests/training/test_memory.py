"""Memory stays flat: attempts go to disk, not to a list. The long form is benchmarks/memory.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.mark.timeout(1200)  # some seconds, but not on a machine that is busy with other things
def test_twenty_thousand_attempts_leave_memory_where_it_was():
    """An attempt is some 4 KiB as Python objects: kept in a list, 16,000 of them would show as 64 MiB."""
    command = [sys.executable, str(SCRIPT), "--attempts", "20000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["attempts"] >= 19_000
    assert result["rss_end_mib"] - result["rss_start_mib"] < 12
