"""A scripted server of vLLM's scale-out routes: the real Qwen3 tokenizer and template, and a model that says what it
is told to. Shapes recorded from vLLM 0.32 (``tests/e2e/test_vllm_splice.py`` holds the real one to them).
"""

import asyncio
import contextlib
import functools
import json
import re
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

from engine_helpers import CACHE, event
from polar_env.engine import tokenizer
from served_helpers import hang, serving

END = 151_645
LOOK = '<think>why</think>\n\n<tool_call>{"name":"bash","arguments":{"command":"ls"}}</tool_call><|im_end|>'
"""A turn in a spelling that the template would not give it again."""
DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def words() -> tokenizer.Tokenizer:
    return tokenizer.load(tokenizer.fetch(CACHE))


def log_probs(count: int) -> "array[float]":
    """What the model's tokens got, in order."""
    return array("f", [-0.01 * (at + 1) for at in range(count)])


@dataclass
class TokenServer:
    """``says`` are the turns of the model in order, the last one for ever; ``fault`` is what goes wrong."""

    says: list[str] = field(default_factory=lambda: [LOOK])
    fault: str = ""
    window: int = 4096
    version: str = "default"
    cap: int | None = None
    """The model's own limit of an answer, as its generation config may have it."""
    url: str = ""
    generated: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of /inference/v1/generate; likewise for the other routes."""
    chats: list[dict[str, Any]] = field(default_factory=list)
    rendered: list[dict[str, Any]] = field(default_factory=list)
    derendered: list[dict[str, Any]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator["TokenServer", None]:
        routes = {
            "GET /v1/models": self._models,
            "POST /v1/chat/completions": self._chat,
            "POST /v1/chat/completions/render": self._render,
            "POST /v1/chat/completions/derender": self._derender,
            "POST /inference/v1/generate": self._generate,
        }
        async with serving(routes) as self.url:
            yield self

    # --- routes ---

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": self.window}]})

    async def _chat(self, request: web.Request) -> web.Response:
        self.chats.append(body := await request.json())
        ids, cap = _prompt(body), body.get("max_tokens") or self.window
        sampled, finish = self._sample(cap)
        said = _message(sampled)
        content = [{"token": "?", "logprob": value} for value in log_probs(len(sampled))]
        choice = {"index": 0, "message": said, "token_ids": sampled, "logprobs": {"content": content}}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(sampled)}
        whole = {"id": "chat-1", "prompt_token_ids": ids, "usage": usage, "system_fingerprint": "fp"}
        return web.json_response({**whole, "choices": [choice | {"finish_reason": finish}]})

    async def _render(self, request: web.Request) -> web.Response:
        self.rendered.append(body := await request.json())
        if self.fault == "disabled":
            return _error(403, DISABLED)
        if self.fault == "grammar" and [tool["function"]["name"] for tool in body.get("tools", ())] == ["bash"]:
            return _error(400, "no grammar for this schema")
        if self.fault == "busy" and len(self.generated):
            return _error(503, "overloaded")
        ids = _prompt(body)
        if self.fault == "moody":
            ids.insert(
                0, len(body["messages"])
            )  # a template that looks at the whole conversation is no suffix template
            ids.append(len(body["messages"]))
        room = self.window - len(ids)
        caps = [room, *(cap for cap in (body.get("max_tokens"), self.cap) if cap is not None)]
        params: dict[str, Any] = {"temperature": body.get("temperature", 1.0), "max_tokens": min(caps), "logprobs": 0}
        params |= {"top_p": body.get("top_p", 1.0), "min_p": 0.0, "repetition_penalty": 1.1, "seed": None}
        if body.get("tools") and not body.get("parallel_tool_calls", True):
            params["structured_outputs"] = {"structural_tag": [tool["function"]["name"] for tool in body["tools"]]}
        found = {"request_id": "r", "token_ids": ids, "sampling_params": params, "model": body["model"]}
        return web.json_response(found | {"priority": 0, "cache_salt": None, "reasoning_ended": False})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.generated.append(body := await request.json())
        sampled, finish = self._sample(body["sampling_params"]["max_tokens"])
        if not body["stream"]:
            whole = {"request_id": "g", "choices": [self._choice(sampled, 0, finish)], **self._behind(body)}
            return web.json_response(whole | {"usage": _usage(body, sampled)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for at, token in enumerate(sampled):
            last = at == len(sampled) - 1
            if self.fault and at == 2 and not await self._go_on(request, response):
                return response
            choice = self._choice([token], at, finish if last else None)
            told = {} if at else self._behind(body)
            await response.write(event({"request_id": "g", "choices": [choice], **told}))
        await response.write(event({"request_id": "g", "choices": [], "usage": _usage(body, sampled)}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _behind(self, body: dict[str, Any]) -> dict[str, Any]:
        """The prompt as this server says it was: 0.32 does not say it."""
        ids = body["token_ids"]
        return {"echo": {"prompt_token_ids": ids}, "other_prompt": {"prompt_token_ids": ids[1:]}}.get(self.fault, {})

    async def _go_on(self, request: web.Request, response: web.StreamResponse) -> bool:
        """What goes wrong two tokens in. False: the answer ends here."""
        match self.fault:
            case "die":
                cast("asyncio.Transport", request.transport).abort()
            case "eof":
                pass
            case "error_event":
                await response.write(event({"error": {"message": "EngineCore died", "code": 500}}))
            case "hang":
                await hang(self.started, self.aborted)
            case _:
                return True
        return False

    async def _derender(self, request: web.Request) -> web.Response:
        self.derendered.append(body := await request.json())
        if self.fault == "unreadable":
            return _error(400, "choice 0 cannot be parsed")
        if self.fault == "mute":
            return web.json_response({"choices": []})
        sampled = body["generate_response"]["choices"][0]["token_ids"]
        if not sampled:
            return _error(400, "choice 0 has empty or null token_ids")
        choice = {"index": 0, "message": _message(sampled), "finish_reason": "stop", "token_ids": sampled}
        return web.json_response({"id": "d", "choices": [choice], "usage": {"prompt_tokens": 0}})

    # --- the model ---

    def _sample(self, cap: int) -> tuple[list[int], str]:
        text = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        ids = list(words().encode(text))
        return (ids, "stop") if len(ids) <= cap else (ids[:cap], "length")

    def _choice(self, ids: Sequence[int], at: int, finish: str | None) -> dict[str, Any]:
        values = log_probs(at + len(ids))[at:]
        content = [
            {"token_id": i, "logprob": v, "rank": 1, "top_logprobs": []} for i, v in zip(ids, values, strict=True)
        ]
        versions = [{"version": self.version, "start": 0, "end": at + len(ids)}] if finish else None
        choice = {"index": 0, "token_ids": list(ids), "logprobs": {"content": content}, "finish_reason": finish}
        return choice | {"weight_versions": versions, "stop_reason": None}


def _prompt(body: dict[str, Any]) -> list[int]:
    return list(_rendered(json.dumps([body["messages"], [tool["function"] for tool in body.get("tools", ())]])))


@functools.cache
def _rendered(asked: str) -> "array[int]":
    """Each prompt of the start-up proof is rendered once for all tests."""
    messages, tools = json.loads(asked)
    for message in messages:
        if reasoning := message.pop("reasoning", ""):
            message["reasoning_content"] = reasoning
    return words().render(messages, tools)


_ids = iter(range(1_000_000))


def _message(sampled: Sequence[int]) -> dict[str, Any]:
    """The server's own parsers, for these scripts: a thought, text, calls. An end token would show in the text."""
    thought, closed, said = words().decode(sampled).partition("</think>")
    said = said if closed else thought
    calls = [
        {"id": f"t{next(_ids)}", "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
        for call in map(json.loads, _CALL.findall(said))
    ]
    reasoning = thought.removeprefix("<think>") if closed else None
    return {"role": "assistant", "content": _CALL.sub("", said).strip(), "reasoning": reasoning, "tool_calls": calls}


def _usage(body: dict[str, Any], sampled: Sequence[int]) -> dict[str, int]:
    return {"prompt_tokens": len(body["token_ids"]), "completion_tokens": len(sampled)}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "E", "code": status}}, status=status)
