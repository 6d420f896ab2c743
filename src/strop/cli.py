"""The command line: parse, call, print. Nothing else lives here, and nothing heavy is imported until it is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from strop.sampling.opening import Endpoint

app = typer.Typer(
    name="strop",
    help="Post-training for agentic language models: attempt, score, update, repeat.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
data_app = typer.Typer(help="Training data in files.", no_args_is_help=True)
env_app = typer.Typer(help="Environments.", no_args_is_help=True)
sandbox_app = typer.Typer(help="Places where model-written code runs.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(data_app, name="data")
app.add_typer(env_app, name="env")
app.add_typer(sandbox_app, name="sandbox")

Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting: a.b=c; a stage by name: stages.rl.steps=3.")
]
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        "--endpoint", help="Sample from this OpenAI-compatible API (http://host:8000/v1), not from MODEL here."
    ),
]
EndpointModel = Annotated[str | None, typer.Option("--endpoint-model", help="The model's name there; default MODEL.")]
EndpointKey = Annotated[
    str | None, typer.Option("--endpoint-key", envvar="STROP_ENDPOINT_KEY", help="The key that opens it.")
]


def main() -> None:
    """Entry point: a `StropError` is a paragraph for the user, not a traceback."""
    from strop.errors import StropError

    try:
        app()
    except StropError as error:
        _error(str(error))
        sys.exit(2)


def _error(text: str) -> None:
    typer.secho(f"strop: {text}", err=True, fg=typer.colors.RED)


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A TOML recipe, for example recipes/quickstart.toml.")] = None,
    set_: Set = None,
    runs: Runs = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="Take up this run where it stopped.")] = None,
    take_up: Annotated[
        bool, typer.Option("--continue", help="If the run exists: take it up, or show it if it is done.")
    ] = False,
    promote: Annotated[
        str | None, typer.Option(help="With --resume: let this stage's model go on though its gate is closed.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Check everything, say what would happen, and stop.")] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard files into the run as well.")] = False,
) -> None:
    """Train a model by a recipe."""
    from strop import console
    from strop.config import load_recipe
    from strop.errors import ConfigError
    from strop.training.train import check

    if resume is not None:
        if recipe is not None or set_:
            raise ConfigError("--resume", "a recipe or --set was given too", "A run is taken up as it was asked for")
        console.train_in(resume, None, promote=promote, tensorboard=tensorboard)
        return
    if promote is not None:
        raise ConfigError("--promote", "no run is taken up", "Write strop train --resume RUN --promote STAGE")
    if recipe is None:
        raise ConfigError("recipe", "none was named", "Write strop train recipes/quickstart.toml")
    asked = load_recipe(recipe, set_ or [])
    if dry_run:
        check(asked)
        console.show_plan(asked)
        return
    path = runs / asked.name
    exists = (path / "config.toml").exists()
    console.train_in(path, None if take_up and exists else asked, tensorboard=tensorboard)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A start model, a folder (a checkpoint too), or a hub name.")],
    env: Annotated[str, typer.Option(help="Environment: a built-in name, package.module:Class, or file.py:Class.")],
    option: Annotated[list[str] | None, typer.Option(help="Option of the environment: name=value.")] = None,
    tasks: Annotated[int, typer.Option(help="The first so many held-out tasks.")] = 200,
    split: Annotated[str, typer.Option(help="Which tasks.")] = "test",
    attempts: Annotated[int, typer.Option(help="Attempts at each task; with more than one, pass@k up to it.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default 0, or 1 with several attempts.")
    ] = None,
    agent: Annotated[str, typer.Option(help="single_reply or tool_loop.")] = "single_reply",
    max_tokens: Annotated[int, typer.Option(help="Sampled tokens of one reply.")] = 128,
    max_turns: Annotated[int, typer.Option(help="Replies of one attempt (tool_loop).")] = 8,
    max_context: Annotated[int, typer.Option(help="Tokens of a whole conversation.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the evaluation here, for strop compare.")] = None,
    endpoint: EndpointUrl = None,
    endpoint_model: EndpointModel = None,
    endpoint_key: EndpointKey = None,
) -> None:
    """Score a model on an environment: pass@1, pass@k, intervals, by difficulty."""
    from strop import console

    console.evaluate_model(
        model,
        {"name": env, "options": dict(_pair(text) for text in option or []),
         "agent": {"kind": agent, "max_tokens": max_tokens, "max_turns": max_turns}},
        {"tasks": tasks, "split": split, "attempts": attempts,
         "temperature": (0.0 if attempts == 1 else 1.0) if temperature is None else temperature},
        max_context=max_context, seed=seed, out=out, endpoint=_endpoint(endpoint, endpoint_model, endpoint_key),
    )  # fmt: skip


@app.command()
def compare(
    before: Annotated[str, typer.Argument(help="An evaluation file of strop eval, or RUN or RUN:EVALUATION.")],
    after: Annotated[str, typer.Argument(help="What to compare it with.")],
    runs: Runs = Path("runs"),
) -> None:
    """Compare two evaluations of the same tasks: paired, with an interval."""
    from strop.runs.show import show_comparison

    _print(show_comparison(before, after, runs))


@app.command("runs")
def list_(runs: Annotated[Path, typer.Argument(help="Folder that holds the runs.")] = Path("runs")) -> None:
    """List the runs."""
    from strop.runs.show import show_runs

    _print(show_runs(runs))


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    step: Annotated[int | None, typer.Option(help="The attempts of this step.")] = None,
    stage: Annotated[str | None, typer.Option(help="Stage of the step; the last one by default.")] = None,
    evaluation: Annotated[str | None, typer.Option(help="The attempts of this evaluation.")] = None,
    attempt: Annotated[int | None, typer.Option(help="One attempt of the step or evaluation, turn by turn.")] = None,
    logprobs: Annotated[bool, typer.Option(help="With every sampled token's log-probability.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Show a run, a step's attempts, or one attempt turn by turn."""
    from strop.runs import show as rooms
    from strop.runs.reading import open_run

    record = open_run(run, runs)
    if attempt is not None:
        _print(rooms.show_attempt(record, attempt, step=step, stage=stage, evaluation=evaluation, logprobs=logprobs))
    elif step is not None or evaluation is not None:
        _print(rooms.show_step(record, step=step, stage=stage, evaluation=evaluation))
    else:
        _print(rooms.show_run(record))


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; default report.html in the run.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Write one self-contained HTML page about a run."""
    from strop.runs.reading import open_run
    from strop.runs.report import write_report

    record = open_run(run, runs)
    typer.echo(write_report(record.path, out or record.path / "report.html"))


@app.command()
def cost(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    machine: Annotated[str | None, typer.Option(help="Price of this machine of the price file instead.")] = None,
    usd_per_hour: Annotated[float | None, typer.Option(help="Or this price of the whole machine.")] = None,
    target_points: Annotated[
        float | None, typer.Option(help="Dollars until the gain's lower bound passed this.")
    ] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Say what a run cost: by part, per token, per solved task, and its intelligence per dollar."""
    from strop.costs import price_of
    from strop.runs.reading import open_run
    from strop.runs.show import show_cost

    price = price_of(machine or "auto", usd_per_hour) if machine or usd_per_hour is not None else None
    _print(show_cost(open_run(run, runs), price, target_points))


