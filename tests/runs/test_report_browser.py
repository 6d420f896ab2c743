"""What the report's page does in a browser: filters, keys, the pointer on a curve. Needs a Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from synthetic import make_run

from strop.runs.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")

#: Uses the page as a person does and leaves what it saw in the title.
VISIT = """
<script>
const choose = (id, value) => { byId(id).value = value; byId(id).oninput(); return shown.length; };
const seen = { all: shown.length };
for (const outcome of ["solved", "unsolved", "error", "cut", "failed"]) seen[outcome] = choose("outcome", outcome);
choose("outcome", "");
seen.high = choose("low", "1");
choose("low", "");
seen.step = choose("file", data.files.indexOf("rl step 2"));
byId("list").dispatchEvent(new KeyboardEvent("keydown", { key: "j" }));
seen.second = byId("attempt").querySelector(".dim").textContent;
seen.nothing = choose("search", "no transcript says this");
const svg = document.querySelector("svg[data-chart]"), box = svg.getBoundingClientRect();
svg.onpointermove({ clientX: box.right - 20, clientY: box.top + 40 });
seen.tip = byId("tip").textContent;
seen.markup = document.querySelectorAll("#attempt b:not(.solved):not(.unsolved)").length;
document.title = JSON.stringify(seen);
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_visit_to_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    page = write_report(run.path, tmp_path / "page.html")
    page.write_text(page.read_text().replace("</body>", VISIT + "</body>"))
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    dom = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60).stdout
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title
    seen = json.loads(unescape(title[1]))
    attempts = [attempt for file in run.rollout_files for attempt in run.attempts(file)]
    assert seen["all"] == len(attempts)
    assert seen["solved"] == sum(a.solved is True for a in attempts)
    assert seen["unsolved"] == sum(a.solved is False for a in attempts)
    assert seen["failed"] == sum(a.failure is not None for a in attempts)
    assert seen["cut"] == sum(a.rollout.truncated for a in attempts)
    assert seen["error"] == sum(any("error" in m for m in a.rollout.transcript) for a in attempts)
    assert seen["high"] == sum((a.rollout.reward or 0) >= 1 for a in attempts)
    assert seen["step"] == 32 and "rl step 2 · attempt 1" in seen["second"]
    assert seen["nothing"] == 0 and seen["markup"] == 0
    assert seen["tip"] == f"step 16held-out score {run.evaluations[-1].evaluation.score().value:.1%}"
