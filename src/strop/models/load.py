"""Loading a causal language model and its tokenizer from a folder, a hub name or the name of a start model.

Everything that can be wrong with a model is a `ModelError` of one paragraph, and what can be told from the small files
is told by `check_model` before any weights are read. Saving is in `strop.models.save`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import ModelError
from strop.models.allocator import keep_memory
from strop.models.start import START_MODELS, Progress, get_start_model, start_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that was loaded.

    Attributes:
        model: on the CPU, in eval mode, in the dtype that was asked for.
        tokenizer: fits the model's vocabulary.
        source: the folder or hub name it came from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str


def resolve_model(name: str, progress: Progress | None = None) -> str:
    """The folder or hub name that `name` stands for; a start model is fetched if it isn't cached.

    Raises:
        ModelError: `name` looks like a path and nothing is there, or fetching failed.
    """
    path = Path(name).expanduser()
    if path.exists():
        return str(path)
    if name in START_MODELS:
        return str(get_start_model(name, progress))
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelError(
            f"model {name!r}: there is no such folder. Name a local Hugging Face folder, a hub model as OWNER/NAME, or "
            f"a start model ({', '.join(START_MODELS)})."
        )
    return name


def check_model(name: str) -> None:
    """Check what can be checked without reading weights or using the network: for a configuration, before a start.

    Raises:
        ModelError: the folder is missing or is not a causal language model with a tokenizer that fits.
    """
    if Path(name).expanduser().exists():
        _check_folder(Path(name).expanduser())
    elif name in START_MODELS:
        folder = start_model_folder(name)
        if folder.exists():
            _check_folder(folder)
    else:
        resolve_model(name)


def load_model(name: str, *, dtype: str = "float32", progress: Progress | None = None) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name: a local folder (an adapter's folder is merged into its base), a hub name, or a start model's name.
        dtype: "float32", "bfloat16" or "float16"; training starts from float32, so that nothing is rounded away.
        progress: told how fetching a start model goes.

    Raises:
        ModelError: what is wrong with it, and what would be right.
    """
    import torch

    keep_memory()
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in dtypes:
        raise ModelError(f"model {name!r}: dtype {dtype!r} is not known. Choose one of: {', '.join(dtypes)}.")
    source = resolve_model(name, progress)
    folder = Path(source)
    if folder.exists():
        _check_folder(folder)
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            return _load_adapter(folder, dtype, progress)
    model = _load_weights(source, dtypes[dtype])
    tokenizer = load_tokenizer(source)
    _check_vocabulary(source, len(tokenizer), model.get_input_embeddings().weight.shape[0])
    return Loaded(model.eval(), tokenizer, source)


def _check_folder(folder: Path) -> None:
    """What the small files of a local folder tell."""
    if not folder.is_dir():
        if folder.suffix == ".gguf":
            raise ModelError(
                f"model {folder}: it is a GGUF file. Make a transformers folder of it first: strop model export {folder} FOLDER"
            )
        raise ModelError(f"model {folder}: it is a file. Name the folder that holds config.json and the weights.")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return
    config = _read_json(folder / "config.json")
    if "model_type" not in config:
        raise ModelError(f"model {folder}: config.json has no model_type, so it is not a transformers configuration.")
    if "quantization_config" in config:
        raise ModelError(
            f"model {folder}: its weights are quantised, which can't be trained or published in place. Use the "
            "unquantised model."
        )
    architectures = config.get("architectures") or []
    if architectures and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        raise ModelError(
            f"model {folder}: it is a {architectures[0]}, not a causal language model. Name a model whose architecture "
            "ends in ForCausalLM."
        )
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ModelError(
            f"model {folder}: it holds no weights. A file such as model.safetensors must be beside config.json."
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model {folder}: it holds no tokenizer. Copy the tokenizer's files (tokenizer.json, tokenizer_config.json) "
            "of the model it was made from beside config.json."
        )
    rows = config.get("vocab_size")
    if (folder / "tokenizer.json").is_file() and isinstance(rows, int):
        tokenizer = _read_json(folder / "tokenizer.json")
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
        _check_vocabulary(str(folder), max(ids, default=-1) + 1, rows)


def _check_vocabulary(source: str, tokens: int, rows: int) -> None:
    """Padding rows of the embedding are usual; tokens without a row are not."""
    if tokens > rows:
        raise ModelError(
            f"model {source}: its tokenizer has {tokens} tokens, but its embedding only {rows} rows. The tokenizer is "
            "of another model; use the one that the model was trained with, or resize the embedding and save again."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"model {path.parent}: it has no {path.name}. Name a folder in transformers format, which save_pretrained "
            "writes."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model {path.parent}: {path.name} can't be read ({error}). Copy the file again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"model {path.parent}: {path.name} is not a JSON object. Copy the file again.")
    return content


def _load_weights(source: str, dtype: Any) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # who calls this shows progress of its own, or none
    try:
        model, notes = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except SafetensorError as error:
        raise ModelError(
            f"model {source}: its weights file is damaged ({error}). Copy or download it again."
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _explain(source, error) from error
    if missing := sorted(notes.get("missing_keys") or ()):
        raise ModelError(
            f"model {source}: its weights file lacks {len(missing)} of the model's tensors ({', '.join(missing[:3])} …), "
            "which would stay random. The file belongs to another model or is incomplete."
        )
    return model


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a folder or hub name.

    Raises:
        ModelError: it can't be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # tokenizer loading raises whatever its backend raises, bare Exception included
        raise ModelError(
            f"model {source}: its tokenizer can't be loaded ({_first_line(error)}). Copy the tokenizer's files of the "
            "model it was made from again."
        ) from error


def _load_adapter(folder: Path, dtype: str, progress: Progress | None) -> Loaded:
    """Load an adapter's base and merge the adapter into it, so that what follows sees an ordinary model."""
    base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"model {folder}: it is an adapter that does not say of which model (base_model_name_or_path)."
        )
    try:
        from peft import PeftModel
    except ImportError:
        raise ModelError(
            f"model {folder}: it is a LoRA adapter, which needs peft: pip install 'strop[lora]'."
        ) from None
    loaded = load_model(base, dtype=dtype, progress=progress)
    try:
        merged = PeftModel.from_pretrained(loaded.model, str(folder)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"model {folder}: the adapter does not fit its base {base} ({_first_line(error)}).") from error
    return Loaded(merged.eval(), loaded.tokenizer, str(folder))


def _explain(source: str, error: Exception) -> ModelError:
    """One paragraph for what transformers and the hub raise."""
    said = _first_line(error)
    if Path(source).exists():
        if "size mismatch" in str(error) or "mismatched" in str(error).lower():
            return ModelError(f"model {source}: its weights don't have the shapes that config.json says ({said}).")
        return ModelError(f"model {source}: it can't be loaded as a causal language model ({said}).")
    return ModelError(
        f"model {source}: it is not in the local cache and can't be fetched from the Hugging Face hub ({said}). Check "
        "the name and the network (a private or gated model needs a login), or name a local folder."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
