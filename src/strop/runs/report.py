"""The report of a run: one HTML file with its scores, curves, costs and attempts. Opens offline, loads nothing.

What is on the page is decided here; curves are drawn in `report_svg`, attempts packed in `report_attempts`, looks and
behaviour are in report.css and report.js.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files as resources
from pathlib import Path
from string import Template
from typing import Any

from strop.costs.report import Account, CostReport, Gain, cost_report
from strop.runs.files import written_whole
from strop.runs.reading import RunRecord
from strop.runs.report_attempts import packed_attempts
from strop.runs.report_svg import Chart, Series
from strop.runs.show import dollars, duration, figure, pays_off, to_target
from strop.statistics import Estimate


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of step metrics.

    Attributes:
        title: above it.
        note: what a good one looks like, below the title.
        metrics: (metric, name in the legend), drawn together.
        form: format of values.
        log: logarithmic y axis.
        low, high: fixed ends of the y axis.
    """

    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]
    form: str = ".3g"
    log: bool = False
    low: float | None = None
    high: float | None = None


PANELS = (
    Panel(
        "Reward",
        "mean over the batch's scored attempts",
        (("reward", "reward"), ("reward_std_in_group", "spread in groups")),
        ".3f",
    ),
    Panel(
        "Solved in training",
        "share of attempts, on tasks of the training split",
        (("solved", "solved"),),
        ".0%",
        low=0,
        high=1,
    ),
    Panel("Recovery", "errors recovered from, of errors met", (("recovery", "recovered"),), ".0%", low=0, high=1),
    Panel(
        "Length",
        "sampled tokens of an attempt",
        (("tokens_per_attempt", "mean"), ("tokens_longest", "longest")),
        ".0f",
        low=0,
    ),
    Panel("Cut off", "attempts that ran into the token limit", (("truncated", "cut off"),), ".0%", low=0),
    Panel(
        "Sampler against learner",
        "difference of log-probabilities: should stay small and flat",
        (("mismatch_kl", "KL"), ("mismatch_max", "largest")),
        ".1e",
        log=True,
    ),
    Panel(
        "Staleness",
        "weight versions between sampling and training",
        (("staleness_mean", "mean"), ("staleness_max", "largest")),
        ".2f",
        low=0,
    ),
    Panel(
        "Groups without variance",
        "all rewards equal: they teach nothing",
        (("groups_without_variance", "share"),),
        ".0%",
        low=0,
        high=1,
    ),
    Panel(
        "Entropy", "of the policy, nats a token: a collapse shows here first", (("entropy", "entropy"),), ".2f", low=0
    ),
    Panel("Gradient norm", "before clipping", (("grad_norm", "norm"),), ".3g", low=0),
    Panel("Loss", "", (("loss", "loss"),), ".4f"),
    Panel(
        "Failed by the system", "attempts of a batch, left out of every baseline", (("failed", "failed"),), ".0f", low=0
    ),
    Panel("Learning rate", "", (("learning_rate", "rate"),), ".1e", low=0),
)


def write_report(run_dir: Path, out: Path, *, megabytes: float = 6.0) -> Path:
    """Write the report of a run, finished or not.

    Args:
        run_dir: the run's directory.
        out: the HTML file, replaced whole.
        megabytes: about how much of the file attempts may take; the page says how many of them it holds.

    Returns:
        `out`.

    Raises:
        RunError: the run's files are damaged, or `out` can't be written.
    """
    run = RunRecord(run_dir)
    report = cost_report(run)
    page = _template("report.html").substitute(
        title=escape(run.name),
        style=_resource("report.css"),
        script=_resource("report.js"),
        head=_head(run, report),
        tiles=_tiles(run, report),
        scores=_scores(run),
        curves=_curves(run),
        costs=_costs(report),
        gains=_gains(report.gains),
        notes=_notes(run),
        attempts=packed_attempts(run, int(megabytes * 1e6)),
    )
    with written_whole(out) as beside:
        beside.write_text(page, encoding="utf-8")
    return out


def write_curve_svg(run_dir: Path, out: Path) -> Path:
    """Write the curve of a run's held-out score with its interval as an SVG file, for a page about the run.

    Returns:
        `out`.
    """
    svg = _score_chart(RunRecord(run_dir), width=760, height=300).svg(standalone=True)
    with written_whole(out) as beside:
        beside.write_text(svg, encoding="utf-8")
    return out


