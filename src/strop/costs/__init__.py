"""What a run cost: the ledger of seconds and tokens, prices, and intelligence per dollar."""

from strop.costs.ledger import ACTIVITIES, Ledger
from strop.costs.prices import MachinePrice, Price, find_price, machine_price, price_book

__all__ = ["ACTIVITIES", "Ledger", "MachinePrice", "Price", "find_price", "machine_price", "price_book"]
