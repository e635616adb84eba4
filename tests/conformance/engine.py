"""The scripted engine as a served one looks from outside: new ids for every call, pictures taken, faults at the
generations a case names. Its requests are kept."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from polar_env.config import EngineConfig
from polar_env.engine import Session as EngineSession
from polar_env.engine.scripted import ScriptedEngine
from polar_env.errors import EngineBusy, EngineError, EngineOverflow
from polar_env.messages import ChatMessage
from polar_env.types import Delta, EngineReply, ModelRequest, Sampling

SILENCE = 40.0
"""Seconds without a token."""


class FaultyEngine(ScriptedEngine):
    """``faults``: number of the generation, from 0 -> its kind, as below."""

    def __init__(self, config: EngineConfig, faults: Mapping[int, str]) -> None:
        super().__init__(config)
        self._faults = faults
        self.requests: list[ModelRequest] = []

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: EngineSession
    ) -> AsyncIterator[Delta | EngineReply]:
        fault = self._faults.get(len(self.requests), "")
        self.requests.append(request)
        match fault:
            case "busy":
                raise EngineBusy("the queue is full", retry_after=2.0)
            case "broken":
                raise EngineError("a worker died")
            case "reset":
                yield Delta("text", "I was about to")
                await asyncio.sleep(0.5)  # until the headers and this much have left
                raise EngineError("a worker died in mid-stream")
            case "malformed":
                yield Delta("text", "I was about to")
                await asyncio.sleep(0.5)
                raise KeyError("choices")  # what reading a piece that is no chunk comes to
            case "overflow":
                raise EngineOverflow(
                    "This model's maximum context length is 65536 tokens. However, your request has 66000 input tokens."
                )
            case "silent":
                await asyncio.sleep(SILENCE)
            case "cut":
                session = replace(session, script="long")
            case _:
                pass
        number = len(self.requests)
        async with aclosing(super().generate(seen(request), sampling, session)) as items:
            async for item in items:
                yield named(item, number)


def seen(request: ModelRequest) -> ModelRequest:
    """Pictures as words: the template is a text model's."""
    return replace(request, messages=tuple({**message, "content": _words(message)} for message in request.messages))


def _words(message: ChatMessage) -> str | list[dict[str, Any]] | None:
    content = message.get("content")
    if not isinstance(content, list):
        return content
    return [part if "text" in part else {"type": "text", "text": "[a picture]"} for part in content]


def named(item: Delta | EngineReply, number: int) -> Delta | EngineReply:
    """With ids that no other generation gives, as a server's are."""
    if isinstance(item, Delta):
        return replace(item, id=f"{item.id}_{number}") if item.id else item
    calls = tuple(replace(call, id=f"{call.id}_{number}") for call in item.turn.tool_calls)
    return replace(item, turn=replace(item.turn, tool_calls=calls))
