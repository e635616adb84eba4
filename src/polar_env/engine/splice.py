"""The next prompt of a conversation as the tokens it already has and a rendering of what is new. No tokenizer, no HTTP.

A prompt rendered from messages spells the model's earlier turns anew: thoughts are dropped, arguments written
differently, merges chosen again, and what was sampled is no longer what the next call was given. Here the next prompt
is the exact prompt and sampled ids of the call it carries on, and behind them only the *tail*: the rest of what ends
the assistant's turn, the new messages, the next assistant's opening. The tail is cut out of the model's own template,
which renders a short stand-in: a user, an assistant with the same calls whose text is a sentinel, the new messages.

That a template can be cut there is proved before a rollout starts (``prove``) and never assumed: where it cannot, every
prompt is rendered whole. Nothing here looks into a template; a server that renders is enough.
"""

from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from polar_env.errors import EngineError
from polar_env.messages import ChatMessage, ChatToolCall, ToolSpec
from polar_env.types import ModelRequest

Render = Callable[[Sequence[ChatMessage], Sequence[ToolSpec]], Awaitable["array[int]"]]
"""Messages and tools -> prompt ids [P], the next assistant's opening included. Raises EngineError."""

_SENTINELS = ("Zqvx", "kwyj")
"""Words that share no piece, so that one in place of the other changes all their ids and no others."""

_TOOL = ToolSpec(name="run", description="Run a command.", parameters={"type": "object", "properties": {}})
"""Stands for a request's tools: templates ask whether there are any, and name them long before the tail."""


class Unspliceable(EngineError):  # noqa: N818 - it says of a call that it cannot be, and the engine is fine
    """This call's prompt, or this template, cannot be spliced: render the prompt whole, and count it."""


