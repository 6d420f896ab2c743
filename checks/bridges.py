"""Other ecosystems' environments, as they are: which ran, how many rows, and how it went.

    python checks/bridges.py [--only verifiers,verifiers_v1,gym,harbor,exports] [NAME[=OPTIONS] …]

Each environment runs in the Python that has it (`benchmarks/peers/setup.sh` makes them below .peers/) over replies that
play along (as in `clients.py`); what isn't set up is skipped, and named. Every attempt's tokens are compared with what
the sampler read and gave. An environment counts as run if at least one row was scored and no token was wrong; one that is
broken on purpose, if every attempt at it failed. Of NeMo Gym's environments the rollouts that come with the package are
judged again, and the rewards compared with those that are recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from clients import Audit, PlayingSampler, wrong_tokens

from strop.agents import ToolLoop
from strop.agents.attempts import AttemptRunner
from strop.agents.own_harness import OwnHarness
from strop.costs import Ledger
from strop.environments import Environment, load_environment
from strop.environments.harbor import Harbor
from strop.environments.nemo_gym import NemoGym, row_of
from strop.environments.nemo_gym.server import serve
from strop.environments.workers import WorkerEnvironment
from strop.errors import AttemptError, StropError
from strop.gateway import shared
from strop.rollouts import Failed, FailureKind, Rollout, Scored
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams
from strop.sandboxes import probe

HERE = Path(__file__).parent
PACKAGES = HERE / "verifiers_packages"
#: Packages of PyPI, one of strop's own inside verifiers, environments that verifiers brings, and ones written for this
#: check; "DATA" becomes a file of rows.
VERIFIERS = (
    "stardata.envs.constraint_gym",
    "strop_check_korrel",
    "falsepass._demo.falsepass_toy_env",
    'primebeaker.environments.jtc_label_env={"dataset": "DATA"}',
    'strop.environments.exports.verifiers={"environment": "shopkeeper", "train_tasks": 5, "test_tasks": 0}',
    "strop_check_reasoning_gym",
    "strop_check_group",
    "strop_check_single",
    "strop_check_tools",
    "strop_check_broken",
)
VERIFIERS_V1 = ('marble_v1={"tasks": 10}', "strop_check_v1", 'strop_check_v1={"broken": true}')
GYM = (
    *("mcqa", "gpqa_diamond", "bunsenbench_chemistry_mcq", "string_match", "spartqa", "bbq", "ragtruth"),
    *("equivalence_rule", "lc_niah", "ruler", "arc_agi", "reasoning_gym", "structured_outputs", "xlam_fc"),
    *("example_session_state_mgmt", "example_single_tool_call", "example_tool_call_multireward", "example_multi_step"),
    *("workplace_assistant", "math_advanced_calculations"),
)
#: Rows for environments that bring none.
ROWS = [{"question": f"Is {n} even? Answer A for yes, B for no.", "answer": "AB"[n % 2]} for n in range(6)]


class CallingSampler(PlayingSampler):
    """Makes one call, then answers."""

    def __init__(self, tokenizer: Any, max_context: int, call: dict[str, Any]) -> None:
        super().__init__(tokenizer, max_context)
        self._call = f"<tool_call>{json.dumps(call)}</tool_call><|im_end|>"

    def _reply(self, read: str) -> str:  # type: ignore[override]
        return "It is 3 kg.<|im_end|>" if "<tool_response>" in read else self._call


@dataclass
class Ran:
    """How an environment went."""

    name: str
    of: int = 0
    rollouts: list[Rollout] = field(default_factory=list)
    wrong: int = 0
    said: str = ""
    counted: bool | None = None

    @property
    def good(self) -> bool:
        """Whether it counts as run."""
        if self.counted is not None:
            return self.counted and not self.wrong
        endings = [rollout.ending for rollout in self.rollouts]
        if "broken" in self.name:
            return bool(endings) and all(isinstance(e, Failed) and e.kind is FailureKind.SCORER for e in endings)
        return any(isinstance(ending, Scored) for ending in endings) and not self.wrong

    def show(self) -> None:
        """One line."""
        counts = Counter(
            "scored" if isinstance(r.ending, Scored) else f"failed: {r.ending.kind} ({r.ending.reason[:160]})"
            for r in self.rollouts
            if r.ending is not None
        )
        outcome = "; ".join([*(f"{count} {ending}" for ending, count in counts.items()), *filter(None, [self.said])])
        calls = sum(len(rollout.calls) for rollout in self.rollouts)
        reward = sum(rollout.reward or 0.0 for rollout in self.rollouts) / max(1, len(self.rollouts))
        shown = (
            f"{self.name[:46]:<46}{len(self.rollouts):>5}{self.of:>7}{calls:>7}{reward:>8.2f}{self.wrong:>7}  {outcome}"
        )
        print(shown, flush=True)


@dataclass
class Workshop:
    """What attempts need, whatever the environment."""

    tokenizer: Any
    renderer: Any
    args: argparse.Namespace

    async def attempts(self, name: str, environment: Environment, agent: Any) -> Ran:
        """Attempts at the environment's first rows, all at once."""
        audit = Audit(PlayingSampler(self.tokenizer, 8192))
        runner = AttemptRunner(
            environment=environment,
            agent=agent,
            sampler=audit,
            renderer=self.renderer,
            params=SamplingParams(max_tokens=self.args.max_tokens),
            seconds=self.args.seconds,
            ledger=Ledger(),
            clock=time.monotonic,
        )
        try:
            tasks = environment.tasks("train") or environment.tasks("test")
            rows = [runner.run(f"{name}-{n}", 0, tasks[n], seed=1) for n in range(min(self.args.rows, len(tasks)))]
            rollouts = list(await asyncio.gather(*rows))
        except StropError as error:
            return Ran(name, said=str(error)[-300:])
        return Ran(name, len(tasks), rollouts, _wrong(rollouts, audit))


