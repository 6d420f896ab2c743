"""mini-swe-agent, by its own command line: a shell task in the folder that it starts in."""

import os
import subprocess
import sys
from pathlib import Path

variables = {
    **os.environ,
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": str(Path.cwd() / "config"),
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
}
command = [str(Path(sys.executable).parent / "mini"), "-m", f"openai/{os.environ['STROP_MODEL']}", "-y"]
command += ["-t", "Write the number 42 into answer.txt.", "--exit-immediately", "-o", "trajectory.json"]
command += ["-c", "mini.yaml", "-c", "agent.step_limit=4", "-c", "agent.cost_limit=0"]
sys.exit(subprocess.run(command, env=variables, stdin=subprocess.DEVNULL).returncode)
