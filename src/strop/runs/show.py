"""What `strop runs`, `show` and `cost` print: tables of runs, of a run, of a step, and an attempt turn by turn.

Everything here returns something that rich can print and reads nothing but run directories.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from strop.costs.prices import MachinePrice
from strop.costs.report import CostReport, Gain, cost_report, run_price
from strop.errors import RunError
from strop.rollouts import ModelCall, Task
from strop.runs.reading import Attempt, RunRecord, Step, list_runs, open_run
from strop.runs.turns import Turn, token_texts, turns
from strop.statistics import Estimate, Evaluation, compare

#: Step metrics that are worth a column, in this order, where the run has them: (metric, heading, format).
COLUMNS = (
    ("loss", "loss", ".3f"),
    ("reward", "reward", ".3f"),
    ("solved", "solved", ".0%"),
    ("tokens_per_attempt", "tokens", ".0f"),
    ("recovery", "recovery", ".0%"),
    ("groups_without_variance", "no\nvariance", ".0%"),
    ("staleness_max", "stale", ".0f"),
    ("mismatch_kl", "mismatch\nKL", ".1e"),
    ("grad_norm", "gradient\nnorm", ".2f"),
    ("failed", "failed", ".0f"),
)
#: Which of them go first where the terminal is narrow.
FIRST_TO_GO = (
    "grad_norm",
    "failed",
    "staleness_max",
    "tokens_per_attempt",
    "groups_without_variance",
    "mismatch_kl",
    "loss",
    "recovery",
)
_ROLE_COLOURS = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow", "note": "magenta"}


def show_runs(root: str | Path = "runs") -> RenderableType:
    """The runs under a directory, the newest first."""
    runs = list_runs(root)
    if not runs:
        return Text(f"No runs in {root} yet. `strop train recipes/quickstart.toml` makes one.")
    table = _table("run", "state", ">done", ">score", ">cost", ">time", ">last event")
    for run in runs:
        last = run.steps[-1] if run.steps else None
        scores = [found.evaluation.score().value for _, found in run.milestones]
        seconds = run.cost_points[-1].seconds() if run.cost_points else 0.0
        table.add_row(
            run.name,
            _state(run),
            f"{last.stage} {last.step}" if last else "-",
            " → ".join(f"{score:.0%}" for score in (scores if len(scores) < 2 else [scores[0], scores[-1]])) or "-",
            dollars(run_price(run).usd(seconds)),
            duration(seconds),
            ago(run.events[-1]["time"]) if run.events else "-",
        )
    return table


def show_run(run: RunRecord, *, last_steps: int = 20) -> RenderableType:
    """A run: what it is, its scores, its last steps, what it cost, and what it warned of.

    Args:
        run: the run.
        last_steps: how many of the newest steps to list.
    """
    model = run.config.get("model", {}).get("name", "?")
    environment = run.config.get("environment", {}).get("name", "?")
    title = Text.assemble((run.name, "bold"), f"  {model} on {environment}, ", _state(run))
    parts: list[RenderableType] = [title, Text(str(run.path), style="dim")]
    if run.milestones:
        parts += [Text(), show_scores(run)]
    if run.steps:
        parts += [Text(), show_steps(run.steps[-last_steps:], hidden=len(run.steps) - last_steps)]
    parts += [Text(), show_costs(cost_report(run))]
    for event in run.warnings[-10:]:
        what = event.get("what", "warning")
        parts.append(Text(f"{what} at {duration(event['clock'])}: {event['message']}", style="yellow"))
    if run.damaged:
        parts.append(Text(f"{len(run.damaged)} damaged lines of events.jsonl were passed over", style="red"))
    if run.rollout_files:
        parts += [Text(), Text(f"Attempts: strop show {run.name} --step N [--attempt K]", style="dim")]
    return Group(*parts)


def show_scores(run: RunRecord) -> Table:
    """Held-out score at the start and after each stage, overall and by label."""
    labels = list(dict.fromkeys(label for _, found in run.milestones for label in found.evaluation.by_label()))
    labels = labels if len(labels) > 1 else []
    table = _table("held-out score", *[f">{name}" for name, _ in run.milestones])
    rows = [("all tasks", [found.evaluation.score() for _, found in run.milestones])]
    by_label = [found.evaluation.by_label() for _, found in run.milestones]
    rows += [(f"  {label}", [scores[label] for scores in by_label if label in scores]) for label in labels]
    for name, scores in rows:
        table.add_row(name, *[f"{s.value:.1%} ({100 * s.low:.0f} to {100 * s.high:.0f})" for s in scores])
    if any("recovery" in found.evaluation.metrics for _, found in run.milestones):
        recovered = [found.evaluation.metrics.get("recovery") for _, found in run.milestones]
        table.add_row("errors recovered from", *["-" if value is None else f"{value:.0%}" for value in recovered])
    return table


def show_steps(steps: Sequence[Step], hidden: int = 0) -> RenderableType:
    """A row a step, with the metrics that it has, as many as the terminal has room for."""
    columns = {name: (heading, form) for name, heading, form in COLUMNS if any(name in step.metrics for step in steps)}

    def table(names: Sequence[str]) -> Table:
        made = _table("stage", ">step", *[f">{columns[name][0]}" for name in names], ">minute")
        if hidden > 0:
            made.add_row(Text(f"… {hidden} before", style="dim"))
        for step in steps:
            values = [f"{step.metrics[name]:{columns[name][1]}}" if name in step.metrics else "" for name in names]
            made.add_row(step.stage, str(step.step), *values, f"{step.clock / 60:.1f}")
        return made

    return _Fitting(table, list(columns), [name for name in FIRST_TO_GO if name in columns])


def show_cost(run: RunRecord, price: MachinePrice | None = None, target_points: float | None = None) -> RenderableType:
    """What a run cost and bought; arguments as in `cost_report`."""
    return show_costs(cost_report(run, price, target_points))


def show_costs(report: CostReport) -> RenderableType:
    """Where the seconds and dollars went, and what they bought."""
    table = _table("phase", "activity", ">time", ">share", ">cost")
    small = [account for account in report.accounts if account.seconds < 0.001 * report.seconds]
    for account in report.accounts[: len(report.accounts) - len(small)]:
        share = account.seconds / report.seconds
        table.add_row(account.phase, account.activity, duration(account.seconds), f"{share:.1%}", dollars(account.usd))
    if small:
        seconds, usd = sum(account.seconds for account in small), sum(account.usd for account in small)
        table.add_row(f"{len(small)} more", "", duration(seconds), f"{seconds / report.seconds:.1%}", dollars(usd))
    table.add_section()
    table.add_row("all", "", duration(report.seconds), "100%", dollars(report.usd), style="bold")
    lines = [f"Machine: {report.price.text}, {dollars(report.price.usd_per_hour)} an hour."]
    for cost in (report.sampled, report.trained):
        if cost.usd_per_million is not None and cost.usd_per_million_all is not None:
            lines.append(
                f"Tokens {cost.kind}: {cost.tokens:,}; a million costs {dollars(cost.usd_per_million)} where it is made, "
                f"{dollars(cost.usd_per_million_all)} with everything."
            )
    if report.usd_per_attempt is not None:
        solved = (
            ""
            if report.usd_per_solved is None
            else f", {dollars(report.usd_per_solved)} a solved one ({report.solved:,})"
        )
        lines.append(f"Attempts: {report.attempts:,}, {dollars(report.usd_per_attempt)} each{solved}.")
    parts: list[RenderableType] = [table, Text("\n".join(lines))]
    if report.gains:
        parts += [Text(), show_gains(report.gains)]
    return Group(*parts)


def show_gains(gains: Sequence[Gain]) -> Table:
    """Intelligence per dollar: what each stage gained for what it cost."""
    table = _table("what it bought", *[f">{'whole run' if gain.name == 'run' else gain.name}" for gain in gains])
    rows: dict[str, Callable[[Gain], str]] = {
        "gain, points": lambda gain: two_lines(gain.comparison.gain.scaled(100), "+.1f"),
        "cost": lambda gain: dollars(gain.usd),
        "points per dollar": lambda gain: two_lines(gain.points_per_usd) if gain.points_per_usd else "-",
        "dollars to target": to_target,
        "a solved task before": lambda gain: "-" if gain.solved_usd_before is None else dollars(gain.solved_usd_before),
        "a solved task after": lambda gain: "-" if gain.solved_usd_after is None else dollars(gain.solved_usd_after),
        "solved tasks until paid": pays_off,
    }
    for name, cell in rows.items():
        cells = [cell(gain) for gain in gains]
        if set(cells) != {"-"}:
            table.add_row(name, *cells)
    return table


def to_target(gain: Gain) -> str:
    """Dollars until the target was passed, in words."""
    if gain.target_points is None:
        return "-"
    reached = "not reached" if gain.usd_to_target is None else dollars(gain.usd_to_target)
    return f"{reached} (+{gain.target_points:g})"


def pays_off(gain: Gain) -> str:
    """After how many solved tasks a gain pays off, in words. Nothing pays off that isn't proven."""
    if gain.break_even is None:
        return "-"
    if gain.comparison.gain.low <= 0:
        return "no gain is proven"
    return "never" if math.isinf(gain.break_even) else f"{gain.break_even:,.0f}"


