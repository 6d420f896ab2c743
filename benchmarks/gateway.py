"""What the gateway costs with a model that answers at once: everything that is left is HTTP, matching and recording.

Two kinds of rollout, each with its attempt opened, frozen and closed: two calls with a tool result between them, and 21
calls whose history grows to 15,000 tokens. They run over loopback (one connection a rollout; the client is a bare one
of this file, and shares the process, so that its time is counted too), and in process. Figures are CPU milliseconds of
the whole process for a rollout, median over rounds that take turns. All texts are new in every rollout.

Then thousands of streams at once from another process, over a model that takes seconds: calls lost, the longest time
that the server's event loop stood still while the clients' process ran (and the longest that it worked meanwhile: the
rest is other processes'), and resident memory from the second round to the last.

    python benchmarks/gateway.py --tokenizer FOLDER [--rounds 5] [--rollouts 200] [--streams 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from statistics import median
from typing import Any

import orjson
import psutil

from strop.gateway import Attempt, Engine, Gateway, running
from strop.gateway.attempts import NEW
from strop.gateway.dialects import chat
from strop.gateway.server import unhurried_collection
from strop.rollouts import FinishReason, Rollout
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import Sample, SamplingParams

WORDS = ["lamp", "costs", "more", "than", "a", "chair", "but", "less", "this", "table", "and", "nobody", "knows", "why"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look an item up.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]
PARAMS = SamplingParams(max_tokens=256)
Say = Callable[[Attempt, dict[str, Any]], Awaitable[dict[str, Any]]]


class InstantSampler:
    """Answers at once: a tool call, or an answer if the prompt ends with a last tool result."""

    version, max_context = 0, 65_536

    def __init__(self, tokenizer: Any, seconds: float = 0.0) -> None:
        call = '<tool_call>{"name": "lookup", "arguments": {"item": "lamp"}}</tool_call><|im_end|>'
        self.call, self.answer, self.last = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (
                call,
                "It is 85 dollars.<|im_end|>",
                "that is all</tool_response><|im_end|>\n<|im_start|>assistant\n",
            )
        )
        self.seconds = seconds

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        await asyncio.sleep(self.seconds * random.random() if self.seconds else 0)
        last = list(prompt[-len(self.last) :]) == self.last
        tokens = list(self.answer if last else self.call)
        return Sample(tokens, [-0.5] * len(tokens), [0] * len(tokens), FinishReason.STOP)

    async def close(self) -> None:
        return None


def words(count: int, rng: random.Random) -> str:
    """A text of about so many tokens that was never there before."""
    return " ".join([str(rng.randrange(10**6)), *rng.choices(WORDS, k=max(0, count - 4))])


async def rollout(engine: Engine, say: Say, texts: list[str], number: int) -> Rollout:
    """One attempt of an agent that sends its whole history with every call: a question, then a tool result a call."""
    calls = len(texts)
    attempt = engine.attempts.open(Rollout(f"g/{number}", "t", "e", 0, seed=number), engine.renderer, params=PARAMS)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Use the tools."}]
    messages.append({"role": "user", "content": texts[0]})
    for left in reversed(range(calls)):
        reply = await say(attempt, {"model": "tiny", "messages": messages, "tools": TOOLS})
        messages.append(reply)
        if left:
            text = texts[calls - left] + (" that is all" if left == 1 else "")
            messages.append({"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": text})
    recorded = attempt.freeze()
    engine.attempts.close(attempt)
    assert len(recorded.calls) == calls and recorded.forks == 0 and recorded.leaves() == [calls - 1]
    return recorded


class Connection:
    """A client with one connection and nothing around it."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def post(self, path: str, key: str, body: dict[str, Any]) -> bytes:
        """The body of a response that went well."""
        content = orjson.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        self.writer.write(head.encode() + content)
        answered = await self.reader.readuntil(b"\r\n\r\n")
        sized = answered.lower().split(b"content-length: ", 1)
        if len(sized) == 2:
            received = await self.reader.readexactly(int(sized[1].split(b"\r\n", 1)[0]))
        else:
            received = b"".join([chunk async for chunk in self._chunks()])
        if b" 200 " not in answered.split(b"\r\n", 1)[0]:
            raise RuntimeError(received.decode())
        return received

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The chunks of a streamed body."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)


async def measure(batch: Callable[[], Awaitable[None]], rollouts: int) -> float:
    """CPU milliseconds of this process for a rollout."""
    gc.collect()
    before = time.process_time()
    await batch()
    return (time.process_time() - before) * 1000 / rollouts


