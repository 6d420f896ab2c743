"""The learner that shares one copy of the weights with the sampler of this process.

A fused decoder runs over prefix trees; any other model through its own forward. Both end in the same lines: per-token
losses, weighted by the whole batch's counts, summed over micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

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
from strop.learning.microbatches import MicroBatch, smallest_budget, split_batch
from strop.learning.optimizer import MasterWeights, Moments
from strop.learning.outputs import fused_outputs, module_outputs, no_gradient, to_tensor
from strop.learning.reference import ReferenceWeights
from strop.learning.routing import LoadMeter, balance_loss, given_choices, real_places
from strop.models.experts import Routing
from strop.models.lora import adapter_of, write_adapter
from strop.models.passes import Pass, running
from strop.models.policy import Policy
from strop.models.save import write_model

STATE_FILE = "learner.safetensors"

T = TypeVar("T")


class EmbeddedLearner:
    """Trains a policy in this process. See `strop.learning.Learner`.

    Args:
        policy: what is trained. Weights that don't require a gradient stay as they are.
        tokenizer: saved beside the weights.
        masters: fp32 values by HF parameter name, taken from the model before the policy rounded it; None starts from
            the policy's own.
        tokens_per_micro_batch: most tokens that are computed at once.
        weight_decay, betas, epsilon: of AdamW.
        max_grad_norm: the gradient is scaled down to this norm.
        adapter: the one of the policy's adapters that is trained, each by a learner of its own; None: the only one.
        recompute: keep only the layers' inputs for the backward pass, and compute each layer again.
        replay_experts: have routers choose what the sampler's chose, where a batch says so.
        balance: weight of the routers' balance loss (`strop.learning.routing.balance_loss`).
        moments: how the optimizer keeps its moments.

    Raises:
        ModelError: there is no such adapter, or several to choose from; or the model's layers can't be recomputed.
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
        adapter: str | None = None,
        recompute: bool = False,
        replay_experts: bool = True,
        balance: float = 0.0,
        moments: Moments = "float32",
    ) -> None:
        if recompute and not policy.recomputes:
            raise ModelError(
                f"{type(policy.model).__name__} has no layers that can be computed again: leave out "
                "learner.activation_checkpointing"
            )
        self.policy, self.tokenizer = policy, tokenizer
        self.budget, self.max_grad_norm = tokens_per_micro_batch, max_grad_norm
        self.adapter = _trained_adapter(policy, adapter)
        trained = [w for w in policy.weights if adapter_of(w.name) == (self.adapter or None)]
        self.masters = MasterWeights(
            trained, masters, weight_decay=weight_decay, betas=betas, epsilon=epsilon, moments=moments
        )
        self.recompute, self.replay_experts, self.balance = recompute, replay_experts, balance
        self._splits = 0
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
        if self._splits:
            metrics |= {"memory_splits": float(self._splits), "tokens_per_micro_batch": float(self.budget)}
            self._splits = 0
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
        if not len(chosen):
            return {"skipped": 1.0, "loss": 0.0, "tokens_trained": 0.0, "tokens_computed": 0.0}

        def attempt() -> Metrics:
            meter, load = BatchMeter(loss), LoadMeter(self.policy.experts) if self.policy.experts else None
            for part in self._split(batch, chosen, loss.compares_sequences):
                with self._running(batch, part) as routing:
                    tokens = self._tokens(batch, part, self._part_logprobs(part, temperature))
                    total = tokens.logprobs.new_zeros(())
                    for (name, weight, component), by_sequence in zip(loss.components, weights, strict=True):
                        losses, metrics = component(tokens)
                        share = self._tensor(by_sequence[part.sequences].astype(np.float32))[tokens.sequence]
                        contribution = (losses * share).sum()
                        meter.component(name, contribution, metrics, component.by_sequence)
                        total = total + weight * contribution
                    if routing and load:
                        total = total + self._routed(routing, load, part, len(chosen))
                    if learns:
                        total.backward()  # type: ignore[no-untyped-call]
                        self.masters.take_gradients()
                    meter.part(part, tokens)
            return meter.result() | (load.result() if load else {})

        metrics = self._within_memory(attempt, batch, chosen, loss.compares_sequences)
        return metrics | {"learner_seconds": time.monotonic() - started}

    @contextmanager
    def _running(self, batch: Batch, part: MicroBatch) -> Iterator[Routing | None]:
        """The settings of a pass over a micro-batch; gives what records its routing."""
        layout, routing = self.policy.experts, None
        if layout:
            given = given_choices(batch, part, layout, self.policy.device) if self.replay_experts else None
            routing = Routing(given, keep_scores=self.balance > 0)
        settings = Pass(
            adapter=self.adapter,
            routing=routing,
            recompute=self.recompute,
            gradient_of=self.masters.gradient_of,
        )
        with running(settings):
            yield routing

    def _routed(self, routing: Routing, load: LoadMeter, part: MicroBatch, sequences: int) -> Tensor | float:
        """Measure a micro-batch's routing; its share of the balance loss, which is the mean over the batch's sequences."""
        real = real_places(part, self.policy.device)
        load.add(routing, real)
        if not self.balance:
            return 0.0
        contribution = balance_loss(routing, real).sum() / sequences
        load.balance += float(contribution.detach())
        return self.balance * contribution

    def _within_memory(
        self, attempt: Callable[[], T], batch: Batch, chosen: NDArray[np.int64], whole_groups: bool = False
    ) -> T:
        """Do something that goes through a batch; each time memory runs out, undo it and do it again in half the parts.

        Raises:
            BatchError: memory runs out for the smallest parts that there can be.
        """
        before = self.masters.gradient.clone() if self._has_gradient else None
        while True:
            with self._guarded():
                try:
                    return attempt()
                except Exception as error:
                    if not _out_of_memory(error):
                        raise
                    smallest = smallest_budget(batch, chosen, shared=self._shared, whole_groups=whole_groups)
                    if self.budget <= smallest:
                        raise
            self._undo(before)
            self.budget = max(self.budget // 2, smallest)
            self._splits += 1

    def _undo(self, before: Tensor | None) -> None:
        """Take back what a broken pass left behind."""
        for weight in self.masters.weights:
            weight.tensor.grad = None
        self.masters.gradient.zero_()
        if before is not None:
            self.masters.gradient.copy_(before)
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

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
        chosen = np.flatnonzero(batch.trained_counts)

        def attempt() -> NDArray[np.float32]:
            result = np.zeros(len(batch.tokens), dtype=np.float32)
            for part in self._split(batch, chosen):
                with self._running(batch, part):
                    result[part.trained] = self._part_logprobs(part, temperature, reference).cpu().numpy()
            return result

        with torch.no_grad():
            return self._within_memory(attempt, batch, chosen)

    @property
    def _shared(self) -> bool:
        """Whether common prefixes are computed once."""
        return self.policy.decoder is not None

    def _split(self, batch: Batch, chosen: NDArray[np.int64], whole_groups: bool = False) -> list[MicroBatch]:
        return split_batch(batch, self.budget, chosen, shared=self._shared, whole_groups=whole_groups)

    def _part_logprobs(self, part: MicroBatch, temperature: float, reference: ReferenceWeights | None = None) -> Tensor:
        """(trained,) log-probabilities, under the present weights or (without a gradient) a reference's."""
        decoder = self.policy.decoder
        gradient_of: GradientOf = no_gradient if reference else self.masters.gradient_of
        if decoder is None:
            named = reference.named() if reference else None
            return module_outputs(self.policy, part, temperature, gradient_of, named)
        if reference:
            decoder = reference.decoder(decoder)
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
                    f"the learner ran out of memory with micro-batches of {self.budget} tokens, and a batch can't be "
                    "split further than into single sequences. Set learner.activation_checkpointing = true, or make "
                    "attempts shorter (agent.max_tokens, sampler.max_context)."
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
        if self.adapter:
            state["masters"] = self.masters.values
            write_adapter(folder, self.policy.model, self.adapter, self.masters.named_values())
            self.tokenizer.save_pretrained(folder)
        elif self.policy.decoder is None:  # names in files may differ from the module's
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


def _trained_adapter(policy: Policy, asked: str | None) -> str:
    """The adapter to train; "" where the policy has none."""
    names = policy.adapters
    if asked is None and len(names) <= 1:
        return policy.adapter
    if asked not in names:
        wrong = "none was named" if asked is None else f"there is no adapter {asked!r}"
        raise ModelError(f"{wrong}: the policy's are {', '.join(names) or 'none'}. Name the one that is to be trained.")
    return asked


def _with_gradient(batch: Batch) -> NDArray[np.bool_]:
    """(sequences,) whether any trained token of the sequence has an advantage."""
    active = batch.mask & (batch.advantages != 0)
    return np.bincount(batch.sequence[active], minlength=len(batch.lengths)) > 0


def _out_of_memory(error: BaseException) -> bool:
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )
