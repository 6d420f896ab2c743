"""What rows become: the tokens that a plain rendering gives, and masks that hold what the model would sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.config import DataSettings
from strop.data import Conversation, RowRenderer, load_rows, parse_row, usable_rows
from strop.data.check import DataCheck, show_data_check
from strop.data.files import read_rows
from strop.errors import DataError
from strop.sampling.rendering import ChatMLRenderer, renderer_for

USER, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def render(chat_tokenizer) -> RowRenderer:
    return RowRenderer(ChatMLRenderer(chat_tokenizer), chat_tokenizer)


def learnt(render: RowRenderer, row: dict[str, Any], name: str, strings: str = "chat") -> list[str]:
    """The stretches of text that are learnt, of each sequence one after another."""
    found = []
    for tokens, mask in render(parse_row(row, name, strings)).sequences:  # type: ignore[arg-type]
        assert len(tokens) == len(mask)
        run: list[int] = []
        for token, trained in [*zip(tokens, mask, strict=True), (0, False)]:
            if trained:
                run.append(token)
            elif run:
                found.append(render.tokenizer.decode(run))
                run = []
    return found


def text(render: RowRenderer, row: dict[str, Any], name: str, strings: str = "chat") -> list[str]:
    return [render.tokenizer.decode(tokens) for tokens, _ in render(parse_row(row, name, strings)).sequences]  # type: ignore[arg-type]


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("messages", {"messages": [USER, SAID, USER, {**SAID, "content": "Again"}]}, ["Hello", "Again"]),
        ("messages", {"messages": [USER, {**SAID, "weight": 0}, USER, {**SAID, "content": "Again"}]}, ["Again"]),
        ("messages", {"messages": [USER, {**SAID, "content": [{"type": "text", "text": "Hello"}]}]}, ["Hello"]),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}, ["Yes"]),
        ("alpaca", {"instruction": "Add", "input": "1 2", "output": "3", "history": [["a", "b"]]}, ["3"]),
        ("prompt_completion", {"prompt": "Hi", "completion": "Hello"}, ["Hello"]),
        ("prompt_completion", {"prompt": [USER, SAID, USER], "completion": [SAID]}, ["Hello"]),
        ("pairs", {"prompt": "Hi", "chosen": "Yes", "rejected": "No"}, ["Yes", "No"]),
        ("pairs", {"chosen": [USER, SAID], "rejected": [USER, {**SAID, "content": "No"}]}, ["Hello", "No"]),
        ("labelled", {"prompt": [USER], "completion": [SAID], "label": False}, ["Hello"]),
    ],
)
def test_what_the_assistant_says_is_learnt_with_its_end(render, name, row, said):
    assert learnt(render, row, name) == [text + END for text in said]


def test_tool_calls_are_learnt_and_results_are_not(render):
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    row = {"messages": [USER, call, {"role": "tool", "content": "42"}, SAID], "tools": json.dumps([TOOL])}
    (first, second) = learnt(render, row, "messages")
    assert first == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' + END
    assert second == "Hello" + END
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "Hello"},
    ]
    assert learnt(render, {"conversations": turns, "tools": [TOOL]}, "sharegpt") == [first, second]


def test_the_tokens_are_those_of_the_models_own_template(render, chat_tokenizer):
    (found,) = text(render, {"messages": [USER, SAID]}, "messages")
    assert found == chat_tokenizer.apply_chat_template([USER, SAID], tokenize=False).removeprefix(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )


def test_masks_by_prefixes_agree_with_masks_by_message(chat_tokenizer):
    """The template itself, which can't say what is sampled, beside the renderer that can."""
    from renderers.base import create_renderer
    from renderers.configs import DefaultRendererConfig

    row = {"messages": [USER, {**SAID, "weight": 0}, USER, {**SAID, "content": "Again"}]}
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    by_message = RowRenderer(ChatMLRenderer(chat_tokenizer, default), chat_tokenizer)
    by_prefix = RowRenderer(create_renderer(chat_tokenizer, DefaultRendererConfig()), chat_tokenizer)
    example = parse_row(row, "messages")
    assert by_message(example) == by_prefix(example)
    assert type(renderer_for(chat_tokenizer, "any")) is ChatMLRenderer


def test_plain_strings_have_no_template(render):
    row = {"prompt": "one two", "completion": " three"}
    assert text(render, row, "prompt_completion", "plain") == ["one two three" + END]
    assert learnt(render, row, "prompt_completion", "plain") == [" three" + END]
    assert learnt(render, {"text": "abc"}, "text") == ["bc" + END]  # nothing predicts the first token


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_kept_or_dropped(chat_tokenizer, key):
    row = {"messages": [USER, {**SAID, key: "They greet."}]}
    kept = RowRenderer(ChatMLRenderer(chat_tokenizer), chat_tokenizer)
    dropped = RowRenderer(ChatMLRenderer(chat_tokenizer), chat_tokenizer, reasoning="drop")
    assert learnt(kept, row, "messages") == ["<think>\nThey greet.\n</think>\n\nHello" + END]
    assert learnt(dropped, row, "messages") == ["Hello" + END]
    inline = {"messages": [USER, {**SAID, "content": "<think>They greet.</think>\n\nHello"}]}
    assert learnt(dropped, inline, "messages") == ["Hello" + END]
    assert learnt(kept, inline, "messages") == ["<think>They greet.</think>\n\nHello" + END]


