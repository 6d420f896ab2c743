"""The openai SDK as its users use it: a tool loop, a stream, several replies, responses with a chain, completions."""

import json
import os

from openai import OpenAI

client = OpenAI()
model = os.environ["STROP_MODEL"]
tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
messages = [{"role": "user", "content": "What is 20 + 22?"}]
for _ in range(3):
    reply = client.chat.completions.create(model=model, messages=messages, tools=[tool], logprobs=True).choices[0]
    assert len(reply.logprobs.content) > 0
    messages.append(reply.message)
    if not reply.message.tool_calls:
        break
    for call in reply.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        total = sum(value for value in arguments.values() if isinstance(value, int | float))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})

messages.append({"role": "user", "content": "Say it again, please."})
stream = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], stream=True, stream_options={"include_usage": True}
)
text, usage = "", None
for chunk in stream:
    usage = chunk.usage or usage
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
assert usage.completion_tokens > 0

several = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], n=3, stop=["\n\n"])
assert [choice.index for choice in several.choices] == [0, 1, 2]

first = client.responses.create(model=model, input="What is 1 + 1?", instructions="Be brief.")
second = client.responses.create(
    model=model, input="And 2 + 2?", previous_response_id=first.id, instructions="Be brief."
)
with client.responses.stream(model=model, input=[{"role": "user", "content": "Count to three."}]) as events:
    kinds = [event.type for event in events]
    final = events.get_final_response()
assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
assert final.output_text == "".join(part.text for item in final.output for part in item.content)

client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, logprobs=1)
assert model in [card.id for card in client.models.list()]
print(second.output_text or "(nothing)")
