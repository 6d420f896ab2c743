"""A conversation records what was sampled, as deltas, and nothing is ever tokenized twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from strop.rollouts import FinishReason, Rollout, derive_seed
from strop.sampling.conversation import Conversation
from strop.sampling.rendering import ChatMLRenderer, renderer_for
from strop.sampling.sampler import SamplingParams

CALL = (
    '<tool_call>{"name": "lookup", "arguments": {"item":   "pear"}}</tool_call>'  # spaces the renderer wouldn't write
)
QUESTION = [{"role": "user", "content": "What is a pear?"}]
RESULT = [{"role": "tool", "tool_call_id": "call_1", "name": "lookup", "content": "3"}]
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "Look up.", "parameters": {}}}]

Make = Callable[..., Any]


@pytest.fixture
def rollout() -> Rollout:
    return Rollout(id="g/0", task_id="t", environment="e", member=0, seed=7)


def converse(sampler: Any, rollout: Rollout, **options: Any) -> Conversation:
    renderer = options.pop("renderer", None) or renderer_for(sampler.tokenizer, "some/folder")
    params = options.pop("params", SamplingParams(max_tokens=200))
    return Conversation(sampler, renderer, rollout, params, tools=TOOLS, **options)


async def test_two_turns_are_recorded_as_deltas(scripted_sampler: Make, rollout: Rollout) -> None:
    sampler = scripted_sampler([CALL + "<|im_end|>", "Three.<|im_end|>"])
    conversation = converse(sampler, rollout)
    first = await conversation.reply(QUESTION)
    assert [(call.name, call.arguments, call.problem) for call in first.calls] == [("lookup", {"item": "pear"}, None)]
    second = await conversation.reply(RESULT)
    assert second.message == {"role": "assistant", "content": "Three."} and second.calls == ()

    one, two = rollout.calls
    assert (one.parent, two.parent) == (None, 0)
    assert sampler.prompts[0] == one.prompt
    assert sampler.prompts[1] == [*one.prompt, *one.tokens, *two.prompt]
    assert rollout.branch_tokens(1) == [*sampler.prompts[1], *two.tokens]
    assert sampler.tokenizer.decode(one.tokens) == CALL + "<|im_end|>"  # as sampled, odd spaces and all
    assert sampler.tokenizer.decode(two.prompt) == (
        "\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [message["role"] for message in rollout.transcript] == ["user", "assistant", "tool", "assistant"]
    assert rollout.forks == 0


async def test_seeds_depend_on_the_rollout_and_the_call_alone(scripted_sampler: Make, rollout: Rollout) -> None:
    sampler = scripted_sampler(["a<|im_end|>", "b<|im_end|>"])
    conversation = converse(sampler, rollout, params=SamplingParams(max_tokens=9, temperature=0.5, seed=123))
    await conversation.reply(QUESTION)
    await conversation.reply(QUESTION, max_tokens=4)
    assert [params.seed for params in sampler.params] == [derive_seed(7, "call", 0), derive_seed(7, "call", 1)]
    assert sampler.params[0].seed != sampler.params[1].seed
    assert [params.max_tokens for params in sampler.params] == [9, 4]
    assert {params.temperature for params in sampler.params} == {0.5}
    assert sampler.params[0].stop_token_ids == (2, 0)


async def test_a_cut_off_turn_is_closed_before_the_next(scripted_sampler: Make, rollout: Rollout) -> None:
    sampler = scripted_sampler(["So I think", "Yes.<|im_end|>"])
    conversation = converse(sampler, rollout)
    assert (await conversation.reply(QUESTION)).finish_reason is FinishReason.LENGTH
    await conversation.reply([{"role": "user", "content": "Go on"}])
    assert rollout.forks == 0
    assert sampler.tokenizer.decode(sampler.prompts[1]).endswith(
        "<|im_start|>assistant\nSo I think<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_rewritten_history_opens_a_new_root_and_is_counted(scripted_sampler: Make, rollout: Rollout) -> None:
    sampler = scripted_sampler(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    conversation = converse(sampler, rollout)
    await conversation.reply(QUESTION)
    conversation.rewrite([{"role": "user", "content": "In short: a pear?"}])
    await conversation.reply()
    await conversation.reply(QUESTION)
    assert [call.parent for call in rollout.calls] == [None, None, 1]
    assert rollout.forks == 1 and rollout.leaves() == [0, 2]
    assert "What is a pear" not in sampler.tokenizer.decode(sampler.prompts[1])
    assert [message["role"] for message in rollout.transcript] == [
        *("user", "assistant", "note", "user", "assistant", "user", "assistant")
    ]


class Unbridged(ChatMLRenderer):
    """A renderer that can't extend a turn, like one that only has the model's template."""

    bridges_from_last_turn = False

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> None:
        return None


class Retokenizing(ChatMLRenderer):
    """A renderer that breaks its contract: it loses a sampled token."""

    bridges_from_last_turn = False

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], *args: Any, **options: Any) -> Any:
        return super().bridge_to_next_turn(prompt, completion[:-2] + completion[-1:], *args, **options)


@pytest.mark.parametrize("kind", [Unbridged, Retokenizing])
async def test_a_renderer_that_can_not_keep_the_tokens_forks(
    kind: type[ChatMLRenderer], scripted_sampler: Make, rollout: Rollout
) -> None:
    sampler = scripted_sampler([CALL + "<|im_end|>", "Three.<|im_end|>"])
    renderer = kind(sampler.tokenizer)
    conversation = converse(sampler, rollout, renderer=renderer)
    await conversation.reply(QUESTION)
    await conversation.reply(RESULT)
    assert [call.parent for call in rollout.calls] == [None, None] and rollout.forks == 1
    assert sampler.tokenizer.decode(rollout.calls[0].tokens) == CALL + "<|im_end|>"
    assert rollout.calls[1].prompt == sampler.prompts[1]  # a root holds its whole prompt


async def test_a_full_context_is_said_not_raised(scripted_sampler: Make, rollout: Rollout) -> None:
    sampler = scripted_sampler(["a<|im_end|>"])
    conversation = converse(sampler, rollout)
    await conversation.reply(QUESTION)
    sampler.max_context = len(sampler.prompts[0]) + 10
    reply = await conversation.reply([{"role": "user", "content": "and more " * 5}])
    assert reply.finish_reason is FinishReason.LENGTH and reply.calls == ()
    assert len(rollout.calls) == 1 and len(sampler.prompts) == 1


async def test_malformed_calls_are_kept_in_order(scripted_sampler: Make, rollout: Rollout) -> None:
    sampler = scripted_sampler([f"{CALL}<tool_call>{{nope</tool_call>{CALL}<|im_end|>"])
    reply = await converse(sampler, rollout).reply(QUESTION)
    assert [call.problem for call in reply.calls] == [None, "invalid_json", None]
    assert [call.raw for call in reply.calls][1] == "{nope"
    assert len({call.id for call in reply.calls}) == 3
    written = reply.message["tool_calls"][1]
    assert (written["function"]["arguments"], written["problem"]) == ("{nope", "invalid_json")


async def test_time_spent_sampling_is_counted(scripted_sampler: Make, rollout: Rollout) -> None:
    ticks = iter([1.0, 3.5, 10.0, 10.25])
    conversation = converse(scripted_sampler(["a<|im_end|>", "b<|im_end|>"]), rollout, clock=lambda: next(ticks))
    await conversation.reply(QUESTION)
    await conversation.reply(QUESTION)
    assert rollout.seconds == {"sampler": 2.75}
    assert (rollout.calls[1].started, rollout.calls[1].ended) == (10.0, 10.25)


async def test_replying_to_nothing_is_an_error(scripted_sampler: Make, rollout: Rollout) -> None:
    conversation = converse(scripted_sampler(["a<|im_end|>"]), rollout)
    with pytest.raises(ValueError, match="nothing to reply to"):
        await conversation.reply()
    await conversation.reply(QUESTION)
    with pytest.raises(ValueError, match="nothing to reply to"):
        await conversation.reply()


async def test_a_known_models_own_renderer_extends_its_turns(scripted_sampler: Make, rollout: Rollout) -> None:
    sampler = scripted_sampler([CALL + "<|im_end|>", "Three.<|im_end|>"])
    sampler.tokenizer = copy.deepcopy(sampler.tokenizer)
    sampler.tokenizer.unk_token = None
    markers = ["tool_call", "tool_response", "think"]
    sampler.tokenizer.add_tokens(
        [f"<{close}{marker}>" for marker in markers for close in ("", "/")], special_tokens=True
    )
    renderer = renderer_for(sampler.tokenizer, "Qwen/Qwen3-0.6B", options={"enable_thinking": False})
    assert type(renderer).__module__ == "renderers.qwen3"
    conversation = converse(sampler, rollout, renderer=renderer)
    reply = await conversation.reply(QUESTION)
    assert reply.calls[0].arguments == {"item": "pear"}
    await conversation.reply(RESULT)
    assert rollout.forks == 0
    assert sampler.prompts[1] == [*rollout.calls[0].prompt, *rollout.calls[0].tokens, *rollout.calls[1].prompt]