def test_long_rows_are_refused_cut_or_dropped(tmp_path, chat_tokenizer):
    rows = [
        {"prompt": "Hi", "completion": "x" * 100},
        {"prompt": "y" * 100, "completion": "Hi"},
        {"prompt": "a", "completion": "b"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(too_long: str, bad_rows: str = "refuse"):
        settings = DataSettings(path=str(path), max_tokens=80, too_long=too_long, bad_rows=bad_rows)  # type: ignore[arg-type]
        render = RowRenderer(ChatMLRenderer(chat_tokenizer), chat_tokenizer, max_tokens=80, cut=too_long == "cut")
        return usable_rows(load_rows(settings, render), settings, ("demonstrations",))

    with pytest.raises(DataError, match=r"row 1: it has 1[0-9]+ tokens"):
        load("refuse")
    with pytest.raises(DataError, match="row 2: the first 80 of its"):
        load("cut")
    kept, warnings = load("cut", "drop")
    assert [row.number for row in kept] == [1, 3] and kept[0].rendered.cut > 0
    assert kept[0].rendered.tokens == 80 and len(warnings) == 2
    kept, warnings = load("drop")
    assert [row.number for row in kept] == [3] and "2 of them too long" in warnings[0]


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    rows = [{"prompt": f"p{n}", "completion": f"c{n}"} for n in range(5)]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(table, tmp_path / "a.parquet")
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    (saved / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow"):
        part = table.slice(0, 3) if "00000-" in name else table.slice(3)
        with pa.OSFile(str(saved / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    for place in ("a.jsonl", "a.json", "a.parquet", "saved"):
        assert [values for _, _, values in read_rows(tmp_path / place)] == rows, place


@pytest.mark.parametrize(
    ("split", "files", "found"),
    [
        ("", ["train.jsonl", "test.jsonl"], ["train.jsonl"]),
        ("test", ["train.jsonl", "test-00000-of-00001.parquet"], ["test-00000-of-00001.parquet"]),
        ("", ["b.jsonl", "a.jsonl"], ["a.jsonl", "b.jsonl"]),
        ("dev", ["train/a.jsonl", "dev/a.jsonl"], ["a.jsonl"]),
        ("", ["data/train-0.jsonl", "data/test-0.jsonl"], ["train-0.jsonl"]),
    ],
)
def test_splits_of_a_folder(tmp_path, split, files, found):
    from strop.data.files import data_files

    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in data_files(tmp_path, split)] == found


@pytest.mark.parametrize(("files", "split"), [(["train.jsonl"], "test"), (["test.jsonl", "dev.jsonl"], ""), ([], "")])
def test_a_split_that_is_not_there_is_refused(tmp_path, files, split):
    from strop.data.files import data_files

    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(DataError):
        data_files(tmp_path, split)


def test_rows_of_another_kind_are_refused(tmp_path, render):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    settings = DataSettings(path=str(path))
    with pytest.raises(DataError, match=r"its rows are pairs .* trains on demonstrations"):
        usable_rows(load_rows(settings, render), settings, ("demonstrations",))


def test_the_check_says_it_all(tmp_path: Path, render, chat_tokenizer):
    from rich.console import Console

    rows = [{"prompt": "Hi", "completion": "Hello"}, {"prompt": "Hi", "completion": "Hello"}, {"prompt": "Hi"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataSettings(path=str(path))
    loaded = load_rows(settings, render)
    check = DataCheck(settings, "tiny", loaded, [(loaded.rows[1], loaded.rows[0])], chat_tokenizer.decode, 90.0, 0.01)
    assert not check.good
    console = Console(width=200, record=True, file=(tmp_path / "said").open("w"))
    console.print(show_data_check(check, batch_size=2))
    said = console.export_text()
    for words in ("2 demonstrations (prompt_completion)", "rows.jsonl row 2 says what row 1", "1 steps of 2", "90 s",
                  "rows.jsonl row 3, completion: it is missing", "Hello<|im_end|>"):  # fmt: skip
        assert words in said, words


def test_a_conversation_keeps_its_messages_bare():
    example = parse_row({"messages": [USER, {**SAID, "weight": 1}]}, "messages")
    assert isinstance(example, Conversation)
    assert example.messages == (USER, SAID) and example.trained == (False, True)
