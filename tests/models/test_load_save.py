"""Loading says what is wrong with a model in one paragraph; saving is whole or not at all, and loads anywhere."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from strop.errors import ModelError, RunError
from strop.models.load import check_model, load_model, resolve_model
from strop.models.save import save_model, tensors_hash, verify_folder, write_folder

CONFIG = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def build(**options) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**CONFIG, **options}))


@pytest.fixture
def folder(tmp_path: Path, chat_tokenizer) -> Path:
    save_model(tmp_path / "model", build(tie_word_embeddings=True), chat_tokenizer)
    return tmp_path / "model"


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_saved_model_comes_back_and_loads_in_plain_transformers(folder, chat_tokenizer):
    check_model(str(folder))
    loaded = load_model(str(folder))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = build(tie_word_embeddings=True).state_dict()
    for model in (loaded.model, plain):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert not loaded.model.training
    assert loaded.tokenizer("A b.")["input_ids"] == chat_tokenizer("A b.")["input_ids"]
    assert load_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_disk_that_takes_no_more_is_said_and_leaves_nothing(tmp_path, chat_tokenizer):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # less than the weights, more than the other files
    try:
        with pytest.raises(RunError, match="can't be written"):
            save_model(tmp_path / "model", build(), chat_tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_another_state_than_the_modules_own_is_what_is_saved(tmp_path, chat_tokenizer):
    model = build().bfloat16()
    masters = {name: tensor.float() + 1e-4 for name, tensor in model.state_dict().items()}
    save_model(tmp_path / "model", model, chat_tokenizer, masters)
    loaded = load_model(str(tmp_path / "model")).model
    assert all(torch.equal(tensor, masters[name]) for name, tensor in loaded.state_dict().items())
    assert transformers.AutoConfig.from_pretrained(tmp_path / "model").dtype == torch.float32


def wrong_folders():
    def missing_config(folder):
        (folder / "config.json").unlink()

    def damaged_config(folder):
        (folder / "config.json").write_text("{")

    def listed_config(folder):
        (folder / "config.json").write_text("[]")

    def untyped_config(folder):
        edit(folder / "config.json", model_type=None)
        config = json.loads((folder / "config.json").read_text())
        del config["model_type"]
        (folder / "config.json").write_text(json.dumps(config))

    def not_causal(folder):
        edit(folder / "config.json", architectures=["BertForMaskedLM"])

    def quantised(folder):
        edit(folder / "config.json", quantization_config={"quant_method": "gptq"})

    def no_weights(folder):
        (folder / "model.safetensors").unlink()

    def no_tokenizer(folder):
        (folder / "tokenizer.json").unlink()

    def foreign_tokenizer(folder):
        edit(folder / "config.json", vocab_size=100)

    yield missing_config, "no config.json"
    yield damaged_config, r"config\.json can't be read"
    yield listed_config, "not a JSON object"
    yield untyped_config, "no model_type"
    yield not_causal, "BertForMaskedLM, not a causal language model"
    yield quantised, "quantised"
    yield no_weights, "no weights"
    yield no_tokenizer, "no tokenizer"
    yield foreign_tokenizer, "259 tokens, but its embedding only 100 rows"


@pytest.mark.parametrize(("spoil", "says"), wrong_folders())
def test_what_small_files_tell_is_told_before_weights_are_read(folder, spoil, says):
    spoil(folder)
    for call in (check_model, load_model):
        with pytest.raises(ModelError, match=says) as caught:
            call(str(folder))
        assert "\n" not in str(caught.value)
        assert folder.name in str(caught.value)


def test_a_damaged_weights_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelError, match=r"damaged|can't be loaded"):
        load_model(str(folder))


def test_weights_that_lack_a_tensor_or_have_another_shape(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks 1 .*{name}"):
        load_model(str(folder))
    save_file({**tensors, name: torch.zeros(2, 2)}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"shape|mismatch"):
        load_model(str(folder))


def test_an_architecture_that_is_not_known(folder):
    edit(folder / "config.json", model_type="perceiver3000", architectures=["PerceiverForCausalLM"])
    with pytest.raises(ModelError, match="perceiver3000"):
        load_model(str(folder))


def test_a_tokenizer_file_that_is_damaged(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    with pytest.raises(ModelError, match="tokenizer can't be loaded"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "smollm3", "owner/na me"])
def test_names_that_stand_for_nothing(name):
    for call in (resolve_model, check_model, load_model):
        with pytest.raises(ModelError, match="no such folder") as caught:
            call(name)
        assert "smollm2" in str(caught.value)


def test_a_file_is_not_a_folder(folder):
    with pytest.raises(ModelError, match="it is a file"):
        load_model(str(folder / "config.json"))


def test_an_unknown_dtype(folder):
    with pytest.raises(ModelError, match="float32, bfloat16, float16"):
        load_model(str(folder), dtype="int8")


def test_a_hub_name_without_a_network(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert resolve_model("owner/model") == "owner/model"
    with pytest.raises(ModelError, match="owner/model: it is not in the local cache and can't be fetched"):
        load_model("owner/model")


def test_an_adapter_is_merged_into_its_base(folder, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(load_model(str(folder)).model, config).eval()
    tokens = torch.arange(9)[None]
    expected = adapted(tokens).logits
    adapted.save_pretrained(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(folder))
    check_model(str(tmp_path / "adapter"))
    torch.testing.assert_close(load_model(str(tmp_path / "adapter")).model(tokens).logits, expected, atol=1e-5, rtol=0)
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(ModelError, match="does not say of which model"):
        load_model(str(tmp_path / "adapter"))


# -- saving --------------------------------------------------------------------------------------------------------------


def test_a_folder_is_whole_or_not_there(tmp_path):
    def fails(place: Path) -> None:
        (place / "first").write_text("written")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "made", fails)
    assert not list(tmp_path.iterdir())


def test_a_finished_folder_is_never_overwritten(tmp_path):
    write_folder(tmp_path / "made", lambda place: (place / "file").write_text("first") and None)
    with pytest.raises(ModelError, match="exists already"):
        write_folder(tmp_path / "made", lambda place: (place / "file").write_text("second") and None)
    assert (tmp_path / "made" / "file").read_text() == "first"


def test_the_manifest_names_the_bad_file(folder, tmp_path):
    verify_folder(folder)
    for spoil, says in (
        (lambda copy: (copy / "config.json").unlink(), r"config\.json: it is missing"),
        (lambda copy: (copy / "tokenizer.json").write_text("{}"), r"tokenizer\.json: its content"),
        (lambda copy: (copy / "manifest.json").unlink(), r"no manifest\.json"),
        (lambda copy: (copy / "manifest.json").write_text("3"), r"manifest\.json: it is damaged"),
    ):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        spoil(copy)
        with pytest.raises(ModelError, match=says):
            verify_folder(copy)
        shutil.rmtree(copy)


def test_one_flipped_bit_is_found(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        verify_folder(folder)


def test_the_hash_of_tensors_sees_names_types_shapes_and_bits():
    base = {"a": torch.arange(6.0), "b": torch.zeros(2)}
    others = [
        {"a": torch.arange(6.0), "c": torch.zeros(2)},
        {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)},
        {"a": torch.arange(6.0).double(), "b": torch.zeros(2)},
        {"a": torch.arange(6.0), "b": torch.tensor([0.0, -0.0])},
    ]
    hashes = {tensors_hash(tensors) for tensors in (base, *others)}
    assert len(hashes) == 5
    assert tensors_hash({"b": torch.zeros(2), "a": torch.arange(12.0)[::2] / 2}) == tensors_hash(base)
