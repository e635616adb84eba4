"""The vLLM engine against a real HTTP server that answers, and fails, in vLLM's shapes."""

import asyncio
import contextlib
import functools
import itertools
import json
import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialect_helpers import read_chat
from engine_helpers import BASH, PATIENT, TOOL_ANSWER, Answer, Step, VllmServer, ask, opened, play, user
from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import Session
from polar_env.engine.vllm import VllmEngine
from polar_env.engine.vllm_wire import Assembly, chat_body, error_text, message_body
from polar_env.errors import EngineBusy, EngineError, EngineOverflow
from polar_env.proxy.call_ids import CallIds
from polar_env.proxy.chat import Chat
from polar_env.proxy.sse import Parser
from polar_env.types import (
    Delta,
    EngineReply,
    HoleKind,
    ModelRequest,
    Sampling,
    StopReason,
    ToolCall,
    Usage,
    WireApi,
)

SHARED = Path(__file__).parents[2] / "shared" / "vllm_samples"


engine_at = functools.partial(opened, VllmEngine)


@contextlib.asynccontextmanager
async def served(fault: str = "", answer: Answer | None = None, stream: bool = True, **settings):
    server = VllmServer(answer or Answer(), fault)
    async with server.run(), engine_at(server.url, stream=stream, **settings) as engine:
        yield server, engine


# --- a good answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_ids_and_log_probs_arrive_as_the_engine_sent_them(stream):
    async with served(stream=stream) as (_, engine):
        _, reply = await play(engine, ask())
    assert reply.prompt_ids == array("i", [151644, 872, 198, 151645])
    assert reply.sampled_ids == array("i", [40, 1401, 151657, 198, 4913, 5631, 4730, 151658, 151645])
    assert reply.log_probs == array("f", [-0.5, -0.25, -0.1, -0.2, -0.3, -0.4, 0.0, -0.6, -0.7])
    assert reply.turn.usage == Usage(4, 9)
    assert reply.turn.text == "I will look."
    assert reply.turn.tool_calls == (ToolCall("t1", "bash", '{"command": "ls"}'),)
    assert reply.turn.stop is StopReason.TOOL_CALLS
    assert (reply.finish, reply.choices) == ("tool_calls", 1)
    assert judge("c", reply) == ()


async def test_deltas_are_streamed_in_the_order_the_model_spoke():
    async with served() as (_, engine):
        deltas, _ = await play(engine, ask())
    assert deltas == [
        Delta("text", "I will"),
        Delta("text", " look."),
        Delta("tool_open", index=0, id="t1", name="bash"),
        Delta("tool_args", '{"command"'),
        Delta("tool_args", ': "ls"}'),
    ]


async def test_the_session_s_sampling_is_sent_and_the_harness_s_is_not():
    request = ask(
        user("Hi"), asked=Sampling(temperature=0.1, max_tokens=5), tool_choice="bash", parallel_tool_calls=False
    )
    async with served() as (server, engine):
        await play(engine, request, Session("session-7"), Sampling(1.0, 0.9, 40, 8192))
    body = server.requests[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (1.0, 0.9, 40, 8192)
    assert (body["return_token_ids"], body["logprobs"], body["top_logprobs"]) == (True, True, 0)
    assert body["stream_options"] == {"include_usage": True}
    assert body["model"] == "tiny"
    assert body["session_id"] == "session-7"
    assert body["tools"] == [{"type": "function", "function": BASH}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "bash"}}
    assert body["parallel_tool_calls"] is False


async def test_the_api_key_is_sent_as_a_bearer_token():
    async with served(api_key="k-123") as (server, engine):
        await play(engine, ask())
    assert server.headers[0]["authorization"] == "Bearer k-123"


