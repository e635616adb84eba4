"""The SGLang engine against an endpoint that speaks 0.5.23's documented shapes, on a real tokenizer and template.

No SGLang can run here (it needs a GPU), so what a server does beyond these shapes is for ``polar check`` to find.
"""

import asyncio
import contextlib
import functools
import json
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from engine_helpers import CACHE, ask, opened, play, user
from nemo_rl_helpers import letter_by_letter, words
from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import Session, tokenizer
from polar_env.engine.sglang import SglangEngine
from polar_env.errors import EngineBusy, EngineError, EngineOverflow, EngineRefused
from polar_env.types import Continuation, EngineReply, HoleKind, ModelRequest, Sampling, StopReason, ToolCall
from served_helpers import always, hang, serving

LOOK = 'I look.<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'


@dataclass
class Sglang:
    """One replica. ``says`` is what the policy answers, in order, the last for ever."""

    says: list[str] = field(default_factory=lambda: ["Hello there."])
    fault: str = ""
    weight_version: Any = "default"
    spans: list[dict[str, Any]] = field(default_factory=list)
    window: int = 4096
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def run(self):
        await asyncio.to_thread(words)
        routes = {
            "POST /v1/chat/completions": self._chat,
            "GET /v1/models": self._models,
            "POST /tokenize": self._count,
        }
        async with serving(routes) as self.url:
            yield self

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "qwen", "object": "model", "max_model_len": self.window}]})

    async def _count(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = words().render(body["messages"], [tool["function"] for tool in body.get("tools", ())])
        return web.json_response({} if self.fault == "no_count" else {"tokens": ids.tolist(), "count": len(ids)})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if body["stream"] and body["return_meta_info"]:
            return _error(400, "return_meta_info is not supported with streaming.")
        if self.fault == "hang":
            await hang(self.started, self.aborted)
        if self.fault in ERRORS:
            return _error(*ERRORS[self.fault])
        given = None if self.fault == "ignores_ids" else body.get("input_ids")
        tools = [tool["function"] for tool in body.get("tools", ())]
        prompt = array("i", given) if given else words().render(body["messages"], tools)
        if len(prompt) + body.get("max_tokens", 1) > self.window:
            return _error(
                400, f"The input ({len(prompt)} tokens) is longer than the model's context length (64 tokens)."
            )
        return web.json_response(self._answer(prompt, body))

    def _answer(self, prompt: "array[int]", body: dict[str, Any]) -> dict[str, Any]:
        text = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        ids = [*letter_by_letter(text), *words().encode(words().eos)][: body.get("max_tokens")]
        said, _, call = text.partition("<tool_call>")
        message: dict[str, Any] = {"role": "assistant", "content": said, "reasoning_content": None, "tool_calls": None}
        if call:
            made = json.loads(call.removesuffix("</tool_call>"))
            function = {"name": made["name"], "arguments": json.dumps(made["arguments"])}
            message["tool_calls"] = [{"id": "call_0", "index": 0, "type": "function", "function": function}]
        cut = len(ids) == body.get("max_tokens")
        finish = "abort" if self.fault == "abort" else "length" if cut else "tool_calls" if call else "stop"
        triples = [[-0.5 - 0.01 * at, token, None] for at, token in enumerate(ids)]
        if self.fault == "other_ids":
            triples[0][1] += 1
        if self.fault == "short":
            triples.pop()
        meta = {"id": "r", "finish_reason": {"type": finish}, "output_token_logprobs": triples}
        meta |= {"weight_version": self.weight_version, "weight_versions": self.spans}
        choice = {"index": 0, "message": message, "finish_reason": finish, "matched_stop": None}
        if self.fault != "no_ids":
            choice |= {"prompt_token_ids": prompt.tolist(), "response_token_ids": ids, "meta_info": meta}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return {"id": "r", "model": "qwen", "choices": [choice], "usage": usage}


ERRORS = {
    "busy": (503, "The request queue is full."),
    "bad_schema": (400, "Tool 'x' has an invalid JSON schema"),
    "broken": (500, "Internal Server Error"),
}


def _error(status: int, message: str) -> web.Response:
    """SGLang's error body is flat."""
    return web.json_response({"object": "error", "message": message, "type": "x", "code": status}, status=status)


engine_at = functools.partial(opened, SglangEngine, kind="sglang")


@contextlib.asynccontextmanager
async def served(server: Sglang | None = None, **settings):
    server = server or Sglang()
    async with server.run(), engine_at(server.url, **settings) as engine:
        yield server, engine


@contextlib.asynccontextmanager
async def splicing(server: Sglang | None = None, **settings):
    """An engine whose check has proved the template of the model it serves."""
    async with served(server, tokenizer=tokenizer.fetch(CACHE), **settings) as (server, engine):
        assert "exact ids" in (await engine.check()).notes[0]
        server.requests.clear()
        yield server, engine


def carried_on(request: ModelRequest, reply: EngineReply, *new) -> ModelRequest:
    said = {"role": "assistant", "content": reply.turn.text}
    messages = (*request.messages, said, *new)
    cut = reply.turn.stop is StopReason.LENGTH
    ids = reply.prompt_ids + reply.sampled_ids
    return ask(*messages, continues=Continuation("c0", ids, len(request.messages) + 1, cut=cut))


# --- a good answer ----------------------------------------------------------------------------------------------


async def test_ids_and_log_probs_are_the_servers_own():
    async with served(Sglang([LOOK])) as (_, engine):
        deltas, reply = await play(engine, ask())
    assert reply.prompt_ids == words().render(ask().messages, ask().tools)
    assert reply.sampled_ids == array("i", [*letter_by_letter(LOOK), *words().encode(words().eos)])
    assert reply.log_probs[:2] == array("f", [-0.5, -0.51])
    assert reply.turn.tool_calls == (ToolCall("call_0", "bash", '{"command": "ls"}'),)
    assert (reply.turn.text, reply.turn.stop) == ("I look.", StopReason.TOOL_CALLS)
    assert [delta.kind for delta in deltas] == ["text", "tool_open", "tool_args"]
    assert judge("c", reply) == ()


async def test_the_three_flags_are_asked_for_and_never_with_a_stream():
    async with served(stream=True) as (server, engine):
        await play(engine, ask())
    body = server.requests[0]
    flags = ("return_token_ids", "return_prompt_token_ids", "return_meta_info", "logprobs")
    assert [body[flag] for flag in flags] == [True] * 4
    assert (body["stream"], body["model"]) == (False, "qwen")


async def test_no_sampling_is_left_to_the_models_generation_config():
    async with served() as (server, engine):
        await play(engine, ask(), sampling=Sampling(0.8, None, None, 99))
    body = server.requests[0]
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    assert [body[name] for name in names] == [0.8, 1.0, -1, 0.0, 1.0, 99]


async def test_an_answer_cut_at_its_length_says_so():
    async with served() as (_, engine):
        _, reply = await play(engine, ask(), sampling=Sampling(max_tokens=3))
    assert (reply.turn.stop, len(reply.sampled_ids), judge("c", reply)) == (StopReason.LENGTH, 3, ())


@pytest.mark.parametrize("own", [True, False])
async def test_count_tokens_is_the_length_of_the_rendered_prompt(own):
    async with served(tokenizer=tokenizer.fetch(CACHE) if own else None) as (server, engine):
        assert await engine.count_tokens(ask()) == len(words().render(ask().messages, ask().tools))
    assert server.requests == []


async def test_a_server_that_counts_nothing_says_what_to_set():
    async with served(Sglang(fault="no_count")) as (_, engine):
        with pytest.raises(EngineError, match=r"set engine\.tokenizer"):
            await engine.count_tokens(ask())


# --- whose weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "declared", "version", "known"),
    [
        (Sglang(weight_version="step-4"), "step-3", "step-4", True),
        (Sglang(spans=[{"version": "4", "start": 0}, {"version": "5", "start": 2}]), "", "4+5", True),
        (Sglang(), "", "qwen@unversioned", False),
        (Sglang(), "step-3", "step-3", False),
        (Sglang(weight_version=None), "step-3", "step-3", False),
    ],
    ids=["told", "changed under it", "never set", "configured", "an older server"],
)
async def test_the_version_is_the_servers_own_then_the_declared_one(server, declared, version, known):
    async with served(server, policy_version=declared) as (_, engine):
        _, reply = await play(engine, ask())
    assert (reply.policy_version, reply.versioned) == (version, known)


