"""A NeMo-RL vLLM worker's HTTP endpoint with a real tokenizer and template, and a policy that answers from a list.

What it accepts, refuses and returns follows NeMo-RL 7ea279ab: ``vllm_worker_async.py`` lines 396-860, ``vllm/utils.py``
lines 321-415, ``openai_server_utils.py`` lines 28-130. ``e2e/test_nemo_rl_worker.py`` runs the real one's app on a CPU
and holds this one to it.
"""

import asyncio
import contextlib
import functools
import json
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from engine_helpers import CACHE
from polar_env.engine import tokenizer
from served_helpers import hang, serving


@functools.cache
def words() -> tokenizer.Tokenizer:
    """Qwen3's own tokenizer and template."""
    return tokenizer.load(tokenizer.fetch(CACHE))


def letter_by_letter(text: str) -> list[int]:
    """Ids that no tokenizer would choose for ``text``: a rendering of the same text always differs."""
    return [token for letter in text for token in words().encode(letter)]


@dataclass
class Worker:
    """One data-parallel rank. ``says`` is what the policy answers, in order, the last for ever."""

    says: list[str] = field(default_factory=lambda: ["Hello there."])
    temperature: float = 1.0
    top_p: float = 1.0
    val_temperature: float = 0.0
    val_top_p: float = 1.0
    model: str = "org/policy"
    window: int = 4096
    finish: str = "stop"
    fault: str = ""
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator["Worker", None]:
        await asyncio.to_thread(words)
        routes = {"POST /v1/chat/completions": self._chat, "POST /tokenize": self._tokenize}
        async with serving(routes) as self.url:
            yield self

    # --- the endpoint ---

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if body.get("model") and body["model"] != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if not self._on_policy(body):
            return web.Response(status=500, text="Internal Server Error")  # an AssertionError in the worker
        if self.fault == "hang":
            await hang(self.started, self.aborted)
        shows = [message for message in body["messages"] if isinstance(message.get("content"), list)]
        if shows or self.fault == "blinks":
            self.fault = ""
            return web.Response(status=500, text="Internal Server Error")  # as a text model's worker does of an image
        if self.fault == "bad_schema":
            return _error(400, "tools: 'strin' is not a type")
        try:
            prompt = self._prompt(body)
        except AssertionError:
            return web.Response(status=500, text="Internal Server Error")
        room = self.window - len(prompt)
        if room <= 0:
            told = f"This model's maximum context length is {self.window} tokens. However, you requested {len(prompt)}."
            return _error(400, told)
        answer = self._answer(prompt, body, min(room, body.get("max_tokens") or room))
        if body.get("stream"):
            return web.Response(text=f"data: {json.dumps(_bare(answer))}\n\n", content_type="text/event-stream")
        return web.json_response(answer)

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self._prompt(await request.json())
        return web.json_response({"count": len(ids), "max_model_len": self.window, "tokens": ids.tolist()})

    def _on_policy(self, body: dict[str, Any]) -> bool:
        """Lines 737-773: sampling that is neither the training nor the validation profile fails an assertion."""
        asked = (body.get("temperature", 1.0), body.get("top_p"))
        profiles = ((self.temperature, self.top_p), (self.val_temperature, self.val_top_p))
        return body.get("top_k") in (None, -1) and asked[1] is not None and asked in profiles

    # --- its prompt ---

    def _prompt(self, body: dict[str, Any]) -> "array[int]":
        """Lines 455-567: the rendering, with required ids put in front of what follows the last assistant's turn."""
        messages, tools = body["messages"], [tool["function"] for tool in body.get("tools", ())]
        whole = words().encode(words().template(messages, tools))
        required = body.get("required_prefix_token_ids")
        if not required or self.fault == "ignores_ids":
            return whole
        assert self.fault != "cannot_join"
        at = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
        before = words().encode(words().template(messages[: at + 1], tools, generate=False))
        return join(array("i", required), before, whole, words().encode(words().eos)[0])

    # --- its answer ---

    def _answer(self, prompt: "array[int]", body: dict[str, Any], room: int) -> dict[str, Any]:
        text = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        ids = [*letter_by_letter(text), *words().encode(words().eos)]
        finish = self.finish if len(ids) <= room else "length"
        ids = ids[:room]
        message: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": None, "tool_calls": []}
        said, _, call = text.partition("<tool_call>")
        message["content"] = (said if call else words().decode(ids, skip_special_tokens=True)) or None
        if call and finish != "length":
            made = json.loads(call.removesuffix("</tool_call>"))
            function = {"name": made["name"], "arguments": json.dumps(made["arguments"])}
            message["tool_calls"] = [{"id": f"call-{len(prompt)}", "type": "function", "function": function}]
            finish = "tool_calls"
        if body.get("logprobs") and self.fault != "no_ids":
            log_probs = [-0.125 * (1 + at % 8) for at in range(len(ids))]
            message |= {"prompt_token_ids": prompt.tolist(), "generation_token_ids": ids}
            message |= {"generation_log_probs": log_probs[:-1] if self.fault == "short" else log_probs}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        content = [{"token": f"token_id:{token}", "logprob": -0.125} for token in ids]
        choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": finish}
        return {"id": "chatcmpl-1", "model": self.model, "choices": [choice], "usage": usage}


def join(required: "array[int]", before: "array[int]", whole: "array[int]", end: int) -> "array[int]":
    """``required``, then what follows in ``whole`` from the end token that is the last of ``before``.

    A turn that was cut has no end token of its own: the template's stands behind it. Raises AssertionError when the
    rendering has fewer turns than ``before``.
    """
    turns = before.count(end)
    places = [at for at, token in enumerate(whole) if token == end]
    assert 0 < turns <= len(places)
    kept = required[:-1] if required[-1] == end else required
    return kept + whole[places[turns - 1] :]


def _bare(answer: dict[str, Any]) -> dict[str, Any]:
    """What a stream carries: no ids."""
    choice = answer["choices"][0]
    delta = {name: choice["message"][name] for name in ("role", "content", "tool_calls")}
    return {**answer, "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]}


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "code": status}}
    return web.json_response(body, status=status)
