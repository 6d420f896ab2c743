"""Saving: folders that appear whole or not at all, with a manifest of checksums; transformers-format checkpoints.

A folder is written beside its place, flushed to disk, and renamed into it, so a process killed at any moment leaves
either the old state or the new one. What goes into a learner's own state is in `strop.learning`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import ModelError
from strop.runs import files

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` atomically: `write` fills a folder beside it, which gets a manifest and is renamed into place.

    Args:
        folder: must not exist.
        write: writes files into the folder it is given.

    Raises:
        ModelError: `folder` already exists.
        RunError: the disk is full or the place can't be written.
    """
    if folder.exists():
        raise ModelError(f"{folder}: it exists already, and a finished folder is never overwritten. Name another one.")
    with files.written_whole(folder) as beside:
        beside.mkdir()
        write(beside)
        names = sorted(path.relative_to(beside).as_posix() for path in beside.rglob("*") if path.is_file())
        files.write_json(beside / MANIFEST, {name: files.sha256(beside / name) for name in names})


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in order of name: the same whatever file format holds them."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_model(folder: Path, model: Any, tokenizer: Any, state: Mapping[str, Tensor] | None = None) -> None:
    """Write what plain `transformers` (for an adapter: plain `peft`) loads into an existing folder.

    Args:
        folder: where.
        model: a transformers model, or a peft model, of which the adapter alone is saved.
        tokenizer: its tokenizer.
        state: the parameters under the model's own names, where they are not the module's own (fp32 masters).
    """
    # The shard limit keeps a small model in one file, which is what most readers expect.
    model.save_pretrained(folder, state_dict=None if state is None else dict(state), max_shard_size="20GB")
    if state and (folder / "config.json").is_file():
        _note_dtype(folder / "config.json", next(iter(state.values())))
    tokenizer.save_pretrained(folder)


def save_model(folder: Path, model: Any, tokenizer: Any, state: Mapping[str, Tensor] | None = None) -> None:
    """`write_model` into a new folder, atomically and with a manifest.

    Raises:
        ModelError: the folder exists.
        RunError: it can't be written.
    """
    write_folder(folder, lambda beside: write_model(beside, model, tokenizer, state))


def _note_dtype(path: Path, tensor: Tensor) -> None:
    """The saved state may be of another type (fp32 masters) than the module that describes it (bf16)."""
    config = json.loads(path.read_text())
    config["dtype"] = str(tensor.dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def verify_folder(folder: Path) -> None:
    """Check a saved folder against its manifest.

    Raises:
        ModelError: there is no manifest, or a file is missing or of other content; names the file.
    """
    try:
        manifest: dict[str, str] = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ModelError(f"{folder}: it has no {MANIFEST}, so it is not a folder that was saved whole.") from None
    except (ValueError, TypeError) as error:
        raise ModelError(f"{folder / MANIFEST}: it is damaged ({error}). Use an earlier checkpoint.") from error
    for name, digest in manifest.items():
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: it is missing. Use an earlier checkpoint or copy the folder again.")
        if files.sha256(folder / name) != digest:
            raise ModelError(
                f"{folder / name}: its content does not have the recorded SHA-256, so it was damaged after it was saved. "
                "Use an earlier checkpoint or copy the folder again."
            )