@app.command()
def verify(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    runs: Runs = Path("runs"),
) -> None:
    """Check every file, checksum and rule of a run, and say what is broken."""
    from strop.runs.reading import open_run
    from strop.runs.verify import show_verification

    _print_and_exit(show_verification(open_run(run, runs).path))


@app.command()
def replay(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    step: Annotated[int, typer.Option(help="The step to train again, from the checkpoint before it.")],
    stage: Annotated[str | None, typer.Option(help="Stage of the step; the last one by default.")] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Compare this attempt's log-probabilities token by token.")
    ] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Do a stored step again in the learner, and compare its loss and weights with what was recorded."""
    import asyncio

    from strop.runs.reading import open_run
    from strop.training.replay import replay_step, show_replay

    path = open_run(run, runs).path
    _print_and_exit(show_replay(asyncio.run(replay_step(path, step, stage=stage, attempt=attempt))))


@app.command()
def select(
    run: Annotated[str, typer.Argument(help="A run's name or directory.")],
    out: Annotated[Path, typer.Option(help="The JSONL file to write: a row of messages and tools for each attempt.")],
    stage: Annotated[str | None, typer.Option(help="Whose attempts; default the last stage that has any.")] = None,
    best: Annotated[int, typer.Option(min=1, help="Attempts kept of each group, the highest rewards first.")] = 1,
    reward_above: Annotated[float | None, typer.Option(help="Only attempts that were rewarded with more.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Write the best attempts of a run as data for supervised learning (rejection sampling)."""
    from strop.runs.reading import open_run
    from strop.training.stored import best_attempts, stored_groups, write_conversations

    record = open_run(run, runs)
    groups = stored_groups(record, stage)
    chosen = best_attempts(groups, best, reward_above)
    rows = write_conversations(chosen, out)
    typer.echo(f"{rows} of {sum(len(group.rollouts) for group in groups)} attempts, of {len(chosen)} groups: {out}")


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A start model, a folder (a checkpoint too), or a hub name.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default the folder's name.")] = None,
    slots: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 64,
    max_context: Annotated[int, typer.Option(help="Tokens of a whole conversation.")] = 2048,
    api_key: Annotated[
        str | None, typer.Option(envvar="STROP_API_KEY", help="What clients must send; default: anything goes.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="STROP_ADMIN_KEY", help="Opens /admin; without one it is closed.")
    ] = None,
    endpoint: EndpointUrl = None,
    endpoint_model: EndpointModel = None,
    endpoint_key: EndpointKey = None,
) -> None:
    """Serve a model over the OpenAI and Anthropic APIs."""
    from strop import console

    console.serve_model(
        model,
        host=host,
        port=port,
        name=name,
        slots=slots,
        max_context=max_context,
        api_key=api_key,
        admin_key=admin_key,
        endpoint=_endpoint(endpoint, endpoint_model, endpoint_key),
    )


