"""Taking a model elsewhere: into a transformers folder, a GGUF file, or (an adapter as it is) a peft folder; and from
GGUF into transformers. An adapter is merged into its base unless it is to stay one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from strop.errors import ModelError
from strop.models.load import load_model, load_tokenizer
from strop.models.save import MANIFEST, verify_folder, write_folder, write_model

Format = Literal["transformers", "gguf", "adapter"]
CARD = "README.md"
GGUF_NAME = "model.gguf"


def export_model(
    source: str,
    folder: Path,
    *,
    kind: Format = "transformers",
    dtype: str | None = None,
    tokenizer: str | None = None,
    card: str | None = None,
) -> None:
    """Write a model into a new folder, whole or not at all, with a manifest of checksums.

    Args:
        source: a folder (a checkpoint or an adapter too), a GGUF file, a hub name or a start model's name.
        folder: must not exist.
        kind: "transformers" and "gguf" hold the whole model, an adapter merged; "adapter" holds the adapter alone.
        dtype: of the weights; None: float32 for transformers, float16 for GGUF. GGUF takes q8_0 as well.
        tokenizer: where to take the tokenizer from, if not from `source`.
        card: text of README.md.

    Raises:
        ModelError: the source can't be read or has no place in the format, or the folder exists.
    """
    if kind == "adapter":
        write_folder(folder, lambda place: _copy_adapter(Path(source).expanduser(), place, card))
        return
    stored = dtype or ("float16" if kind == "gguf" else "float32")
    model, own_tokenizer = _read(source, "float32" if kind == "gguf" else stored, tokenizer)

    def write(place: Path) -> None:
        if kind == "gguf":
            from strop.models.gguf_file import write_gguf

            write_gguf(place / GGUF_NAME, model, own_tokenizer, stored)
        else:
            write_model(place, model, own_tokenizer)
        _write_card(place, card)

    write_folder(folder, write)


def _read(source: str, dtype: str, tokenizer: str | None) -> tuple[Any, Any]:
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        import torch

        from strop.models.gguf_file import load_gguf

        return load_gguf(path, getattr(torch, dtype), tokenizer)
    if path.is_dir() and (path / MANIFEST).is_file():
        verify_folder(path)
    loaded = load_model(source, dtype=dtype)
    return loaded.model, load_tokenizer(tokenizer) if tokenizer else loaded.tokenizer


def _copy_adapter(source: Path, place: Path, card: str | None) -> None:
    """The adapter's own files and the tokenizer's: not the learner's state, which nobody else needs."""
    if not (source / "adapter_config.json").is_file():
        raise ModelError(f"{source}: it is no adapter. Export it as transformers or gguf.")
    for file in sorted(source.iterdir()):
        wanted = file.name.startswith(("adapter_", "tokenizer", "special_tokens", "chat_template", "vocab", "merges"))
        if file.is_file() and wanted:
            shutil.copyfile(file, place / file.name)
    _write_card(place, card)


def _write_card(place: Path, card: str | None) -> None:
    if card is not None:
        (place / CARD).write_text(card, encoding="utf-8")
