"""First prompts that are equal in every rollout of a group: what names the day or the machine is shown to the engine
in a fixed form. Pure.

GRPO compares the rollouts of one prompt; a group that crosses midnight, or runs on nodes with two kernels, falls apart
into prompts that are alone, and an alone prompt has no advantage. The harness cannot be given another clock (its
binary may be static, and time namespaces leave the wall clock alone), so the request is changed before it is rendered.
The record holds the ids the engine saw; ``body_digest`` is that of the body the harness sent.

Only text that a harness writes is touched: system messages, and the user messages before the model's first word. What
was changed in one request is changed the same way in the next, so a session's prompts still extend each other.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from polar_env.messages import ChatMessage
from polar_env.types import ModelRequest

NONCE: tuple[tuple[str, str, str], ...] = (
    ("system", r"\A(x-anthropic-billing-header: cc_version=\d+\.\d+\.\d+)\.[0-9a-f]+(?=;)", r"\1"),
    ("system", r"\A(x-anthropic-billing-header: [^\n]*?); ?cch=[0-9a-f]+(?=;|$)", r"\1"),
)
"""Claude Code's billing block, the first of its system prompt: a suffix of the version that differs between requests
(and a checksum that may follow it) would make every prefix new. Our preset switches the block off; others may not."""


class Steady:
    """Applies rules ``(role, pattern, shown)``: ``role`` is ``system`` or ``user``, ``pattern`` a regular expression,
    ``shown`` its replacement. ``changed`` counts what was replaced, by pattern."""

    def __init__(self, rules: Iterable[tuple[str, str, str]] = ()) -> None:
        self._rules = [(role, re.compile(pattern), shown) for role, pattern, shown in (*NONCE, *rules)]
        self.changed: Counter[str] = Counter()

    def __call__(self, request: ModelRequest) -> ModelRequest:
        """The request as the engine is to see it."""
        messages: list[ChatMessage] = []
        opening = True
        for message in request.messages:
            opening = opening and message["role"] not in ("assistant", "tool")
            messages.append(self._message(message, opening))
        return replace(request, messages=tuple(messages))

    def _message(self, message: ChatMessage, opening: bool) -> ChatMessage:
        role = "system" if message["role"] in ("system", "developer") else message["role"]
        if role != "system" and not (role == "user" and opening):
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._text(role, content)}
        if content is None:
            return message
        return {**message, "content": [self._part(role, part) for part in content]}

    def _part(self, role: str, part: dict[str, Any]) -> dict[str, Any]:
        text: object = part.get("text")
        return {**part, "text": self._text(role, text)} if isinstance(text, str) else part

    def _text(self, role: str, text: str) -> str:
        for wanted, pattern, shown in self._rules:
            if wanted == role:
                text, count = pattern.subn(shown, text)
                if count:
                    self.changed[pattern.pattern] += count
        return text