def _endpoint(url: str | None, model: str | None, key: str | None) -> Endpoint | None:
    from strop.sampling.opening import Endpoint

    return Endpoint(url, model, key) if url else None


@sandbox_app.command("serve")
def sandbox_serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8787,
    token: Annotated[
        str | None, typer.Option(envvar="STROP_SANDBOX_TOKEN", help="What clients must bear; default a random one.")
    ] = None,
    warm: Annotated[int, typer.Option(help="Sandboxes kept ready.")] = 0,
    max_live: Annotated[int, typer.Option(help="Most sandboxes at once.")] = 4096,
    tier: Annotated[str, typer.Option(help="auto, namespaces, rootless or bubblewrap.")] = "auto",
    least: Annotated[str, typer.Option(help="The weakest tier that auto may take.")] = "rootless",
    allow_weak: Annotated[bool, typer.Option(help="Serve although control groups are missing.")] = False,
) -> None:
    """Serve this machine's sandboxes over HTTP."""
    from strop import console

    kinds = {"tier": tier, "least": least, "allow_weak": allow_weak}
    console.serve_sandboxes(host=host, port=port, token=token, warm=warm, max_live=max_live, **kinds)


@app.command()
def doctor() -> None:
    """Say what this machine can do, what is missing, and the command that mends it."""
    from strop.doctor import diagnose, show_findings

    findings = diagnose()
    _print(show_findings(findings))
    raise typer.Exit(1 if any(finding.state == "missing" for finding in findings) else 0)


@model_app.command("get")
def model_get(name: Annotated[str, typer.Argument(help="A start model's name.")] = "smollm2") -> None:
    """Fetch a start model, convert it once, and print the folder it is in."""
    from strop.console import fetch_model

    typer.echo(fetch_model(name))


