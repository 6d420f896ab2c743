"""Real clients and agents, unmodified, through the gateway: which ran, and whether every token is right.

    python checks/clients.py [--model smollm2] [--python .peers/clients/bin/python]

Each program of `client_programs/` runs as an attempt of its own, once with replies that play along (so that tools are
called and turns extended), and with --model once more with that model's own. An attempt is right if what is recorded
is, token by token, what the sampler read and sampled, each sampled token once. Clients that aren't installed are
skipped, and named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.agents.program import Program
from strop.environments import Environment, ProgramResult, Session
from strop.errors import AttemptError
from strop.rollouts import FinishReason, Rollout, Task
from strop.sampling.conversation import Conversation
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import Sample, SamplingParams

PROGRAMS = Path(__file__).parent / "client_programs"
#: Program, and what it imports.
CLIENTS = {
    "openai_sdk": "openai",
    "anthropic_sdk": "anthropic",
    "openai_agents": "agents",
    "langchain_agent": "langchain",
    "smolagents_agent": "smolagents",
    "inspect_task": "inspect_ai",
    "mini_swe_agent": "minisweagent",
}
TASK = Task("clients", "clients", ({"role": "user", "content": "What is 20 + 22?"},))


class PlayingSampler:
    """Plays along: calls the first tool that was announced, then answers. No model: replies are written by rule."""

    version = 0

    def __init__(self, tokenizer: Any, max_context: int) -> None:
        self.tokenizer, self.max_context = tokenizer, max_context

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        await asyncio.sleep(0)
        text = self._reply(self.tokenizer.decode(list(prompt)))
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        cut = tokens[: params.max_tokens]
        ended = FinishReason.STOP if len(cut) == len(tokens) else FinishReason.LENGTH
        return Sample(cut, [-0.25] * len(cut), [0] * len(cut), ended)

    @staticmethod
    def _reply(read: str) -> str:
        system, last = read.split("<|im_end|>", 1)[0], read.rsplit("<|im_start|>user", 1)[-1]
        begun = last.rsplit("<|im_start|>assistant\n", 1)[-1]
        used = "<tool_response>" in last
        if "<code>" in system:  # the code agent's prompt
            return "<code>\nfinal_answer(add(20, 22))\n</code><|im_end|>"
        if re.search(r"^bash\(", system, re.MULTILINE):
            command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if used else "echo  42 > answer.txt"
            return f'I will.\n<tool_call>{{"name":  "bash", "arguments": {{"command": "{command}"}}}}</tool_call><|im_end|>'
        if re.search(r"^final_answer\(", system, re.MULTILINE) and used:
            call = '{"name": "final_answer", "arguments": {"answer":   "42"}}</tool_call><|im_end|>'
            return call if begun.startswith("<tool_call>") else f"<tool_call>{call}"
        if re.search(r"^add\(", system, re.MULTILINE) and not used:
            call = '{"name": "add", "arguments": {"b":  22, "a": 20}}</tool_call><|im_end|>'
            return call if begun.startswith("<tool_call>") else f"<tool_call>{call}"
        return " The answer is 42.<|im_end|>"

    async def close(self) -> None:
        return None


@dataclass
class Audit:
    """A sampler that keeps what it was asked and what it gave."""

    inner: Any
    seen: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)

    @property
    def version(self) -> int:
        return int(self.inner.version)

    @property
    def max_context(self) -> int:
        return int(self.inner.max_context)

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        sample = await self.inner.sample(prompt, params, deadline=deadline)
        self.seen.append((list(prompt), list(sample.tokens), list(sample.logprobs)))
        return sample

    async def close(self) -> None:
        await self.inner.close()


class Clients(Environment):
    """Keeps how the program ended."""

    result: ProgramResult | None = None

    async def start(self, task: Task, seed: int) -> Session:
        environment = self

        class Kept(Session):
            async def program_ended(self, result: ProgramResult) -> None:
                environment.result = result

        return Kept(self, task, seed)


def wrong_tokens(rollout: Rollout, seen: list[tuple[list[int], list[int], list[float]]]) -> int:
    """Calls whose tokens are not one-to-one what the sampler read and gave."""
    left = list(seen)
    wrong = 0
    for index, call in enumerate(rollout.calls):
        whole = rollout.branch_tokens(index)
        recorded = (whole[: len(whole) - len(call.tokens)], call.tokens, call.logprobs)
        if recorded in left:
            left.remove(recorded)
        else:
            wrong += 1
    return wrong + len(left)


async def attempt(client: str, python: Path, sampler: Any, renderer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Run one client as an attempt of its own."""
    audit, environment = Audit(sampler), Clients()
    rollout = Rollout(f"{client}/0", TASK.id, TASK.environment, 0, seed=1)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=1.0)
    conversation = Conversation(audit, renderer, rollout, params, deadline=time.monotonic() + args.seconds + 30)
    program = Program(f"{python} {PROGRAMS / client}.py", where="host", seconds=args.seconds)
    session = await environment.start(TASK, 1)
    try:
        await program.run(TASK, session, conversation)
    except AttemptError as error:
        return {"ok": False, "why": str(error)}
    result = environment.result
    assert result is not None
    wrong = wrong_tokens(rollout, audit.seen)
    why = "" if result.exit_code == 0 else (result.stderr.strip() or result.stdout.strip())[-args.show :]
    return {
        "ok": result.exit_code == 0 and bool(rollout.calls) and not wrong,
        "calls": len(rollout.calls),
        "tokens": rollout.sampled_tokens,
        "extended": sum(call.parent is not None for call in rollout.calls),
        "forks": rollout.forks,
        "wrong": wrong,
        "seconds": result.seconds,
        "why": why,
    }


