"""What one session may use of the model, and what it has used. No clock and no sockets.

Every limit is a limit on what may still *start*: a call under way is finished, so totals may overshoot by the calls in
flight. What counts:

- a call: one generation that was sampled, or could not be for the harness's own fault (a full context window). Retries
  that were joined or replayed and failures of the engine cost nothing.
- a turn: a call of the agent itself on its main thread. No side call, compaction or sub-agent is one, and one question
  asked again is still one turn: an answer thrown away (superseded), or one that never arrived, after which Claude Code
  asks with the part it had ("cut off mid-stream").
- tokens: the engine's own usage of every reply it gave, thrown away or not.

Turns are counted here for harnesses that have no limit of their own (Codex, Pi, OpenHands); the others are told theirs.
"""

from collections.abc import Iterator

from polar_env.config import ProxyConfig
from polar_env.proxy.attempts import Attempt, TurnLimit
from polar_env.types import Usage


class Limits:
    """One session's allowance. ``max_turns``: ``None`` when the harness counts turns itself."""

    def __init__(self, config: ProxyConfig, max_turns: int | None = None) -> None:
        self._config = config
        self._max_turns = max_turns
        self.calls = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._turns: list[Attempt] = []

    def check(self, *, turn: bool, again: Attempt | None = None) -> None:
        """Raises TurnLimit, which names the first limit that is used up.

        ``turn``: the call would be a turn. ``again``: the attempt it replaces, whose place it takes.
        """
        for used, most, what in self._used(turn, again):
            if most is not None and used >= most:
                raise TurnLimit(404, f"this session has used its {most} {what}; stop here")

    def started(self, attempt: Attempt, *, turn: bool, again: Attempt | None = None) -> None:
        """A generation begins."""
        self.calls += 1
        if turn:
            if again is not None:
                self._turns = [other for other in self._turns if other is not again]
            self._turns.append(attempt)

    def repeated(self) -> None:
        """A request was told again what it had been told, without the engine: it uses up a call, so that loops end."""
        self.calls += 1

    def returned(self) -> None:
        """The engine failed a call: the harness gets it back."""
        self.calls -= 1

    def sampled(self, usage: Usage) -> None:
        """The engine replied."""
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens

    def turns(self, without: Attempt | None = None) -> int:
        """Turns taken so far, those in flight included."""
        return sum(attempt.counts for attempt in self._turns if attempt is not without)

    def _used(self, turn: bool, again: Attempt | None) -> Iterator[tuple[int, int | None, str]]:
        config = self._config
        yield self.calls, config.max_calls, "model calls"
        yield self.prompt_tokens, config.max_total_prompt_tokens, "prompt tokens"
        yield self.output_tokens, config.max_total_output_tokens, "output tokens"
        if turn and self._max_turns is not None:
            yield self.turns(again), self._max_turns, "turns"