async def cost(args: argparse.Namespace, tokenizer: Any) -> dict[str, float]:
    """The cost of rollouts, over HTTP and in process."""
    engine = Engine(InstantSampler(tokenizer), renderer_for(tokenizer, args.tokenizer), tokenizer)
    gateway = Gateway(engine, "tiny")
    rng = random.Random(1)
    found: dict[str, list[float]] = {}
    number = 0
    tokens_read = 0

    async def in_process(attempt: Attempt, body: dict[str, Any]) -> dict[str, Any]:
        return (await engine.answer(chat.read(body, NEW), attempt))[0].message

    async with running(gateway) as url:
        host, port = url.removeprefix("http://").split(":")

        async def batch(told: list[list[str]], through_http: bool) -> None:
            nonlocal number, tokens_read
            for texts in told:
                number += 1
                if not through_http:
                    await rollout(engine, in_process, texts, number)
                    continue
                async with Connection(host, int(port)) as connection:

                    async def say(
                        attempt: Attempt, body: dict[str, Any], link: Connection = connection
                    ) -> dict[str, Any]:
                        answer = orjson.loads(await link.post("/v1/chat/completions", attempt.key, body))
                        message: dict[str, Any] = answer["choices"][0]["message"]
                        return message

                    done = await rollout(engine, say, texts, number)
                    tokens_read = max(tokens_read, len(done.branch_tokens(len(texts) - 1)))

        kinds = {
            "two_call_http_ms": (2, 40, args.rollouts, True),
            "two_call_in_process_ms": (2, 40, args.rollouts, False),
            "calls_21_http_ms": (21, args.result_tokens, max(1, args.rollouts // 10), True),
            "calls_21_in_process_ms": (21, args.result_tokens, max(1, args.rollouts // 10), False),
        }
        for round_number in range(args.rounds + 1):
            for kind, (calls, tokens, rollouts, http) in kinds.items():
                told = [[words(tokens, rng) for _ in range(calls)] for _ in range(rollouts)]
                milliseconds = await measure(lambda: batch(told, http), rollouts)  # noqa: B023
                if round_number:  # the first one warms up
                    found.setdefault(kind, []).append(milliseconds)
    for kind, values in found.items():
        print(f"{kind:<26}{median(values):8.2f}   from {min(values):.2f} to {max(values):.2f}")
    print(f"{'tokens of 21 calls':<26}{tokens_read:8d}")
    return {kind: round(median(values), 3) for kind, values in found.items()} | {"calls_21_tokens": tokens_read}


async def streams(args: argparse.Namespace, tokenizer: Any) -> dict[str, float]:
    """Thousands of streams at once."""
    sampler = InstantSampler(tokenizer, seconds=args.seconds)
    engine = Engine(sampler, renderer_for(tokenizer, args.tokenizer), tokenizer)
    stalls, busy, at_rest = [0.0], [0.0], [0.0]
    talks = False
    process = psutil.Process()

    async def watch() -> None:
        while True:
            before, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.005)
            stood = time.perf_counter() - before - 0.005
            if talks:
                stalls.append(stood)
                busy.append(time.thread_time() - worked)
            else:  # between the rounds: attempts are opened and closed, garbage is collected
                at_rest.append(stood)

    lost, memory, most = 0, [], 0
    idle = lambda: not engine.in_flight  # noqa: E731
    async with unhurried_collection(idle), running(Gateway(engine, "tiny")) as url:  # as `strop serve` does
        watching = asyncio.create_task(watch())
        for round_number in range(args.stream_rounds):
            keys = []
            for number in range(args.streams):
                opened = engine.attempts.open(
                    Rollout(f"{round_number}/{number}", "t", "e", 0, seed=number), engine.renderer, params=PARAMS
                )
                keys.append(opened.key)
                if number % 100 == 99:
                    await asyncio.sleep(0)
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--client", url), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            talks = True
            talking = asyncio.create_task(client.communicate("\n".join(keys).encode()))
            while not talking.done():
                most = max(most, engine.in_flight)
                await asyncio.sleep(0.02)
            talks = False
            ended = json.loads(talking.result()[0])
            recorded = 0
            for attempt in engine.attempts:
                recorded += len(attempt.rollout.calls)
                engine.attempts.close(attempt)
                await asyncio.sleep(0)
            lost += 2 * args.streams - min(recorded, ended["calls"])
            memory.append(process.memory_info().rss / 2**20)
            print(f"round {round_number}: {ended['calls']} calls answered, {recorded} recorded, {memory[-1]:.0f} MiB")
        watching.cancel()
    print(f"{'most in flight':<26}{most:8d}")
    print(
        f"{'longest stall':<26}{max(stalls) * 1000:8.1f} ms, of which the process worked {max(busy) * 1000:.1f} ms at most"
    )
    print(f"{'longest between rounds':<26}{max(at_rest) * 1000:8.1f} ms")
    return {
        "streams": args.streams,
        "streams_in_flight": most,
        "lost_calls": lost,
        "max_loop_stall_ms": round(max(stalls) * 1000, 1),
        "max_loop_busy_ms": round(max(busy) * 1000, 1),
        "max_stall_between_rounds_ms": round(max(at_rest) * 1000, 1),
        "memory_growth_mib": round(memory[-1] - memory[1], 1) if len(memory) > 2 else 0.0,
    }


async def stream_client(url: str) -> None:
    """The other process: a stream for each key, two calls each."""
    host, port = url.removeprefix("http://").split(":")
    ended = 0

    async def one(key: str) -> None:
        nonlocal ended
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Look {key[-6:]} up."}]
        async with Connection(host, int(port)) as connection:
            for _ in range(2):
                body = {"model": "tiny", "messages": messages, "tools": TOOLS, "stream": True}
                received = await connection.post("/v1/chat/completions", key, body)
                chunks = [orjson.loads(part[6:]) for part in received.split(b"\n\n")[:-2]]
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
                calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
                assert received.endswith(b"data: [DONE]\n\n")
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": "85"} for call in calls]
                ended += 1

    await asyncio.gather(*(one(key) for key in sys.stdin.read().split()), return_exceptions=True)
    print(json.dumps({"calls": ended}))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="smollm2", help="folder of a ChatML model, or a start model's name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--result-tokens", type=int, default=690, help="of one tool result in the long rollout")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--stream-rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0, help="longest time that the slow model takes")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.client:
        return await stream_client(args.client)
    from transformers import AutoTokenizer

    from strop.models.load import resolve_model

    args.tokenizer = resolve_model(args.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    found = await cost(args, tokenizer)
    found |= await streams(args, tokenizer)
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
