"""What the command line does with a terminal: long work with a live line, a clean end on Ctrl-C, results as tables.

The commands themselves are in `strop.cli`; what they show of a finished run in `strop.runs.show`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from strop.config import (
    AgentSettings,
    DistillSettings,
    EnvironmentSettings,
    EvaluationSettings,
    ExamplesSettings,
    Recipe,
    Stage,
)
from strop.costs import MachinePrice, price_of
from strop.errors import ConfigError
from strop.runs.events import Event
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.runs.show import dollars, duration, interval, show_run
from strop.sampling.opening import Endpoint
from strop.statistics import Evaluation

console = Console()
#: What a step's line shows, in this order, where the step has it: (metric, heading, format).
COLUMNS = (
    ("loss", "loss", ".3f"),
    ("reward", "reward", ".3f"),
    ("solved", "solved", ".0%"),
    ("recovery", "recovery", ".0%"),
    ("reverse_kl", "teacher KL", ".3f"),
    ("accuracy", "accuracy", ".0%"),
    ("margin", "margin", ".3f"),
    ("tokens_per_attempt", "tokens", ".0f"),
    ("mismatch_kl", "mismatch", ".1e"),
)


def train_in(path: Path, recipe: Recipe | None, *, promote: str | None = None, tensorboard: bool = False) -> None:
    """Begin (or, without a recipe, take up) the run in `path`, and show how it goes.

    Args:
        path: the run's directory.
        recipe: what is asked of a new run.
        promote: a stage whose model goes on though its gate is closed.
        tensorboard: whether to write TensorBoard files.

    Raises:
        StropError: as `strop.training.train.train`; the run is resumable unless it never began.
    """
    from strop.training.chain import promote_by_hand
    from strop.training.train import check, train

    if recipe is not None:
        check(recipe)
    elif (path / "summary.json").exists():
        console.print(f"{path} is finished: there is nothing left to do.\n")
        show_end(path)
        return
    run = Run.create(path, recipe) if recipe is not None else Run.resume(path)
    try:
        price = price_of(run.recipe.costs.machine, run.recipe.costs.usd_per_hour)
        console.print(f"[bold]{run.recipe.name}[/]: {_chain(run.recipe)}, in {path}")
        if promote is not None:
            promote_by_hand(run, promote)
        with LiveLine(run, price) as line:
            run.listeners.append(line.hear)
            if tensorboard:
                from strop.runs.tensorboard import TensorBoardSink

                run.listeners.append(TensorBoardSink(run.path / "tensorboard").hear)
            try:
                run_until_interrupted(train(run))
            except KeyboardInterrupt:
                run.log("run", what="stopped", flush=True)
                line.say("")
                console.print(f"Stopped at a clean point. Go on with: strop train --resume {path}")
                raise SystemExit(130) from None
    finally:
        run.close()
    from strop.runs.report import write_report

    write_report(path, path / "report.html")
    show_end(path)


def run_until_interrupted(work: Any) -> Any:
    """Run a coroutine; Ctrl-C (or SIGTERM) cancels it at its next await, and is raised once it has cleaned up.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """

    async def run() -> Any:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class LiveLine:
    """Lines of steps and evaluations, and below them one that changes: what is under way, cost so far, time left.

    Without a terminal, only the lines that stay are written.
    """

    def __init__(self, run: Run, price: MachinePrice) -> None:
        self.run, self.price = run, price
        self._what, self._done, self._of = "setting up", 0, 0
        self._stage, self._stage_began, self._stage_from = "", time.monotonic(), 0
        self._step = 0
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)

    def __enter__(self) -> LiveLine:
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, what: str) -> None:
        """Change the moving line."""
        self._what, self._done, self._of = what, 0, 0

    def hear(self, event: Event) -> None:
        """Take in an event of the run."""
        match event["kind"]:
            case "progress":
                self._what, self._done, self._of = event["what"], event["done"], event["of"]
            case "stage" if event["what"] == "began":
                self._stage, self._step, self._stage_from = event["stage"], event["step"], event["step"]
                self._stage_began = time.monotonic()
                steps = self._steps()
                console.print(f"\n[bold]{self._stage}[/] ({steps} step{'s' * (steps != 1)})")
                self.say("collecting attempts")
            case "step":
                self._step = event["step"] + 1
                self._print_step(event)
            case "evaluation":
                score = Evaluation.from_record(event).score()
                extra = event["metrics"].get("recovery")
                recovery = f", recovery from errors {extra:.0%}" if extra is not None else ""
                console.print(
                    f"  [bold cyan]held-out score ({event['name']}): {interval(score)} of {score.n} tasks[/]{recovery}",
                    soft_wrap=True,
                )
            case "examples":
                console.print(
                    f"  [dim]{event['trained']} examples, {event['tokens']:,} tokens of which {event['tokens_trained']:,} are "
                    f"learnt; {event['held_out']} held out[/]"
                )
            case "validation":
                accuracy = event["metrics"].get("accuracy")
                further = f", {accuracy:.0%} of pairs the right way round" if accuracy is not None else ""
                console.print(
                    f"  [bold cyan]held-out examples after step {event['step']}: loss {event['metrics']['loss']:.4f}"
                    f"{further}[/]",
                    soft_wrap=True,
                )
            case "gate" if event["passed"]:
                console.print(f"  [dim]{event['message']}[/]")
            case "warning":
                console.print(f"  [yellow]! {event['message']}[/]")
            case "checkpoint":
                console.print(f"  [dim]saved {event['path']}[/]")

    def _steps(self) -> int:
        return next(stage.steps for stage in self.run.recipe.stages if stage.name == self._stage)

    def _print_step(self, event: Event) -> None:
        metrics = event["metrics"]
        parts = [f"{name} {metrics[key]:{form}}" for key, name, form in COLUMNS if key in metrics]
        spent = dollars(self.price.usd(self.run.ledger.seconds) + self.run.ledger.bought)
        console.print(
            f"  step {event['step'] + 1:>3}/{self._steps()}  {'  '.join(parts)}  [dim]{spent}[/]",
            highlight=False,
            soft_wrap=True,
        )

    def _render(self) -> Text:
        parts = [self._what]
        if self._of:
            parts.append(f"{self._done}/{self._of}")
        if self._stage and self._step > self._stage_from:
            each = (time.monotonic() - self._stage_began) / (self._step - self._stage_from)
            parts.append(
                f"{self._stage} step {self._step}/{self._steps()}, about {duration(each * (self._steps() - self._step))} left"
            )
        tokens = self.run.ledger.snapshot()["tokens"]
        sampled = sum(int(counts["sampled"]) for counts in tokens.values())
        seconds = self.run.ledger.seconds
        parts.append(f"{sampled} tokens sampled, {sampled / max(seconds, 1e-9):.0f}/s")
        parts.append(f"{duration(seconds)}, {dollars(self.price.usd(seconds) + self.run.ledger.bought)}")
        return Text("  " + " · ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")


def show_end(path: Path) -> None:
    """What a finished run gained and cost, and where to look further."""
    console.print(show_run(RunRecord(path)))
    console.print(
        f"\nRead the attempts:  strop show {path} --attempt 0"
        f"\nOpen the page:      {path / 'report.html'}"
        f"\nSee what it cost:   strop cost {path}"
        f"\nAll figures:        {path / 'summary.json'}",
        soft_wrap=True,  # a command or a path in two halves can't be copied
    )


def show_plan(recipe: Recipe) -> None:
    """What `--dry-run` says."""
    console.print(f"[bold]{recipe.name}[/]: every check passed; nothing was started.")
    table = Table("stage", "kind", "steps", "environment", "a step", "evaluation", box=None)
    for stage in recipe.stages:
        evaluation = recipe.evaluation_of(stage)
        scored = f"{evaluation.tasks} tasks of {evaluation.split!r}" if evaluation.tasks else "none"
        names = ", ".join(environment.called for environment in recipe.environments_of(stage))
        table.add_row(stage.name, stage.kind, str(stage.steps), names, _size(stage), scored)
    console.print(table)


def _size(stage: Stage) -> str:
    """What a step is made of."""
    if isinstance(stage, ExamplesSettings):
        return f"{stage.batch_size} examples"
    if isinstance(stage, DistillSettings) and stage.stored:
        return f"{stage.collect.groups} groups of stored attempts of {stage.stored.stage}"
    return f"{stage.collect.groups} groups of {stage.collect.group_size} attempts, staleness {stage.collect.staleness}"


def _chain(recipe: Recipe) -> str:
    return " → ".join(f"{stage.name} ({stage.kind}, {stage.steps} steps)" for stage in recipe.stages)


def evaluate_model(
    model: str,
    environment: dict[str, Any],
    evaluation: dict[str, Any],
    *,
    max_context: int,
    seed: int,
    out: Path | None,
    endpoint: Endpoint | None = None,
) -> None:
    """Score a model and print pass@1, pass@k and scores by difficulty.

    Raises:
        StropError: the model, environment or an option is not right.
    """
    from strop.evaluation.standalone import score_model

    asked = EnvironmentSettings(**{**environment, "agent": AgentSettings(**environment["agent"])})
    settings = EvaluationSettings(**evaluation)
    with console.status(f"scoring {model} on {asked.name}") as status:

        def tell(done: int, of: int) -> None:
            status.update(f"scoring {model} on {asked.name}: {done}/{of} attempts")

        found = run_until_interrupted(
            score_model(model, asked, settings, max_context=max_context, seed=seed, tell=tell, endpoint=endpoint)
        )
    console.print(evaluation_table(found))
    if found.failed:
        console.print(f"[yellow]{found.failed} attempts failed for reasons of the system and are in no score.[/]")
    if out is not None:
        from strop.runs.files import write_json

        write_json(out, found.as_record())
        console.print(f"written to {out}")


def evaluation_table(found: Evaluation) -> Table:
    """Scores of an evaluation, whole and by label."""
    table = Table("", "score", "95% interval", "tasks", box=None)

    def row(name: str, estimate: Any) -> None:
        table.add_row(name, f"{estimate.value:.1%}", f"{estimate.low:.1%} to {estimate.high:.1%}", str(estimate.n))

    row("pass@1", found.score())
    fewest = min(len(task.solved) for task in found.tasks)
    for k in (2, 4, 8, 16, 32, 64):
        if k <= fewest:
            row(f"pass@{k}", found.pass_at(k))
    labels = found.by_label()
    if len(labels) > 1:
        for label, estimate in labels.items():
            row(label, estimate)
    for name, value in sorted(found.metrics.items()):
        table.add_row(f"[dim]{name}[/]", f"[dim]{value:.4g}[/]", "", "")
    return table


def fetch_model(name: str) -> Path:
    """Fetch a start model with a progress line.

    Raises:
        ModelError: there is no such start model, or it can't be had.
    """
    from strop.models.start import get_start_model

    with console.status(f"fetching {name}") as status:
        return get_start_model(name, lambda what, share: status.update(f"{name}: {what} {share:.0%}"))


def export(source: str, folder: Path, kind: str, dtype: str | None, tokenizer: str | None, runs: Path) -> Path:
    """Export a model, with a card if a run made it; gives the folder.

    Args:
        source: a run's name or directory (its newest checkpoint is meant), or what `export_model` takes.
        folder, kind, dtype, tokenizer: see `strop.models.export.export_model`.
        runs: folder that holds the runs.

    Raises:
        StropError: what is wrong with the source or the format.
    """
    from strop.models.export import Format, export_model
    from strop.runs.card import model_card, newest_checkpoint, run_of
    from strop.runs.reading import RunRecord

    if kind not in get_args(Format):
        raise ConfigError("--format", f"there is no format {kind!r}", f"Choose one of: {', '.join(get_args(Format))}")
    place = next((path for path in (Path(source), runs / source) if (path / "config.toml").is_file()), None)
    checkpoint = newest_checkpoint(RunRecord(place)) if place else Path(source)
    run, card = run_of(checkpoint), None
    if run is not None:
        card = model_card(run, checkpoint.name, Path(str(run.config["model"]["name"])).name)
    with console.status(f"exporting {source}"):
        export_model(
            str(checkpoint) if run else source,
            folder,
            kind=cast(Format, kind),
            dtype=dtype,
            tokenizer=tokenizer,
            card=card,
        )
    return folder


def serve_model(
    model: str,
    *,
    host: str,
    port: int,
    name: str | None,
    slots: int,
    max_context: int,
    api_key: str | None = None,
    admin_key: str | None = None,
    endpoint: Endpoint | None = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C.

    Args:
        model: a start model, a folder, or a hub name.
        host, port: where to listen.
        name: what clients call the model.
        slots, max_context: of the sampler.
        api_key, admin_key: see `strop.gateway.Access`.
        endpoint: a server that samples; None samples here.

    Raises:
        StropError: the model can't be loaded, or the gateway's packages are missing.
    """
    from strop.gateway import Access, serve
    from strop.sampling.opening import open_sampler
    from strop.sampling.rendering import renderer_for

    known = name or Path(model).name

    def ready(url: str) -> None:
        console.print(f"{known} is served at {url} (OpenAI: {url}/v1, Anthropic: {url}). Ctrl-C ends it.")

    async def work() -> None:
        with console.status(f"loading {model}"):
            sampler, tokenizer, source = await open_sampler(
                model, slots=slots, max_context=max_context, endpoint=endpoint
            )
            renderer = renderer_for(tokenizer, source)
        access = Access(api_key, admin_key)
        await serve(sampler, renderer, tokenizer, known, host=host, port=port, access=access, on_ready=ready)

    _until_ended(work())


