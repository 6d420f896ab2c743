"""Export: what comes out loads elsewhere with the same logits, and a card says where it came from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from strop.errors import ModelError
from strop.models.export import export_model
from strop.models.load import load_model
from strop.models.lora import add_adapter, write_adapter
from strop.models.save import save_model, verify_folder

sys.path.append(str(Path(__file__).parents[1] / "learning"))
import tiny_models as tiny

TOKENS = torch.tensor([[7, 3, 40, 22, 9, 60, 1]])
#: Families that GGUF has a name for, with a vocabulary that the tokenizer fits.
WRITTEN = {
    "llama": lambda rows: transformers.LlamaConfig(**{**tiny.SIZES, "vocab_size": rows}, tie_word_embeddings=True),
    "qwen2": lambda rows: transformers.Qwen2Config(**{**tiny.SIZES, "vocab_size": rows}),
    "qwen3": lambda rows: transformers.Qwen3Config(**{**tiny.SIZES, "vocab_size": rows}, head_dim=8),
    "qwen3 moe": lambda rows: transformers.Qwen3MoeConfig(
        **{**tiny.SIZES, "vocab_size": rows},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=8,
        norm_topk_prob=True,
    ),
}


def random_model(config) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def folder(tmp_path, chat_tokenizer) -> Path:
    save_model(tmp_path / "model", random_model(WRITTEN["llama"](len(chat_tokenizer))), chat_tokenizer)
    return tmp_path / "model"


@pytest.mark.parametrize("family", WRITTEN)
def test_gguf_out_and_in_again_is_the_same_model(family, tmp_path, chat_tokenizer):
    model = random_model(WRITTEN[family](len(chat_tokenizer) + 5))
    save_model(tmp_path / "model", model, chat_tokenizer)
    export_model(str(tmp_path / "model"), tmp_path / "out", kind="gguf", dtype="float32")
    verify_folder(tmp_path / "out")
    export_model(str(tmp_path / "out" / "model.gguf"), tmp_path / "back")
    found = load_model(str(tmp_path / "back"))
    torch.testing.assert_close(found.model(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=0)
    text = "Two words, 12 numbers."
    assert found.tokenizer(text)["input_ids"] == chat_tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": "Hello"}]
    rendered = [t.apply_chat_template(messages, tokenize=False) for t in (found.tokenizer, chat_tokenizer)]
    assert rendered[0] == rendered[1]


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 1e-2), ("bfloat16", 5e-2), ("q8_0", 5e-2)])
def test_smaller_types_round(folder, tmp_path, dtype, bound):
    export_model(str(folder), tmp_path / "out", kind="gguf", dtype=dtype)
    export_model(str(tmp_path / "out" / "model.gguf"), tmp_path / "back")
    expected, found = (load_model(str(place)).model(TOKENS).logits for place in (folder, tmp_path / "back"))
    error = float((found - expected).abs().max())
    assert 0 < error < bound * float(expected.abs().max())


def test_an_adapter_is_merged_or_stays_one(folder, tmp_path):
    peft = pytest.importorskip("peft")
    base = load_model(str(folder))
    model = add_adapter(base.model, rank=2, alpha=4.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    expected = model.eval()(TOKENS).logits
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_adapter(adapter, model, "default")
    base.tokenizer.save_pretrained(adapter)
    (adapter / "learner.safetensors").write_bytes(b"the learner's own")
    export_model(str(adapter), tmp_path / "merged", card="# A card\n")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(whole(TOKENS).logits, expected, atol=1e-5, rtol=0)
    assert (tmp_path / "merged" / "README.md").read_text() == "# A card\n"
    export_model(str(adapter), tmp_path / "apart", kind="adapter")
    plain = peft.PeftModel.from_pretrained(load_model(str(folder)).model, tmp_path / "apart")
    torch.testing.assert_close(plain(TOKENS).logits, expected, atol=1e-5, rtol=0)
    assert not (tmp_path / "apart" / "learner.safetensors").exists()
    with pytest.raises(ModelError, match="is no adapter"):
        export_model(str(folder), tmp_path / "none", kind="adapter")


def test_what_has_no_place_in_gguf_is_refused(tmp_path, folder, chat_tokenizer):
    gpt2 = transformers.GPT2Config(vocab_size=len(chat_tokenizer), n_embd=32, n_layer=1, n_head=4)
    save_model(tmp_path / "gpt2", random_model(gpt2), chat_tokenizer)
    with pytest.raises(ModelError, match="GPT2LMHeadModel can't be written as GGUF"):
        export_model(str(tmp_path / "gpt2"), tmp_path / "out", kind="gguf")
    stretched = WRITTEN["llama"](len(chat_tokenizer))
    stretched.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    save_model(tmp_path / "stretched", random_model(stretched), chat_tokenizer)
    with pytest.raises(ModelError, match="'linear' can't be written"):
        export_model(str(tmp_path / "stretched"), tmp_path / "out", kind="gguf")
    with pytest.raises(ModelError, match="no type 'q3'"):
        export_model(str(folder), tmp_path / "out", kind="gguf", dtype="q3")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused(folder, tmp_path):
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["pre_tokenizer"] = {"type": "Whitespace"}
    path.write_text(json.dumps(stored))
    (folder / "manifest.json").unlink()
    with pytest.raises(ModelError, match="splits text is not known"):
        export_model(str(folder), tmp_path / "out", kind="gguf")


def test_a_damaged_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(ModelError, match="can't be read as GGUF"):
        export_model(str(tmp_path / "model.gguf"), tmp_path / "out")
    with pytest.raises(ModelError, match="strop model export"):
        load_model(str(tmp_path / "model.gguf"))


def test_a_checkpoint_that_changed_is_refused(folder, tmp_path):
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ModelError, match="damaged after it was saved"):
        export_model(str(folder), tmp_path / "out")