@data_app.command("check")
def data_check(
    file: Annotated[Path, typer.Argument(help="A JSONL, JSON or Parquet file, or a folder of them.")],
    model: Annotated[
        str, typer.Option(help="Whose tokens are counted: a start model, a folder, or a hub name.")
    ] = "smollm2",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of a stage's data table: max_tokens=512.")
    ] = None,
    show: Annotated[int, typer.Option(help="Show so many rows as the model reads them.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Examples of one step.")] = 8,
) -> None:
    """Say row by row what is wrong with a data file, what it becomes, and what training on it would cost."""
    from strop.config import parse_data
    from strop.data.check import check_data, show_data_check

    found = check_data(parse_data({"path": str(file), **dict(_pair(text) for text in set_ or [])}), model)
    _print(show_data_check(found, show=show, batch_size=batch_size))
    raise typer.Exit(0 if found.good else 1)


@model_app.command("export")
def model_export(
    source: Annotated[
        str, typer.Argument(help="A run, a folder (a checkpoint or adapter too), a GGUF file, or a name.")
    ],
    folder: Annotated[Path, typer.Argument(help="The new folder.")],
    format_: Annotated[
        str, typer.Option("--format", help="transformers or gguf (an adapter is merged), or adapter (as it is).")
    ] = "transformers",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16; for gguf q8_0 too. Default float32, gguf float16.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Take the tokenizer from this folder instead.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Take a model elsewhere: transformers or GGUF out, GGUF in, adapters merged, with a card of the run."""
    from strop.console import export

    typer.echo(export(source, folder, format_, dtype, tokenizer, runs))


@env_app.command("check")
def env_check(
    spec: Annotated[str, typer.Argument(help="A built-in name, package.module:Class, or path/to/file.py:Class.")],
    option: Annotated[list[str] | None, typer.Option(help="Option of the environment: name=value.")] = None,
) -> None:
    """Tell an environment's author what is wrong with it."""
    from strop.environments.check import check_environment, show_check

    found = check_environment(spec, dict(_pair(text) for text in option or []))
    _print(show_check(found))
    raise typer.Exit(0 if found.good else 1)


@env_app.command("serve")
def env_serve(
    spec: Annotated[str, typer.Argument(help="A built-in name, package.module:Class, or path/to/file.py:Class.")],
    option: Annotated[list[str] | None, typer.Option(help="Option of the environment: name=value.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8001,
) -> None:
    """Serve an environment as a resources server of NeMo Gym."""
    from strop import console

    console.serve_environment(spec, dict(_pair(text) for text in option or []), host=host, port=port)


@env_app.command("rows")
def env_rows(
    spec: Annotated[str, typer.Argument(help="A built-in name, package.module:Class, or path/to/file.py:Class.")],
    out: Annotated[Path, typer.Argument(help="The file of JSON lines.")],
    option: Annotated[list[str] | None, typer.Option(help="Option of the environment: name=value.")] = None,
    split: Annotated[str, typer.Option(help="Which tasks.")] = "train",
    tasks: Annotated[int, typer.Option(help="The first so many.")] = 1000,
    agent: Annotated[str | None, typer.Option(help="Name of the agent in NeMo Gym's configuration.")] = None,
) -> None:
    """Write an environment's tasks as rows of NeMo Gym, for what strop env serve serves."""
    from strop import console

    options = dict(_pair(text) for text in option or [])
    typer.echo(f"{console.write_rows(spec, options, out, split=split, tasks=tasks, agent=agent)} rows")


def _pair(text: str) -> tuple[str, Any]:
    """ "name=value" with a TOML value, or else a plain string."""
    import tomllib

    from strop.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--option {text}", "it has no '='", "Write --option name=value")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console().print(renderable)


def _print_and_exit(shown: tuple[Any, int]) -> None:
    """Print the first and exit with the second."""
    _print(shown[0])
    raise typer.Exit(shown[1])
