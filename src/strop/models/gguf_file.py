"""GGUF files, the format of llama.cpp: written from a transformers model with the gguf package's writer, read through
transformers. Only architectures whose every tensor and setting has a place in the format are written.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

#: transformers' class: (the format's name, whether rotary pairs lie side by side there).
ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", True),
    "MistralForCausalLM": ("llama", True),
    "Qwen2ForCausalLM": ("qwen2", False),
    "Qwen3ForCausalLM": ("qwen3", False),
    "Qwen3MoeForCausalLM": ("qwen3moe", False),
}
#: How matrices are stored: the type's name in the format. Norms and biases stay float32.
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
#: Settings that transformers doesn't read from the files of every family: the format's name, the configuration's.
_LEFT_OUT = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}
#: llama.cpp's kinds of tokens.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
_WORDS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+"
)


def _split(pattern: str) -> list[dict[str, Any]]:
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [words, _BYTE_LEVEL | {"add_prefix_space": False, "use_regex": False}]


#: How text is split before byte pairs are merged, by llama.cpp's name for it: the parts of tokenizer.json's pre-tokenizer.
SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL | {"add_prefix_space": False}],
    "gpt-2": [_BYTE_LEVEL | {"add_prefix_space": False}],
    "llama-bpe": _split(_WORDS % "{1,3}"),
    "qwen2": _split(_WORDS % ""),
}


def write_gguf(path: Path, model: Any, tokenizer: Any, dtype: str = "float16") -> None:
    """Write a model and its tokenizer.

    Args:
        path: the file.
        model: a transformers causal LM, without adapters.
        tokenizer: its tokenizer, byte-level BPE.
        dtype: a key of `TYPES`.

    Raises:
        ModelError: the architecture, the tokenizer or the type has no place in the format.
    """
    import gguf

    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{name} can't be written as GGUF. What can: {', '.join(ARCHITECTURES)}; or export transformers."
        )
    if dtype not in TYPES:
        raise ModelError(f"GGUF has no type {dtype!r} here. Choose one of: {', '.join(TYPES)}.")
    architecture, paired = ARCHITECTURES[name]
    vocabulary = _vocabulary(tokenizer, model.config.vocab_size)
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer, model.config)
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(TYPES[dtype], f"MOSTLY_{TYPES[dtype]}")])
    _add_tokenizer(writer, tokenizer, vocabulary)
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture], model.config.num_hidden_layers
    )
    for key, array in _tensors(model, paired):
        place = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise ModelError(f"{name}'s tensor {key} has no place in a GGUF file of architecture {architecture}.")
        kind = gguf.GGMLQuantizationType[TYPES[dtype] if array.ndim > 1 else "F32"]
        if kind == gguf.GGMLQuantizationType.Q8_0 and array.shape[-1] % 32:
            kind = gguf.GGMLQuantizationType.F16  # blocks of 32
        data = gguf.quantize(array, kind)
        writer.add_tensor(place, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: Any, config: Any) -> None:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") != "default":
        raise ModelError(
            f"rotary positions of the type {rope['rope_type']!r} can't be written as GGUF here. Export transformers instead."
        )
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "num_experts"):
        if not config.norm_topk_prob or config.mlp_only_layers or config.decoder_sparse_step != 1:
            raise ModelError(
                "GGUF's qwen3moe has experts in every layer, whose weights add up to one; this model's config has "
                "norm_topk_prob = false or dense layers. Export transformers instead."
            )
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _tensors(model: Any, paired: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor once, float32, under the names that gguf's own map knows."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        array = parameter.detach().float().cpu().numpy()
        part = name.split(".")[-2]
        if paired and part in heads:
            # llama.cpp stores the halves of every rotary pair side by side; transformers one half after another.
            halves = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if name.endswith("experts.gate_up_proj"):
            gate, up = array[:, : array.shape[1] // 2], array[:, array.shape[1] // 2 :]
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        else:
            yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), array


def _vocabulary(tokenizer: Any, rows: int) -> list[str]:
    """Text of every row of the embedding; rows beyond the tokenizer's own are fillers."""
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    return [texts.get(number, _filler(number)) for number in range(rows)]


def _filler(number: int) -> str:
    """Text of a row that has no token, as llama.cpp's own conversion writes it."""
    return f"[PAD{number}]"


