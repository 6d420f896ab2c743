"""The learner that shares one copy of the weights with the sampler of this process.

A fused decoder runs over prefix trees; any other model through its own forward. Both end in the same lines: per-token
losses, weighted by the whole batch's counts, summed over micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.errors import BatchError, ModelError
from strop.learning.aggregation import token_weights
from strop.learning.batch import Batch
from strop.learning.fused_pass import GradientOf
from strop.learning.learner import Metrics
from strop.learning.losses import Loss, Tokens
from strop.learning.metrics import BatchMeter
from strop.learning.microbatches import MicroBatch, split_batch
from strop.learning.optimizer import MasterWeights
from strop.learning.outputs import fused_outputs, module_outputs, no_gradient, to_tensor
from strop.learning.reference import ReferenceWeights
from strop.models.policy import Policy
from strop.models.save import write_model

STATE_FILE = "learner.safetensors"


class EmbeddedLearner:
    """Trains a policy in this process. See `strop.learning.Learner`.

    Args:
        policy: what is trained. Weights that don't require a gradient stay as they are (adapters).
        tokenizer: saved beside the weights.
        masters: fp32 values by HF parameter name, taken from the model before the policy rounded it; None starts from
            the policy's own.
        tokens_per_micro_batch: most tokens that are computed at once.
        weight_decay, betas, epsilon: of AdamW.
        max_grad_norm: the gradient is scaled down to this norm.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        *,
        masters: Mapping[str, Tensor] | None = None,
        tokens_per_micro_batch: int = 4096,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        max_grad_norm: float = 1.0,
    ) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.budget, self.max_grad_norm = tokens_per_micro_batch, max_grad_norm
        self.masters = MasterWeights(policy.weights, masters, weight_decay=weight_decay, betas=betas, epsilon=epsilon)
        self._anchor = torch.zeros((), device=policy.device, requires_grad=True)
        self._has_gradient = False
        self._reference: ReferenceWeights | None = None

    @property
    def version(self) -> int:
        """See `Learner`."""
        return self.policy.version

    def forward_backward(self, batch: Batch, loss: Loss, temperature: float = 1.0) -> Metrics:
        """See `Learner`."""
        metrics = self._pass(batch, loss, temperature, learns=True)
        self._has_gradient = self._has_gradient or not metrics.get("skipped")
        return metrics

    def measure(self, batch: Batch, loss: Loss, temperature: float = 1.0) -> Metrics:
        """See `Learner`."""
        with torch.no_grad():
            return self._pass(batch, loss, temperature, learns=False)

    def _pass(self, batch: Batch, loss: Loss, temperature: float, learns: bool) -> Metrics:
        """The loss of a batch, and where the learner `learns` its gradient."""
        started = time.monotonic()
        self._check_head(loss)
        batch = self._with_extras(batch, loss, temperature)
        counts = batch.trained_counts
        weights = [token_weights(counts, part.aggregation, part.constant) for _, _, part in loss.components]
        passed_over = learns and loss.scales_with_advantage
        chosen = np.flatnonzero(_with_gradient(batch) if passed_over else counts > 0)
        meter = BatchMeter(loss)
        if not len(chosen):
            return {"skipped": 1.0, "loss": 0.0, "tokens_trained": 0.0, "tokens_computed": 0.0}
        with self._guarded():
            for part in self._split(batch, chosen, loss.compares_sequences):
                tokens = self._tokens(batch, part, self._part_logprobs(part, temperature))
                total = tokens.logprobs.new_zeros(())
                for (name, weight, component), by_sequence in zip(loss.components, weights, strict=True):
                    losses, metrics = component(tokens)
                    share = self._tensor(by_sequence[part.sequences].astype(np.float32))[tokens.sequence]
                    contribution = (losses * share).sum()
                    meter.component(name, contribution, metrics, component.by_sequence)
                    total = total + weight * contribution
                if learns:
                    total.backward()  # type: ignore[no-untyped-call]
                    self.masters.take_gradients()
                meter.part(part, tokens)
        return meter.result() | {"learner_seconds": time.monotonic() - started}

    def _check_head(self, loss: Loss) -> None:
        there = "values" if self.policy.gives_values else "logprobs"
        if loss.reads != {there}:
            asked = " and ".join(sorted(loss.reads))
            raise BatchError(f"the loss reads {asked}, but the model ends in a head that gives {there}.")

    def _with_extras(self, batch: Batch, loss: Loss, temperature: float) -> Batch:
        """The batch with the log-probabilities that the loss needs and it doesn't carry."""
        lacking = loss.needs - set(batch.extras)
        extras: dict[str, NDArray[np.float32]] = {}
        if "proximal_logprobs" in lacking:
            extras["proximal_logprobs"] = self.logprobs(batch, temperature)
        if "reference_logprobs" in lacking:
            if self._reference is None:
                self._reference = ReferenceWeights(self.masters.weights)
            extras["reference_logprobs"] = self._logprobs(batch, temperature, self._reference)
        if unknown := sorted(lacking - set(extras)):
            raise BatchError(f"the loss needs {', '.join(unknown)} for every token, which the batch does not carry.")
        return batch.with_extras(**extras) if extras else batch

    def step(self, learning_rate: float) -> Metrics:
        """See `Learner`."""
        if not self._has_gradient:
            return {"skipped": 1.0}
        started = time.monotonic()
        self._has_gradient = False
        metrics = self.masters.step(learning_rate, self.max_grad_norm)
        unchanged = learning_rate == 0  # the end of a schedule that falls to 0
        version = self.policy.publish(self.masters.write_weights, base=self.policy.version, allow_unchanged=unchanged)
        seconds = time.monotonic() - started
        return metrics | {"learning_rate": learning_rate, "version": float(version), "step_seconds": seconds}

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> NDArray[np.float32]:
        """See `Learner`."""
        return self._logprobs(batch, temperature, None)

    def _logprobs(self, batch: Batch, temperature: float, reference: ReferenceWeights | None) -> NDArray[np.float32]:
        result = np.zeros(len(batch.tokens), dtype=np.float32)
        with self._guarded(), torch.no_grad():
            for part in self._split(batch, np.flatnonzero(batch.trained_counts)):
                result[part.trained] = self._part_logprobs(part, temperature, reference).cpu().numpy()
        return result

    def _split(self, batch: Batch, chosen: NDArray[np.int64], whole_groups: bool = False) -> list[MicroBatch]:
        shared = self.policy.decoder is not None
        return split_batch(batch, self.budget, chosen, shared=shared, whole_groups=whole_groups)

    def _part_logprobs(self, part: MicroBatch, temperature: float, reference: ReferenceWeights | None = None) -> Tensor:
        """(trained,) log-probabilities, under the present weights or (without a gradient) a reference's."""
        decoder = self.policy.decoder
        if decoder is None:
            return module_outputs(self.policy, part, temperature, reference.named() if reference else None)
        gradient_of: GradientOf = self.masters.gradient_of
        if reference:
            decoder, gradient_of = reference.decoder(decoder), no_gradient
        return fused_outputs(self.policy, decoder, part, temperature, self._anchor, gradient_of)

    def _tokens(self, batch: Batch, part: MicroBatch, logprobs: Tensor) -> Tokens:
        return Tokens(
            logprobs=logprobs,
            sampler_logprobs=self._tensor(batch.sampler_logprobs[part.trained]),
            advantages=self._tensor(batch.advantages[part.trained]),
            sequence=self._tensor(part.sequence),
            groups=self._tensor(batch.groups[part.sequences]),
            extras={name: self._tensor(array[part.trained]) for name, array in batch.extras.items()},
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_tensor(array, self.policy.device)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """No half gradient survives an error, and running out of memory says what to do about it."""
        try:
            yield
        except BaseException as error:
            self.masters.gradient.zero_()
            self._has_gradient = False
            if _out_of_memory(error):
                raise BatchError(
                    f"the learner ran out of memory with learner.tokens_per_micro_batch = {self.budget}. Halve it, or "
                    "make attempts shorter (agent.max_tokens, sampler.max_context)."
                ) from error
            raise

    def begin_stage(self) -> None:
        """See `Learner`."""
        self.masters.reset()
        self._has_gradient = False
        self._reference = None

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """See `Learner`."""
        self.masters.fill(weights)
        self.policy.publish(self.masters.write_weights, allow_unchanged=True)
        self.begin_stage()

    def save(self, folder: Path) -> None:
        """See `Learner`."""
        from safetensors.torch import save_file

        state = self.masters.state()
        if self._reference is not None:
            state["reference"] = self._reference.flat
        if self.policy.decoder is None:  # names in files may differ from the module's, or adapters alone are saved
            state["masters"] = self.masters.values
            write_model(folder, self.policy.model, self.tokenizer, self._whole_state())
        else:
            write_model(folder, self.policy.model, self.tokenizer, self.masters.named_values())
        save_file(state, folder / STATE_FILE)

    def _whole_state(self) -> dict[str, Tensor] | None:
        """Masters where there are any, the frozen weights otherwise."""
        named: dict[str, Tensor] = dict(self.policy.model.state_dict())
        return named | self.masters.named_values()

    def load(self, folder: Path, version: int | None = None) -> None:
        """See `Learner`."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(folder / STATE_FILE, device=str(self.policy.device))
            stored, reference = state.pop("masters", None), state.pop("reference", None)
            if stored is None:
                named: dict[str, Tensor] = {}
                for path in sorted(folder.glob("model*.safetensors")):
                    named |= load_file(path, device=str(self.policy.device))
                self.masters.fill(named)
            elif stored.shape != self.masters.values.shape:
                raise ModelError(f"{folder / STATE_FILE} is of another model.")
            else:
                self.masters.values.copy_(stored)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"checkpoint {folder}: it can't be read ({error}). Use an earlier one.") from error
        self.masters.load_state(state)
        self._reference = None if reference is None else ReferenceWeights(self.masters.weights, reference)
        self._has_gradient = False
        self.policy.publish(self.masters.write_weights, version=version, allow_unchanged=True)


def _with_gradient(batch: Batch) -> NDArray[np.bool_]:
    """(sequences,) whether any trained token of the sequence has an advantage."""
    active = batch.mask & (batch.advantages != 0)
    return np.bincount(batch.sequence[active], minlength=len(batch.lengths)) > 0


def _out_of_memory(error: BaseException) -> bool:
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )
