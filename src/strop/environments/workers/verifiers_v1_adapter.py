"""Packages of verifiers ≥ 0.4 (tasksets) in a worker: their tasks, tools and rewards, acted on through the gateway.

Runs in the environment's own Python, beside `worker.py`; strop is not installed there. The harnesses that come with
verifiers start a program for every attempt; the one here is their chat loop in this process, so that thousands can run
at once. Tasks whose own tools or commands need a place run in its subprocess runtime, never in its paid default.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from strop_worker import Failure
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
from verifiers.v1.utils import loaders

#: Which part of the system an error is of; anything else is of the environment.
_KINDS = {"SandboxError": "sandbox", "ToolsetError": "tool", "ProviderError": "sampler", "InterceptionError": "sampler"}
_LONG = 600.0  # seconds for one model call; the gateway ends it sooner
_HARNESS = "strop_adapter"  # the name under which `worker.py` loads this file
__all__ = ["ChatLoop"]


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    """Replies, and calls the task's tools, until a reply has no call: verifiers' own loop, without a process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """See `vf.Harness.launch`."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=_LONG, max_retries=0)
            )
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            asked = {"tools": tools} if tools else {}
            while True:
                answer = await http.chat.completions.create(model=ctx.model, messages=messages, **asked)
                if not answer.choices:  # a stop condition of the task ended the attempt
                    break
                reply = answer.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                if not reply.tool_calls:
                    break
                for call in reply.tool_calls:
                    content = await _call(connections, places, call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _call(connections: Any, places: Any, name: str, arguments: str) -> Any:
    """What a tool gives; what the model got wrong is for it to read."""
    if name not in places:
        return f"error: unknown tool {name!r}"
    try:
        given = json.loads(arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(given, dict):
        return "error: the arguments are no object"
    return await call_mcp(connections, places, name, given)


class VerifiersV1Adapter:
    """A taskset of verifiers.

    Args:
        name: of the package (or the bundled taskset) that exports it.
        options: of its configuration; and "tasks", how many are read (all, or 1,000 of an endless one), and "test_tasks",
            how many of them, from the end, are held out.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        options = dict(options)
        count, held_out = options.pop("tasks", None), int(options.pop("test_tasks", 0))
        if loaders.environment_class(name) is not SingleAgentEnv:
            raise ValueError(f"{name} brings an environment of several agents, which is not supported")
        taskset = loaders.load_taskset(loaders.taskset_config_type(name)(id=name, **options))
        if count is None and not taskset.bounded:
            count = 1000
        self.tasks = list(itertools.islice(taskset, count))
        if not 0 <= held_out < max(1, len(self.tasks)):
            raise ValueError(f"test_tasks is {held_out}, of {len(self.tasks)} tasks")
        self.sizes = {"train": len(self.tasks) - held_out, "test": held_out}
        self.numbers = itertools.count()
        sys.modules.setdefault(_HARNESS, sys.modules[__name__])

    def task(self, split: str, index: int) -> dict[str, Any]:
        """A task as strop shows it."""
        data = self._task(split, index).data
        messages = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        if isinstance(data.prompt, str):
            messages.append({"role": "user", "content": data.prompt})
        else:
            messages += [message_to_wire(message) for message in data.prompt or ()]
        return {"id": f"{split}-{data.id or data.idx}", "messages": messages}

    def _task(self, split: str, index: int) -> Any:
        return self.tasks[index if split == "train" else self.sizes["train"] + index]

    async def attempt(self, split: str, index: int, model: dict[str, Any], seed: int) -> dict[str, Any]:
        """Let the loop act on a task, and its rewards score it."""
        variable = f"STROP_ATTEMPT_{next(self.numbers)}"  # its clients read keys from variables only
        os.environ[variable] = model["key"]
        try:
            agent = vf.Agent(
                vf.AgentConfig(
                    harness=vf.HarnessConfig(id=_HARNESS),
                    runtime=SubprocessConfig(),
                    model=model["name"],
                    client=vf.EvalClientConfig(base_url=f"{model['url']}/v1", api_key_var=variable),
                    sampling={"temperature": model["temperature"], "max_tokens": model["max_tokens"]},
                )
            )
            async with agent:
                trace = await agent.run(self._task(split, index))
        finally:
            del os.environ[variable]
        return _result(trace)


def _result(trace: Any) -> dict[str, Any]:
    """What a trace was scored. Raises Failure if anything broke on the way, the rewards included."""
    if trace.last_error is not None:
        error = trace.last_error
        kind = _KINDS.get(error.type) or ("scorer" if trace.timing.scoring.start else "environment")
        raise Failure(kind, f"{error.type}: {error.message}"[:500])
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        raise Failure("scorer", f"no score of {', '.join(missing) or 'any reward'}: {trace.stop_condition}")
    metrics = {name: value for name, value in trace.metrics.items() if isinstance(value, int | float)}
    metrics |= {f"reward_{name}": reward.score for name, reward in trace.rewards.items()}
    full = sum(reward.weight for reward in trace.rewards.values() if reward.weight > 0)
    return {"reward": trace.reward, "metrics": _floats(metrics), "solved": trace.reward >= full - 1e-6}


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
