"""A run's checkpoints as others find them, and the card that goes with an exported model: what it was made from, on what
data, what it scores and what it cost, written from the run directory alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from strop.costs.report import summarise
from strop.errors import RunError
from strop.runs.reading import RunRecord
from strop.runs.run import check_checkpoint


def newest_checkpoint(run: RunRecord) -> Path:
    """The run's newest whole checkpoint, without changing anything in the run.

    Raises:
        RunError: there is none.
    """
    order = {str(stage["name"]): number for number, stage in enumerate(run.config.get("stages", []))}
    found = []
    for path in (run.path / "checkpoints").glob("*-[0-9]*"):
        stage, _, step = path.name.rpartition("-")
        if stage in order and step.isdigit():
            found.append((order[stage], int(step), path))
    for _, _, path in sorted(found, reverse=True):
        if not list(check_checkpoint(path)):
            return path
    raise RunError(f"{run.path} has no whole checkpoint yet. A stage saves one at its end.")


def run_of(checkpoint: Path) -> RunRecord | None:
    """The run that a folder is a checkpoint of; None if it is none."""
    run = checkpoint.resolve().parent.parent
    inside = checkpoint.resolve().parent.name == "checkpoints" and (run / "config.toml").is_file()
    return RunRecord(run) if inside else None


def model_card(run: RunRecord, checkpoint: str, base: str) -> str:
    """The README.md of a model that a run made, with the header that model hubs read.

    Args:
        run: the run.
        checkpoint: name of the checkpoint that is exported.
        base: what the run started from, as people may know it.
    """
    summary, config = run.summary or summarise(run), run.config
    stages = config.get("stages", [])
    header = {
        "base_model": base,
        "library_name": "transformers",
        "tags": ["strop", *dict.fromkeys(s["kind"] for s in stages)],
    }
    lines = ["---", *_yaml(header), "---", "", f"# {run.name}", ""]
    lines += [f"Made from `{base}` by strop's run `{run.name}` ({run.state}), checkpoint `{checkpoint}`.", ""]
    lines += ["## Scores", "", *_scores(run, summary), "", "## Data", "", *_data(config), ""]
    lines += ["## Cost", "", *_cost(summary), "", "## Recipe", "", "```toml"]
    recipe = {key: value for key, value in config.items() if key != "versions"}
    lines += [tomli_w.dumps(recipe).strip(), "```", ""]
    if versions := config.get("versions"):
        lines += ["## Versions", "", ", ".join(f"{name} {number}" for name, number in versions.items()), ""]
    return "\n".join(lines)


def _yaml(header: dict[str, Any]) -> Iterator[str]:
    for key, value in header.items():
        if isinstance(value, list):
            yield f"{key}:"
            yield from (f"- {entry}" for entry in value)
        else:
            yield f"{key}: {value}"


def _scores(run: RunRecord, summary: dict[str, Any]) -> Iterator[str]:
    """A row for each milestone, with its interval."""
    if not summary["scores"]:
        yield "It was not evaluated."
        return
    evaluated = {stage: found.evaluation for stage, found in run.milestones}
    yield "| after | score | 95 % interval | tasks |"
    yield "|---|---|---|---|"
    for row in summary["scores"]:
        yield f"| {row['stage']} | {row['score']:.3f} | {row['low']:.3f} to {row['high']:.3f} | {row['n']} |"
    if len({evaluation.name for evaluation in evaluated.values()}) > 1:
        yield ""
        yield "Scores are of held-out tasks, each stage's as its recipe says."


def _data(config: dict[str, Any]) -> Iterator[str]:
    """What each stage was trained on, as the recipe names it."""
    common = config.get("environment")
    for stage in config.get("stages", []):
        named = {
            key: stage[key] for key in ("environments", "environment", "data", "pairs", "teachers") if stage.get(key)
        }
        named = named or {"environment": common}
        said = "; ".join(f"{key} {_short(value)}" for key, value in named.items())
        yield f"- `{stage['name']}` ({stage['kind']}, {stage['steps']} steps): {said}"


def _short(value: Any) -> str:
    """What a table of the recipe names, without its settings."""
    if isinstance(value, list):
        return ", ".join(_short(entry) for entry in value)
    if isinstance(value, dict):
        for key in ("name", "path", "file", "files", "source", "model"):
            if value.get(key):
                return _short(value[key])
        return ", ".join(str(key) for key in value)
    return f"`{value}`"


def _cost(summary: dict[str, Any]) -> Iterator[str]:
    tokens = ", ".join(f"{count:,} {kind}" for kind, count in summary["tokens"].items())
    yield f"- {summary['seconds']:,.0f} seconds, {summary['cost_usd']:.4f} US dollars"
    yield f"- tokens: {tokens}"
    if summary.get("points_per_usd"):
        found = summary["points_per_usd"]
        yield f"- {found['value']:,.0f} points per dollar ({found['low']:,.0f} to {found['high']:,.0f})"
