"""The vLLM engine against a real vLLM 0.32 on this CPU: opt-in, ``make test-vllm``."""

import asyncio
import contextlib
import json
from dataclasses import replace

import aiohttp
import pytest
import pytest_asyncio

from e2e.vllm_helpers import MODEL, VLLM, served_vllm, session_members
from engine_helpers import CACHE, ask, play, user
from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import Session, tokenizer
from polar_env.engine.scripted import history
from polar_env.engine.vllm import VllmEngine
from polar_env.errors import EngineError, EngineOverflow
from polar_env.messages import ToolSpec
from polar_env.types import EngineReply, Sampling, StopReason

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (VLLM / "vllm").exists(), reason="no .venv-vllm: run `make test-vllm`"),
]

GREEDY = Sampling(temperature=0.0, max_tokens=24)

CHOICE: ToolSpec = {
    "name": "bash",
    "description": "Run a command",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": ["ls", "pwd"]}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
"""A schema whose every value ends: a random model would write an open string for ever."""

STRICT = ("--tool-strict-level", "parameter")
"""vLLM holds a forced call to its tool's schema only when the tool is strict, or the server makes all of them so."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    async with served_vllm(tmp_path_factory.mktemp("vllm"), *STRICT, max_model_len=8192) as running:
        yield running
    assert session_members(running.pid) == []


@contextlib.asynccontextmanager
async def engine_of(server, stream: bool):
    engine = VllmEngine(EngineConfig(base_urls=(server.url,), stream=stream))
    try:
        yield engine
    finally:
        await engine.aclose()


@pytest_asyncio.fixture(loop_scope="module", params=[True, False], ids=["stream", "whole"])
async def engine(request, server):
    async with engine_of(server, request.param) as made:
        yield made


async def test_check_proves_a_real_server(engine):
    facts = await engine.check()
    assert (facts.model, facts.max_model_len, facts.real_tensors) == (MODEL, 8192, True)
    assert "raw_logprobs" in facts.notes[0]
    assert facts.policy_version


async def test_a_server_without_scale_out_is_used_whole_or_refused(engine, server):
    """This file's server is served without --enable-scale-out: it answers 403, and says what to do."""
    assert "--enable-scale-out" in (await engine.check()).notes[1]
    strict = VllmEngine(EngineConfig(base_urls=(server.url,), splice="on"))
    with pytest.raises(EngineError, match=r"cannot splice.*serve it with --enable-scale-out"):
        await strict.check()
    await strict.aclose()


async def test_the_reply_keeps_the_capture_contract(engine):
    _, reply = await play(engine, ask(tools=()), sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=20))
    assert judge("c", reply) == ()
    assert len(reply.sampled_ids) == len(reply.log_probs) == reply.turn.usage.completion_tokens > 0
    assert len(reply.prompt_ids) == reply.turn.usage.prompt_tokens


async def test_the_prompt_ids_are_the_template_s_and_the_count_is_theirs(engine):
    """Our own renderer and vLLM's agree: so a scripted prompt is what a served model would be given."""
    request = ask()
    _, reply = await play(engine, request, sampling=GREEDY)
    words = tokenizer.load(tokenizer.fetch(CACHE))
    assert words.decode(reply.prompt_ids) == words.template(request.messages, request.tools)
    assert reply.prompt_ids == words.render(request.messages, request.tools)
    assert await engine.count_tokens(request) == len(reply.prompt_ids)


async def test_a_streamed_and_a_whole_answer_are_the_same_tokens(server):
    async with engine_of(server, True) as streaming, engine_of(server, False) as waiting:
        deltas, streamed = await play(streaming, ask(), sampling=GREEDY)
        _, whole = await play(waiting, ask(), sampling=GREEDY)
    assert streamed.sampled_ids == whole.sampled_ids
    assert streamed.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
    assert streamed.turn == whole.turn
    assert "".join(delta.text for delta in deltas if delta.kind == "text") == whole.turn.text


async def called(engine: VllmEngine) -> EngineReply:
    request = ask(user("List the files."), tools=(CHOICE,), tool_choice="required")
    _, reply = await play(engine, request, sampling=Sampling(temperature=1.0, max_tokens=200))
    return reply


async def test_a_forced_tool_call_is_parsed_and_every_token_of_its_markup_is_kept(engine):
    reply = await called(engine)
    assert reply.turn.stop is StopReason.TOOL_CALLS
    call = reply.turn.tool_calls[0]
    assert (call.name, json.loads(call.arguments)["command"] in {"ls", "pwd"}) == ("bash", True)
    assert judge("c", reply) == ()
    spelled = tokenizer.load(tokenizer.fetch(CACHE)).decode(reply.sampled_ids)
    assert "bash" in spelled
    assert call.arguments in spelled


async def test_the_history_of_a_tool_call_is_rendered_by_vllm_and_by_us_alike(engine):
    """Reasoning, arguments and a tool result in the history: the same prompt on both sides, id for id."""
    reply = await called(engine)
    turn = replace(reply.turn, text="I look.", reasoning="What is here?")
    request = ask(user("List the files."), *history(turn, ("a.py",) * len(turn.tool_calls)), tools=(CHOICE,))
    _, after = await play(engine, request, sampling=GREEDY)
    assert after.prompt_ids == tokenizer.load(tokenizer.fetch(CACHE)).render(request.messages, request.tools)


async def test_the_policy_version_is_the_one_the_trainer_set(engine, server):
    async with aiohttp.ClientSession() as trainer:
        told = {"new_version": "step-7"}
        async with trainer.post(server.url.removesuffix("/v1") + "/update_weight_version", json=told) as response:
            assert response.status == 200
    _, reply = await play(engine, ask(), sampling=GREEDY)
    assert reply.policy_version == "step-7"


async def test_a_prompt_over_the_window_is_an_overflow(engine):
    with pytest.raises(EngineOverflow, match="maximum context length is 8192 tokens"):
        await play(engine, ask(user("word " * 9000)), sampling=GREEDY)


async def test_a_cap_beyond_the_window_is_no_overflow(engine):
    long = ask(user("word " * 8140), tools=())
    _, reply = await play(engine, long, sampling=Sampling(temperature=1.0, max_tokens=4096))
    assert judge("c", reply) == ()
    assert len(reply.prompt_ids) + len(reply.sampled_ids) <= 8192


async def test_a_request_vllm_refuses_is_an_engine_error_in_its_own_words(engine):
    with pytest.raises(EngineError, match="400"):
        await play(engine, ask(), sampling=Sampling(temperature=-1.0))


async def test_a_closed_generation_leaves_the_engine_free_for_the_next(server):
    async with engine_of(server, True) as engine:
        parts = engine.generate(ask(tools=()), Sampling(temperature=1.0, max_tokens=6000), Session("gone"))
        await anext(parts)
        await parts.aclose()
        _, reply = await asyncio.wait_for(play(engine, ask(tools=()), sampling=GREEDY), 60)
    assert judge("c", reply) == ()


async def test_eight_sessions_are_sampled_at_once(server):
    async with engine_of(server, True) as engine, asyncio.TaskGroup() as group:
        sampling = Sampling(temperature=1.0, max_tokens=16)
        tasks = [group.create_task(play(engine, ask(), Session(f"s{i}"), sampling)) for i in range(8)]
    assert all(judge("c", task.result()[1]) == () for task in tasks)