@dataclass(frozen=True, slots=True)
class Splicer:
    """What is known of one template. Made by ``prove``."""

    render: Render
    sentinel: "array[int]"
    """Ids of the stand-in's text."""
    end: int
    """The id that ends an assistant's turn in the template, and that a model samples to end it."""

    async def prompt(self, request: ModelRequest) -> "array[int]":
        """Prompt ids [P]: ``request.continues.ids``, then the tail; the ids in front are never changed.

        Raises:
            Unspliceable: it continues nothing, adds nothing, shows images (ids alone do not hold them), was ended by
                another id than the template's, or its stand-in was not rendered as expected.
        """
        carried = request.continues
        if carried is None:
            raise Unspliceable("the request carries on no earlier call")
        if any(map(shows_image, request.messages)):
            raise Unspliceable("the conversation shows an image")
        turn, new = request.messages[carried.messages - 1], request.messages[carried.messages :]
        tail = await self.tail(turn, new, tools=bool(request.tools))
        if carried.ids[-1] == self.end:
            return carried.ids + tail
        if not carried.cut:
            raise Unspliceable(f"the turn ended with id {carried.ids[-1]}, the template ends one with {self.end}")
        return carried.ids + array("i", [self.end]) + tail

    async def tail(self, turn: ChatMessage, new: Sequence[ChatMessage], *, tools: bool) -> "array[int]":
        """Ids [T] that follow the end token of ``turn``: the rest of its end, ``new``, the next assistant's opening.

        Raises Unspliceable.
        """
        if turn["role"] != "assistant" or not new:
            raise Unspliceable("nothing new follows an assistant's turn")
        try:
            ids = await self.render([_ASKED, _stand_in(turn), *new], [_TOOL] if tools else [])
        except EngineError as error:
            raise Unspliceable(f"the stand-in cannot be rendered: {error}") from error
        return self._behind_the_end(ids)

    def _behind_the_end(self, ids: "array[int]") -> "array[int]":
        """What follows the first end token after the first sentinel. Calls in between have no arguments, so nothing
        that a model or a tool wrote comes before it."""
        text, mark = ids.tobytes(), self.sentinel.tobytes()
        at = text.find(mark)
        while at % ids.itemsize and at >= 0:
            at = text.find(mark, at + 1)
        if at < 0:
            raise Unspliceable("the template does not show the assistant's text as it is")
        try:
            return ids[ids.index(self.end, at // ids.itemsize + len(self.sentinel)) + 1 :]
        except ValueError:
            raise Unspliceable(f"no end token {self.end} follows the assistant's turn") from None


_ASKED = ChatMessage(role="user", content="Go on.")


def _stand_in(turn: ChatMessage) -> ChatMessage:
    """The turn with the sentinel for its text and its calls without arguments: results may be named after calls."""
    calls = [_call(call["function"]["name"], call["id"], "{}") for call in turn.get("tool_calls", ())]
    said = ChatMessage(role="assistant", content=_SENTINELS[0])
    return {**said, "tool_calls": calls} if calls else said


def _call(name: str, call_id: str, arguments: str) -> ChatToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shows_image(message: ChatMessage) -> bool:
    """Whether it has a part that is no text: ids alone do not hold it."""
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") != "text" for part in content)


# --- the start-up proof -----------------------------------------------------------------------------------------


async def prove(render: Render) -> Splicer:
    """Learn a template's end token, and prove on conversations of every shape that its tail can be cut out.

    For each: (1) the full rendering, with a system prompt and tools, ends with the end token and the tail of the
    stand-in; (2) what stands before depends on no word of the new messages, so the tail holds all of them.

    Raises:
        Unspliceable: naming the conversation that fails and how.
        EngineError: nothing at all can be rendered.
    """
    sentinel, end = await _learn(render)
    splicer = Splicer(render, sentinel, end)
    for name, (turn, *new) in _conversations().items():
        try:
            await _prove_one(splicer, turn, new)
        except EngineError as error:
            raise Unspliceable(f"{name}: {error}") from error
    return splicer


async def _learn(render: Render) -> tuple["array[int]", int]:
    """(the sentinel's ids, the id right behind it) by what changes when another word takes its place."""
    ours, other = [
        await render([_ASKED, ChatMessage(role="assistant", content=word), _ASKED], []) for word in _SENTINELS
    ]
    start, after = _shared(ours, other), _shared(ours[::-1], other[::-1])
    if not after or start + after >= len(ours):
        raise Unspliceable("the template does not show the assistant's text")
    sentinel, end = ours[start : len(ours) - after], ours[len(ours) - after]
    return sentinel, end


def _shared(one: "array[int]", other: "array[int]") -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


async def _prove_one(splicer: Splicer, turn: ChatMessage, new: Sequence[ChatMessage]) -> None:
    """Raises Unspliceable when the suffix property does not hold, EngineError when it cannot be rendered."""
    heads = list["array[int]"]()
    for tools in (_TOOLS, ()):
        for words in (new, [_reworded(message) for message in new]):
            whole = await splicer.render([*_OPENING, turn, *words], tools)
            tail = array("i", [splicer.end]) + await splicer.tail(turn, words, tools=bool(tools))
            if whole[-len(tail) :] != tail:
                raise Unspliceable("what is new is rendered otherwise behind another conversation")
            heads.append(whole[: -len(tail)])
    if heads[0] != heads[1] or heads[2] != heads[3]:
        raise Unspliceable("the new messages are not all behind the turn's end")


def _reworded(message: ChatMessage) -> ChatMessage:
    return {**message, "content": "Other words."}


_TOOLS = (
    ToolSpec(
        name="bash",
        description="Run a command.",
        parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    ),
    ToolSpec(
        name="read",
        description="Read a file.",
        parameters={"type": "object", "properties": {"path": {"type": "string"}}},
    ),
)
_OPENING = (
    ChatMessage(role="system", content="You fix bugs."),
    ChatMessage(role="user", content="Fix the bug in a.py."),
)


def _conversations() -> dict[str, list[ChatMessage]]:
    """Name -> the turn that was sampled and what is new after it."""
    user = ChatMessage(role="user", content="And\n\nnow b.py?\n")
    in_parts = ChatMessage(role="user", content=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}])
    one, two = _call("bash", "call00001", '{"command": "ls\\n"}'), _call("read", "call00002", '{"path": "a.py"}')
    first = ChatMessage(role="tool", tool_call_id="call00001", content="a.py\nb.py\n")
    second = ChatMessage(role="tool", tool_call_id="call00002", content="")
    said = ChatMessage(role="assistant", content="Done.")
    thought = ChatMessage(role="assistant", content="Done.", reasoning_content="Is it?\nYes.")
    calls = ChatMessage(role="assistant", content="", tool_calls=[one])
    both = ChatMessage(role="assistant", content="I look.", tool_calls=[one, two])
    pondered = ChatMessage(role="assistant", content="", tool_calls=[one], reasoning_content="Look first.")
    return {
        "a text turn, then the user": [said, user],
        "a tool call, then its result": [calls, first],
        "parallel calls, then their results": [both, first, second],
        "a thinking turn, then the user": [thought, user],
        "a thinking turn with a call, then its result": [pondered, first],
        "a turn cut at its length, then the user": [ChatMessage(role="assistant", content="I was ab"), user],
        "an empty turn, then the user": [ChatMessage(role="assistant", content=""), user],
        "a result and the user at once": [calls, first, user],
        "a user message in parts": [said, in_parts],
    }
