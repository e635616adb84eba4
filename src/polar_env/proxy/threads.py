"""Which sub-agent a request comes from, where two of them look the same on the wire. Pure.

Qwen Code and Gemini CLI send no thread with the calls of a sub-agent; their presets name it by what it was told, and
two that were told the same word for word send the same first request. To be told apart from a retry:

- A harness that asks again has let go of its first request (measured, all of them). One that is still waited for on
  another connection is another sub-agent's.
- A harness that asks again threw the first answer away. One whose calls came back in a history was used, and the same
  request once more is another sub-agent's.

The second sub-agent of a name is called ``name#2``, and so on. What it asks later is told by the ids of the calls it
made: they are ours, a new one for every call. Taken for a retry, one of the two would have been given the other's
answer, or would have had it thrown away.
"""

from collections.abc import Callable, Mapping

from polar_env.messages import ChatMessage
from polar_env.proxy.attempts import Attempt
from polar_env.types import AssistantTurn


class Threads:
    """The sub-agents of one session."""

    def __init__(self) -> None:
        self._twins: set[str] = set()
        self._owners: dict[str, str] = {}
        self._used: set[str] = set()

    def place(
        self,
        thread: str,
        messages: tuple[ChatMessage, ...],
        key: Callable[[str], str],
        latest: Mapping[str, Attempt],
    ) -> str:
        """The thread of a sub-agent's request. ``thread``: its name so far; ``key``: a thread -> its retry key in
        ``latest``."""
        calls = [call["id"] for message in messages for call in message.get("tool_calls", [])]
        self._used.update(calls)
        thread = next((self._owners[call] for call in calls if call in self._owners), thread)
        name, count = thread, 1
        while self._taken(latest.get(key(name))):
            count += 1
            name = f"{thread}#{count}"
            self._twins.add(name)
        return name

    def answered(self, thread: str, turn: AssistantTurn) -> None:
        """A call of ``thread`` got its answer."""
        if thread in self._twins:
            self._owners.update((call.id, thread) for call in turn.tool_calls)

    def _taken(self, earlier: Attempt | None) -> bool:
        if earlier is None or earlier.waited_for:
            return earlier is not None
        calls = earlier.turn.tool_calls if earlier.turn is not None else ()
        return earlier.delivered and any(call.id in self._used for call in calls)