# --- splice -------------------------------------------------------------------------------------------------------


async def test_the_next_prompt_is_sent_as_the_very_ids_and_what_is_new():
    async with splicing(Sglang(["Hm <think>no</think>.", "Done."])) as (server, engine):
        server.says = ["Hm <think>no</think>.", "Done."]
        _, first = await play(engine, ask())
        request = carried_on(ask(), first, user("Go on."))
        _, second = await play(engine, request)
    before = first.prompt_ids + first.sampled_ids
    assert "input_ids" not in server.requests[0]
    assert server.requests[1]["input_ids"] == second.prompt_ids.tolist()
    assert second.prompt_ids[: len(before)] == before
    assert words().render(request.messages, request.tools)[: len(before)] != before, "a rendering would have differed"
    assert words().decode(second.prompt_ids[len(before) :]).endswith("Go on.<|im_end|>\n<|im_start|>assistant\n")
    assert (second.spliced, judge("c", second)) == (True, ())


async def test_a_history_that_was_edited_is_rendered_by_the_server():
    async with splicing() as (server, engine):
        await play(engine, ask(user("Hi"), {"role": "assistant", "content": "Yes?"}, user("Go on.")))
    assert "input_ids" not in server.requests[0]
    assert engine.unspliced == {}


async def test_a_turn_that_cannot_be_spliced_is_rendered_by_the_server_and_counted():
    image = user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}])
    async with splicing() as (server, engine):
        _, first = await play(engine, ask())
        with contextlib.suppress(EngineError):
            await play(engine, carried_on(ask(), first, image))
    assert "input_ids" not in server.requests[1]
    assert sum(engine.unspliced.values()) == 1


