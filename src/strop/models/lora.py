"""Low-rank adapters through peft: fresh ones, stored ones, several on one base, merged ones. What is trained is the
adapter, what is saved is in peft's own format. Which adapter a pass goes through, the pass says (`strop.models.passes`).
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import ConfigError, ModelError
from strop.models.experts import find_experts
from strop.models.passes import ask, current

if TYPE_CHECKING:
    from torch import Tensor

#: Name of the adapter that a run trains.
DEFAULT = "default"
ALL_LINEAR = "all-linear"
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PARAMETER = re.compile(r"\.lora_[A-Za-z_]+\.([^.]+)")


def add_adapter(
    model: Any, *, rank: int, alpha: float, targets: Sequence[str] | str = ALL_LINEAR, name: str = DEFAULT
) -> Any:
    """The model with a fresh adapter: its own weights frozen, the adapter's trainable.

    Args:
        model: a transformers causal LM, or one that has adapters already.
        rank, alpha: as in Hu et al. 2021 (arXiv:2106.09685); updates are scaled by alpha / rank. Dropout is 0, so that
            sampler and learner compute the same function.
        targets: names of the linear layers that get one, whole or their ends ("q_proj", "mlp.down_proj"), or
            "all-linear" for every linear layer but the head.
        name: of the adapter.

    Raises:
        ConfigError: peft is not installed, the name is taken, or a target is no linear layer of the model.
    """
    peft = _peft("model.lora")
    check_targets(model, targets)
    check_name(model, name)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    if find_experts(base_of(model)) is not None:
        _keep_off_experts(config, base_of(model))
    try:
        if adapters_of(model):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    except ValueError as error:
        raise ConfigError("model.lora.targets", str(error), "Name linear layers of the model") from None
    return _trainable(model)


def _keep_off_experts(config: Any, model: Any) -> None:
    """Leave of the targets those that are linear layers: peft takes some names for the experts', whose tensors it would
    replace for each pass, for every thread at once.

    Raises:
        ConfigError: a named target is such a name.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    named = config.target_modules != ALL_LINEAR
    if not named:
        head = model.get_output_embeddings()
        mixers = {name for name, module in model.named_modules() if hasattr(module, "A_log")}
        config.target_modules = {
            name
            for name, module in model.named_modules()
            # A state-space mixer may read its last matrix past the layer, which peft refuses.
            if _linear(module) and module is not head and name.removesuffix(".out_proj") not in mixers
        }
    taken = copy.deepcopy(config)
    convert_peft_config_for_transformers(taken, model, None)
    if not taken.target_parameters:
        return
    if named:
        wrong = f"{sorted(set(config.target_modules) - set(taken.target_modules))} are taken for layers of the experts"
        raise ConfigError("model.lora.targets", wrong, f'Name others, or "{ALL_LINEAR}" for all that can carry one')
    config.target_modules = taken.target_modules


def _linear(module: Any) -> bool:
    import torch

    return isinstance(getattr(module, "base_layer", module), torch.nn.Linear)


def load_adapter(model: Any, folder: str | Path, name: str = DEFAULT) -> Any:
    """The model with a stored adapter, which can be trained on.

    Args:
        model: as in `add_adapter`.
        folder: in peft's format.
        name: under which requests and learners name it.

    Raises:
        ConfigError: peft is not installed, or the name is taken.
        ModelError: the folder can't be read or does not fit the model.
    """
    peft = _peft("model.lora")
    check_name(model, name)
    try:
        if adapters_of(model):
            model.load_adapter(str(folder), adapter_name=name, is_trainable=True)
        else:
            model = peft.PeftModel.from_pretrained(model, str(folder), adapter_name=name, is_trainable=True)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ModelError(f"adapter {folder}: it does not fit the model ({said}).") from error
    return _trainable(model)