def _wrong(rollouts: list[Rollout], audit: Audit) -> int:
    """Calls whose tokens are not what the sampler read and gave."""
    if len(rollouts) == 1:
        return wrong_tokens(rollouts[0], audit.seen)
    sampled = Counter((*prompt, *tokens) for prompt, tokens, _ in audit.seen)
    recorded = Counter(tuple(r.branch_tokens(index)) for r in rollouts for index in range(len(r.calls)))
    return sum(((recorded - sampled) + (sampled - recorded)).values())


async def run_workers(shop: Workshop, kind: str, python: Path, specs: list[str]) -> list[Ran]:
    """Packages of verifiers, each in worker processes of the Python that has them."""
    ran = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        for spec in specs:
            name, _, options = spec.partition("=")
            given = json.loads((options or "{}").replace("DATA", str(data)))
            environment = WorkerEnvironment(name, str(python.absolute()), kind, given, start_seconds=600)
            found = await shop.attempts(spec if "broken" in spec else name, environment, OwnHarness())
            await environment.close()
            found.show()
            ran.append(found)
    return ran


@asynccontextmanager
async def nemo_gym(python: Path, names: list[str]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """NeMo Gym's own servers while the context is open: their URL, and what each says about itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(python.absolute()), str(HERE / "nemo_gym_servers.py"), str(port), *names]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"{"):
                break
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient() as http:
            for _ in range(600):
                try:
                    await http.get(url)
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.2)
        yield url, json.loads(line)
    finally:
        process.kill()
        await process.wait()


async def run_gym(shop: Workshop, python: Path, names: list[str]) -> list[Ran]:
    """Rows and servers of nemo-gym: attempts, and the recorded rollouts judged again."""
    ran = []
    async with nemo_gym(python, names) as (url, told):
        for name in names:
            if "error" in told[name]:
                found = Ran(name, said=told[name]["error"])
            else:
                try:
                    environment = NemoGym(train=told[name]["rows"], url=f"{url}/{name}", name=name)
                    found = await shop.attempts(name, environment, ToolLoop(max_turns=4))
                    agreed, refused, others = await judge_again(Path(told[name]["rollouts"]), f"{url}/{name}")
                    found.said = (
                        f"recorded rewards: {agreed} of {agreed + refused + len(others)} given again, {refused} refused"
                    )
                    found.said += f"; others, was and is now: {others}" if others else ""
                except (StropError, AttemptError) as error:
                    found = Ran(name, said=str(error)[-200:])
            found.show()
            ran.append(found)
    return ran


async def judge_again(path: Path, url: str) -> tuple[int, int, list[tuple[float, float | str]]]:
    """Send recorded episodes to /verify, after calling their tools again.

    Returns:
        how many get the recorded reward, how many are refused (of a form that the server no longer takes), and of the
        others the reward that is recorded and what the server says now.
    """
    agreed, refused, others = 0, 0, list[tuple[float, float | str]]()
    for row in _lines(path):
        if not isinstance(row.get("response"), dict) or "reward" not in row:
            continue
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            sent = {key: value for key, value in row.items() if key != "reward"}
            asked = row["responses_create_params"]  # older recordings write out what was not said
            sent["responses_create_params"] = {key: value for key, value in asked.items() if value is not None}
            await http.post("/seed_session", json=sent)
            for item in row["response"]["output"]:
                if item.get("type") == "function_call":
                    await http.post(
                        f"/{item['name']}", content=item["arguments"], headers={"content-type": "application/json"}
                    )
            answer = await http.post("/verify", json=sent)
        now = answer.json()["reward"] if answer.status_code == 200 else f"status {answer.status_code}"
        if answer.status_code == 422:
            refused += 1
        elif isinstance(now, int | float) and abs(now - row["reward"]) < 1e-6:
            agreed += 1
        else:
            others.append((row["reward"], now))
    return agreed, refused, others


async def run_exports(shop: Workshop, peers: Path) -> list[Ran]:
    """Ours inside others: NeMo Gym's own agent on a served environment, and a task of inspect_ai."""
    ran = []
    if (python := _python(peers / "nemo-gym", True)) is not None:
        ran.append(await served_to_their_agent(shop, python))
    if (python := _python(peers / "inspect-ai", True)) is not None:
        told = await _told([str(python.absolute()), str(HERE / "inspect_export.py")])
        scores = told.get("scores")
        right = told.get("status") == "success" and scores == [0.0, 1.0, 0.0, 1.0]
        ran.append(Ran("shopkeeper in inspect_ai", said=json.dumps(told), counted=right))
    for found in ran:
        found.show()
    return ran


async def served_to_their_agent(shop: Workshop, python: Path) -> Ran:
    """One attempt: their SimpleAgent asks our gateway, calls our tools, and has our server verify it."""
    environment = load_environment("shopkeeper", {"fault_rate": 0.0, "train_tasks": 1})
    task = environment.tasks("train")[0]
    call = {"name": task.tools[0]["function"]["name"], "arguments": {"item": "pears"}}
    audit = Audit(CallingSampler(shop.tokenizer, 8192, call))
    rollout = Rollout("served", task.id, environment.name, 0, 1)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(environment, "127.0.0.1", 0, started.set_result))
    try:
        async with shared(audit, shop.renderer, shop.tokenizer) as (gateway, url):
            params = SamplingParams(max_tokens=shop.args.max_tokens)
            attempt = gateway.engine.attempts.open(rollout, shop.renderer, name="served", params=params)
            row = row_of(task, "train")
            row["responses_create_params"]["model"] = gateway.model
            command = [str(python.absolute()), str(HERE / "nemo_gym_agent.py"), await started, url, attempt.key]
            told = await _told(command, json.dumps(row).encode())
            gateway.engine.attempts.close(attempt)
    finally:
        serving.cancel()
        await asyncio.wait([serving])
    body = told.get("body")
    reward = body.get("reward") if isinstance(body, dict) else None
    met = body.get("tool_calls", 0) + body.get("rejected_calls", 0) if isinstance(body, dict) else 0
    verified = isinstance(body, dict) and body.get("mask_sample") is False and met == 1
    if reward is not None:
        rollout.ending = Scored(reward)
    said = f"verified by ours: {verified}" if verified else json.dumps(told)[-400:]
    return Ran("shopkeeper served to NeMo Gym's agent", 1, [rollout], wrong_tokens(rollout, audit.seen), said, verified)