# -- steps on one axis --------------------------------------------------------------------------------------------


def stage_spans(run: RunRecord) -> list[tuple[str, float, float]]:
    """Each stage with its first and last place on an axis that counts steps over the whole run."""
    lengths: dict[str, int] = {}
    for step in run.steps:
        lengths[step.stage] = max(lengths.get(step.stage, 0), step.step)
    for found in run.evaluations:
        if found.stage:
            lengths[found.stage] = max(lengths.get(found.stage, 0), found.step)
    spans, at = [], 0.0
    for stage, length in lengths.items():
        spans.append((stage, at, at + length))
        at += length
    return spans


def _score_chart(run: RunRecord, width: float, height: float) -> Chart:
    spans = stage_spans(run)
    offsets = {stage: first for stage, first, _ in spans}
    scores = [(offsets.get(found.stage, 0.0) + found.step, found.evaluation.score()) for found in run.evaluations]
    unit = all(score.low >= 0 and score.high <= 1 for _, score in scores)
    form = ".1%" if unit else ".3g"
    series = Series(
        "held-out score",
        [[(x, score.value) for x, score in scores]],
        [(x, score.low, score.high) for x, score in scores],
        dots=True,
        labels=[
            (
                offsets.get(found.stage, 0.0) + found.step,
                (score := found.evaluation.score()).value,
                f"{score.value:{form}}",
            )
            for _, found in run.milestones
        ],
    )
    low, high = (0.0, 1.0) if unit else (None, None)
    return Chart([series], spans, form, low=low, high=high, width=width, height=height)


def _curves(run: RunRecord) -> str:
    """A small chart for each panel that has data, then the metrics that no panel names."""
    spans = stage_spans(run)
    named = {metric for panel in PANELS for metric, _ in panel.metrics}
    rest = sorted({metric for step in run.steps for metric in step.metrics} - named)
    charts = [_panel(run, panel, spans) for panel in PANELS]
    others = [_panel(run, Panel(metric, "", ((metric, metric),)), spans) for metric in rest]
    html = f'<div class="grid-charts">{"".join(charts)}</div>'
    if any(others):
        html += f'<details><summary>{len(others)} more metrics</summary><div class="grid-charts">{"".join(others)}</div></details>'
    return html if any(charts) or any(others) else '<p class="dim">No step has been made yet.</p>'


def _panel(run: RunRecord, panel: Panel, spans: Sequence[tuple[str, float, float]]) -> str:
    offsets = {stage: first for stage, first, _ in spans}
    series = []
    for metric, name in panel.metrics:
        segments: dict[str, list[tuple[float, float]]] = {}
        for step in run.steps:
            value = step.metrics.get(metric)
            if value is not None and math.isfinite(value):
                segments.setdefault(step.stage, []).append((offsets[step.stage] + step.step, float(value)))
        if segments:
            series.append(Series(name, list(segments.values())))
    if not series:
        return ""
    legend = ""
    if len(series) > 1:
        keys = [f'<span class="key c{number}">{escape(line.name)}</span>' for number, line in enumerate(series)]
        legend = f'<span class="legend">{"".join(keys)}</span>'
    chart = Chart(series, spans, panel.form, panel.log, panel.low, panel.high)
    note = f'<p class="note">{escape(panel.note)}</p>' if panel.note else ""
    return f'<figure class="card"><figcaption>{escape(panel.title)}{legend}</figcaption>{note}{chart.svg()}</figure>'


#: Kinds of stages in words.
KINDS = {
    "sft": "supervised fine-tuning",
    "preference": "preference learning",
    "reward": "a reward model",
    "rl": "reinforcement learning",
    "distill": "distillation",
}


# -- blocks of the page -------------------------------------------------------------------------------------------


def _head(run: RunRecord, report: CostReport) -> str:
    config = run.config
    stages = ", then ".join(
        f"{stage.get('steps', '?')} steps of {KINDS.get(stage.get('kind', ''), '?')} ({stage.get('name', '?')})"
        for stage in config.get("stages", [])
    )
    environment = (config.get("environment") or {}).get("name", "?")
    sentence = f"{(config.get('model') or {}).get('name', '?')} on {environment}: {stages or 'no stages'}."
    state = run.state
    facts = [
        f"{report.seconds and duration(report.seconds)}",
        f"{report.attempts:,} attempts",
        report.price.text,
        f"seed {config.get('seed', '?')}",
    ]
    return (
        f'<h1>{escape(run.name)} <span class="state {escape(state)}">{escape(state)}</span></h1>'
        f'<p class="lead">{escape(sentence)}</p><p class="dim">{escape("  ·  ".join(map(str, facts)))}</p>'
    )


