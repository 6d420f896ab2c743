"""What `strop data check` says of a data file: rows that are wrong, tokens, duplicates, truncations, and the cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from strop.config import DataSettings
from strop.costs import price_of
from strop.data.formats import FORMATS
from strop.data.load import Loaded, Row, load_rows
from strop.data.rendering import RowRenderer
from strop.models.load import load_tokenizer, resolve_model

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Problems and duplicates that are shown row by row.
SHOWN = 20
#: A step is taken to need so many times the matrix products alone; benchmarks/sft_dpo.py measures it.
OVER_MATMUL = 1.5
#: Passes over the weights that a token costs: forward, and two in the backward pass; at 2 operations a weight.
OPERATIONS = 6


@dataclass(frozen=True, slots=True)
class DataCheck:
    """A data file, looked at for a model.

    Attributes:
        settings: how its rows were understood.
        model: whose tokens are counted.
        loaded: rows and problems.
        duplicates: rows that say what an earlier row said, each with that row.
        decode: text of token ids.
        seconds: that an epoch of training takes on this machine, estimated.
        usd: what that costs.
    """

    settings: DataSettings
    model: str
    loaded: Loaded
    duplicates: list[tuple[Row, Row]]
    decode: Callable[[list[int]], str]
    seconds: float
    usd: float

    @property
    def good(self) -> bool:
        """Whether a stage would train on it as it is."""
        return bool(self.loaded.rows) and not self.loaded.problems


def check_data(settings: DataSettings, model: str) -> DataCheck:
    """Read and render every row as a stage would, and estimate what training on them costs.

    Args:
        settings: as a stage has them.
        model: a start model's name, a folder or a hub name; its tokenizer is loaded, its weights are only counted.

    Raises:
        StropError: the file can't be read, or the model has no tokenizer or chat template.
    """
    from strop.sampling.rendering import renderer_for

    source = resolve_model(model)
    tokenizer = load_tokenizer(source)
    render = RowRenderer(
        renderer_for(tokenizer, source),
        tokenizer,
        reasoning=settings.reasoning,
        max_tokens=settings.max_tokens,
        cut=settings.too_long == "cut",
    )
    loaded = load_rows(settings, render)
    first: dict[object, Row] = {}
    duplicates = []
    for row in loaded.rows:
        key = tuple(tuple(tokens) for tokens, _ in row.rendered.sequences), row.rendered.desirable
        if key in first:
            duplicates.append((row, first[key]))
        first.setdefault(key, row)
    tokens = sum(row.rendered.tokens for row in loaded.rows)
    seconds = OVER_MATMUL * OPERATIONS * _weights(source) * tokens / _operations_per_second()
    decode: Callable[[list[int]], str] = tokenizer.decode
    return DataCheck(settings, model, loaded, duplicates, decode, seconds, price_of().usd(seconds))


def _weights(source: str) -> float:
    """Weights that a token meets, by the model's configuration: matrices of its layers and of its head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    counted = {id(p): p.numel() for p in model.parameters() if p.dim() > 1}
    looked_up, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return float(sum(counted.values()) - (looked_up.numel() if looked_up is not head else 0))


def _operations_per_second() -> float:
    """Of matrix products on this machine, in the type that it computes fastest: measured in a third of a second."""
    import torch

    from strop.models.policy import fastest_dtype

    x, w = (torch.randn(1024, 1024).to(fastest_dtype()) for _ in range(2))
    for _ in range(2):
        x @ w
    began, products = time.perf_counter(), 0
    while time.perf_counter() - began < 0.3:
        x @ w
        products += 1
    return products * 2 * 1024**3 / (time.perf_counter() - began)


def show_data_check(check: DataCheck, *, show: int = 1, batch_size: int = 8) -> RenderableType:
    """The check as people read it.

    Args:
        check: what was found.
        show: rows whose rendering is shown.
        batch_size: of a stage, for the number of steps of an epoch.
    """
    from rich.console import Group
    from rich.text import Text

    loaded = check.loaded
    gives = FORMATS[loaded.format].gives if loaded.format else "rows of no known format"
    head = f"{check.settings.path}: {len(loaded.rows)} {gives} ({loaded.format or '?'})"
    parts: list[RenderableType] = [Text(head, style="bold")]
    for row in loaded.rows[:show]:
        parts += [Text(f"\n{row.file} row {row.number}; what is learnt is green:", style="dim"), _rendering(check, row)]
    if loaded.rows:
        parts += [Text(), _figures(check, batch_size)]
    if loaded.problems:
        counted = Counter(f"{problem.field.split('[')[0]} {problem.wrong.split('(')[0]}" for problem in loaded.problems)
        parts.append(Text(f"\n{len(loaded.problems)} rows can't be trained on:", style="red"))
        parts += [Text(f"  {problem}") for problem in loaded.problems[:SHOWN]]
        if len(loaded.problems) > SHOWN:
            parts += [Text(f"  … and {len(loaded.problems) - SHOWN} more. By kind:")]
            parts += [Text(f"  {count:>6} × {kind}") for kind, count in counted.most_common(10)]
    return Group(*parts)


def _figures(check: DataCheck, batch_size: int) -> RenderableType:
    from rich.table import Table

    rows = check.loaded.rows
    sizes = sorted(len(tokens) for row in rows for tokens, _ in row.rendered.sequences)
    tokens, trained = (sum(getattr(row.rendered, name) for row in rows) for name in ("tokens", "trained"))
    cut = [row for row in rows if row.rendered.cut]
    table = Table(box=None, show_header=False, pad_edge=False)
    steps = -(-len(rows) // batch_size)
    for name, value in {
        "tokens": f"{tokens:,} of {check.model}'s, of which {trained:,} ({trained / tokens:.0%}) are learnt",
        "lengths": f"{sizes[0]} to {sizes[-1]} tokens, half of them up to {median(sizes):.0f}",
        "cut": f"{len(cut)} rows at {check.settings.max_tokens} tokens" if cut else "none",
        "duplicates": "\n".join(_duplicates(check)) or "none",
        "an epoch": f"{steps} steps of {batch_size}; on this machine about {_time(check.seconds)}, ${check.usd:.4f} "
        f"(estimated from {OPERATIONS} operations a weight and token at {OVER_MATMUL:g} times the matrix products alone)",
    }.items():
        table.add_row(name, value)
    return table


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _duplicates(check: DataCheck) -> Iterator[str]:
    for row, earlier in check.duplicates[:SHOWN]:
        yield f"{row.file} row {row.number} says what row {earlier.number} of {earlier.file} says"
    if len(check.duplicates) > SHOWN:
        yield f"… and {len(check.duplicates) - SHOWN} more"


def _rendering(check: DataCheck, row: Row) -> RenderableType:
    """The row's tokens as text, what is learnt in green."""
    from itertools import groupby

    from rich.text import Text

    text = Text()
    for number, (tokens, mask) in enumerate(row.rendered.sequences):
        if len(row.rendered.sequences) > 1:
            text.append("\n── rejected ──\n" if number else "── chosen ──\n", style="dim")
        for learnt, run in groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1]):
            text.append(check.decode([token for token, _ in run]), style="green" if learnt else "dim")
    return text