def _add_tokenizer(writer: Any, tokenizer: Any, vocabulary: list[str]) -> None:
    import gguf

    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    model = stored["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ModelError(
            f"a tokenizer of the kind {model['type']} can't be written as GGUF here: only byte-level BPE can."
        )
    added = {token["id"]: token["special"] for token in stored.get("added_tokens", [])}
    kinds = gguf.TokenType
    types = [
        (kinds.CONTROL if added[n] else kinds.USER_DEFINED) if n in added else kinds.NORMAL if text in model["vocab"] else kinds.UNUSED
        for n, text in enumerate(vocabulary)
    ]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(stored.get("pre_tokenizer") or {}))
    writer.add_token_list(vocabulary)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    for kind, number in (
        ("bos", tokenizer.bos_token_id),
        ("eos", tokenizer.eos_token_id),
        ("pad", tokenizer.pad_token_id),
        ("unk", tokenizer.unk_token_id),
    ):
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _split_name(pre_tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name for a pre-tokenizer.

    Raises:
        ModelError: it has none that is known here.
    """
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    for name, known in SPLITS.items():
        # What else a part says (trim_offsets) concerns offsets, not tokens.
        decides = ("type", "individual_digits", "pattern", "behavior", "invert", "add_prefix_space", "use_regex")
        if [{key: part[key] for key in decides if key in part} for part in parts] == [
            {key: part[key] for key in decides if key in part} for part in known
        ]:
            return name
    raise ModelError(
        "llama.cpp's name for the way in which this tokenizer splits text is not known here, and a wrong one would give "
        "other tokens than the model was trained on. Export transformers, and convert with llama.cpp's own script."
    )


def load_gguf(path: Path, dtype: Any, tokenizer: str | None = None) -> tuple[Any, Any]:
    """Read a model and its tokenizer.

    Args:
        path: the file.
        dtype: a torch dtype that weights are dequantised to.
        tokenizer: a folder or hub name to take the tokenizer from instead of the file.

    Raises:
        ModelError: the file is damaged, of an architecture that transformers can't read, or its tokenizer can't be
            read without losing how it splits text.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    from strop.models.load import load_tokenizer

    logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        fields = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
        config = AutoConfig.from_pretrained(**place)
        for key, name in _LEFT_OUT.items():  # by transformers, which takes the family's default instead
            if (value := fields.get(f"{fields['general.architecture']}.{key}")) is not None and hasattr(config, name):
                setattr(config, name, value)
        read, notes = AutoModelForCausalLM.from_pretrained(
            **place,
            config=config,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # one that knows nothing of the file
        model.load_state_dict(read.state_dict())
    except (OSError, ValueError, KeyError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ModelError(f"model {path}: it can't be read as GGUF ({said}).") from error
    if missing := sorted(notes.get("missing_keys") or ()):
        raise ModelError(f"model {path}: it lacks {len(missing)} of the model's tensors ({', '.join(missing[:3])} …).")
    if tokenizer is not None:
        return model, load_tokenizer(tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(Path(scratch), fields.__getitem__, str(path), tuple(fields))
        return model, load_tokenizer(scratch)


def write_tokenizer(folder: Path, field: Callable[[str], Any], source: str, names: Collection[str]) -> None:
    """Write the tokenizer of a GGUF file's fields as tokenizer.json and what belongs to it.

    transformers' own conversion from GGUF leaves out how text is split, and so tokenizes as the model never saw.

    Args:
        folder: an existing folder.
        field: gives a field's content.
        source: said in errors.
        names: of the fields that there are.

    Raises:
        ModelError: its kind, or its way of splitting text, is not known here.
    """
    kind, split = field("tokenizer.ggml.model"), "gpt-2"
    if "tokenizer.ggml.pre" in names:
        split = field("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS:
        raise ModelError(
            f"model {source}: its tokenizer ({kind}, {split}) can't be read exactly from GGUF. Name the tokenizer's own "
            "folder: --tokenizer FOLDER."
        )
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = field("tokenizer.ggml.merges") if "tokenizer.ggml.merges" in names else []  # an empty list is left out
    special = {}
    for ours, theirs in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if f"tokenizer.ggml.{theirs}_token_id" in names:
            special[f"{ours}_token"] = tokens[field(f"tokenizer.ggml.{theirs}_token_id")]
    opens = "tokenizer.ggml.add_bos_token" in names and bool(field("tokenizer.ggml.add_bos_token"))
    first = special["bos_token"] if opens and "bos_token" in special else None
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    parts = SPLITS[split]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token} | flags | {"special": kind == _CONTROL}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts} if len(parts) > 1 else parts[0],
        "post_processor": None if first is None else _opening(first, tokens.index(first)),
        "decoder": _BYTE_LEVEL | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split == "llama-bpe",
            "vocab": {token: n for n, token in enumerate(tokens) if (kinds[n], token) != (_UNUSED, _filler(n))},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    write_json(folder / "tokenizer.json", content)
    length = field(f"{field('general.architecture')}.context_length")
    beside = {"clean_up_tokenization_spaces": False, "model_max_length": length}
    write_json(folder / "tokenizer_config.json", special | beside | {"tokenizer_class": "PreTrainedTokenizerFast"})
    if "tokenizer.chat_template" in names:
        (folder / "chat_template.jinja").write_text(field("tokenizer.chat_template"), encoding="utf-8")


def _opening(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts a token first."""
    marker = {"SpecialToken": {"id": token, "type_id": 0}}
    single, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [marker, single],
        "pair": [marker, single, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON for people to read."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
