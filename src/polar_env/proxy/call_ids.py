"""Tool calls whose ids the engine gives twice, told apart. Pure.

Most engines make up an id for every call. Some take the model's own (vLLM's Kimi parser: ``functions.bash:0``, from 0
again in every sub-agent and every retry), and some count from 0 in every answer. Harnesses join results to calls by
id, and so do we (``continuation``, ``threads``, the order of results): an id that came twice would give one call the
result, or the tokens, of another.

So a session hands out each id once. One that it handed out before gets a number at its end, and loses it again on the
way back to the engine: templates that write ids into the prompt must find the model's own. So must whoever trains on
messages (``polar export --format sft``): records and logs hold the engine's own too.
"""

from collections.abc import Mapping
from dataclasses import replace

from polar_env.messages import ChatMessage, ChatToolCall
from polar_env.types import AssistantTurn, Delta, ModelRequest, ToolCall


class CallIds:
    """The ids one session has handed out."""

    def __init__(self) -> None:
        self._out: set[str] = set()
        self._own: dict[str, str] = {}
        """An id that was given a number -> the engine's own."""

    def answer(self) -> "AnswerIds":
        """For the calls of one generation."""
        return AnswerIds(self)

    def hand_out(self, own: str) -> str:
        """``own``, or a new id in its place when that is taken. No id stays none."""
        given, count = own, 1
        while given and given in self._out:
            count += 1
            given = f"{own}-{count}"
        self._out.add(given)
        if given != own:
            self._own[given] = own
        return given

    def engines(self, request: ModelRequest) -> ModelRequest:
        """``request`` with the ids as the engine gave them."""
        if not self._own:
            return request
        return replace(request, messages=tuple(_with(message, self._own) for message in request.messages))


class AnswerIds:
    """The ids of one generation, the same in its fragments and in its turn."""

    def __init__(self, ids: CallIds) -> None:
        self._ids = ids
        self._given: dict[int, tuple[str, str]] = {}

    def delta(self, delta: Delta) -> Delta:
        """A fragment as the harness is to see it."""
        if delta.kind != "tool_open":
            return delta
        given = self._id(delta.index, delta.id)
        return delta if given == delta.id else replace(delta, id=given)

    def turn(self, turn: AssistantTurn) -> AssistantTurn:
        """The whole turn as the harness is to see it."""
        calls = tuple(self._call(index, call) for index, call in enumerate(turn.tool_calls))
        return turn if calls == turn.tool_calls else replace(turn, tool_calls=calls)

    def _call(self, index: int, call: ToolCall) -> ToolCall:
        return replace(call, id=self._id(index, call.id))

    def _id(self, index: int, own: str) -> str:
        """What was given for the call at ``index``; the turn's call may be another than the stream began."""
        known = self._given.get(index)
        if known is None or known[0] != own:
            known = self._given[index] = (own, self._ids.hand_out(own))
        return known[1]


def _with(message: ChatMessage, own: Mapping[str, str]) -> ChatMessage:
    changed = message.copy()
    if (answered := message.get("tool_call_id", "")) in own:
        changed["tool_call_id"] = own[answered]
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_call_with(call, own) for call in calls]
    return changed


def _call_with(call: ChatToolCall, own: Mapping[str, str]) -> ChatToolCall:
    return {**call, "id": own.get(call["id"], call["id"])}
