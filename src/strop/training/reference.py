"""Log-probabilities under the policy of a stage's beginning: computed once, stored in the run, read by who resumes."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strop.data import Rendered
from strop.errors import RunError
from strop.learning import pack_demonstrations
from strop.runs import files

if TYPE_CHECKING:
    from strop.training.workshop import Workshop

Floats = NDArray[np.float32]
#: Examples that are computed at once.
CHUNK = 64


class StoredReference:
    """The reference of a stage's examples. `prepare` comes first.

    Args:
        shop: whose learner, while the stage has made no step, is the reference.
        stage: the stage's name.
        examples: all that will be asked for.
    """

    def __init__(self, shop: Workshop, stage: str, examples: Sequence[Rendered]) -> None:
        self.shop, self.stage, self.examples = shop, stage, list(examples)
        self.path = shop.run.path / "reference" / f"{stage}.npz"
        self._of: dict[int, Floats] = {}

    async def prepare(self, done: int) -> None:
        """Read what an earlier process stored, or compute and store it.

        Args:
            done: steps that the stage has made already.

        Raises:
            RunError: the file is damaged or of other examples, or it is missing and the weights have moved on.
        """
        if self.path.exists():
            values = self._read()
        elif done:
            raise RunError(f"{self.path} is missing: the reference can't be computed after {done} steps. Restore it.")
        else:
            values = await self._compute()
        ends = np.cumsum([example.tokens for example in self.examples])[:-1]
        self._of = {id(e): part for e, part in zip(self.examples, np.split(values, ends), strict=True)}

    def of(self, examples: Sequence[Rendered]) -> Floats:
        """(tokens,) of all sequences of some of the examples, one after another; 0 where not learnt."""
        return np.concatenate([self._of[id(example)] for example in examples])

    async def _compute(self) -> Floats:
        found = []
        for start in range(0, len(self.examples), CHUNK):
            self.shop.run.tell("progress", what="reference", done=start, of=len(self.examples))
            chunk = [sequence for example in self.examples[start : start + CHUNK] for sequence in example.sequences]
            batch = pack_demonstrations(chunk)
            found.append(await self.shop.compute("the reference", "learner", self.shop.learner.logprobs, batch))
        values = np.concatenate(found)
        self.path.parent.mkdir(exist_ok=True)
        with files.written_whole(self.path) as beside, beside.open("wb") as file:
            np.savez(file, logprobs=values, examples=np.array(self._digest()))
        name, count = self.path.relative_to(self.shop.run.path), len(self.examples)
        self.shop.run.log("reference", stage=self.stage, file=str(name), examples=count, flush=True)
        return values

    def _read(self) -> Floats:
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                values: Floats = stored["logprobs"]
                digest = str(stored["examples"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise RunError(f"{self.path} is damaged ({error}). Restore it, or begin the run anew.") from error
        if digest != self._digest():
            raise RunError(
                f"{self.path} is of other examples: the data, or how it is rendered, changed since the run began. "
                "Restore the data, or begin the run anew."
            )
        return values

    def _digest(self) -> str:
        """Of every token and mask, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.examples:
            for tokens, mask in example.sequences:
                digest.update(np.array(tokens, dtype=np.int32).tobytes())
                digest.update(np.array(mask, dtype=bool).tobytes())
        return digest.hexdigest()