def write_adapter(folder: Path, model: Any, name: str, state: Mapping[str, Tensor] | None = None) -> None:
    """Write one adapter, as plain peft loads it, into an existing folder.

    Args:
        folder: where.
        model: a model with adapters.
        name: which.
        state: values by the model's parameter names where they are not the module's own (fp32 masters).
    """
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    whole = dict(model.state_dict()) | dict(state or {})
    kept = get_peft_model_state_dict(model, state_dict=whole, adapter_name=name)
    save_file({key: tensor.detach().clone().contiguous() for key, tensor in kept.items()}, folder / WEIGHTS_FILE)
    config = model.peft_config[name]
    before, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = before


def merge(model: Any, name: str | None = None) -> Any:
    """The base with an adapter's update added to its weights: an ordinary model. The adapters are gone from it.

    Args:
        model: a model with adapters.
        name: which; None, the only one.

    Raises:
        ConfigError: there is no such adapter, or there are several to choose from.
    """
    names = adapters_of(model)
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        raise ConfigError("adapter", f"there is no adapter {name!r}", f"There are: {', '.join(names) or 'none'}")
    return model.merge_and_unload(adapter_names=[name])


def adapters_of(model: Any) -> tuple[str, ...]:
    """Names of the model's adapters, in the order in which they came."""
    return tuple(getattr(model, "peft_config", ()) or ())


def base_of(model: Any) -> Any:
    """The transformers model below its adapters."""
    return model.get_base_model() if adapters_of(model) else model


def adapter_of(parameter: str) -> str | None:
    """Name of the adapter that a parameter of that name belongs to; None for the base's own."""
    found = _PARAMETER.search(parameter)
    return found.group(1) if found else None


def check_name(model: Any, name: str) -> None:
    """Refuse a name that is taken, or that can't be part of a parameter's name."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ConfigError("adapter", f"{name!r} is no name for an adapter", "Use letters, digits, '-' and '_'")
    if name in adapters_of(model):
        raise ConfigError("adapter", f"the model has an adapter {name!r} already", "Choose another name")


def check_targets(model: Any, targets: Sequence[str] | str) -> None:
    """Refuse targets that are no linear layers of the model.

    Raises:
        ConfigError: names the first wrong one, and what there is.
    """
    linear, others = set[str](), set[str]()
    for name, module in base_of(model).named_modules():
        (linear if _linear(module) else others).add(name)
    others |= {name for name, _ in base_of(model).named_parameters()}
    if targets == ALL_LINEAR:
        return
    if isinstance(targets, str) or not targets:
        raise ConfigError("model.lora.targets", f"{targets!r} names nothing", 'Write a list of names, or "all-linear"')
    ends = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        if any(_ends_with(name, target) for name in linear):
            continue
        close = difflib.get_close_matches(target, ends, 1)
        what = "is no linear layer" if any(_ends_with(name, target) for name in others) else "is not in the model"
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigError("model.lora.targets", f"{target!r} {what}", f"{hint}There are: {', '.join(ends)}")


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _peft(key: str) -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(key, "it needs the package peft", "Install it: pip install 'strop[lora]'") from None
    return peft


def _trainable(model: Any) -> Any:
    """Every adapter's weights are free: peft leaves those alone that it has switched on."""
    for name, parameter in model.named_parameters():
        if adapter_of(name) is not None:
            parameter.requires_grad_(True)
    return model


def prepare_adapters(model: Any) -> tuple[str, ...]:
    """Have every layer with adapters ask the pass of its thread which one to use: peft's switch is one for all threads.

    Returns:
        The adapters' names, in the order in which they came.
    """
    names = adapters_of(model)
    if names:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                ask(module, Adapted)
    return names


class Adapted:
    """A layer with adapters, of which it uses the one that the pass names."""

    @property
    def active_adapters(self) -> list[str]:
        """What peft asks for."""
        chosen = current().adapter
        if chosen is None:
            return super().active_adapters  # type: ignore[misc,no-any-return]
        return [chosen] if chosen else []
