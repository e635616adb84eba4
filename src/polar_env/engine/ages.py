"""How old are the weights behind a token? Names of versions, in the order in which they came. Pure.

A trainer *declares* names; some engines *tell* names of their own in their answers. The two are separate orders: a
name is as old as the newest name of its own order says. A name in neither (the model's own, before any was declared) is
older than all that were declared.
"""

import re

COUNTED = re.compile(r"(.*?)(\d{1,12})")
"""A name that ends in a number, such as ``step-12`` or ``12``: the number counts updates. Of twelve digits at most: an
age is a number of a row, which holds 2**46 (``gym.contract``, rule 9)."""


class _Order:
    """Names as they came. Every call asks for ages and a run has thousands of updates, so nothing here walks them."""

    def __init__(self) -> None:
        self.newest = ""
        self._count = 0
        self._places: dict[str, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, name: str) -> None:
        """The newest is ``name``."""
        self.newest, self._places[name] = name, self._count
        self._count += 1

    def age(self, name: str) -> int:
        """How many came after it."""
        if not self._count or name == self.newest:
            return 0
        counted = behind(name, self.newest)
        return counted if counted > 0 else self._count - 1 - self._places.get(name, -1)


class Versions:
    """The versions of one engine."""

    def __init__(self) -> None:
        self._declared = _Order()
        self._told = _Order()

    @property
    def named(self) -> bool:
        """Whether anybody ever said a name."""
        return bool(self._declared or self._told)

    def declare(self, name: str) -> bool:
        """The weights have this name now; whether that is news. A name that comes back (a trainer that went back to a
        checkpoint) is the newest."""
        if self._declared and self._declared.newest == name:
            return False
        self._declared.add(name)
        return True

    def told(self, version: str) -> bool:
        """The engine answered with these weights (``a+b``: they changed under the call); whether that is news.

        Only a name's first appearance counts: several replicas change one after the other.
        """
        fresh = [name for name in dict.fromkeys(version.split("+")) if name not in self._told]
        for name in fresh:
            self._told.add(name)
        return bool(fresh)

    def age(self, version: str) -> int:
        """Updates between ``version`` (the oldest of ``a+b``; empty: what was there before any was declared) and
        today's weights."""
        return self._oldest(version)[0]

    def newest(self, version: str) -> str:
        """The name that the age of ``version`` is counted up to; empty when there is none."""
        return self._oldest(version)[1]

    def _oldest(self, version: str) -> tuple[int, str]:
        """(age, the name it is counted up to) of the oldest name."""
        return max((order.age(name), order.newest) for name in version.split("+") for order in self._orders(name))

    def _orders(self, name: str) -> list[_Order]:
        return [order for order in (self._declared, self._told) if name in order] or [self._declared]


def behind(old: str, new: str) -> int:
    """How many updates ``old`` is behind ``new`` by the numbers at their ends; 0 when they are not counted alike."""
    first, second = COUNTED.fullmatch(old), COUNTED.fullmatch(new)
    if first is None or second is None or first[1] != second[1]:
        return 0
    return int(second[2]) - int(first[2])