async def _told(command: list[str], given: bytes = b"") -> dict[str, Any]:
    """The JSON that a program prints last; what it said if there is none."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, errors = await asyncio.wait_for(process.communicate(given), 600)
    lines = [line for line in out.splitlines() if line.startswith(b"{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"said": errors.decode()[-300:]}
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open() as file:
            yield from (json.loads(line) for line in file if line.strip())


async def run_harbor(shop: Workshop, folders: list[Path]) -> list[Ran]:
    """Task folders: attempts by the loop of tools, and the task's own solution."""
    ran = []
    for folder in folders:
        try:
            environment = Harbor(train=str(folder), images={"base": "host"}, name=folder.name)
            found = await shop.attempts(folder.name, environment, ToolLoop(max_turns=4))
            session = await environment.start(environment.tasks("train")[0], 1)
            try:
                await session.solve()
                solved = await session.score(Rollout("solution", folder.name, "harbor", 0, 1))
            finally:
                await session.close()
            found.said = f"its own solution: reward {solved.reward:g}"
            found.wrong += solved.reward != 1.0
        except (StropError, AttemptError) as error:
            found = Ran(folder.name, said=str(error)[-200:])
        found.show()
        ran.append(found)
    return ran


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of environments of the one kind in --only; options as JSON behind =")
    parser.add_argument("--only", default="verifiers,verifiers_v1,gym,harbor,exports")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder of the virtual environments")
    parser.add_argument("--tokenizer", default="smollm2", help="a start model, or a folder of a ChatML model")
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    kinds = args.only.split(",")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(PACKAGES), str(HERE.parent / "src")))  # workers inherit it
    from transformers import AutoTokenizer

    from strop.models.load import resolve_model

    folder = resolve_model(args.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shop = Workshop(tokenizer, renderer_for(tokenizer, folder), args)
    results: dict[str, list[Ran]] = {}
    print(f"{'environment':<46}{'rows':>5}{'of':>7}{'calls':>7}{'reward':>8}{'wrong':>7}  outcome")
    for kind, listed in (("verifiers", VERIFIERS), ("verifiers_v1", VERIFIERS_V1)):
        place = "verifiers" if kind == "verifiers" else "verifiers-1"
        if (python := _python(args.peers / place, kind in kinds)) is not None:
            results[kind] = await run_workers(shop, kind, python, list(args.names or listed))
    if (python := _python(args.peers / "nemo-gym", "gym" in kinds)) is not None:
        results["gym"] = await run_gym(shop, python, list(args.names or GYM))
    if "harbor" in kinds:
        if probe().tier in ("namespaces", "rootless"):
            given = [Path(name) for name in args.names]
            results["harbor"] = await run_harbor(shop, given or sorted((HERE / "harbor_tasks").iterdir()))
        else:
            print("harbor: skipped, this machine has no sandboxes")
    if "exports" in kinds:
        results["exports"] = await run_exports(shop, args.peers)
    good = {kind: sum(found.good for found in ran) for kind, ran in results.items()}
    wrong = sum(found.wrong for ran in results.values() for found in ran)
    counts = {
        "verifiers": good.get("verifiers", 0) + good.get("verifiers_v1", 0),
        "gym": good.get("gym", 0),
        "harbor": good.get("harbor", 0),
        "exports": good.get("exports", 0),
    }
    print("RESULT " + json.dumps({**counts, "wrong_tokens": wrong}))
    return 0 if not wrong and all(good[kind] == len(ran) for kind, ran in results.items()) else 1


def _python(place: Path, wanted: bool) -> Path | None:
    """The interpreter of a virtual environment, if it is wanted and there."""
    python = place / "bin" / "python"
    if wanted and not python.exists():
        print(f"skipped: there is no {python}")
    return python if wanted and python.exists() else None


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