def test_what_is_not_asked_for_is_left_to_the_engine():
    body = chat_body(ask(user("Hi"), tools=()), Sampling(), "s", "m", stream=False)
    unwanted = {"temperature", "top_p", "top_k", "max_tokens", "tools", "tool_choice", "stream_options"}
    assert unwanted.isdisjoint(body)


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_a_plain_tool_choice_is_sent_as_a_word(choice):
    assert chat_body(ask(tool_choice=choice), Sampling(), "s", "m", stream=True)["tool_choice"] == choice


def test_a_developer_message_becomes_a_system_message():
    assert message_body({"role": "developer", "content": "Be brief."}) == {"role": "system", "content": "Be brief."}


def test_reasoning_is_sent_under_the_name_vllm_renders():
    body = message_body({"role": "assistant", "content": "x", "reasoning_content": "why"})
    assert body == {"role": "assistant", "content": "x", "reasoning": "why"}


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": tru', {"arguments": '{"a": tru'}),
        ("[1]", {"arguments": "[1]"}),
        pytest.param("[" * 100_000, {"arguments": "[" * 100_000}, id="a model that repeats itself"),
    ],
)
def test_arguments_that_vllm_would_blank_out_are_kept_as_an_object(said, sent):
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": said}}
    body = message_body({"role": "assistant", "content": None, "tool_calls": [call]})
    assert json.loads(body["tool_calls"][0]["function"]["arguments"]) == sent
    assert call["function"]["arguments"] == said


async def test_reasoning_is_read_under_both_of_its_names():
    steps = (
        Step((1,), (-1.0,), {"reasoning": "Let me "}),
        Step((2,), (-1.0,), {"reasoning_content": "think."}),
        Step((3,), (-1.0,), {"content": "Done."}),
    )
    async with served(answer=Answer(steps, finish="stop")) as (_, engine):
        deltas, reply = await play(engine, ask())
    assert [delta.kind for delta in deltas] == ["reasoning", "reasoning", "text"]
    assert (reply.turn.reasoning, reply.turn.text) == ("Let me think.", "Done.")


async def test_a_named_tool_ends_with_stop_on_the_wire_and_is_told_as_a_tool_call():
    async with served(answer=Answer(finish="stop")) as (_, engine):
        _, reply = await play(engine, ask(tool_choice="bash"))
    assert (reply.finish, reply.turn.stop) == ("stop", StopReason.TOOL_CALLS)


async def test_an_answer_cut_at_its_length_is_told_as_cut():
    async with served(answer=Answer(finish="length")) as (_, engine):
        _, reply = await play(engine, ask())
    assert reply.turn.stop is StopReason.LENGTH


async def test_count_tokens_asks_the_tokenizer_and_generates_nothing():
    async with served() as (server, engine):
        assert await engine.count_tokens(ask()) == 4
    assert [set(body) for body in server.requests] == [{"model", "messages", "tools", "add_generation_prompt"}]


async def test_a_tokenizer_answer_without_a_count_is_an_engine_error():
    async with served("no_count") as (_, engine):
        with pytest.raises(EngineError, match="without a count"):
            await engine.count_tokens(ask())


async def test_a_hundred_generations_run_at_once_and_each_gets_its_own_reply():
    async with served() as (server, engine), asyncio.TaskGroup() as group:
        tasks = [group.create_task(play(engine, ask(), Session(f"s{i}"))) for i in range(100)]
    assert {task.result()[1].turn.text for task in tasks} == {"I will look."}
    assert {body["session_id"] for body in server.requests} == {f"s{i}" for i in range(100)}


# --- the wire, chunk by chunk -----------------------------------------------------------------------------------


def assembled(raw: bytes, cuts: list[int]) -> tuple[list[Delta], EngineReply]:
    """The reply that a stream cut at ``cuts`` gives."""
    parser, answer = Parser(), Assembly()
    edges = sorted({0, len(raw), *(cut % len(raw) for cut in cuts)})
    deltas: list[Delta] = []
    for start, end in itertools.pairwise(edges):
        for found in parser.feed(raw[start:end]):
            if found.data != "[DONE]":
                deltas += answer.feed(found.json())
    return deltas, answer.reply("v1")


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=6)
ids = st.integers(0, 151_935)


