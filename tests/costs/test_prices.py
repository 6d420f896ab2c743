"""Prices are dated, named, overridable; a machine's price is the sum of its parts."""

from __future__ import annotations

import re

import pytest

from strop.costs import find_price, machine_price, price_book
from strop.errors import ConfigError


def test_every_entry_is_dated_sourced_and_unique() -> None:
    book = price_book()
    assert len({entry.name for entry in book}) == len(book)
    for entry in book:
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", entry.date), entry
        assert entry.source and entry.usd_per_hour > 0
        assert entry.unit == ("vCPU" if entry.kind == "vcpu" else "GPU")
    assert {"vcpu", "h100", "h200", "b200", "a100", "l40s", "mi300x"} <= {entry.kind for entry in book}


def test_a_kind_stands_for_its_first_entry_and_case_is_ignored() -> None:
    assert find_price("H100").name == "runpod-h100-sxm"
    assert find_price("aws-p5").usd_per_hour == 6.88
    with pytest.raises(ConfigError, match=r"'tpu9'.*h100"):
        find_price("tpu9")


def test_a_machine_costs_the_sum_of_its_parts() -> None:
    price = machine_price(vcpus=8, gpus={"h100": 2})
    assert price.usd_per_hour == pytest.approx(8 * 0.1785 / 4 + 2 * 2.69)  # by hand from the file's sources
    assert price.usd(1800) == pytest.approx(price.usd_per_hour / 2)
    assert "2 H100" in price.text and "8 vCPU" in price.text
    assert machine_price(gpus={"h100": 2}).usd_per_hour == pytest.approx(5.38)  # the host is in the GPU's price


def test_this_machine_is_the_default_and_a_set_price_beats_everything() -> None:
    assert machine_price().usd_per_hour > 0
    assert machine_price(usd_per_hour=0.0).usd(10) == 0.0
    assert machine_price(usd_per_hour=1.25, gpus={"h100": 8}).usd_per_hour == 1.25
    with pytest.raises(ConfigError, match="negative"):
        machine_price(usd_per_hour=-1)
    with pytest.raises(ConfigError, match="negative"):
        machine_price(gpus={"h100": -1})
