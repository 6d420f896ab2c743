"""What a run cost: the ledger of seconds and tokens, prices, and intelligence per dollar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.costs.ledger import ACTIVITIES, Ledger
from strop.costs.prices import (
    MachinePrice,
    Price,
    available_vcpus,
    find_price,
    machine_price,
    price_book,
    price_of,
)

if TYPE_CHECKING:
    from strop.costs.report import CostReport, Gain, cost_report, summarise

__all__ = [
    "ACTIVITIES",
    "CostReport",
    "Gain",
    "Ledger",
    "MachinePrice",
    "Price",
    "available_vcpus",
    "cost_report",
    "find_price",
    "machine_price",
    "price_book",
    "price_of",
    "summarise",
]


def __getattr__(name: str) -> Any:
    # The report reads run directories, whose writer needs the ledger from here: it is imported when it is asked for.
    if name in ("CostReport", "Gain", "cost_report", "summarise"):
        from strop.costs import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