@st.composite
def steps(draw) -> Step:
    tokens = tuple(draw(st.lists(ids, max_size=3)))
    values = tuple(draw(st.floats(-50, 0, width=32)) for _ in tokens)
    call = {"index": draw(st.integers(0, 2)), "id": "c", "function": {"name": "bash", "arguments": draw(words)}}
    delta = draw(st.sampled_from(["none", "content", "reasoning", "tool"]))
    said = {"none": {}, "content": {"content": draw(words)}, "reasoning": {"reasoning": draw(words)}}
    return Step(tokens, values, said.get(delta, {"tool_calls": [call]}))


answers = st.builds(
    Answer,
    steps=st.lists(steps(), min_size=1, max_size=6).map(tuple),
    prompt_ids=st.lists(ids, min_size=1, max_size=5).map(tuple),
    finish=st.sampled_from(["stop", "tool_calls", "length"]),
)


@PATIENT
@given(answers, st.lists(st.integers(0, 10_000), max_size=20))
def test_any_chunking_of_the_stream_gives_the_same_reply(answer, cuts):
    raw = answer.stream()
    assert assembled(raw, cuts) == assembled(raw, [])


@PATIENT
@given(answers)
def test_a_streamed_answer_is_the_whole_answer_token_for_token(answer):
    whole = Assembly()
    whole.feed(answer.whole())
    _, streamed = assembled(answer.stream(), [])
    plain = whole.reply("v1")
    assert (streamed.prompt_ids, streamed.sampled_ids) == (plain.prompt_ids, plain.sampled_ids)
    assert (streamed.log_probs, streamed.turn.usage) == (plain.log_probs, plain.turn.usage)
    assert (streamed.turn.text, streamed.turn.reasoning) == (plain.turn.text, plain.turn.reasoning)
    assert streamed.turn.stop is plain.turn.stop


@PATIENT
@given(answers)
def test_deltas_joined_are_the_turn(answer):
    deltas, reply = assembled(answer.stream(), [])
    assert "".join(delta.text for delta in deltas if delta.kind == "text") == reply.turn.text
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == reply.turn.reasoning
    opened = [delta.index for delta in deltas if delta.kind == "tool_open"]
    for index, call in zip(sorted(opened), reply.turn.tool_calls, strict=True):
        told = "".join(delta.text for delta in deltas if delta.kind == "tool_args" and delta.index == index)
        assert told == call.arguments


@pytest.mark.parametrize("pieces", [
    [(1, "c", "bash", '{"command": '), (1, None, None, '"ls"}')],
    [(0, None, None, "noise"), (1, "c", "bash", '{"command": "ls"}')],
    [(7, "c", None, '{"command": '), (7, None, "bash", '"ls"}')],
], ids=["counts from one", "one that is never named", "named late"])  # fmt: skip
def test_a_call_is_streamed_once_however_the_engine_s_parser_counts(pieces):
    """Streamed under another number than it has in the turn it was sent twice, and the harness ran it twice."""
    answer, ids, said = Assembly(), CallIds().answer(), ModelRequest(WireApi.CHAT, "m", (user("hi"),), stream=True)
    encoder = Chat().encoder(said, "chatcmpl-1", 1)
    told = encoder.start()
    for index, name, function, text in pieces:
        call = {"index": index, "id": name, "function": {"name": function, "arguments": text}}
        for delta in answer.feed({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}):
            told += encoder.delta(ids.delta(delta))
    turn = ids.turn(answer.reply("v").turn)
    told += b"".join(encoder.finish(turn))
    (call,) = read_chat(told)["message"]["tool_calls"]
    assert (call["id"], call["function"]) == ("c", {"name": "bash", "arguments": '{"command": "ls"}'})