def show_comparison(before: str, after: str, root: str | Path = "runs") -> RenderableType:
    """Two evaluations of the same tasks, compared task by task.

    Args:
        before, after: a file that `strop eval --out` wrote, or RUN (its last evaluation), or RUN:EVALUATION.
        root: directory of runs that are given by name.

    Raises:
        RunError: there is no such file, run or evaluation.
        EvaluationError: they have no task in common.
    """
    old, new = find_evaluation(before, root), find_evaluation(after, root)
    found = compare(old, new)
    table = _table("tasks", f">{before}", f">{after}", ">gain, points", ">n")
    labels = [label for label in old.by_label() if label in new.by_label()]
    rows = [("all in common", found)]
    if len(labels) > 1:
        rows += [(f"  {label}", compare(old.only(label), new.only(label))) for label in labels]
    for name, row in rows:
        gain = interval(row.gain.scaled(100), "+.1f")
        table.add_row(name, f"{row.score_before:.1%}", f"{row.score_after:.1%}", gain, str(row.gain.n))
    left_out = f" {found.left_out} tasks that only one of the two scored are left out." if found.left_out else ""
    lines = f"{found.wins} tasks went up, {found.losses} down; sign test p = {found.p_value:.2g}.{left_out}"
    return Group(table, Text(lines))


