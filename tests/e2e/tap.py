"""A tap on the wire between our proxy and an engine: forwards everything untouched and keeps what the engine sent."""

import contextlib
import json
from array import array
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web


@dataclass
class Tap:
    """``url`` is the engine as seen through the tap; ``replies`` the bodies of generations, in order of their start,
    each with what was asked. A client that has what it wants may leave before the end."""

    upstream: str
    url: str = ""
    replies: list[tuple[bytes, bytearray]] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    """Goes on top of the sampling parameters of generations asked for by ids."""

    def generations(self) -> list[tuple[array, array, array]]:
        """(prompt ids, sampled ids, log-probs) of each reply, read from the raw bytes without polar_env's help."""
        return [_tensors(json.loads(asked), list(_chunks(reply))) for asked, reply in self.replies]

    @property
    def given_ids(self) -> int:
        """How many of the generations were asked for by ids."""
        return sum("token_ids" in json.loads(asked) for asked, _ in self.replies)


@contextlib.asynccontextmanager
async def tapped(upstream: str) -> AsyncGenerator[Tap]:
    """A tap in front of the engine at ``upstream``, with or without its ``/v1``."""
    tap = Tap(upstream)
    app = web.Application(client_max_size=64 * 2**20)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = _with(await request.read(), request.path, tap.sampling)
            headers = {"Content-Type": request.content_type, "Authorization": request.headers.get("Authorization", "")}
            target = upstream.removesuffix("/v1") + request.path_qs
            async with client.request(request.method, target, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                kept = bytearray()
                if request.path.endswith(("/chat/completions", "/inference/v1/generate")):
                    tap.replies.append((body, kept))
                async for piece in answer.content.iter_any():
                    kept += piece
                    await response.write(piece)
                return response

        app.router.add_route("*", "/{tail:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            tap.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield tap
        finally:
            await runner.cleanup()


def _with(body: bytes, path: str, sampling: dict[str, Any]) -> bytes:
    if not sampling or not path.endswith("/inference/v1/generate"):
        return body
    asked = json.loads(body)
    return json.dumps({**asked, "sampling_params": {**asked["sampling_params"], **sampling}}).encode()


def _chunks(reply: bytearray) -> Iterator[dict[str, Any]]:
    if not reply.startswith(b"data:"):
        yield json.loads(reply)
        return
    for line in reply.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _tensors(asked: dict[str, Any], chunks: list[dict[str, Any]]) -> tuple[array, array, array]:
    """A prompt sent as ids is what was sent; one sent as messages is what the engine says it was."""
    prompt, sampled, log_probs = array("i", asked.get("token_ids", ())), array("i"), array("f")
    for chunk in chunks:
        prompt.extend(chunk.get("prompt_token_ids") or ())
        for choice in chunk.get("choices", ()):
            sampled.extend(choice.get("token_ids") or ())
            log_probs.extend(entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ())
    return prompt, sampled, log_probs