@pytest.mark.parametrize(
    ("server", "own", "why"),
    [
        (Sglang(), None, r"set engine\.tokenizer"),
        (Sglang(fault="ignores_ids"), "same", "does not take input_ids"),
        (Sglang(), "other", "renders other ids than the server"),
    ],
)
async def test_check_does_not_take_splice_on_trust(tmp_path, server, own, why):
    folder = {"same": tokenizer.fetch(CACHE), "other": _other(tmp_path)}.get(own or "")
    async with served(server, tokenizer=folder) as (_, engine):
        notes = (await engine.check()).notes
        assert "prompts are rendered whole" in notes[0]
        _, first = await play(engine, ask())
        _, second = await play(engine, carried_on(ask(), first, user("Go on.")))
        assert not second.spliced
    async with served(server, tokenizer=folder, splice="on") as (_, engine):
        with pytest.raises(EngineError, match=f"cannot splice: .*{why}"):
            await engine.check()


async def test_only_replicas_that_were_proved_to_take_ids_are_sent_any():
    tokens = tokenizer.fetch(CACHE)
    async with (
        Sglang().run() as good,
        Sglang(fault="ignores_ids").run() as odd,
        engine_at(good.url, odd.url, tokenizer=tokens) as engine,
    ):
        notes = " ".join((await engine.check()).notes)
        good.requests.clear()
        odd.requests.clear()
        for name in map(str, range(12)):
            _, first = await play(engine, ask(), session=Session(name))
            await play(engine, carried_on(ask(), first, user("Go on.")), session=Session(name))
    assert f"{odd.url}/v1 cannot splice" in notes
    assert "a continued prompt begins with the exact ids" in notes
    assert good.requests
    assert odd.requests
    assert sum("input_ids" in request for request in good.requests) == len(good.requests) / 2
    assert not any("input_ids" in request for request in odd.requests)


