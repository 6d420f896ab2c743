"""What the shopkeeper is asked: kinds of questions, how they are worded, and the plan that answers each.

A plan is a list of tool calls in which "{0}" stands for the number that the first of them gave, and so on. It is what
the demonstrations follow; the agent never sees it. Prices are in dollars, weights in g, distances in km.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

GOODS = (
    *(
        "apple",
        "basket",
        "blanket",
        "bottle",
        "brick",
        "bucket",
        "candle",
        "carpet",
        "chair",
        "clock",
        "cup",
        "curtain",
    ),
    *("drum", "fan", "guitar", "hammer", "helmet", "jacket", "kettle", "lamp", "melon", "mirror", "mug", "pan", "pear"),
    *("pillow", "plate", "pot", "rope", "saw", "spade", "stool", "table", "tent", "towel", "vase", "wheel", "radio"),
)
TOWNS = ("Oslo", "Lima", "Cairo", "Delhi", "Paris", "Rome", "Kyoto", "Quito", "Bern", "Turin", "Leeds", "Perth")

Table = dict[str, dict[str, int]]
Step = dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what answers it.

    Attributes:
        text: what is asked.
        kind: name of its kind.
        plan: the calls that answer it: [{"name": {argument: value}}, …].
        unit: of the answer, for the sentence that gives it.
    """

    text: str
    kind: str
    plan: list[Step]
    unit: str


def draw_table(rng: random.Random) -> Table:
    """Facts about two goods and a town, the ones that a question can be about."""
    table: Table = {}
    for item in rng.sample(GOODS, 2):
        table[item] = {"price": rng.randint(11, 98), "stock": rng.randint(11, 98), "weight": 10 * rng.randint(11, 98)}
    table[rng.choice(TOWNS)] = {"distance": rng.randint(101, 989)}
    return table


def draw_question(table: Table, steps: int, rng: random.Random) -> Question:
    """A question about `table` whose plan has `steps` calls: 2, 3 or 4."""
    kind = rng.choice(KINDS[steps])
    return kind(list(table), rng)


def _lookup(item: str, field: str) -> Step:
    return {"lookup": {"item": item, "field": field}}


def _calculate(expression: str) -> Step:
    return {"calculate": {"expression": expression}}


def _convert(value: str, unit: str, to: str) -> Step:
    return {"convert": {"value": value, "from": unit, "to": to}}


def _bill(names: list[str], rng: random.Random) -> Question:
    item, count = names[0], rng.randint(3, 29)
    text = rng.choice(
        (
            f"What do {count} {item}s cost?",
            f"How many dollars are {count} {item}s?",
            f"A customer buys {count} {item}s. What is the bill?",
            f"Give me the price of {count} {item}s.",
        )
    )
    return Question(text, "bill", [_lookup(item, "price"), _calculate(f"{count}*{{0}}")], "dollars")


def _change(names: list[str], rng: random.Random) -> Question:
    item, count, paid = names[0], rng.randint(2, 5), rng.choice((500, 600, 800, 1000))
    text = rng.choice(
        (
            f"I pay {paid} dollars for {count} {item}s. How much change do I get?",
            f"A customer pays for {count} {item}s with {paid} dollars. What is the change?",
            f"What is left of {paid} dollars after buying {count} {item}s?",
        )
    )
    return Question(text, "change", [_lookup(item, "price"), _calculate(f"{paid}-{count}*{{0}}")], "dollars")


def _total(names: list[str], rng: random.Random) -> Question:
    (one, other), first, second = names[:2], rng.randint(2, 9), rng.randint(2, 9)
    text = rng.choice(
        (
            f"What do {first} {one}s and {second} {other}s cost together?",
            f"How many dollars are {first} {one}s and {second} {other}s?",
            f"A customer buys {first} {one}s and {second} {other}s. What is the bill?",
            f"Add up the price of {first} {one}s and {second} {other}s.",
        )
    )
    plan = [_lookup(one, "price"), _lookup(other, "price"), _calculate(f"{first}*{{0}}+{second}*{{1}}")]
    return Question(text, "total", plan, "dollars")


def _stock_value(names: list[str], rng: random.Random) -> Question:
    item = names[rng.randrange(2)]
    text = rng.choice(
        (
            f"What are all the {item}s in stock worth?",
            f"We sell every {item} we have. How many dollars do we take?",
            f"What is the value of our stock of {item}s?",
        )
    )
    return Question(
        text, "stock value", [_lookup(item, "price"), _lookup(item, "stock"), _calculate("{0}*{1}")], "dollars"
    )


def _weight(names: list[str], rng: random.Random) -> Question:
    item, count = names[0], rng.randint(3, 29)
    text = rng.choice(
        (
            f"How many kg do {count} {item}s weigh?",
            f"What is the weight of {count} {item}s in kg?",
            f"I carry {count} {item}s. How many kg is that?",
        )
    )
    plan = [_lookup(item, "weight"), _calculate(f"{count}*{{0}}"), _convert("{1}", "g", "kg")]
    return Question(text, "weight", plan, "kg")


def _trips(names: list[str], rng: random.Random) -> Question:
    town, count = names[2], rng.randint(2, 9)
    text = rng.choice(
        (
            f"How many m are {count} trips to {town}?",
            f"We drive to {town} {count} times, one way. How many m is that?",
            f"What is {count} times the distance to {town}, in m?",
        )
    )
    plan = [_lookup(town, "distance"), _calculate(f"{count}*{{0}}"), _convert("{1}", "km", "m")]
    return Question(text, "trips", plan, "m")


def _load(names: list[str], rng: random.Random) -> Question:
    (one, other), first, second = names[:2], rng.randint(2, 9), rng.randint(2, 9)
    text = rng.choice(
        (
            f"How many kg do {first} {one}s and {second} {other}s weigh together?",
            f"A box holds {first} {one}s and {second} {other}s. How many kg is that?",
            f"What is the weight of {first} {one}s and {second} {other}s in kg?",
        )
    )
    plan = [
        *(_lookup(one, "weight"), _lookup(other, "weight")),
        *(_calculate(f"{first}*{{0}}+{second}*{{1}}"), _convert("{2}", "g", "kg")),
    ]
    return Question(text, "load", plan, "kg")


def _refill(names: list[str], rng: random.Random) -> Question:
    item, wanted, paid = names[0], rng.randint(100, 199), rng.choice((10_000, 20_000))
    text = rng.choice(
        (
            f"We fill our stock up to {wanted} {item}s at the list price. What is left of {paid} dollars?",
            f"We want {wanted} {item}s in stock and have {paid} dollars. How much is left after buying the rest?",
        )
    )
    plan = [
        *(_lookup(item, "stock"), _lookup(item, "price")),
        *(_calculate(f"({wanted}-{{0}})*{{1}}"), _calculate(f"{paid}-{{2}}")),
    ]
    return Question(text, "refill", plan, "dollars")


#: Kinds of questions by the number of calls that answer them when no tool fails.
KINDS: Mapping[int, tuple[Callable[[list[str], random.Random], Question], ...]] = {
    2: (_bill, _change),
    3: (_total, _stock_value, _weight, _trips),
    4: (_load, _refill),
}