def test_a_call_without_an_id_gets_one_that_names_its_answer_and_place():
    answer = Assembly()
    answer.feed({"id": "chatcmpl-9", "choices": [{"delta": {"tool_calls": [{"function": {"name": "bash"}}]}}]})
    assert answer.reply("v").turn.tool_calls == (ToolCall("call_chatcmpl-9_0", "bash", ""),)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": "flat"}, "flat"),
        ({"message": "old shape"}, "old shape"),
        ({"detail": "fastapi"}, "fastapi"),
        ("text", "text"),
    ],
)
def test_an_error_is_read_in_whatever_shape_the_server_gives_it(body, told):
    assert error_text(body) == told


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded vLLM answers are not beside this checkout")
@pytest.mark.parametrize("name", ["chat_required", "tiny_chat_required"])
def test_answers_recorded_from_a_real_vllm_are_read_whole_and_the_same_both_ways(name):
    _, _, recorded = (SHARED / f"{name}_stream.sse").read_bytes().split(b"\n", 2)
    plain = Assembly()
    plain.feed(json.loads((SHARED / f"{name}.json").read_text().splitlines()[2]))
    _, streamed = assembled(recorded, [])
    whole = plain.reply("v")
    assert streamed.prompt_ids == whole.prompt_ids
    assert len(streamed.prompt_ids) == 168
    assert streamed.sampled_ids == whole.sampled_ids
    assert streamed.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
    assert [call.arguments for call in streamed.turn.tool_calls] == [call.arguments for call in whole.turn.tool_calls]
    assert streamed.turn.stop is whole.turn.stop is StopReason.TOOL_CALLS
    assert {hole.kind for hole in judge("c", whole)} == set()


# --- what is missing stays missing ------------------------------------------------------------------------------


async def kinds(answer: Answer, stream: bool = True) -> set[HoleKind]:
    async with served(answer=answer, stream=stream) as (_, engine):
        _, reply = await play(engine, ask())
    return {hole.kind for hole in judge("c", reply)}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_without_ids_is_a_hole_and_no_id_is_invented(stream):
    async with served(answer=Answer(with_ids=False), stream=stream) as (_, engine):
        _, reply = await play(engine, ask())
    assert len(reply.prompt_ids) == len(reply.sampled_ids) == 0
    assert HoleKind.MISSING_IDS in {hole.kind for hole in judge("c", reply)}


async def test_a_log_prob_that_is_no_number_is_a_hole():
    assert await kinds(Answer((Step((1, 2), (-1.0, math.nan)),), finish="stop")) == {HoleKind.BAD_LOG_PROB}


async def test_a_null_log_prob_is_a_hole():
    assert await kinds(Answer((Step((1, 2), (-1.0, None)),), finish="stop")) == {HoleKind.BAD_LOG_PROB}


async def test_fewer_log_probs_than_ids_is_a_hole():
    assert await kinds(Answer((Step((1, 2), (-1.0,)),), finish="stop")) == {HoleKind.LENGTH_MISMATCH}


@pytest.mark.parametrize("stream", [True, False])
async def test_several_choices_are_a_hole_and_the_first_is_kept(stream):
    async with served(answer=Answer(choices=3), stream=stream) as (_, engine):
        _, reply = await play(engine, ask())
    assert (reply.choices, reply.turn.text, len(reply.sampled_ids)) == (3, "I will look.", 9)
    assert HoleKind.MANY_CHOICES in {hole.kind for hole in judge("c", reply)}


async def test_an_unknown_reason_to_stop_is_a_hole():
    assert await kinds(Answer(finish="moonphase")) == {HoleKind.UNKNOWN_FINISH}


# --- which policy sampled ---------------------------------------------------------------------------------------


async def versioned(answer: Answer, told: list[str], stream: bool = True) -> tuple[str, bool]:
    """The version on the reply, and whether it is one of weights."""
    server = VllmServer(answer, weight_versions=told)
    async with server.run(), engine_at(server.url, stream=stream) as engine:
        _, reply = await play(engine, ask())
    return reply.policy_version, reply.versioned


async def version(answer: Answer, told: list[str], stream: bool = True) -> str:
    name, known = await versioned(answer, told, stream)
    assert known
    return name


