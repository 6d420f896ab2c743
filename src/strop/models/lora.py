"""Low-rank adapters through peft: what is trained is the adapter, what is saved is in peft's own format."""

from __future__ import annotations

from typing import Any

from strop.errors import ConfigError


def add_adapter(model: Any, *, rank: int, alpha: float, targets: list[str] | str) -> Any:
    """The model with a fresh adapter: its own weights frozen, the adapter's trainable.

    Args:
        model: a transformers causal LM.
        rank, alpha: as in Hu et al. 2021 (arXiv:2106.09685); updates are scaled by alpha / rank. Dropout is 0, so that
            sampler and learner compute the same function.
        targets: names of the modules that get one, or "all-linear" for every linear layer but the head.

    Raises:
        ConfigError: peft is not installed, or no module has such a name.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("model.lora", "it needs the package peft", "Install it: pip install 'strop[lora]'") from None
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets, bias="none", task_type="CAUSAL_LM"
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError("model.lora.targets", str(error), "Name modules of the model, or 'all-linear'") from None