def _other(folder):
    """The same tokenizer with another template."""
    found = tokenizer.fetch(CACHE)
    (folder / "tokenizer.json").symlink_to(found / "tokenizer.json")
    config = json.loads((found / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


async def test_splice_off_is_said_and_done():
    async with served(tokenizer=tokenizer.fetch(CACHE), splice="off") as (server, engine):
        assert "engine.splice=off" in (await engine.check()).notes[0]
        _, first = await play(engine, ask())
        await play(engine, carried_on(ask(), first, user("Go on.")))
    assert all("input_ids" not in body for body in server.requests)


# --- what is missing stays missing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("no_ids", HoleKind.MISSING_IDS),
        ("short", HoleKind.LENGTH_MISMATCH),
        ("other_ids", HoleKind.BAD_LOG_PROB),
    ],
)
async def test_a_broken_answer_is_a_hole(fault, kind):
    async with served(Sglang(fault=fault)) as (_, engine):
        _, reply = await play(engine, ask())
    assert kind in {hole.kind for hole in judge("c", reply)}


@pytest.mark.parametrize("answer", [[1], {"choices": "x"}, {"choices": [3]}, {"choices": []}, {"choices": [{}]}])
async def test_what_is_no_answer_is_an_engine_error(answer):
    async with serving({"POST /v1/chat/completions": always(200, answer)}) as url, engine_at(url, model="m") as engine:
        with pytest.raises(EngineError):
            await play(engine, ask())


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        ("busy", EngineBusy, "queue is full"),
        ("bad_schema", EngineRefused, "invalid JSON schema"),
        ("broken", EngineError, "500: Internal"),
    ],
)
async def test_a_refusal_is_the_typed_error_of_its_meaning(fault, kind, told):
    async with served(Sglang(fault=fault)) as (_, engine):
        with pytest.raises(kind, match=told):
            await play(engine, ask())


async def test_a_prompt_that_does_not_fit_is_an_overflow():
    async with served(Sglang(window=64)) as (_, engine):
        with pytest.raises(EngineOverflow, match="longer than the model's context"):
            await play(engine, ask(user("word " * 80)), sampling=Sampling(max_tokens=9))


async def test_an_aborted_generation_says_so():
    async with served(Sglang(fault="abort")) as (_, engine):
        _, reply = await play(engine, ask())
    assert reply.turn.stop is StopReason.ABORT


async def test_cancelling_closes_the_request_which_aborts_the_generation():
    async with served(Sglang(fault="hang")) as (server, engine):
        task = asyncio.ensure_future(play(engine, ask()))
        await server.started.wait()
        task.cancel()
        await asyncio.wait_for(server.aborted.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_session_stays_on_its_replica():
    async with Sglang().run() as one, Sglang().run() as two, engine_at(one.url, two.url) as engine:
        for name in "abcdefgh":
            for _ in range(2):
                await play(engine, ask(user(name)), Session(name))
    homes = [{body["messages"][0]["content"] for body in server.requests} for server in (one, two)]
    assert homes[0].isdisjoint(homes[1])
    assert homes[0] | homes[1] == set("abcdefgh")


# --- the start-up proof -------------------------------------------------------------------------------------------


async def test_check_says_what_it_proved():
    async with served() as (_, engine):
        facts = await engine.check()
    assert (facts.model, facts.max_model_len, facts.real_tensors) == ("qwen", 4096, True)
    assert "temperature 1" in facts.notes[1]


@pytest.mark.parametrize(("fault", "told"), [("no_ids", "missing_ids"), ("bad_schema", "refused a plain question")])
async def test_check_refuses_a_server_without_ids(fault, told):
    async with served(Sglang(fault=fault)) as (_, engine):
        with pytest.raises(EngineError, match=rf"{told}.*is it SGLang 0\.5\.13 or newer"):
            await engine.check()


async def test_check_refuses_replicas_of_different_models():
    async with Sglang().run() as one, Sglang(window=99).run() as two, engine_at(one.url, two.url) as engine:
        with pytest.raises(EngineError, match="different models"):
            await engine.check()


def test_an_engine_without_an_address_is_refused_at_once():
    with pytest.raises(EngineError, match="base_urls is empty"):
        SglangEngine(EngineConfig(kind="sglang"))
