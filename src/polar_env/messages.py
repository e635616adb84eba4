"""Messages and tools in OpenAI-Chat form: what engines take, and what each wire API maps onto without loss."""

from typing import Any, Literal, NamedTuple, NotRequired, TypedDict


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(TypedDict):
    """One OpenAI-Chat message. ``content`` is text or a list of Chat content parts (text, image_url)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[str | list[dict[str, Any]] | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class ToolSpec(TypedDict):
    """A tool offered to the model, as a function with a JSON schema."""

    name: str
    description: NotRequired[str]
    parameters: dict[str, Any]


class Replaced(NamedTuple):
    """A fragment of a harness's text that the engine was shown in another form (``proxy.steady``)."""

    message: int
    """Index of the message in the request."""
    part: int
    """Index of the content part; -1 where the content is a string."""
    start: int
    """Character in the text as shown, when this was the last change."""
    original: str
    shown: str

    def undo(self, text: str) -> str:
        return text[: self.start] + self.original + text[self.start + len(self.shown) :]
