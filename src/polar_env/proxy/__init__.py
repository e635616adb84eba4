"""The proxy room: model calls of a harness in, committed call records out.

``sse`` frames events · ``anthropic`` / ``chat`` / ``responses`` / ``gemini`` are the wire APIs (pure, no sockets) ·
``session`` holds one rollout's calls, retries and limits · ``server`` moves bytes between aiohttp and the two, and
decides nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from polar_env.types import AssistantTurn, Delta, ModelRequest, WireApi

DIALECTS: tuple[str, ...] = (
    "polar_env.proxy.anthropic:Anthropic",
    "polar_env.proxy.chat:Chat",
    "polar_env.proxy.responses:Responses",
    "polar_env.proxy.gemini:Gemini",
)
"""Dotted paths of the dialects, in the order their routes are tried."""


class Encoder(Protocol):
    """Writes one streamed reply. Bytes in the order returned are a valid stream of the wire API.

    ``start`` once; then ``delta`` and ``keep_alive`` in any order; then ``finish`` once. ``finish`` returns
    (what may leave before the commit, the terminal event that is held back until the record is committed).
    Whatever part of ``turn`` was not streamed as deltas is written by ``finish``.
    """

    def start(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...
    def keep_alive(self) -> bytes:
        """A data event of the wire API itself: Codex ignores SSE comments, Gemini CLI breaks on them."""
        ...

    def finish(self, turn: AssistantTurn) -> tuple[bytes, bytes]: ...


class Dialect(Protocol):
    """One wire API as pure functions over bytes and dictionaries."""

    wire: WireApi

    def matches(self, method: str, path: str) -> str | None:
        """The operation a route names, or ``None``.

        ``path`` starts with "/" and has the session's path prefix already removed. Operations: ``generate``,
        ``count_tokens``, ``models``, ``health``, ``websocket`` (answered 426).
        """
        ...

    def decode(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> ModelRequest:
        """Raises BadRequest only for what would change meaning (n > 1, no messages).

        ``path`` is that of ``matches`` with the request's query; ``headers`` are lower-case.
        """
        ...

    def reply(self, request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
        """The body of a non-streaming answer."""
        ...

    def encoder(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> Encoder: ...

    def error(self, status: int, message: str) -> dict[str, Any]:
        """An error body in the wire API's own shape. A 400 for overflow is ``overflow``."""
        ...

    def overflow(self, message: str) -> dict[str, Any]:
        """The body of the 400 whose words make this API's harnesses compact."""
        ...

    def models(self, names: Iterable[str]) -> dict[str, Any]: ...

    def token_count(self, count: int) -> dict[str, Any]: ...
