"""First prompts that are equal in every rollout of a group: what names the day or the machine is shown to the engine
in a fixed form. Pure.

GRPO compares the rollouts of one prompt; a group that crosses midnight, or runs on nodes with two kernels, falls apart
into prompts that are alone, and an alone prompt has no advantage. The harness cannot be given another clock (its
binary may be static, and time namespaces leave the wall clock alone), so the request is changed before it is rendered.
The record holds the ids the engine saw and, in ``replaced``, every original fragment: ``restored`` gives back what the
harness wrote. ``body_digest`` is that of the body it sent.

Only text that a harness writes is touched: system messages, and the user messages before the model's first word. What
was changed in one request is changed the same way in the next, so a session's prompts still extend each other.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from polar_env.messages import ChatMessage, Replaced
from polar_env.types import ModelRequest

NONCE: tuple[tuple[str, str, str], ...] = (
    ("system", r"\A(x-anthropic-billing-header: cc_version=\d+\.\d+\.\d+)\.[0-9a-f]+(?=;)", r"\1"),
    ("system", r"\A(x-anthropic-billing-header: [^\n]*?); ?cch=[0-9a-f]+(?=;|$)", r"\1"),
)
"""Claude Code's billing block, the first of its system prompt: a suffix of the version that differs between requests
(and a checksum that may follow it) would make every prefix new. Our preset switches the block off; others may not."""


class Steady:
    """Applies rules ``(role, pattern, shown)``: ``role`` is ``system`` or ``user``, ``pattern`` a regular expression,
    ``shown`` its replacement. ``changed`` counts what was replaced with something else, by pattern."""

    def __init__(self, rules: Iterable[tuple[str, str, str]] = ()) -> None:
        self._rules = [(role, re.compile(pattern), shown) for role, pattern, shown in (*NONCE, *rules)]
        self.changed: Counter[str] = Counter()

    def __call__(self, request: ModelRequest) -> ModelRequest:
        """The request as the engine is to see it, with what was changed in ``replaced``."""
        messages: list[ChatMessage] = []
        replaced: list[Replaced] = []
        opening = True
        for at, message in enumerate(request.messages):
            opening = opening and message["role"] not in ("assistant", "tool")
            role = "system" if message["role"] in ("system", "developer") else message["role"]
            ours = role == "system" or (role == "user" and opening)
            messages.append(self._message(message, role, at, replaced) if ours else message)
        return replace(request, messages=tuple(messages), replaced=tuple(replaced))

    def _message(self, message: ChatMessage, role: str, at: int, replaced: list[Replaced]) -> ChatMessage:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._text(role, content, (at, -1), replaced)}
        if content is None:
            return message
        parts = [self._part(role, part, (at, index), replaced) for index, part in enumerate(content)]
        return {**message, "content": parts}

    def _part(
        self, role: str, part: dict[str, Any], place: tuple[int, int], replaced: list[Replaced]
    ) -> dict[str, Any]:
        text: object = part.get("text")
        return {**part, "text": self._text(role, text, place, replaced)} if isinstance(text, str) else part

    def _text(self, role: str, text: str, place: tuple[int, int], replaced: list[Replaced]) -> str:
        for wanted, pattern, shown in self._rules:
            if wanted == role:
                text, found = _substitute(pattern, shown, text, place)
                replaced += found
                if found:
                    self.changed[pattern.pattern] += len(found)
        return text


def _substitute(pattern: re.Pattern[str], shown: str, text: str, place: tuple[int, int]) -> tuple[str, list[Replaced]]:
    """(the text with every match replaced, those that differ, at their places in the new text)."""
    found: list[Replaced] = []
    moved = 0

    def one(match: re.Match[str]) -> str:
        nonlocal moved
        new = match.expand(shown)
        if new != match[0]:
            found.append(Replaced(*place, match.start() + moved, match[0], new))
        moved += len(new) - len(match[0])
        return new

    return pattern.sub(one, text), found


def restored(messages: Iterable[ChatMessage], replaced: Sequence[Replaced]) -> list[ChatMessage]:
    """The messages as the harness wrote them: what ``Steady`` changed, undone from the last change to the first."""
    out = list(messages)
    for change in reversed(replaced):
        message = out[change.message]
        content = message.get("content")
        if isinstance(content, list):
            part = content[change.part]
            parts = [*content[: change.part], {**part, "text": change.undo(part["text"])}, *content[change.part + 1 :]]
            out[change.message] = {**message, "content": parts}
        elif content is not None:
            out[change.message] = {**message, "content": change.undo(content)}
    return out
