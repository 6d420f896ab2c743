"""The report is one file that needs nothing else, and its numbers are the run's."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from synthetic import PRICE, Writer, make_run

from strop.errors import ConfigError
from strop.runs.reading import RunRecord
from strop.runs.report import stage_spans, write_curve_svg, write_report
from strop.runs.report_svg import LEFT, RIGHT, Chart, Series, nice_step
from strop.runs.tensorboard import TensorBoardSink


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return make_run(tmp_path_factory.mktemp("runs") / "made-up")


@pytest.fixture(scope="module")
def page(run: RunRecord) -> str:
    return write_report(run.path, run.path / "report.html").read_text()


class Checker(HTMLParser):
    """Collects what the page would load, and checks that tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "input", "br", "link", "img", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_loads_nothing_and_is_well_formed(page: str) -> None:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(value.startswith("#") for value in checker.loaded)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not something that is loaded


def test_a_transcript_cannot_break_out_of_the_page(run: RunRecord, page: str) -> None:
    assert page.count("</script>") == 2
    assert any("of course </script>." in text for text in data_of(page)["texts"])  # though the model said it


def test_attempts_on_the_page_are_those_of_the_files(run: RunRecord, page: str) -> None:
    data = data_of(page)
    assert data["made"] == run.attempt_counts["made"] == sum(map(len, data["attempts"]))
    assert data["files"] == [file.label for file in run.rollout_files]
    for file, rows in zip(run.rollout_files, data["attempts"], strict=True):
        for row, attempt in zip(rows, run.attempts(file), strict=True):
            assert (row["id"], row["reward"], row["solved"], row["failure"]) == (
                attempt.rollout.id,
                attempt.rollout.reward,
                attempt.solved,
                attempt.failure,
            )
            assert data["texts"][row["turns"][1]["text"]] == attempt.group.task.messages[1]["content"]


def test_sampled_tokens_come_with_text_and_probability_where_a_checkpoint_has_a_tokenizer(
    run: RunRecord, tmp_path: Path, chat_tokenizer: Any
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    folder = copy / "checkpoints" / "rl-000012"
    folder.mkdir(parents=True)
    chat_tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    data = data_of(write_report(copy, tmp_path / "page.html").read_text())
    attempt, row = run.attempts(run.find(step=1))[0], data["attempts"][data["files"].index("rl step 1")][0]
    call, turn = attempt.rollout.calls[0], next(turn for turn in row["turns"] if turn["role"] == "assistant")
    assert [data["texts"][number] for number in turn["tokens"]] == [chat_tokenizer.decode([t]) for t in call.tokens]
    assert turn["percent"] == [round(100 * 2.718281828459045**logprob) for logprob in call.logprobs]


def test_a_small_page_holds_whole_groups_of_every_file_and_says_what_is_left_out(
    run: RunRecord, tmp_path: Path
) -> None:
    small = write_report(run.path, tmp_path / "small.html", megabytes=0.05).read_text()
    data = data_of(small)
    assert all(data["attempts"])  # something of every file
    assert sum(map(len, data["attempts"])) < data["made"]
    assert all(len(rows) % 8 == 0 for name, rows in zip(data["files"], data["attempts"], strict=True) if "step" in name)
    assert len(small) < 300_000


def test_a_long_run_shows_every_evaluation_and_evenly_spaced_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", steps=6, tasks=4)
    sample = next(file for file in run.rollout_files if file.step == 1)
    for number in range(6, 300):
        shutil.copy(sample.path, sample.path.with_name(f"rl-{number:06d}.parquet"))
    data = data_of(write_report(run.path, tmp_path / "long.html").read_text())
    steps = [int(name.rpartition(" ")[2]) for name in data["files"] if " step " in name]
    assert len(data["files"]) == 100
    assert (steps[0], steps[-1]) == (1, 300)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 4
    assert sum(name.startswith("evaluation") for name in data["files"]) == len(run.evaluations)


def test_figures_on_the_page_are_the_summarys(run: RunRecord, page: str) -> None:
    summary = run.summary
    assert summary is not None
    first, last = summary["scores"][0]["score"], summary["scores"][-1]["score"]
    assert f"{first:.1%} → {last:.1%}" in page
    assert f"{summary['gain_rl']['points']:+.1f} points" in page
    assert f"{summary['points_per_usd']['value']:,.0f} points" in page
    assert f"{summary['recovery']['before']:.0%} → {summary['recovery']['after']:.0%}" in page


def test_curves_hold_every_step_at_its_place(run: RunRecord, page: str) -> None:
    charts = [json.loads(text.replace("&quot;", '"')) for text in re.findall(r'data-chart="(.*?)"', page)]
    (reward,) = [chart for chart in charts if chart["series"][0][0] == "reward"]
    expected = [[4 + step.step, step.metrics["reward"]] for step in run.steps if step.stage == "rl"]
    assert [point[:2] for point in reward["series"][0][1]] == expected
    (score,) = [chart for chart in charts if chart["series"][0][0] == "held-out score"]
    assert [point[0] for point in score["series"][0][1]] == [0, 4, 8, 12, 16]
    assert stage_spans(run) == [("warmup", 0.0, 4.0), ("rl", 4.0, 16.0)]


def test_a_metric_that_no_panel_names_still_has_a_curve(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "odd", 0)
    for step in range(3):
        writer.event("step", stage="rl", step=step, metrics={"my_own_metric": float(step), "broken": float("nan")})
    page = write_report(tmp_path / "odd", tmp_path / "odd.html").read_text()
    assert "<figcaption>my_own_metric" in page
    assert "<figcaption>broken" not in page


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "begun", 0)
    writer.event("run", what="started", price=PRICE.as_record())
    page = write_report(tmp_path / "begun", tmp_path / "begun.html").read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    for sentence in ("No evaluation has been made", "No step has been made yet", "The ledger has no entry yet"):
        assert sentence in page