def installed(python: Path, module: str) -> bool:
    """Whether that Python has the module."""
    if not python.exists():
        return False
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code]).returncode == 0


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=str, help="a model to sample from as well: a folder, or the start model's name")
    parser.add_argument("--tokenizer", help="of the played replies: a folder of a ChatML model; default the model's")
    parser.add_argument("--python", type=Path, default=Path(".peers/clients/bin/python"), help="where the clients are")
    parser.add_argument("--only", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    parser.add_argument("--seconds", type=float, default=240.0, help="time for one client")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest reply")
    parser.add_argument("--show", type=int, default=400, help="characters of an error to show")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    from strop.models.load import resolve_model

    python = args.python.absolute()
    folder = resolve_model(args.tokenizer or args.model or "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = renderer_for(tokenizer, folder)
    samplers: list[tuple[str, Any]] = [("played", PlayingSampler(tokenizer, 32_768))]
    if args.model:
        samplers.append(("model", embedded(args.model)))
    print(
        f"{'client':<18}{'replies':<9}{'calls':>6}{'extended':>9}{'roots+':>7}{'tokens':>8}{'wrong':>6}{'s':>7}  outcome"
    )
    right = ran = skipped = 0
    for client in args.only:
        if not installed(python, CLIENTS[client]):
            print(f"{client:<18}skipped: {CLIENTS[client]} is not installed in {args.python}")
            skipped += 1
            continue
        for name, sampler in samplers:
            found = await attempt(client, python, sampler, renderer, args)
            ran += 1
            right += found["ok"]
            counted = "".join(
                f"{found.get(key, 0):>{width}}"
                for key, width in (("calls", 6), ("extended", 9), ("forks", 7), ("tokens", 8), ("wrong", 6))
            )
            outcome = "every token right" if found["ok"] else f"FAILED: {found['why'] or 'wrong tokens'}"
            print(f"{client:<18}{name:<9}{counted}{found.get('seconds', 0.0):>7.1f}  {outcome}", flush=True)
    for _, sampler in samplers:
        await sampler.close()
    print("RESULT " + json.dumps({"ran": ran, "right": right, "skipped": skipped}))
    return 0 if right == ran and ran else 1


def embedded(model: str) -> Any:
    """The embedded sampler over a model of this machine."""
    from strop.models.load import load_model
    from strop.models.policy import Policy
    from strop.sampling.embedded import EmbeddedSampler

    loaded = load_model(model)
    return EmbeddedSampler(Policy(loaded.model), loaded.tokenizer, slots=8, max_context=8192)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