def find_evaluation(where: str, root: str | Path = "runs") -> Evaluation:
    """The evaluation that a file, RUN or RUN:EVALUATION names; see `show_comparison`."""
    if Path(where).is_file():
        try:
            return Evaluation.from_record(json.loads(Path(where).read_text(encoding="utf-8")))
        except ValueError as error:
            raise RunError(f"{where} isn't an evaluation: it isn't JSON ({error}).") from error
    name, _, wanted = where.partition(":")
    run = open_run(name, root)
    names = [found.evaluation.name for found in run.evaluations]
    if not names or (wanted and wanted not in names):
        there = ", ".join(names) or "none"
        raise RunError(f"Run {run.name} has no evaluation{f' {wanted!r}' if wanted else ''}. There are: {there}.")
    return run.evaluations[names.index(wanted) if wanted else -1].evaluation


def show_step(
    run: RunRecord, step: int | None = None, *, stage: str | None = None, evaluation: str | None = None
) -> RenderableType:
    """The attempts of a step or an evaluation, a row each, numbered as `show_attempt` takes them.

    Args:
        run, step, stage, evaluation: as in `RunRecord.find`.
    """
    file = run.find(step=step, stage=stage, evaluation=evaluation)
    rows = [_attempt_row(number, attempt) for number, attempt in enumerate(run.attempts(file))]

    def table(names: Sequence[str]) -> Table:
        made = _table(*names)
        for row in rows:
            made.add_row(*[row[name] for name in names])
        return made

    names = [">#", "task", "label", ">reward", "solved", ">tokens", ">calls", ">tool errors", "weights", "ending"]
    fitting = _Fitting(table, names, ["weights", ">calls", "label", ">tool errors", ">tokens"])
    return Group(Text.assemble((f"{run.name}, {file.label}", "bold")), fitting)


