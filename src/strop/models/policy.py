"""The policy: one copy of the weights that the sampler reads and the learner writes, under a version number.

Publishing is a write between two decoding steps, not a copy. Every publication is checked: the content must have
changed, the base must be the current version, and the module's parameters must still be the tensors that kernels
read. Loading a model and running it are not here.
"""

from __future__ import annotations

import hashlib
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.errors import ModelError, StallError, WeightsError
from strop.models.experts import prepare_experts
from strop.models.fused import Decoder, Weight, fusable, fuse
from strop.models.lora import base_of, prepare_adapters
from strop.models.passes import LeftOut, Pass, ask, recompute_layers, running

#: seconds after which waiting for the weights is an error: far longer than any decoding step or optimizer write.
LOCK_TIMEOUT = 120.0


def fastest_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bf16 where `device` multiplies it in hardware, else fp32 (bf16 is emulated, and slower, elsewhere)."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type != "cpu" or platform.system() != "Linux":
        return torch.float32
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return torch.bfloat16 if flags & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32


class WeightsLock:
    """A lock that serves threads in the order in which they came.

    A decoding loop takes it again and again; with an ordinary lock the learner could wait for ever.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[tuple[str, float]] = deque()

    @contextmanager
    def hold(self, purpose: str, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """Hold the lock for `purpose` (said in errors).

        Raises:
            StallError: it was not free within `timeout` seconds.
        """
        ticket = (purpose, time.monotonic())
        with self._condition:
            self._queue.append(ticket)
            if not self._condition.wait_for(lambda: self._queue[0] is ticket, timeout):
                holder, since = self._queue[0]
                self._queue.remove(ticket)
                raise StallError(
                    f"{purpose} waited {timeout:.0f} s for the policy's weights, which {holder} "
                    f"asked for {time.monotonic() - since:.0f} s ago and has not let go"
                )
        try:
            yield
        finally:
            with self._condition:
                self._queue.popleft()
                self._condition.notify_all()


class Policy:
    """A causal language model's weights in one process.

    Args:
        model: a transformers causal LM, loaded. It is put in eval mode, cast to `dtype`, and where its family is
            known (`strop.models.fused`) its projections are fused in place. Don't cast or move it afterwards.
        dtype: compute dtype; None takes the fastest of the model's device.
        version: number of the weights as they are.
        fused: False keeps a known family on its own HF forward (slower; for comparison).

    Attributes:
        model: the HF module: its own forward, `state_dict` and `load_state_dict` work.
        decoder: description for the fused passes; None for a model that only its HF forward can run.
        weights: every weight once, as kernels read it; what a learner trains. A tied head is its embedding.
        adapters: names of the model's adapters; the first is the one that is meant where none is named.
        head: the output layer of a model without a description, if logits are what it gives; None if they are changed
            after it.
        experts: the model's sparse layers; None if it has none.
        recomputes: whether its layers can be computed again for the backward pass, to save memory.
        gives_values: whether it ends in a value head (a reward model) instead of a head over the vocabulary.
        version: of the weights that the next step reads.
        weights_lock: held for each decoding step, and for each write.

    Raises:
        ModelError: the module's weights are not all of floating point, it is on several devices, or its experts are of
            a kind that can't be carried.
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype | None = None, version: int = 0, fused: bool = True
    ) -> None:
        parameters = dict(model.named_parameters())
        devices = {parameter.device for parameter in parameters.values()}
        if len(devices) != 1 or not all(parameter.is_floating_point() for parameter in parameters.values()):
            raise ModelError(
                f"{type(model).__name__} has quantised weights or lies on {sorted(map(str, devices))}: a policy needs "
                "floating-point weights on one device; load it without quantization_config and device_map"
            )
        self.device = devices.pop()
        self.dtype = dtype or fastest_dtype(self.device)
        exact = tuple(getattr(base_of(model), "_keep_in_fp32_modules_strict", None) or ())
        for name, parameter in parameters.items():  # parameters only: rotary buffers must stay fp32
            if not any(part in name for part in exact):
                parameter.data = parameter.data.to(self.dtype)
        self.model = model.eval()
        self.adapters = prepare_adapters(model)
        self.experts = prepare_experts(base_of(model))
        self.decoder: Decoder | None = None
        self.recomputes, self.head = True, None
        if fused and fusable(model):
            self.decoder, self.weights = fuse(model)
        else:
            self.recomputes = recompute_layers(base_of(model)) > 0
            self.weights = [Weight(n, p, ((n, p.shape[0] if p.dim() else 1),)) for n, p in parameters.items()]
        self.gives_values = hasattr(model, "score")
        if self.decoder is None and not self.gives_values:
            self.head = _plain_head(model)
        self.version = version
        self.weights_lock = WeightsLock()
        self._torn = ""
        self._fingerprint = self.fingerprint()

    @property
    def adapter(self) -> str:
        """The adapter that is meant where none is named; "" if there is none."""
        return self.adapters[0] if self.adapters else ""

    @contextmanager
    def step(self, purpose: str) -> Iterator[int]:
        """Hold the weights still for one step of reading; gives their version.

        Raises:
            WeightsError: an earlier write broke off in the middle.
        """
        with self.weights_lock.hold(purpose):
            if self._torn:
                raise WeightsError(self._torn)
            yield self.version

    def publish(
        self,
        write: Callable[[], None],
        *,
        base: int | None = None,
        version: int | None = None,
        allow_unchanged: bool = False,
    ) -> int:
        """Write new weights in place, between two steps, and raise the version.

        Args:
            write: writes into `weights` (or, the same storage, the module's parameters). Called once, under the lock.
            base: version that the new weights were made from; a mismatch is a stale update.
            version: number of the new weights; None counts on by one.
            allow_unchanged: accept weights that are bit for bit what they were (restoring a checkpoint, learning
                rate 0).

        Returns:
            The new version.

        Raises:
            WeightsError: stale base, a version that doesn't rise, an update that changed nothing, or parameters that
                no longer share storage with the fused weights. In the last two the old version stays.
            StallError: a step held the weights too long.
        """
        with self.weights_lock.hold("publishing weights"):
            number = self.version + 1 if version is None else version
            if base is not None and base != self.version:
                raise WeightsError(
                    f"stale update: made from weights version {base}, but the policy is at {self.version}; "
                    "publish updates one after another, each from the version before it"
                )
            again = number == self.version and allow_unchanged  # what is loaded may be what is there
            if number <= self.version and not again:
                raise WeightsError(f"version {number} does not come after {self.version}: versions only rise")
            self._torn = f"writing weights version {number} broke off; restore a checkpoint"
            with torch.no_grad():
                write()
            self._check_shared()
            fingerprint = self.fingerprint()
            if again and fingerprint != self._fingerprint:
                raise WeightsError(f"version {number} is there already, with other weights: restore a checkpoint")
            self._torn = ""
            if fingerprint == self._fingerprint and not allow_unchanged:
                raise WeightsError(
                    f"empty update: weights version {number} is bit for bit version {self.version}. Check that the "
                    "optimizer's result is written into policy.weights and that the learning rate is not 0"
                )
            self._fingerprint, self.version = fingerprint, number
            return number

    @property
    def content(self) -> str:
        """Fingerprint of the current version, as last computed by `publish`."""
        return self._fingerprint

    def fingerprint(self) -> str:
        """A digest of every weight's bits: 16 hex digits.

        Sums the words of each tensor with wrap-around and hashes the sums (a memory-speed pass, about 30 ms for 270
        MB): any dropped, partial or empty update shows. It does not stand up to an adversary, and reordering words
        within one tensor leaves it unchanged; stored files carry real hashes.
        """
        digest = hashlib.blake2b(digest_size=8)
        for weight in self.weights:
            digest.update(weight.name.encode())
            digest.update(_word_sum(weight.tensor.detach()).to_bytes(8, "little", signed=True))
        return digest.hexdigest()

    def named_weights(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Weights by HF parameter name, as views: what a checkpoint stores.

        Args:
            tensors: stand-ins by `Weight.name` (fp32 master copies, gradients); None takes the weights themselves.
        """
        named: dict[str, Tensor] = {}
        for weight in self.weights:
            named.update(weight.split(weight.tensor.detach() if tensors is None else tensors[weight.name]))
        return named

    def _check_shared(self) -> None:
        """The module's parameters must be the storage that kernels read, or an update is dropped in silence."""
        parameters = dict(self.model.named_parameters())
        for name, view in self.named_weights().items():
            if parameters[name].data_ptr() != view.data_ptr() or parameters[name].dtype != view.dtype:
                raise WeightsError(
                    f"{name} no longer shares its storage with the policy's weights: the module was moved, cast or "
                    "had its parameters replaced. Write in place (copy_), or build a new Policy"
                )


@torch.no_grad()
def _plain_head(model: Any) -> nn.Linear | None:
    """The output layer of a causal LM, if the model does nothing to the logits that it gives: tried out on two tokens,
    as scaled and capped logits are written in many ways."""
    head = base_of(model).get_output_embeddings()
    if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters()):
        return None
    ask(head, LeftOut)
    tokens = torch.tensor([[0, 1]], device=head.weight.device)

    def given(scale: float, headless: bool) -> Tensor:
        hook = head.register_forward_hook(lambda _, __, result: result * scale)
        try:
            with running(Pass(headless=headless)):
                logits: Tensor = model(input_ids=tokens, use_cache=False).logits
            return logits.float()
        finally:
            hook.remove()

    # Scaling by a power of two is exact, so that any function but the identity shows.
    try:
        plain, scaled, hidden = given(1.0, False), given(1024.0, False), given(1.0, True)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
        return None  # `strop.models.carried` says what is wrong with such a forward
    own = nn.functional.linear(hidden.to(head.weight.dtype), head.weight).float()
    unchanged = hidden.shape[-1] == head.in_features and torch.equal(own, plain) and torch.equal(scaled, plain * 1024)
    return head if unchanged else None


def _word_sum(tensor: Tensor) -> int:
    """Sum of the tensor's bits, read as 64-bit words where it divides into them, else as bytes."""
    flat = tensor.contiguous().view(-1)
    whole = flat.numel() * flat.element_size() % 8 == 0 and flat.data_ptr() % 8 == 0
    return int(flat.view(torch.int64 if whole else torch.uint8).sum(dtype=torch.int64))
