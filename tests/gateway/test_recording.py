"""What an agent does over HTTP is recorded token by token: extended, forked and counted, never tokenized again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from strop.rollouts import FinishReason, ModelCall
from strop.sampling.sampler import SamplingParams

Make = Callable[..., Any]
END = "<|im_end|>"
CALL = '<tool_call>{"name": "lookup", "arguments": {"item":   "pear"}}</tool_call>'  # spaces nobody would write again
ASK = [{"role": "user", "content": "What is a pear?"}]
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "Look up.", "parameters": {}}}]


def result(message: dict[str, Any], content: str = "3") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": content}


async def until(holds: Callable[[], Any]) -> None:
    """Let the others run until something holds."""
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never held")


def check(place: Any, attempt: Any) -> None:
    """Every branch is what the sampler read and said, in the order in which it did."""
    seen = {tuple(prompt) for prompt in place.sampler.prompts}
    for index, call in enumerate(attempt.rollout.calls):
        whole = attempt.rollout.branch_tokens(index)
        assert tuple(whole[: len(whole) - len(call.tokens)]) in seen


async def test_a_tool_loop_extends_what_was_sampled(make_place: Make) -> None:
    place = make_place([CALL + END, "Three." + END])
    attempt = place.open()
    first = await place.chat(ASK, tools=TOOLS)
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["tool_calls"][0]["function"] == {"name": "lookup", "arguments": '{"item": "pear"}'}
    second = await place.chat([*ASK, first["message"], result(first["message"])], tools=TOOLS)
    assert (second["message"]["content"], second["finish_reason"]) == ("Three.", "stop")

    one, two = attempt.rollout.calls
    assert (one.parent, two.parent, attempt.rollout.forks) == (None, 0, 0)
    assert place.sampler.tokenizer.decode(one.tokens) == CALL + END
    assert place.sampler.prompts[1] == [*one.prompt, *one.tokens, *two.prompt]
    assert place.sampler.tokenizer.decode(two.prompt) == (
        "\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [message["role"] for message in attempt.rollout.transcript] == ["user", "assistant", "tool", "assistant"]


async def test_a_client_that_writes_the_call_anew_still_extends(make_place: Make) -> None:
    place = make_place(["  Let me see. " + CALL + END, "Three." + END])
    attempt = place.open()
    message = (await place.chat(ASK, tools=TOOLS))["message"]
    message["tool_calls"][0]["function"]["arguments"] = '{"item":"pear"}'
    message = {"role": "assistant", "content": message["content"].strip(), "tool_calls": message["tool_calls"]}
    await place.chat(
        [{"role": "user", "content": [{"type": "text", "text": "What is a pear?"}]}, message, result(message)],
        tools=TOOLS,
    )
    assert [call.parent for call in attempt.rollout.calls] == [None, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda said: [{"role": "user", "content": "What is a plum?"}, *said[1:]],  # the question
        lambda said: [said[0], {"role": "assistant", "content": "Something else."}, *said[2:]],  # the reply
        lambda said: [{"role": "system", "content": "Be brief."}, *said],  # a system message
        lambda said: [{"role": "user", "content": f"Summary of {len(said)} messages. Go on."}],  # compaction
    ],
)
async def test_rewritten_history_opens_a_counted_root(
    make_place: Make, change: Callable[[list[Any]], list[Any]]
) -> None:
    place = make_place(["A fruit." + END, "Yes." + END])
    attempt = place.open()
    message = (await place.chat(ASK))["message"]
    await place.chat(change([*ASK, message, {"role": "user", "content": "Sure?"}]))
    assert [call.parent for call in attempt.rollout.calls] == [None, None]
    assert attempt.rollout.forks == 1 and attempt.rollout.leaves() == [0, 1]
    assert attempt.rollout.calls[1].prompt == place.sampler.prompts[1]  # a root holds its whole prompt
    assert any(message["role"] == "note" for message in attempt.rollout.transcript)
    check(place, attempt)


async def test_other_tools_are_another_root(make_place: Make) -> None:
    place = make_place(["A fruit." + END, "Yes." + END])
    attempt = place.open()
    message = (await place.chat(ASK))["message"]
    await place.chat([*ASK, message, {"role": "user", "content": "Sure?"}], tools=TOOLS)
    assert [call.parent for call in attempt.rollout.calls] == [None, None] and attempt.rollout.forks == 1


async def test_going_back_to_an_earlier_turn_branches_there(make_place: Make) -> None:
    place = make_place([f"{word}{END}" for word in ("one", "two", "three", "four")])
    attempt = place.open()
    said = list(ASK)
    for more in ("And?", "And then?"):
        said += [(await place.chat(said))["message"], {"role": "user", "content": more}]
    await place.chat(said)
    await place.chat([*said[:2], {"role": "user", "content": "Another way?"}])
    assert [call.parent for call in attempt.rollout.calls] == [None, 0, 1, 0]
    assert attempt.rollout.forks == 0 and attempt.rollout.leaves() == [2, 3]
    check(place, attempt)


async def test_sub_agents_in_parallel_keep_their_own_branches(make_place: Make) -> None:
    place = make_place(lambda number, prompt: f"reply {number}" + END)
    attempt = place.open()

    async def agent(name: str) -> None:
        said: list[Any] = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": "Go."}]
        for _ in range(4):
            said += [(await place.chat(said))["message"], {"role": "user", "content": "More."}]

    await asyncio.gather(*(agent(name) for name in ("Ann", "Bob", "Cem")))
    rollout = attempt.rollout
    assert len(rollout.calls) == 12 and len(rollout.leaves()) == 3 and rollout.forks == 2
    assert sorted(len(rollout.branch(leaf)) for leaf in rollout.leaves()) == [4, 4, 4]
    check(place, attempt)


async def test_several_replies_are_siblings_and_each_can_go_on(make_place: Make) -> None:
    place = make_place(lambda number, prompt: f"reply {number}" + END)
    attempt = place.open()
    body = {"model": "tiny", "messages": ASK, "n": 3}
    choices = (await place.post("/v1/chat/completions", body))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({params.seed for params in place.sampler.params}) == 3
    await place.chat([*ASK, choices[1]["message"], {"role": "user", "content": "Go on."}])
    assert [call.parent for call in attempt.rollout.calls] == [None, None, None, 1] and attempt.rollout.forks == 0


async def test_dropped_reasoning_is_a_rewrite_unless_the_client_can_not_keep_it(make_place: Make) -> None:
    for setting, parents in (("fork", [None, None]), ("keep", [None, 0])):
        place = make_place(["A fruit." + END, "Yes." + END])
        parse = place.engine.renderer.parse_response

        def with_reasoning(*arguments: Any, parse: Any = parse, **options: Any) -> Any:
            parsed = parse(*arguments, **options)
            parsed.reasoning_content = "Let me think."
            return parsed

        place.engine.renderer.parse_response = with_reasoning
        attempt = place.open(dropped_reasoning=setting)
        message = (await place.chat(ASK))["message"]
        assert message.pop("reasoning_content") == "Let me think."
        await place.chat([*ASK, message, {"role": "user", "content": "Sure?"}])
        assert [call.parent for call in attempt.rollout.calls] == parents


async def test_retries_are_recognised_and_asking_twice_is_not_one(make_place: Make) -> None:
    place = make_place(lambda number, prompt: f"reply {number}" + END)
    attempt = place.open()
    body = {"model": "tiny", "messages": ASK}
    first = await place.post("/v1/chat/completions", body, headers={"x-stainless-retry-count": "0"})
    again = await place.post("/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
    assert again["choices"] == first["choices"] and (len(attempt.rollout.calls), attempt.retries) == (1, 1)
    other = await place.post("/v1/chat/completions", body)
    assert other["choices"] != first["choices"] and (len(attempt.rollout.calls), attempt.retries) == (2, 1)
    keyed = [await place.post("/v1/chat/completions", body, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert keyed[0]["choices"] == keyed[1]["choices"] and (len(attempt.rollout.calls), attempt.retries) == (3, 2)
    colder = await place.post(
        "/v1/chat/completions", {**body, "max_tokens": 3}, headers={"x-stainless-retry-count": "1"}
    )
    assert colder["choices"][0]["finish_reason"] == "length" and attempt.retries == 2


async def test_a_retry_joins_the_call_that_is_still_in_flight(make_place: Make) -> None:
    place = make_place(lambda number, prompt: f"reply {number}" + END)
    attempt = place.open()
    await place.engine.pause()
    body = {"model": "tiny", "messages": ASK}
    calls = [
        asyncio.create_task(place.post("/v1/chat/completions", body, headers={"x-stainless-retry-count": str(count)}))
        for count in (0, 1)
    ]
    await until(lambda: attempt.retries == 1)
    place.engine.resume()
    first, again = await asyncio.gather(*calls)
    assert first["choices"] == again["choices"] and len(attempt.rollout.calls) == 1


async def test_freezing_ends_calls_in_flight_and_nothing_is_recorded_after(make_place: Make) -> None:
    place = make_place(lambda number, prompt: f"reply {number}" + END)
    attempt = place.open()
    await place.chat(ASK)
    await place.engine.pause()
    flying = asyncio.create_task(place.client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK}))
    await until(lambda: attempt._running)
    rollout = attempt.freeze()
    place.engine.resume()
    response = await flying
    assert response.status_code == 409 and response.headers["x-should-retry"] == "false"
    late = await place.client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK})
    assert late.status_code == 409 and late.json()["error"]["code"] == "attempt_over"
    assert len(rollout.calls) == 1 and len(place.sampler.prompts) == 1
    place.engine.attempts.close(attempt)
    gone = await place.client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK})
    assert gone.status_code == 401


async def test_an_attempts_own_parameters_win_over_its_agents(make_place: Make) -> None:
    place = make_place(lambda number, prompt: "a reply" + END)
    place.open(params=SamplingParams(max_tokens=50, temperature=0.7, stop=("X",)))
    await place.chat(ASK, temperature=0, top_p=0.5, seed=3, stop="Y", max_tokens=80)
    await place.chat(ASK, max_tokens=20)
    first, second = place.sampler.params
    assert (first.temperature, first.top_p, first.max_tokens, first.stop) == (0.7, 1.0, 50, ("X", "Y"))
    assert second.max_tokens == 20 and first.stop_token_ids == (2, 0)
    assert 3 not in (first.seed, second.seed) and first.seed != second.seed


async def test_seeds_do_not_depend_on_the_order_of_calls(make_place: Make) -> None:
    asked = [[{"role": "user", "content": f"Question {number}"}] for number in range(4)]
    seeds = []
    for order in (asked, asked[::-1]):
        place = make_place(lambda number, prompt: "a reply" + END)
        place.open(params=SamplingParams(max_tokens=50))
        for messages in order:
            await place.chat(messages)
        seeds.append({tuple(p): q.seed for p, q in zip(place.sampler.prompts, place.sampler.params, strict=True)})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 4


async def test_a_token_budget_is_never_exceeded(make_place: Make) -> None:
    place = make_place(lambda number, prompt: "0123456789" * 3 + END)
    attempt = place.open(token_budget=40)
    first = await place.chat(ASK)  # 31 tokens
    assert first["finish_reason"] == "stop"
    answers = await asyncio.gather(*(place.chat(ASK) for _ in range(1)))
    assert answers[0]["finish_reason"] == "length" and attempt.rollout.sampled_tokens == 40
    refused = await place.client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "token_budget_exceeded")


async def test_parallel_calls_share_a_budget(make_place: Make) -> None:
    place = make_place(lambda number, prompt: "0123456789" * 10 + END)
    attempt = place.open(token_budget=60)
    body = {"model": "tiny", "messages": ASK, "max_tokens": 25}
    responses = await asyncio.gather(*(place.client.post("/v1/chat/completions", json=body) for _ in range(6)))
    assert attempt.rollout.sampled_tokens <= 60
    assert [response.status_code for response in responses].count(200) == 3


async def test_a_prompt_of_tokens_extends_the_branch_that_it_begins_with(make_place: Make) -> None:
    place = make_place(["one" + END, "two" + END, "three" + END])
    attempt = place.open()
    start = place.sampler.tokenizer.encode("Once", add_special_tokens=False)
    body = {"model": "tiny", "return_token_ids": True, "stop_token_ids": [2], "max_tokens": 30}
    first = (await place.post("/v1/completions", {**body, "prompt": start}))["choices"][0]
    assert (first["text"], first["prompt_token_ids"], first["weight_versions"]) == ("one", start, [0] * 4)
    longer = [*start, *first["token_ids"], 40, 41]
    await place.post("/inference/v1/generate", {"token_ids": longer, "sampling_params": {"stop_token_ids": [2]}})
    await place.post("/v1/completions", {**body, "prompt": longer[1:]})
    assert [(call.parent, call.prompt) for call in attempt.rollout.calls] == [
        *((None, start), (0, [40, 41]), (None, longer[1:]))
    ]
    assert attempt.rollout.forks == 1


async def test_a_cut_off_reply_is_closed_and_a_stop_string_is_left_out(make_place: Make) -> None:
    place = make_place(["Thought: yes\nObservation:" + END, "So I th", "Yes." + END])
    attempt = place.open()
    first = await place.chat(ASK, stop=["Observation:"])
    assert (first["message"]["content"], first["finish_reason"], first["stop_reason"]) == (
        *("Thought: yes\n", "stop", "Observation:"),
    )
    said = [*ASK, first["message"], {"role": "user", "content": "It is sweet."}]
    second = await place.chat(said)
    assert second["finish_reason"] == "length"
    await place.chat([*said, second["message"], {"role": "user", "content": "Go on."}])
    assert [call.parent for call in attempt.rollout.calls] == [None, 0, 1]
    assert [call.finish_reason for call in attempt.rollout.calls] == [
        *(FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP)
    ]
    assert isinstance(attempt.rollout.calls[1], ModelCall) and place.sampler.tokenizer.decode(
        attempt.rollout.calls[2].prompt
    ).startswith(END + "\n<|im_start|>user\nGo on.")
    check(place, attempt)