def serve_sandboxes(**options: Any) -> None:
    """Serve sandboxes over HTTP until Ctrl-C; `options` are those of `strop.sandboxes.server.serve`.

    Raises:
        StropError: this machine can't, or an open address has no token.
    """
    from strop.sandboxes.server import serve

    def ready(url: str, bearer: str) -> None:
        console.print(f"Sandboxes are served at {url}; bearer token: {bearer}. Ctrl-C ends it.")

    _until_ended(serve(**options, on_ready=ready))


def serve_environment(spec: str, options: Mapping[str, object], *, host: str, port: int) -> None:
    """Serve an environment as a resources server of NeMo Gym until Ctrl-C.

    Raises:
        StropError: it can't be loaded, or the address can't be listened on.
    """
    from strop.environments import load_environment
    from strop.environments.nemo_gym.server import serve

    def ready(url: str) -> None:
        console.print(f"{spec} is served at {url}. Ctrl-C ends it.")

    _until_ended(serve(load_environment(spec, options), host, port, ready))


def write_rows(
    spec: str, options: Mapping[str, object], out: Path, *, split: str, tasks: int, agent: str | None
) -> int:
    """Write the first tasks of an environment as rows of NeMo Gym; how many there are.

    Raises:
        StropError: the environment can't be loaded.
    """
    import itertools
    import json

    from strop.environments import load_environment
    from strop.environments.nemo_gym import row_of

    found = list(itertools.islice(load_environment(spec, options).tasks(split), tasks))
    out.write_text("".join(json.dumps(row_of(task, split, agent), ensure_ascii=False) + "\n" for task in found))
    return len(found)


def _until_ended(work: Any) -> None:
    try:
        run_until_interrupted(work)
    except KeyboardInterrupt:
        console.print("Ended.")
