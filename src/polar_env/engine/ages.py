"""How old are the weights behind a token? Names of versions, in the order in which they came. Pure.

A trainer *declares* names; some engines *tell* names of their own in their answers. The two are separate orders: a
name is as old as the newest name of its own order says. A name in neither (the model's own, before any was declared) is
older than all that were declared.
"""

import re

COUNTED = re.compile(r"(.*?)(\d{1,12})")
"""A name that ends in a number, such as ``step-12`` or ``12``: the number counts updates. Of twelve digits at most: an
age is a number of a row, which holds 2**46 (``gym.contract``, rule 9)."""


class Versions:
    """The versions of one engine."""

    def __init__(self) -> None:
        self._declared: list[str] = []
        self._told: list[str] = []

    @property
    def named(self) -> bool:
        """Whether anybody ever said a name."""
        return bool(self._declared or self._told)

    def declare(self, name: str) -> bool:
        """The weights have this name now; whether that is news. A name that comes back (a trainer that went back to a
        checkpoint) is the newest."""
        if self._declared[-1:] == [name]:
            return False
        self._declared = [*(known for known in self._declared if known != name), name]
        return True

    def told(self, version: str) -> bool:
        """The engine answered with these weights (``a+b``: they changed under the call); whether that is news.

        Only a name's first appearance counts: several replicas change one after the other.
        """
        fresh = [name for name in version.split("+") if name not in self._told]
        self._told += fresh
        return bool(fresh)

    def age(self, version: str) -> int:
        """Updates between ``version`` (the oldest of ``a+b``; empty: what was there before any was declared) and
        today's weights."""
        return max(_age(name, order) for name in version.split("+") for order in self._orders(name))

    def newest(self, version: str) -> str:
        """The name that the age of ``version`` is counted up to; empty when there is none."""
        orders = [(_age(name, order), order) for name in version.split("+") for order in self._orders(name)]
        return (max(orders)[1] or [""])[-1]

    def _orders(self, name: str) -> list[list[str]]:
        return [order for order in (self._declared, self._told) if name in order] or [self._declared]


def _age(name: str, order: list[str]) -> int:
    if not order or name == order[-1]:
        return 0
    counted = behind(name, order[-1])
    if counted > 0:
        return counted
    return len(order) - 1 - order.index(name) if name in order else len(order)


def behind(old: str, new: str) -> int:
    """How many updates ``old`` is behind ``new`` by the numbers at their ends; 0 when they are not counted alike."""
    first, second = COUNTED.fullmatch(old), COUNTED.fullmatch(new)
    if first is None or second is None or first[1] != second[1]:
        return 0
    return int(second[2]) - int(first[2])
