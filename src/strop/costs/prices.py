"""What an hour of a machine costs: a dated price file, and the price of this machine or of one that is named.

Prices are list prices of their date and meant to be overridden. What was done with the hours is in the ledger.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from strop.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Price:
    """An entry of the price file: what one unit costs for one hour.

    Attributes:
        kind: what it is, "vcpu" or a GPU's name ("h100").
        name: of the entry, unique.
        unit: "vCPU" or "GPU".
        usd_per_hour: dollars for one unit.
        date: when that was the list price, YYYY-MM.
        source: whose price, for what.
    """

    kind: str
    name: str
    unit: str
    usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class MachinePrice:
    """What a whole machine costs for one hour, and how that comes about, in one line for people.

    Attributes:
        usd_per_hour: dollars for an hour of everything in it, at least 0.
        text: for example "2 vCPU × $0.0446 (aws-c7i, 2026-04)".
    """

    usd_per_hour: float
    text: str

    def usd(self, seconds: float) -> float:
        """Dollars for so many seconds of the machine."""
        return seconds / 3600.0 * self.usd_per_hour

    def as_record(self) -> dict[str, Any]:
        """As JSON values; what a run writes into its events. `from_record` reads it back."""
        return {"usd_per_hour": self.usd_per_hour, "text": self.text}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> MachinePrice:
        """Read what `as_record` wrote."""
        return cls(float(record["usd_per_hour"]), str(record["text"]))


@cache
def price_book() -> tuple[Price, ...]:
    """Every entry of the price file, in its order: the first of a kind is that kind's default."""
    text = files("strop.costs").joinpath("prices.toml").read_text(encoding="utf-8")
    return tuple(Price(**entry) for entry in tomllib.loads(text)["price"])


def find_price(name: str) -> Price:
    """The entry of that name, or the default of that kind, upper or lower case.

    Raises:
        ConfigError: there is neither.
    """
    wanted = name.lower()
    for entry in price_book():
        if wanted in (entry.name, entry.kind):
            return entry
    known = ", ".join(dict.fromkeys(entry.kind for entry in price_book()))
    raise ConfigError("price", f"no price is known for {name!r}", f"Name one of {known}, or say usd_per_hour yourself")


def machine_price(
    *,
    usd_per_hour: float | None = None,
    vcpus: int | None = None,
    vcpu: str = "vcpu",
    gpus: Mapping[str, int] | None = None,
) -> MachinePrice:
    """What a machine costs: by default this one, as so many vCPUs at the default vCPU price.

    Args:
        usd_per_hour: what you pay for the whole machine; the rest is then ignored.
        vcpus: how many vCPUs; None takes those that this process may use, or none where GPUs are named (a GPU's
            price holds its share of the host).
        vcpu: kind or name of the vCPU price.
        gpus: how many GPUs of each kind or price name, for example {"h100": 8}.

    Raises:
        ConfigError: a price isn't known, or a number is negative.
    """
    if usd_per_hour is not None:
        if usd_per_hour < 0:
            raise ConfigError("usd_per_hour", f"{usd_per_hour} is negative", "Give dollars an hour, 0 or more")
        return MachinePrice(usd_per_hour, f"${usd_per_hour:g} an hour, as set")
    if vcpus is None:
        vcpus = 0 if gpus else available_vcpus()
    total, parts = 0.0, []
    for name, count in {vcpu: vcpus, **(gpus or {})}.items():
        if count < 0:
            raise ConfigError(name, f"{count} of them is negative", "Give a number of 0 or more")
        if count:
            entry = find_price(name)
            total += count * entry.usd_per_hour
            what = entry.unit if entry.unit == "vCPU" else entry.kind.upper()
            parts.append(f"{count} {what} × ${entry.usd_per_hour:.4g} ({entry.name}, {entry.date})")
    return MachinePrice(total, " + ".join(parts) or "nothing")


def available_vcpus() -> int:
    """How many logical processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def price_of(machine: str = "auto", usd_per_hour: float | None = None) -> MachinePrice:
    """What a recipe's [costs] table says the machine costs.

    Args:
        machine: "auto" for this machine's vCPUs at the default price; a vCPU price's name for them at that one; a
            GPU's kind or price name, alone or counted ("h100", "8 x h100").
        usd_per_hour: what you pay for the whole machine; beats `machine`.

    Raises:
        ConfigError: the price isn't known, or a number is negative.
    """
    if usd_per_hour is not None or machine == "auto":
        return machine_price(usd_per_hour=usd_per_hour)
    match = re.fullmatch(r"(?:(\d+)\s*[x×]\s*)?(\S+)", machine)
    if match is None:
        raise ConfigError("costs.machine", f"{machine!r} is no machine", 'Write "auto", "h100" or "8 x h100"')
    entry, count = find_price(match[2]), match[1]
    if entry.unit == "vCPU":
        return machine_price(vcpu=match[2], vcpus=int(count) if count else None)
    return machine_price(gpus={match[2]: int(count or 1)})
