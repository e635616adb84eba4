"""Messages and tools in OpenAI-Chat form: what engines take, and what each wire API maps onto without loss."""

from typing import Any, Literal, NotRequired, TypedDict


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