def _attempt_row(number: int, attempt: Attempt) -> dict[str, str | Text]:
    rollout = attempt.rollout
    left_out = "" if attempt.used in ("trained", "evaluation") else f"not trained on: {attempt.used}"
    ending = attempt.failure or left_out or ("cut off" if rollout.truncated else "")
    errors = sum(turn.error is not None for turn in turns(attempt))
    return {
        ">#": str(number),
        "task": attempt.group.task.id,
        "label": labels_of(attempt.group.task),
        ">reward": "-" if rollout.reward is None else f"{rollout.reward:.3f}",
        "solved": {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}[attempt.solved],
        ">tokens": str(rollout.sampled_tokens),
        ">calls": str(len(rollout.calls)),
        ">tool errors": str(errors or ""),
        "weights": _versions(attempt.versions),
        "ending": Text(ending if len(ending) < 60 else f"{ending[:59]}…", style="red" if attempt.failure else "yellow"),
    }


def show_attempt(
    run: RunRecord,
    number: int,
    step: int | None = None,
    *,
    stage: str | None = None,
    evaluation: str | None = None,
    logprobs: bool = False,
) -> RenderableType:
    """One attempt turn by turn.

    Args:
        run, step, stage, evaluation: which file, as in `RunRecord.find`.
        number: of the attempt in it, as `show_step` counts.
        logprobs: show each sampled token with its probability.

    Raises:
        RunError: there is no such attempt.
    """
    file = run.find(step=step, stage=stage, evaluation=evaluation)
    attempts = run.attempts(file)
    if not 0 <= number < len(attempts):
        raise RunError(f"{file.label} of run {run.name} has attempts 0 to {len(attempts) - 1}, not {number}.")
    attempt = attempts[number]
    parts: list[RenderableType] = [_attempt_head(run, file.label, number, attempt)]
    for turn in turns(attempt):
        parts.append(_show_turn(turn))
        if logprobs and turn.call is not None:
            parts.append(Padding(_show_tokens(run, turn.call), (0, 0, 1, 2)))
    parts.append(_ending(attempt))
    return Group(*parts)


def _attempt_head(run: RunRecord, where: str, number: int, attempt: Attempt) -> Text:
    rollout = attempt.rollout
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in rollout.seconds.items())
    lines = [
        Text.assemble((f"{run.name}, {where}, attempt {number}", "bold"), (f"  {rollout.id}", "dim")),
        Text(f"task {attempt.group.task.id} of {rollout.environment}  {labels_of(attempt.group.task)}"),
        Text(
            f"{len(rollout.calls)} calls, {rollout.sampled_tokens} sampled tokens, weights {_versions(attempt.versions)}, "
            f"seed {rollout.seed}, {rollout.ended - rollout.started:.2f} s ({seconds})"
            + (f", try {rollout.tries}" if rollout.tries > 1 else "")
            + (f", history rewritten {rollout.forks} times" if rollout.forks else ""),
            style="dim",
        ),
    ]
    return Text("\n").join(lines)


def _show_turn(turn: Turn) -> Panel:
    body = Text(turn.text)
    for use in turn.tools:
        body.append("\n" if body else "")
        body.append(f"→ {use.name or '(no name)'} ", style="bold")
        body.append(use.arguments)
        if use.problem:
            body.append(f"  malformed: {use.problem}", style="bold red")
    colour = "red" if turn.error else _ROLE_COLOURS.get(turn.role, "white")
    heading = " ".join(filter(None, [turn.role, turn.name, f"— error: {turn.error}" if turn.error else ""]))
    foot = None
    if turn.call is not None:
        call = turn.call
        foot = f"{len(call.tokens)} tokens, {call.cached} cached, weights {_versions(sorted(set(call.versions)))}, {call.finish_reason.value}"
    return Panel(
        body,
        title=heading,
        title_align="left",
        subtitle=foot,
        subtitle_align="right",
        border_style=colour,
        box=box.ROUNDED,
    )


