"""Held-out examples: measured every so many steps, and the end of a stage that has stopped to learn from its own.

Whether a stage is over is a function of what was measured up to a step, so that whoever resumes ends where the first
process would have ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from strop.agents.metrics import Metrics
from strop.config import ExamplesSettings
from strop.data import Rendered
from strop.learning import Batch, Loss
from strop.training.examples import gather

if TYPE_CHECKING:
    from strop.training.workshop import Workshop

#: Examples that are measured at once.
CHUNK = 64
#: Makes a batch of examples; what it needs beyond their tokens may have to be computed.
MakeBatch = Callable[[Sequence[Rendered]], Awaitable[Batch]]


class Validation:
    """Watches the loss on held-out examples of a stage.

    Args:
        stage: the recipe's; without `validation` nothing is measured and no stage ends early.
        shop: whose learner it is.
        loss: what is measured.
        batch: makes batches.
    """

    def __init__(self, stage: ExamplesSettings, shop: Workshop, loss: Loss, batch: MakeBatch) -> None:
        self.stage, self.shop, self._loss, self._batch = stage, shop, loss, batch
        self._measured: dict[int, float] = shop.run.validations(stage.name)

    async def measure_if_due(self, steps: int) -> None:
        """Measure after so many steps, and keep the weights if they are the best so far."""
        asked = self.stage.validation
        if asked is None or not (steps % asked.every == 0 or steps == self.stage.steps):
            return
        metrics = await self.measure()
        self.shop.run.log_validation(self.stage.name, steps, metrics)
        self._measured[steps] = metrics["loss"]
        if asked.patience and self.best(steps) == steps:
            self.shop.checkpoint(self.stage, steps, spare=(steps,))

    async def measure(self) -> Metrics:
        """What the loss measures on the held-out examples: means over them, as over one batch."""
        examples, count = gather(self.stage, self.shop).held_out, 0
        sums: Metrics = {}
        by_sequence = all(component.by_sequence for _, _, component in self._loss.components)
        for start in range(0, len(examples), CHUNK):
            chunk = examples[start : start + CHUNK]
            found = await self.shop.work(self.shop.learner.measure, await self._batch(chunk), self._loss, 1.0)
            weight = len(chunk) if by_sequence else int(found["tokens_trained"])
            for name in ("loss", "accuracy", "margin"):
                if name in found:
                    sums[name] = sums.get(name, 0.0) + weight * found[name]
            count += weight
        return {name: value / count for name, value in sums.items()}

    def best(self, steps: int) -> int:
        """The measured step with the lowest loss up to `steps`, the first of equal ones; 0 if none was measured."""
        known = {step: loss for step, loss in sorted(self._measured.items()) if step <= steps}
        return min(known, key=lambda step: known[step]) if known else 0

    def over(self, steps: int) -> bool:
        """Whether `patience` measurements have brought no new best."""
        patience = self.stage.validation.patience if self.stage.validation else 0
        since = [step for step in self._measured if self.best(steps) < step <= steps]
        return bool(patience) and len(since) >= patience

    def go_back(self, steps: int) -> None:
        """At the end of a stage that may end early: the weights that were best."""
        best = self.best(steps)
        if not self.stage.validation or not self.stage.validation.patience or best in (0, steps):
            return
        path = self.shop.run.checkpoint_path(self.stage.name, best)
        if not self.shop.run.checkpoint_path(self.stage.name, steps).exists():
            self.shop.keep(path)
            version = self.shop.learner.version
            self.shop.run.log("stage", stage=self.stage.name, what="went back", step=steps, to=best, version=version)
