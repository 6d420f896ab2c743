"""The anthropic SDK as its users use it: a tool loop, a stream, and counting tokens."""

import os

from anthropic import Anthropic

client = Anthropic()
model = os.environ["STROP_MODEL"]
tool = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}
messages = [{"role": "user", "content": "What is 20 + 22?"}]
for _ in range(3):
    counted = client.messages.count_tokens(model=model, system="Be brief.", tools=[tool], messages=messages)
    reply = client.messages.create(model=model, max_tokens=64, system="Be brief.", tools=[tool], messages=messages)
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens >= 1 and counted.input_tokens > 0
    messages.append({"role": "assistant", "content": reply.content})
    if reply.stop_reason != "tool_use":
        break
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": str(sum(value for value in block.input.values() if isinstance(value, int | float))),
        }
        for block in reply.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})

messages.append({"role": "user", "content": [{"type": "text", "text": "Say it again, please."}]})
with client.messages.stream(model=model, max_tokens=64, system="Be brief.", tools=[tool], messages=messages) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == "".join(block.text for block in final.content if block.type == "text")
print(text or "(nothing)")
