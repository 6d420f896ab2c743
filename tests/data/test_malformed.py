"""A hundred files with something wrong: each is refused by the row, the field and the words that lead to it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.config import DataSettings
from strop.data import RowRenderer, load_rows, usable_rows
from strop.errors import DataError
from strop.sampling.rendering import ChatMLRenderer

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "1"}

GOOD = {
    "messages": {"messages": [USER, SAID]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "alpaca": {"instruction": "Say hello", "output": "Hello"},
    "prompt_completion": {"prompt": "Hi", "completion": "Hello"},
    "text": {"text": "Hello there"},
    "pairs": {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
    "openai_pairs": {
        "input": {"messages": [USER]},
        "preferred_output": [SAID],
        "non_preferred_output": [{"role": "assistant", "content": "No"}],
    },
    "labelled": {"prompt": "Hi", "completion": "Hello", "label": True},
}


def without(row: dict, key: str) -> dict:
    return {name: value for name, value in row.items() if name != key}


def chat(*messages: object, **more: object) -> dict:
    return {"messages": list(messages), **more}


def call(**changed: object) -> dict:
    return {**CALLED, "tool_calls": [{**CALL, "function": {**CALL["function"], **changed}}]}


def spoken(*turns: object, **more: object) -> dict:
    return {"conversations": list(turns), **more}


HUMAN, GPT = GOOD["sharegpt"]["conversations"]
ASKED = GOOD["openai_pairs"]
LONG = "word " * 600

#: (format, the bad row, its field, words of the message); the row stands between good ones.
ROWS: list[tuple[str, object, str, str]] = [
    # OpenAI's messages
    ("messages", {}, "messages", "it is missing"),
    ("messages", {"messages": None}, "messages", "it is missing"),
    ("messages", {"messages": "Hi"}, "messages", "it is a string"),
    ("messages", {"messages": {"role": "user"}}, "messages", "it is an object"),
    ("messages", chat(), "messages", "it is empty"),
    ("messages", chat("Hi", SAID), "messages[0]", "it is a string"),
    ("messages", chat(USER, None), "messages[1]", "it is missing"),
    ("messages", chat({"content": "Hi"}, SAID), "messages[0].role", "it is missing"),
    ("messages", chat({**USER, "role": "human"}, SAID), "messages[0].role", 'there is no role "human"'),
    ("messages", chat({**USER, "role": 3}, SAID), "messages[0].role", "there is no role 3"),
    ("messages", chat({"role": "user"}, SAID), "messages[0].content", "it is missing"),
    ("messages", chat({**USER, "content": ""}, SAID), "messages[0].content", "it is empty"),
    ("messages", chat({**USER, "content": " \n"}, SAID), "messages[0].content", "it is empty"),
    ("messages", chat({**USER, "content": 5}, SAID), "messages[0].content", "it is a number"),
    ("messages", chat({**USER, "content": {"text": "Hi"}}, SAID), "messages[0].content", "it is an object"),
    ("messages", chat({**USER, "content": ["Hi"]}, SAID), "messages[0].content[0]", "it is a string"),
    ("messages", chat({**USER, "content": [{"type": "image_url"}]}, SAID), "messages[0].content[0].type", "image_url"),
    ("messages", chat({**USER, "content": [{"type": "text"}]}, SAID), "messages[0].content[0].text", "it is missing"),
    ("messages", chat(USER, {**SAID, "content": ""}), "messages[1].content", "it is empty"),
    ("messages", chat(USER, {"role": "assistant"}), "messages[1].content", "it is missing"),
    ("messages", chat(USER), "messages[0]", "the last message is of user"),
    ("messages", chat(USER, SAID, USER), "messages[2]", "the last message is of user"),
    ("messages", chat(USER, CALLED, RESULT), "messages[2]", "the last message is of tool"),
    ("messages", chat(USER, {**SAID, "weight": 0}), "messages", "every message of the assistant has weight 0"),
    ("messages", chat(USER, {**SAID, "weight": 2}), "messages[1].weight", "2 is no weight"),
    ("messages", chat(USER, {**SAID, "weight": 0.5}), "messages[1].weight", "0.5 is no weight"),
    ("messages", chat(USER, {**SAID, "weight": True}), "messages[1].weight", "true is no weight"),
    ("messages", chat(USER, {**SAID, "weight": "1"}), "messages[1].weight", '"1" is no weight'),
    ("messages", chat({**USER, "weight": 1}, SAID), "messages[0].weight", "a message of user has a weight"),
    ("messages", chat(USER, {**SAID, "function_call": {"name": "add"}}), "messages[1].function_call", "older form"),
    ("messages", chat({**USER, "tool_calls": [CALL]}, SAID), "messages[0].tool_calls", "a message of user calls tools"),
    ("messages", chat(USER, {**CALLED, "tool_calls": []}), "messages[1].tool_calls", "it is empty"),
    ("messages", chat(USER, {**CALLED, "tool_calls": CALL}), "messages[1].tool_calls", "it is an object"),
    ("messages", chat(USER, {**CALLED, "tool_calls": ["add"]}), "messages[1].tool_calls[0]", "it is a string"),
    ("messages", chat(USER, {**CALLED, "tool_calls": [{"type": "code"}]}), "messages[1].tool_calls[0].type", '"code"'),
    ("messages", chat(USER, {**CALLED, "tool_calls": [{}]}), "messages[1].tool_calls[0].function", "it is missing"),
    ("messages", chat(USER, call(name=None)), "messages[1].tool_calls[0].function.name", "it is missing"),
    ("messages", chat(USER, call(name="")), "messages[1].tool_calls[0].function.name", "it is empty"),
    ("messages", chat(USER, call(arguments="{a: 1}")), "messages[1].tool_calls[0].function.arguments", "not valid JSON"),
    ("messages", chat(USER, call(arguments="[1]")), "messages[1].tool_calls[0].function.arguments", "it is a list"),
    ("messages", chat(USER, call(arguments=7)), "messages[1].tool_calls[0].function.arguments", "it is a number"),
    ("messages", chat(USER, call(name="sub"), tools=[TOOL]), "messages[1].tool_calls[0].function.name", "'sub' is not"),
    ("messages", chat(USER, RESULT, SAID), "messages[1]", "nothing was called before it"),
    ("messages", chat(USER, CALLED, {**RESULT, "tool_call_id": "c9"}, SAID), "messages[2].tool_call_id", '"c9"'),
    ("messages", chat(USER, CALLED, {**RESULT, "content": None}, SAID), "messages[2].content", "it is missing"),
    ("messages", chat(USER, SAID, tools="[{"), "tools", "it is not valid JSON"),
    ("messages", chat(USER, SAID, tools={"name": "add"}), "tools", "it is an object"),
    ("messages", chat(USER, SAID, tools=["add"]), "tools[0]", "it is a string"),
    ("messages", chat(USER, SAID, tools=[{"type": "function", "function": {}}]), "tools[0].function.name", "missing"),
    ("messages", chat(USER, SAID, tools=[TOOL, TOOL]), "tools[1].function.name", "two tools are called 'add'"),
    ("messages", chat(USER, {**SAID, "reasoning_content": 4}), "messages[1].reasoning_content", "it is a number"),
    ("messages", chat({**USER, "content": LONG}, SAID), "", "more than max_tokens = 512"),
    ("messages", ["Hi", "Hello"], "", "it is a list"),
    ("messages", "Hi", "", "it is a string"),
    ("messages", None, "", "it is null"),
    ("messages", 17, "", "it is a single value"),
    # ShareGPT
    ("sharegpt", {}, "conversations", "it is missing"),
    ("sharegpt", spoken(), "conversations", "it is empty"),
    ("sharegpt", {"conversations": "Hi"}, "conversations", "it is a string"),
    ("sharegpt", spoken({"value": "Hi"}, GPT), "conversations[0].from", "it is missing"),
    ("sharegpt", spoken({"from": "alien", "value": "Hi"}, GPT), "conversations[0].from", '"alien"'),
    ("sharegpt", spoken({"from": "human"}, GPT), "conversations[0].value", "it is missing"),
    ("sharegpt", spoken({"from": "human", "value": ["Hi"]}, GPT), "conversations[0].value", "it is a list"),
    ("sharegpt", spoken({"from": "human", "value": ""}, GPT), "conversations[0].value", "it is empty"),
    ("sharegpt", spoken(HUMAN, {"from": "gpt", "value": ""}), "conversations[1].value", "it is empty"),
    ("sharegpt", spoken(HUMAN), "conversations[0]", "the last message is of user"),
    ("sharegpt", spoken(HUMAN, {"from": "function_call", "value": "add(1)"}), "conversations[1].value", "not valid JSON"),
    ("sharegpt", spoken(HUMAN, {"from": "observation", "value": "1"}, GPT), "conversations[1]", "nothing was called"),
    ("sharegpt", spoken(HUMAN, GPT, system=3), "system", "it is a number"),
    ("sharegpt", spoken(HUMAN, {**GPT, "weight": 3}), "conversations[1].weight", "3 is no weight"),
    ("sharegpt", spoken(HUMAN, GPT, tools="{"), "tools", "it is not valid JSON"),
    # Alpaca
    ("alpaca", without(GOOD["alpaca"], "output"), "output", "it is missing"),
    ("alpaca", {**GOOD["alpaca"], "instruction": ""}, "instruction", "it is empty"),
    ("alpaca", {**GOOD["alpaca"], "instruction": ["a"]}, "instruction", "it is a list"),
    ("alpaca", {**GOOD["alpaca"], "output": ""}, "output", "it is empty"),
    ("alpaca", {**GOOD["alpaca"], "input": 3}, "input", "it is a number"),
    ("alpaca", {**GOOD["alpaca"], "system": ["Be kind"]}, "system", "it is a list"),
    ("alpaca", {**GOOD["alpaca"], "history": "before"}, "history", "it is a string"),
    ("alpaca", {**GOOD["alpaca"], "history": [["a"]]}, "history[0]", "it is"),
    ("alpaca", {**GOOD["alpaca"], "history": [["a", ""]]}, "history[0][1]", "it is empty"),
    # prompt and completion, text
    ("prompt_completion", {"prompt": "Hi"}, "completion", "it is missing"),
    ("prompt_completion", {"prompt": "", "completion": "Hello"}, "prompt", "it is empty"),
    ("prompt_completion", {"prompt": "Hi", "completion": ""}, "completion", "it is empty"),
    ("prompt_completion", {"prompt": 3, "completion": "Hello"}, "prompt", "it is a number"),
    ("prompt_completion", {"prompt": [USER], "completion": [USER]}, "completion[0]", "the last message is of user"),
    ("prompt_completion", {"prompt": [USER], "completion": [{"role": "assistant"}]}, "completion[0].content", "missing"),
    ("text", {"text": ""}, "text", "it is empty"),
    ("text", {"text": 3}, "text", "it is a number"),
    ("text", {"text": LONG}, "", "more than max_tokens = 512"),
    # pairs
    ("pairs", without(GOOD["pairs"], "rejected"), "rejected", "it is missing"),
    ("pairs", without(GOOD["pairs"], "prompt"), "prompt", "it is missing, and chosen is a string"),
    ("pairs", {**GOOD["pairs"], "rejected": "Hello"}, "rejected", "it is the same as chosen"),
    ("pairs", {**GOOD["pairs"], "chosen": ""}, "chosen", "it is empty"),
    ("pairs", {**GOOD["pairs"], "chosen": [USER]}, "chosen[0]", "the last message is of user"),
    ("pairs", {**GOOD["pairs"], "rejected": [{"role": "assistant", "content": 3}]}, "rejected[0].content", "a number"),
    ("pairs", {"chosen": [USER, SAID], "rejected": [SAID, SAID]}, "rejected[0]", "it differs from chosen[0]"),
    ("pairs", {**GOOD["pairs"], "rejected": LONG}, "rejected", "more than max_tokens = 512"),
    # OpenAI's pairs
    ("openai_pairs", without(ASKED, "preferred_output"), "preferred_output", "it is missing"),
    ("openai_pairs", {**ASKED, "input": "Hi"}, "input", "it is a string"),
    ("openai_pairs", {**ASKED, "input": {}}, "input.messages", "it is missing"),
    ("openai_pairs", {**ASKED, "preferred_output": []}, "preferred_output", "it is empty"),
    ("openai_pairs", {**ASKED, "preferred_output": [SAID, SAID]}, "preferred_output", "it has 2 messages"),
    ("openai_pairs", {**ASKED, "non_preferred_output": [SAID]}, "non_preferred_output", "the same as preferred_output"),
    ("openai_pairs", {**ASKED, "preferred_output": [{**SAID, "content": 1}]}, "preferred_output[0].content", "number"),
    # judged answers
    ("labelled", without(GOOD["labelled"], "label"), "label", "it is missing"),
    ("labelled", {**GOOD["labelled"], "label": "good"}, "label", '"good"'),
    ("labelled", {**GOOD["labelled"], "label": 1}, "label", "it is 1"),
    ("labelled", {**GOOD["labelled"], "completion": None}, "completion", "it is missing"),
]  # fmt: skip

#: (name of the file, its content, words of the message): lines that are no JSON, and files that can't be read at all.
FILES: list[tuple[str, bytes, str]] = [
    ("cut.jsonl", b'{"text": "a b"}\n{"text": "a', "cut.jsonl row 2: it is not valid JSON"),
    ("two.jsonl", b'{"text": "a b"} {"text": "c d"}\n', "two.jsonl row 1: it is not valid JSON"),
    ("comma.jsonl", b'{"text": "a b"},\n{"text": "c d"}\n', "comma.jsonl row 1: it is not valid JSON"),
    ("single.jsonl", b"{'text': 'a b'}\n", "single.jsonl row 1: it is not valid JSON"),
    ("latin.jsonl", b'{"text": "a b"}\n{"text": "caf\xe9"}\n', "latin.jsonl row 2: byte 14 is not valid UTF-8"),
    ("utf16.jsonl", '{"text": "a b"}\n'.encode("utf-16"), "utf16.jsonl row 1: byte 1 is not valid UTF-8"),
    ("nan.jsonl", b'{"text": NaN}\n', "nan.jsonl row 1: it is not valid JSON (NaN is no JSON number)"),
    ("deep.jsonl", b"[" * 100_000 + b"]" * 100_000, "deep.jsonl row 1: it is nested too deeply"),
    ("blank.jsonl", b'\n\n{"text": ""}\n', "blank.jsonl row 3, text: it is empty"),
    ("mark.jsonl", b'\xef\xbb\xbf{"text": ""}\n', "mark.jsonl row 1, text: it is empty"),
    ("keys.jsonl", b'{"question": "a", "answer": "b"}\n', "row 1: no format has these keys: answer, question"),
    ("none.jsonl", b"", "it has no rows"),
    ("only.jsonl", b"\n \n", "it has no rows"),
    ("object.json", b'{"text": "a b"}', "it is not a list of rows"),
    ("cut.json", b'[{"text": "a b"}', "it is not valid JSON"),
    ("row.json", b'[{"text": "a b"}, {"text": 3}]', "row.json row 2, text: it is a number"),
    ("row.json", b'[{"text": "a b"}, 3]', "row.json row 2: it is a single value"),
    ("rows.csv", b"text\na b\n", "files of this kind aren't read"),
    ("cut.parquet", b"PAR1 and then nothing", "it is not a whole Parquet file"),
    ("cut.arrow", b"\xff\xff\xff\xff", "it is not a whole Arrow file"),
]


@pytest.fixture(scope="module")
def render(chat_tokenizer) -> RowRenderer:
    return RowRenderer(ChatMLRenderer(chat_tokenizer), chat_tokenizer, max_tokens=512)


def refused(path: Path, render: RowRenderer, name: str = "auto") -> str:
    settings = DataSettings(path=str(path), format=name)
    with pytest.raises(DataError) as caught:
        usable_rows(load_rows(settings, render), settings, ("demonstrations", "pairs", "judged answers"))
    return str(caught.value)


def test_there_are_more_than_a_hundred_of_every_format():
    assert len(ROWS) + len(FILES) > 100
    assert {name for name, *_ in ROWS} == set(GOOD)


@pytest.mark.parametrize(
    ("name", "row", "field", "says"), ROWS, ids=[f"{n} {at or 'row'} {says}" for n, _, at, says in ROWS]
)
def test_a_bad_row_is_named(tmp_path, render, name, row, field, says):
    """It stands in the second line; rows before and after it are good, and the whole is refused because of it alone."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in (GOOD[name], row, GOOD[name])))
    message = refused(path, render)
    assert message.startswith(f"rows.jsonl row 2{', ' if field else ''}{field}: "), message
    assert says in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(("name", "content", "says"), FILES, ids=[f"{name} {says:.30}" for name, _, says in FILES])
def test_a_bad_file_is_named(tmp_path, render, name, content, says):
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name, render)
    assert says in message and name in message


@pytest.mark.parametrize("name", GOOD)
def test_the_rows_around_them_are_good(tmp_path, render, name):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD[name]) + "\n")
    loaded = load_rows(DataSettings(path=str(path)), render)
    assert loaded.format == name and len(loaded.rows) == 1 and not loaded.problems


def test_columns_of_a_table_are_read_like_keys(tmp_path, render):
    pq.write_table(pa.table({"prompt": ["Hi", None], "completion": ["Hello", "Yes"]}), tmp_path / "rows.parquet")
    assert refused(tmp_path / "rows.parquet", render).startswith("rows.parquet row 2, prompt: it is missing")


def test_many_bad_rows_are_counted(tmp_path, render):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' + '{"text": 1}\n' * 9)
    message = refused(tmp_path / "rows.jsonl", render)
    assert message.splitlines()[-1].startswith("… and 4 more rows: strop data check ")
    assert len(message.splitlines()) == 6