def _tiles(run: RunRecord, report: CostReport) -> str:
    tiles = []
    milestones = run.milestones
    if milestones:
        first, last = milestones[0][1].evaluation.score(), milestones[-1][1].evaluation.score()
        arrow = f"{first.value:.1%} → {last.value:.1%}" if len(milestones) > 1 else f"{first.value:.1%}"
        tiles.append(("held-out score", arrow, f"95% interval {last.low:.1%} to {last.high:.1%}, {last.n} tasks"))
    stages = [gain for gain in report.gains if gain.name != "run"]
    if stages:
        gain = stages[-1].comparison.gain.scaled(100)
        tiles.append(
            (
                f"gain of {stages[-1].name} alone",
                f"{gain.value:+.1f} points",
                f"paired 95% interval {gain.low:+.1f} to {gain.high:+.1f}",
            )
        )
    recovered = [
        found.evaluation.metrics["recovery"] for _, found in milestones if "recovery" in found.evaluation.metrics
    ]
    if recovered:
        arrow = " → ".join(f"{share:.0%}" for share in (recovered[0], recovered[-1])[: len(recovered)])
        tiles.append(("errors recovered from", arrow, "of the errors met in held-out tasks"))
    tiles.append(
        ("cost", dollars(report.usd), f"{duration(report.seconds)} at {dollars(report.price.usd_per_hour)} an hour")
    )
    if report.gains and (value := report.gains[-1].points_per_usd):
        tiles.append(
            (
                "intelligence per dollar",
                f"{figure(value.value)} points",
                f"a dollar; {figure(value.low)} to {figure(value.high)}",
            )
        )
    sampled, trained = report.tokens.get("sampled", 0), report.tokens.get("trained", 0)
    tiles.append(("tokens", f"{compact(sampled)} sampled", f"{compact(trained)} trained on"))
    return "".join(
        f'<div class="tile"><span class="tile-name">{escape(name)}</span><b>{escape(value)}</b><span class="dim">{escape(more)}</span></div>'
        for name, value, more in tiles
    )


def _scores(run: RunRecord) -> str:
    if not run.evaluations:
        return '<p class="dim">No evaluation has been made.</p>'
    chart = _score_chart(run, 760, 290).svg()
    names = [name for name, _ in run.milestones]
    by_label = [found.evaluation.by_label() for _, found in run.milestones]
    labels = list(dict.fromkeys(label for scores in by_label for label in scores))
    rows: list[tuple[str, list[Estimate | None]]] = [("all", [found.evaluation.score() for _, found in run.milestones])]
    if len(labels) > 1:
        rows += [(label, [scores.get(label) for scores in by_label]) for label in labels]
    body = [[escape(name), *[_score_cell(score) for score in scores]] for name, scores in rows]
    table = _html_table(["tasks", *names], body, raw=True)
    return f'<div class="beside"><figure class="card wide">{chart}</figure>{table}</div>'


def _score_cell(score: Estimate | None) -> str:
    return "–" if score is None else _over(f"{score.value:.1%}", f"{score.low:.0%} to {score.high:.0%}")


