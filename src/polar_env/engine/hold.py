"""The time that is nobody's budget: what a session waited at the fence, and generations that were thrown away."""

import time
from collections.abc import Generator
from contextlib import contextmanager


class Hold:
    """The wall-clock time one session lost at the fence, in seconds: the union over its concurrent calls."""

    def __init__(self) -> None:
        self._total = 0.0
        self._until = 0.0
        """End of what is in ``_total``."""
        self._since = 0.0
        self._calls = 0

    @property
    def calls(self) -> int:
        """Calls held now."""
        return self._calls

    @property
    def seconds(self) -> float:
        """Up to now, a hold under way included."""
        return self._total + (time.monotonic() - self._since if self._calls else 0.0)

    def owed(self, granted: float) -> float:
        """Seconds to add to a deadline that has come and was moved by ``granted`` before; 0.0: it stands.

        At least a second while a call is held, so that the holder of the deadline does not ask all the time.
        """
        owed = max(0.0, self.seconds - granted)
        return max(1.0, owed) if self._calls else owed

    @contextmanager
    def held(self) -> Generator[None]:
        """One call waits in this block."""
        if not self._calls:
            self._since = time.monotonic()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._until = time.monotonic()
                self._total += self._until - self._since

    def lost(self, began: float) -> None:
        """A generation that ran from ``began`` (monotonic) until now was thrown away."""
        end = self._since if self._calls else time.monotonic()
        self._total += max(0.0, end - max(began, self._until))
        self._until = max(self._until, end)