async def test_the_version_in_the_answer_outranks_everything():
    assert await version(Answer(versions=("step-4",)), ["other"]) == "step-4"


async def test_weights_swapped_during_the_answer_are_both_named():
    assert await version(Answer(versions=("step-4", "step-5")), []) == "step-4+step-5"


@pytest.mark.parametrize("stream", [True, False])
async def test_without_it_the_server_is_asked_before_and_after(stream):
    assert await version(Answer(), ["step-1"], stream) == "step-1"
    assert await version(Answer(), ["step-1", "step-2"], stream) == "step-1+step-2"


async def test_a_server_that_cannot_tell_is_named_by_model_and_fingerprint():
    assert await versioned(Answer(), []) == ("tiny@vllm-0.32.0-abc", False)
    assert await versioned(Answer(fingerprint=None), []) == ("tiny@unversioned", False)


async def test_weights_that_no_trainer_ever_named_have_no_version():
    assert await versioned(Answer(), ["default"]) == ("default", False)
    assert await versioned(Answer(versions=("default",)), []) == ("default", False)
    assert await versioned(Answer(), ["default", "step-1"]) == ("default+step-1", True)


# --- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("die", "connection to .* was lost"),
        ("reset", "connection to .* was lost"),
        ("eof", "without a finish reason"),
        ("garbage", "not JSON"),
        ("error_event", "EngineCore died"),
        ("list", "is it a vLLM server"),
        ("bad_request", "400: tools: bad schema"),
        ("unauthorised", "set engine.api_key"),
        ("gateway", "502: <html>Bad gateway"),
    ],
)
async def test_a_failed_stream_is_an_engine_error_that_says_what_happened(fault, told):
    async with served(fault) as (_, engine):
        with pytest.raises(EngineError, match=told):
            await play(engine, ask())


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_goes_quiet_is_given_up_after_the_idle_timeout(stream):
    async with served("hang", stream=stream, idle_timeout=0.2) as (_, engine):
        with pytest.raises(EngineError, match=r"engine\.idle_timeout"):
            await play(engine, ask())


async def test_a_whole_answer_that_is_cut_is_an_engine_error():
    async with served("garbage", stream=False) as (_, engine):
        with pytest.raises(EngineError, match="not JSON"):
            await play(engine, ask())


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [{"token_ids": ["a"]}]},
        {"choices": [{"token_ids": [2**40]}]},
        {"prompt_token_ids": ["a"]},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [2**40]},
        {"prompt_token_ids": 3},
        {"choices": [3]},
        {"choices": [{"logprobs": {"content": [{"logprob": "low"}]}}]},
        {"usage": {"completion_tokens": 3}},
    ],
)
def test_a_chunk_of_the_wrong_shape_is_an_engine_error(chunk):
    with pytest.raises(EngineError, match="malformed chunk"):
        Assembly().feed(chunk)


async def test_a_prompt_that_does_not_fit_is_an_overflow_with_the_server_s_words():
    async with served("overflow") as (_, engine):
        with pytest.raises(EngineOverflow, match="maximum context length is 64 tokens"):
            await play(engine, ask(), sampling=Sampling(max_tokens=8))


async def test_a_prompt_that_only_leaves_no_room_for_the_cap_is_sampled_to_the_window_s_end():
    async with served("no_room_for_cap") as (server, engine):
        _, reply = await play(engine, ask(), sampling=Sampling(max_tokens=8192))
    assert reply.turn.text == "I will look."
    assert [body.get("max_tokens") for body in server.requests] == [8192, None]


@pytest.mark.parametrize(("fault", "seconds"), [("busy", 7.0), ("throttled", 2.0)])
async def test_a_busy_engine_says_when_to_come_back(fault, seconds):
    async with served(fault) as (_, engine):
        with pytest.raises(EngineBusy) as caught:
            await play(engine, ask())
    assert caught.value.retry_after == seconds