def _costs(report: CostReport) -> str:
    if not report.accounts:
        return '<p class="dim">The ledger has no entry yet.</p>'
    activities: dict[str, float] = {}
    for account in report.accounts:
        activities[account.activity] = activities.get(account.activity, 0.0) + account.seconds
    order = sorted(activities, key=lambda name: -activities[name])
    colours = {name: number % 6 for number, name in enumerate(order)}
    phases: dict[str, list[Account]] = {}
    for account in report.accounts:
        phases.setdefault(account.phase, []).append(account)
    legend = "".join(
        f'<span class="key c{colours[name]}{" thin" if number > 5 else ""}">{escape(name)} {activities[name] / report.seconds:.1%}</span>'
        for number, name in enumerate(order)
        if activities[name] >= 0.0005 * report.seconds
    )
    longest = max(sum(account.seconds for account in accounts) for accounts in phases.values())
    rows = []
    for phase, accounts in phases.items():
        total = sum(account.seconds for account in accounts)
        bars = "".join(
            f'<i class="c{colours[account.activity]}{" thin" if order.index(account.activity) > 5 else ""}" '
            f'style="width:{100 * account.seconds / longest:.3f}%" '
            f'title="{escape(account.activity)}: {duration(account.seconds)}, {dollars(account.usd)}"></i>'
            for account in accounts
        )
        cost = sum(account.usd for account in accounts)
        rows.append(
            f'<span>{escape(phase)}</span><span class="bar">{bars}</span>'
            f'<span class="num">{duration(total)}</span><span class="num">{dollars(cost)}</span>'
        )
    lines = []
    for cost_of in (report.sampled, report.trained):
        if cost_of.usd_per_million is not None and cost_of.usd_per_million_all is not None:
            lines.append(
                [
                    f"a million tokens {cost_of.kind}",
                    dollars(cost_of.usd_per_million),
                    dollars(cost_of.usd_per_million_all),
                ]
            )
    if report.usd_per_attempt is not None:
        lines.append([f"an attempt ({report.attempts:,})", "", dollars(report.usd_per_attempt)])
    if report.usd_per_solved is not None:
        lines.append([f"a solved attempt ({report.solved:,})", "", dollars(report.usd_per_solved)])
    return (
        f'<div class="card"><div class="legend">{legend}</div><div class="bars">{"".join(rows)}</div></div>'
        + _html_table(["cost of", "where it is made", "with everything"], lines)
    )


def _gains(gains: Sequence[Gain]) -> str:
    if not gains:
        return '<p class="dim">A gain needs two evaluations.</p>'
    heads = ["", "gain", "tasks won, lost", "cost", "points per $", "$ to target", "$ a solved task", "pays off after"]
    return _html_table(heads, [_gain_row(gain) for gain in gains], raw=True)


def _gain_row(gain: Gain) -> list[str]:
    points, per, solved = gain.comparison.gain.scaled(100), gain.points_per_usd, "–"
    if gain.solved_usd_before is not None and gain.solved_usd_after is not None:
        solved = _over(dollars(gain.solved_usd_after), f"before: {dollars(gain.solved_usd_before)}")
    return [
        escape("whole run" if gain.name == "run" else gain.name),
        _over(f"{points.value:+.1f} points", f"{points.low:+.1f} to {points.high:+.1f}"),
        _over(f"{gain.comparison.wins}, {gain.comparison.losses}", f"sign test p = {gain.comparison.p_value:.1g}"),
        dollars(gain.usd),
        _over(figure(per.value), f"{figure(per.low)} to {figure(per.high)}") if per else "–",
        escape(to_target(gain)),
        solved,
        escape(pays_off(gain)),
    ]


def _over(value: str, under: str) -> str:
    """A table cell with a smaller line below its value."""
    return f'{escape(value)}<span class="under">{escape(under)}</span>'


def _notes(run: RunRecord) -> str:
    items = [
        f'<li class="{escape(event["kind"])}"><span class="dim">{duration(event["clock"])}</span> {escape(event["message"])}</li>'
        for event in run.warnings[-50:]
    ]
    notes = f'<ul class="notes">{"".join(items)}</ul>' if items else '<p class="dim">No warnings.</p>'
    config = "\n".join(_flat(run.config))
    return f"{notes}<details><summary>What was asked, and versions</summary><pre>{escape(config)}</pre></details>"


def _flat(value: Any, key: str = "") -> list[str]:
    if isinstance(value, dict):
        return [line for name, inner in value.items() for line in _flat(inner, f"{key}.{name}" if key else str(name))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [line for inner in value for line in _flat(inner, f"{key}.{inner.get('name', '')}")]
    return [f"{key} = {value}"]


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, raw: bool = False) -> str:
    """A table whose first column is text and whose others are numbers; `raw` cells are HTML already."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell if raw else escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def compact(count: float) -> str:
    """A count as people say it: "812", "54.3k", "1.2M"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def _resource(name: str) -> str:
    return resources("strop.runs").joinpath(name).read_text(encoding="utf-8")


def _template(name: str) -> Template:
    return Template(_resource(name))