def _show_tokens(run: RunRecord, call: ModelCall) -> Text:
    """Sampled tokens, the less probable the redder, each with its probability in percent."""
    text_of = token_texts(run.path / "checkpoints")
    line = Text()
    for token, logprob in zip(call.tokens, call.logprobs, strict=True):
        probability = math.exp(min(0.0, logprob))
        style = "green" if probability > 0.8 else "" if probability > 0.3 else "yellow" if probability > 0.05 else "red"
        line.append(repr(text_of(token))[1:-1] if text_of else str(token), style=f"bold {style}")
        line.append(f"⟨{100 * probability:.0f}⟩ ", style="dim")
    return line


def _ending(attempt: Attempt) -> Text:
    if attempt.failure:
        return Text(f"Failed by the system, in no baseline: {attempt.failure}", style="bold red")
    if attempt.rollout.reward is None:
        return Text("It has no ending.", style="bold red")
    metrics = ", ".join(f"{name} {value:g}" for name, value in attempt.metrics.items())
    solved = {True: ("  solved", "bold green"), False: ("  not solved", "bold red"), None: ("", "")}[attempt.solved]
    return Text.assemble((f"Reward {attempt.rollout.reward:g}", "bold"), solved, (f"  {metrics}", "dim"))


class _Fitting:
    """A table that leaves out columns, in a given order, until it fits the terminal."""

    def __init__(
        self, table: Callable[[Sequence[str]], Table], names: Sequence[str], first_to_go: Sequence[str]
    ) -> None:
        self.table, self.names, self.first_to_go = table, names, first_to_go

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=10_000)
        names = list(self.names)
        for name in self.first_to_go:
            if Measurement.get(console, wide, self.table(names)).maximum <= options.max_width:
                break
            names.remove(name)
        yield self.table(names)


def _table(*headings: str) -> Table:
    """A plain table; a heading that begins with ">" is right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        justify: Literal["right", "left"] = "right" if heading.startswith(">") else "left"
        table.add_column(heading.removeprefix(">"), justify=justify, no_wrap=True)
    return table


def _state(run: RunRecord) -> Text:
    colours = {"finished": "green", "interrupted": "red", "stalled": "red", "stopped": "yellow"}
    return Text(run.state, style=colours.get(run.state, "cyan"))


def _versions(versions: Sequence[int]) -> str:
    if not versions:
        return "-"
    return f"v{versions[0]}" if versions[0] == versions[-1] else f"v{versions[0]} to v{versions[-1]}"


def interval(estimate: Estimate, form: str = ".1%") -> str:
    """An estimate as people read it: "43.5% (36.8 to 50.4)" without repeating the per-cent sign."""
    low, high = f"{estimate.low:{form}}", f"{estimate.high:{form}}"
    return f"{estimate.value:{form}} ({low.removesuffix('%')} to {high.removesuffix('%')})"


def labels_of(task: Task) -> str:
    """A task's labels in one line: "steps 2, kind bill"."""
    return ", ".join(f"{name} {value}" for name, value in task.labels.items())


def two_lines(estimate: Estimate, form: str | None = None) -> str:
    """An estimate with its interval below it; without a format, with three digits that matter."""
    value, low, high = (f"{v:{form}}" if form else figure(v) for v in (estimate.value, estimate.low, estimate.high))
    return f"{value}\n{low} to {high}"


def figure(value: float) -> str:
    """A figure with three digits that matter and no exponent: "0.0123", "3.25", "20,300"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def dollars(usd: float) -> str:
    """Dollars with about three digits that matter: "$0.00123", "$1.70", "$1,234"."""
    if math.isinf(usd):
        return "∞"
    if usd >= 100:
        return f"${usd:,.0f}"
    if usd >= 0.995 or usd == 0:
        return f"${usd:.2f}"
    digits = 2 - math.floor(math.log10(abs(usd)))
    return f"${usd:.{digits}f}"


def duration(seconds: float) -> str:
    """Seconds as people say them: "0.4 s", "42 s", "3 min 05 s", "2 h 07 min", "2 d 7 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def ago(moment: float) -> str:
    """How long ago a time since the epoch was."""
    return f"{duration(max(0.0, time.time() - moment))} ago"
