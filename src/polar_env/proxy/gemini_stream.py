"""What a generateContent answer is made of: parts, the signatures on them, and the chunks that stream both.

Source: ai.google.dev, "Generating content" and "Thought signatures". The half of ``gemini`` that writes.

A ``thoughtSignature`` of ours is base64 (Pi drops one that is not) of what the wire cannot carry. On each call: its id,
and the exact text of its arguments where a client's JSON would not give it back. On the first text or call after
reasoning: the reasoning. It sits on the first fragment of a text because Gemini CLI keeps only that one's.
"""

import base64
import binascii
import json
from typing import Any, cast

from polar_env.proxy import render, sse
from polar_env.proxy.render import Kind, Part, obj
from polar_env.types import AssistantTurn, ModelRequest, ToolCall, Usage

_MARK = b"polar1."
_EXACT = 2**53
"""Integers from here on lose digits in JavaScript."""
_STOPS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}


# --- signatures -------------------------------------------------------------------------------------------------


def sign(**fields: str | None) -> str:
    """A signature that carries ``fields``, less those that are None. ASCII inside: half a character has no UTF-8."""
    text = json.dumps({name: value for name, value in fields.items() if value is not None}, separators=(",", ":"))
    return base64.b64encode(_MARK + text.encode("ascii")).decode("ascii")


def unsign(signature: object) -> dict[str, Any]:
    """What a signature of ours carries; nothing for a foreign one. Google's Python SDK sends it in URL-safe base64."""
    if not isinstance(signature, str):
        return {}
    try:
        raw = base64.b64decode(signature.replace("-", "+").replace("_", "/"), validate=True)
        text = raw.removeprefix(_MARK).decode("ascii") if raw.startswith(_MARK) else ""
    except (binascii.Error, ValueError):
        return {}
    return render.parse_object(text) or {}


def restore(ours: dict[str, Any], args: object) -> str:
    """The exact argument text, if the client still says what we sent; what it says now, if it edited them."""
    exact = ours.get("arguments")
    if isinstance(exact, str) and _same(_sent(exact), obj(args)):
        return exact
    return render.dump(obj(args))


def _sent(arguments: str) -> dict[str, Any]:
    """Arguments as this wire carries them: an object, empty when they are none (a cut call, an invalid one)."""
    return render.parse_object(arguments) or {}


def _same(one: object, other: object) -> bool:
    """Equal to a client whose numbers are all floats."""
    return _floats(one) == _floats(other)


def _floats(value: object) -> str:
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)


def _survives(arguments: str, sent: dict[str, Any]) -> bool:
    """Whether a client's JSON gives these arguments back to the letter when ``dump`` writes them again."""
    return render.dump(sent) == arguments and _plain(sent)


