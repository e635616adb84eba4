"""The scripted engine, with a fault at the generation a case names, and its requests kept."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace

from polar_env.config import EngineConfig
from polar_env.engine import Session as EngineSession
from polar_env.engine.scripted import ScriptedEngine
from polar_env.errors import EngineBusy, EngineError, EngineOverflow
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
        async with aclosing(super().generate(request, sampling, session)) as items:
            async for item in items:
                yield item