# -- drawing ------------------------------------------------------------------------------------------------------


def points(svg: str, shape: str) -> list[tuple[float, float]]:
    text = re.search(rf'<{shape} class="[^"]*" points="([^"]*)"', svg)[1]
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())]


def test_a_line_is_where_its_numbers_are() -> None:
    chart = Chart([Series("a", [[(0, 0.0), (5, 0.5), (10, 1.0)]])], low=0, high=1, width=400, height=200)
    (x0, y0), (x1, y1), (x2, y2) = points(chart.svg(), "polyline")
    assert (x0, x2) == (LEFT, 400 - RIGHT)
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y0 > y1 > y2 and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)


def test_a_logarithmic_axis_spaces_decades_equally_and_leaves_out_what_is_not_positive() -> None:
    chart = Chart([Series("a", [[(0, 1e-4), (1, 1e-3), (2, 1e-2), (3, 0.0), (4, -1.0)]])], log=True)
    placed = points(chart.svg(), "polyline")
    assert len(placed) == 3
    assert placed[0][1] - placed[1][1] == pytest.approx(placed[1][1] - placed[2][1], abs=0.2)


@pytest.mark.parametrize(
    "values",
    [[], [(0, 1.0)], [(3, 0.0), (4, 0.0)], [(1, float("nan"))], [(0, 1e9), (1, -1e9)], [(0, 1e-12), (1, 2e-12)]],
)
@pytest.mark.parametrize("log", [False, True])
def test_charts_of_odd_data_are_still_charts(values: list[tuple[float, float]], log: bool) -> None:
    svg = Chart([Series("a", [values], dots=True)], [("s", 0, 0)], log=log).svg(standalone=True)
    ElementTree.fromstring(svg)
    assert "nan" not in svg and "inf" not in svg


@pytest.mark.parametrize(
    ("rough", "step"), [(0.9, 1), (1.0, 1), (1.1, 2), (2.2, 2.5), (3, 5), (7, 10), (0.013, 0.02), (410, 500)]
)
def test_axes_step_in_round_numbers(rough: float, step: float) -> None:
    assert nice_step(rough) == pytest.approx(step)


def test_the_curve_for_a_page_is_a_file_of_its_own(run: RunRecord, tmp_path: Path) -> None:
    svg = write_curve_svg(run.path, tmp_path / "curve.svg").read_text()
    root = ElementTree.fromstring(svg)
    assert root.get("width") == "760" and "prefers-color-scheme" in svg
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {f"{found.evaluation.score().value:.1%}" for _, found in run.milestones} <= set(texts)


# -- TensorBoard --------------------------------------------------------------------------------------------------


def test_tensorboard_gets_every_metric_on_one_axis_also_after_a_resume(run: RunRecord, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    copy = tmp_path / "copy"
    copy.mkdir()
    lines = (run.path / "events.jsonl").read_text().splitlines(keepends=True)
    events, cut = (
        run.events,
        next(n for n, event in enumerate(run.events) if event["stage"] == "rl" and event["step"] == 6),
    )
    for part in (range(cut), range(cut, len(events))):
        sink = TensorBoardSink(copy / "tensorboard")
        for number in part:
            sink.hear(events[number])
        sink.close()
        with (copy / "events.jsonl").open("a") as file:
            file.writelines(lines[number] for number in part)
    found = loader.EventAccumulator(str(copy / "tensorboard"))
    found.Reload()
    reward = {point.step: point.value for point in found.Scalars("rl/reward")}
    assert reward == pytest.approx({4 + s.step: s.metrics["reward"] for s in run.steps if s.stage == "rl"}, rel=1e-6)
    assert [point.step for point in found.Scalars("evaluation/score")] == [0, 4, 8, 12, 16]


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(ConfigError, match=r"strop\[tensorboard\]"):
        TensorBoardSink(tmp_path / "tensorboard")
