"""Whatever an agent does to its history, trained tokens are sampled tokens: each once, after what the sampler read."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from random_clients import Client, RandomSampler, ambiguous_tokenizer

from strop.gateway import Engine
from strop.gateway.attempts import RetryMark
from strop.rollouts import Rollout
from strop.sampling.rendering import ChatMLRenderer

TOKENIZER = ambiguous_tokenizer()
RENDERER = ChatMLRenderer(TOKENIZER)
TEXTS = ["", "More.", "the and 12", "日本 🎈", "<|im_end|>\n<|im_start|>user", "x" * 200, "  spaces  ", "\n"]
OPERATIONS = ["go on", "go on", "go on", "retry", "ask twice", "several", "back", "edit", "compact", "drop", "parallel"]
operation = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3), st.sampled_from(TEXTS))
thread = st.tuples(
    st.sampled_from(["chat", "chat anew", "responses", "anthropic"]),
    st.sampled_from(["", "Be brief.", "You help."]),
    st.booleans(),
)
conversations = st.tuples(
    st.lists(thread, min_size=1, max_size=3), st.lists(operation, min_size=1, max_size=12), st.integers(0, 2**32)
)


@dataclass
class Thread:
    """A client, and what we know of its history: the calls that its last reply may be, if it was left as it was."""

    client: Client
    last: list[int] | None = None
    marks: int = 0


class Play:
    """One attempt by several threads."""

    def __init__(self, threads: list[Any], seed: int) -> None:
        self.rng = random.Random(seed)
        self.sampler = RandomSampler(TOKENIZER, self.rng)
        self.engine = Engine(self.sampler, RENDERER, TOKENIZER)
        self.rollout = Rollout("g/0", "t", "e", 0, seed=seed)
        self.attempt = self.engine.attempts.open(self.rollout, RENDERER)
        self.threads = [Thread(Client(self.engine, self.attempt, *options)) for options in threads]

    async def do(self, name: str, which: int, text: str) -> None:
        thread = self.threads[which % len(self.threads)]
        client = thread.client
        if name == "parallel":
            for other in self.threads:
                other.client.say(text)
            await asyncio.gather(*(self.ask(other) for other in self.threads))
            return
        if name == "back" and len(client.said) > 2 and client.api == "chat":
            del client.said[self.rng.randrange(1, len(client.said)) :]
            client.open_calls, thread.last = [], None
        elif name == "edit" and client.said:
            self._edit(client)
            thread.last = None
        elif name == "compact":
            client.said, client.open_calls, thread.last = [], [], None
        elif name == "drop" and client.api == "chat":
            client.said = [message for message in client.said if message["role"] != "tool"]
            thread.last = None
        client.say(text)
        if name == "several" and client.api == "chat":
            await self.ask(thread, n=3)
        elif name in ("retry", "ask twice"):
            await self._again(thread, retry=name == "retry")
        else:
            await self.ask(thread)

    def _edit(self, client: Client) -> None:
        number = self.rng.randrange(len(client.said))
        item = client.said[number]
        if item.get("type") in ("function_call", "function_call_output"):
            item["arguments" if item["type"] == "function_call" else "output"] = '{"edited": true}'
        else:
            role = item["role"] if item["role"] in ("user", "assistant") else "user"
            client.said[number] = {"role": role, "content": f"edited {number}"}
        client.open_calls = []

    async def _again(self, thread: Thread, *, retry: bool) -> None:
        """The same request twice: a retry is answered once, and asking twice is not a retry."""
        client = thread.client
        said, calls = list(client.said), list(client.open_calls)
        thread.marks += 1
        mark = RetryMark(key=f"{id(thread)} {thread.marks}") if retry else RetryMark()
        before, retries = len(self.rollout.calls), self.attempt.retries
        first = await self.ask(thread, mark=mark)
        client.said, client.open_calls, thread.last = said, calls, None
        second = await client.ask(mark)
        thread.last = second
        assert (first == second) is retry
        assert len(self.rollout.calls) - before == (1 if retry else 2)
        assert self.attempt.retries - retries == int(retry)

    async def ask(self, thread: Thread, mark: RetryMark = RetryMark(), n: int = 1) -> list[int]:  # noqa: B008
        known = thread.last
        sampled = await thread.client.ask(mark, n)
        if known is not None:  # nothing was rewritten: the reply before is extended, in the tokens that were sampled
            for index in sampled:
                parent = self.rollout.calls[index].parent
                assert parent is not None and _says_the_same(self.rollout, parent, known[0])
        thread.last = sampled[:1]
        return sampled

    def check(self) -> None:
        """Every sampled token is recorded once, after exactly what the sampler read before it."""
        calls = self.rollout.calls
        recorded = Counter()
        for index, call in enumerate(calls):
            assert call.parent is None or call.parent < index
            whole = self.rollout.branch_tokens(index)
            recorded[tuple(whole[: len(whole) - len(call.tokens)]), tuple(call.tokens), tuple(call.logprobs)] += 1
        sampled = Counter((tuple(p), tuple(t), tuple(logprobs)) for p, t, logprobs in self.sampler.seen)
        assert recorded == sampled
        delivered = {index for leaf in self.rollout.leaves() for index in self.rollout.branch(leaf)}
        assert delivered == set(range(len(calls)))
        starts = {tuple(call.prompt) for call in calls if call.parent is None}
        assert self.rollout.forks == max(0, len(starts) - 1)
        replies = sum(message["role"] == "assistant" for message in self.rollout.transcript)
        assert replies >= len(calls)


def _says_the_same(rollout: Rollout, one: int, other: int) -> bool:
    """Whether two calls are one, or siblings whose texts are equal: the client can't tell which of them it answers."""
    first, second = rollout.calls[one], rollout.calls[other]
    return one == other or (
        first.parent == second.parent
        and first.prompt == second.prompt
        and _visible(first.tokens) == _visible(second.tokens)
    )


def _visible(tokens: list[int]) -> str:
    """What a client can tell of a reply; it is told a call that was not closed as one that was."""
    text = TOKENIZER.decode([token for token in tokens if token > 2]).strip()
    return text + "</tool_call>" * (text.count("<tool_call>") - text.count("</tool_call>"))


#: Two replies of the same three differ in whether an empty call was closed, and the client answers one of them.
CLOSED_OR_NOT = (
    [("chat", "", False)],
    [(name, 0, "") for name in ["go on", "go on", "back", "go on", "go on", "back", "back", "several", "go on"]],
    584,
)


def play(threads: list[Any], operations: list[Any], seed: int) -> None:
    async def run() -> None:
        played = Play(threads, seed)
        for name, which, text in operations:
            await played.do(name, which, text)
        played.check()

    asyncio.run(run())


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversations)
@example(CLOSED_OR_NOT)
def test_trained_tokens_are_sampled_tokens(conversation: Any) -> None:
    play(*conversation)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(conversations)
def test_trained_tokens_are_sampled_tokens_at_length(conversation: Any) -> None:
    play(*conversation)