async def test_closing_the_generation_aborts_it_upstream():
    async with served("hang") as (server, engine):
        parts = engine.generate(ask(), Sampling(), Session("s"))
        assert await anext(parts) == Delta("text", "I will")
        await server.started.wait()
        await parts.aclose()
        await asyncio.wait_for(server.aborted.wait(), 5)


async def test_cancelling_the_task_aborts_the_generation_upstream():
    async with served("hang", stream=False) as (server, engine):
        task = asyncio.ensure_future(play(engine, ask()))
        await server.started.wait()
        task.cancel()
        await asyncio.wait_for(server.aborted.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await task


def test_an_engine_without_an_address_is_refused_at_once():
    with pytest.raises(EngineError, match="base_urls is empty"):
        VllmEngine(EngineConfig())


# --- replicas ---------------------------------------------------------------------------------------------------


async def homes(engine: VllmEngine, servers: list[VllmServer], sessions: list[str]) -> dict[str, str]:
    """Which server each session's call arrived at."""
    for server in servers:
        server.requests.clear()
    for session in sessions:
        await play(engine, ask(), Session(session))
    return {body["session_id"]: server.url for server in servers for body in server.requests}


async def test_a_session_stays_on_one_replica_and_a_dead_one_moves_only_its_own():
    servers = [VllmServer() for _ in range(3)]
    sessions = [f"session-{i}" for i in range(24)]
    async with servers[0].run(), servers[1].run(), contextlib.AsyncExitStack() as third:
        await third.enter_async_context(servers[2].run())
        async with engine_at(*(f"{server.url}/v1/" for server in servers)) as engine:
            before = await homes(engine, servers, sessions)
            assert await homes(engine, servers, sessions) == before
            assert set(before.values()) == {server.url for server in servers}
            await third.aclose()
            after = await homes(engine, servers[:2], sessions)
    moved = {session for session in sessions if before[session] != after[session]}
    assert moved == {session for session in sessions if before[session] == servers[2].url}


async def test_when_no_replica_can_be_reached_the_error_names_them():
    server = VllmServer()
    async with server.run():
        url = server.url
    async with engine_at(url, model="tiny") as engine:
        with pytest.raises(EngineError, match=f"no engine can be reached: {url}"):
            await play(engine, ask())


# --- the start-up proof -----------------------------------------------------------------------------------------

CERTAIN = tuple(Step(step.ids, tuple(0.0 for _ in step.ids), step.delta) for step in TOOL_ANSWER)


async def test_check_reports_what_it_proved():
    async with served() as (server, engine):
        facts = await engine.check()
    assert (facts.model, facts.max_model_len, facts.real_tensors) == ("tiny", 64, True)
    assert facts.policy_version == "tiny@vllm-0.32.0-abc"
    assert "raw_logprobs" in facts.notes[0]
    assert [body["max_tokens"] for body in server.requests] == [8, 8]


async def test_check_notices_processed_log_probs():
    async with served(answer=Answer(CERTAIN)) as (_, engine):
        assert "processed_logprobs" in (await engine.check()).notes[0]


async def test_check_refuses_an_engine_that_gives_no_ids():
    async with served(answer=Answer(with_ids=False)) as (_, engine):
        with pytest.raises(EngineError, match="return_token_ids"):
            await engine.check()


async def test_check_refuses_a_model_that_is_not_served():
    async with served(model="other") as (_, engine):
        with pytest.raises(EngineError, match=r"serves \['tiny'\], not 'other'"):
            await engine.check()


async def test_check_refuses_replicas_that_serve_different_models():
    one, two = VllmServer(), VllmServer(window=128)
    async with one.run(), two.run(), engine_at(one.url, two.url) as engine:
        with pytest.raises(EngineError, match="different models"):
            await engine.check()


async def test_check_says_so_when_the_server_is_no_vllm():
    server = VllmServer()
    async with server.run(), engine_at(server.url + "/nowhere") as engine:
        with pytest.raises(EngineError, match=r"404.*check engine.model and engine.base_urls"):
            await engine.check()