def _plain(value: object) -> bool:
    """False for numbers that JavaScript writes otherwise, and for keys that it moves to the front."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return all(not key.isdecimal() and _plain(inner) for key, inner in fields.items())
    if isinstance(value, list):
        return all(map(_plain, cast("list[object]", value)))
    return not isinstance(value, float) and (not isinstance(value, int) or abs(value) < _EXACT)


# --- parts ------------------------------------------------------------------------------------------------------


def whole(request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
    """The response of a non-streaming answer."""
    writer = _Parts()
    parts = [writer.said("reasoning", turn.reasoning)] if turn.reasoning else []
    writer.thought(turn.reasoning)
    if turn.text:
        parts.append(writer.said("text", turn.text))
    parts = writer.ended(parts, turn.tool_calls)
    return _response(request, call_id, [_last(turn, parts, len(turn.tool_calls))], _usage(turn.usage))


class _Parts:
    """Makes parts, in order, and signs the first one that can carry the reasoning before it."""

    def __init__(self) -> None:
        self._unsigned = ""

    def thought(self, reasoning: str) -> None:
        """This reasoning is complete: what follows it has to carry it."""
        self._unsigned += reasoning

    def said(self, kind: Kind, text: str) -> Part:
        if kind == "reasoning":
            return {"text": text, "thought": True}
        return self._signed({"text": text})

    def called(self, call: ToolCall) -> Part:
        sent = _sent(call.arguments)
        part: Part = {"functionCall": {"id": call.id, "name": call.name, "args": sent}}
        exact = None if _survives(call.arguments, sent) else call.arguments
        reasoning, self._unsigned = self._unsigned, ""
        return {**part, "thoughtSignature": sign(id=call.id, reasoning=reasoning or None, arguments=exact)}

    def ended(self, parts: list[Part], calls: "tuple[ToolCall, ...] | list[ToolCall]") -> list[Part]:
        """``parts`` and the calls. Reasoning that nothing followed is carried by its own last part."""
        parts = [*parts, *map(self.called, calls)]
        return [*parts[:-1], self._signed(parts[-1])] if parts else []

    def _signed(self, part: Part) -> Part:
        reasoning, self._unsigned = self._unsigned, ""
        return {**part, "thoughtSignature": sign(reasoning=reasoning)} if reasoning else part


def _last(turn: AssistantTurn, parts: list[Part], calls: int) -> dict[str, Any]:
    """The candidate that ends the answer."""
    reason = _STOPS[render.ending(turn, calls)]
    return {"content": {"parts": parts, "role": "model"}, "finishReason": reason, "index": 0}


def _usage(usage: Usage) -> dict[str, int]:
    """Prompt tokens include cached ones. Thoughts count as candidates: engines do not count them apart."""
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    cached = render.cached(usage)
    return {**counts, "cachedContentTokenCount": cached} if cached else counts


def _response(
    request: ModelRequest, call_id: str, candidates: list[dict[str, Any]], usage: dict[str, int]
) -> dict[str, Any]:
    names = {"modelVersion": request.model, "responseId": call_id}
    return {"candidates": candidates, "usageMetadata": usage, **names}


# --- chunks -----------------------------------------------------------------------------------------------------


class GeminiEncoder(render.TurnWriter):
    """One streamed response: thoughts and text as they come, calls whole and with the last chunk.

    The last sign of what was said is kept for the last chunk: an SDK's chat forgets a turn with an empty chunk in it.
    """

    def __init__(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> None:
        super().__init__()
        self._request = request
        self._call_id = call_id
        self._prompt_tokens = prompt_tokens
        self._parts = _Parts()
        self._held: tuple[Kind, str] | None = None
        self._begun = False

    def start(self) -> bytes:
        """Nothing: this API has no opening event, and a chunk without a candidate is a flaw to SDK chats."""
        return b""

    def keep_alive(self) -> bytes:
        """A chunk that says nothing, as Gemini CLI 0.61.0 takes it; a comment would lose it the answer (measured)."""
        return self._chunk([], self._known())

    def streams_call(self, name: str) -> bool:
        """No: this API has no fragments of arguments."""
        return False

    def open_block(self, kind: Kind) -> bytes:
        return b"" if kind == "call" else self._release()

    def block_text(self, kind: Kind, text: str) -> bytes:
        if kind == "call":
            return b""
        text = (self._held[1] if self._held else "") + text
        self._held = (kind, text[-1:])
        return self._said(kind, text[:-1])

    def close_block(self, kind: Kind, text: str) -> bytes:
        if kind == "reasoning":
            self._parts.thought(text)
        return b""

    def end(self, turn: AssistantTurn) -> bytes:
        held = [self._parts.said(*self._held)] if self._held else []
        parts = self._parts.ended(held, self.calls)
        out = self._chunk([_last(turn, parts, len(self.calls))], _usage(turn.usage))
        return out if self._request.sse else out + b"]"

    def _release(self) -> bytes:
        held, self._held = self._held, None
        return self._said(*held) if held else b""

    def _said(self, kind: Kind, text: str) -> bytes:
        if not text:
            return b""
        content = {"parts": [self._parts.said(kind, text)], "role": "model"}
        return self._chunk([{"content": content, "index": 0}], self._known())

    def _known(self) -> dict[str, int]:
        known = self._prompt_tokens
        return {"promptTokenCount": known, "totalTokenCount": known} if known else {}

    def _chunk(self, candidates: list[dict[str, Any]], usage: dict[str, int]) -> bytes:
        """One event, or one more element of the array that a client gets without ``alt=sse``."""
        data = _response(self._request, self._call_id, candidates, usage)
        if self._request.sse:
            return sse.encode(data)
        before, self._begun = b",\r\n" if self._begun else b"[", True
        return before + json.dumps(data, separators=(",", ":")).encode("ascii")
