"""Calls that carry on another, as vLLM's scale-out routes see them: exact ids in, ids and log-probs out, a turn read
back. Against a scripted server with a real tokenizer and template; the real server is in e2e/test_vllm_splice.py."""

import asyncio
import contextlib
import functools
import json
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
import pytest_asyncio

from engine_helpers import ask, opened, play, user
from polar_env.capture import judge
from polar_env.engine import Session
from polar_env.engine.scripted import history
from polar_env.engine.vllm import VllmEngine
from polar_env.errors import EngineError, EngineOverflow
from polar_env.types import Continuation, Delta, EngineReply, ModelRequest, Sampling, StopReason
from token_server_helpers import DISABLED, END, LOOK, TokenServer, log_probs, words

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=64)


engine_at = functools.partial(opened, VllmEngine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proved():
    """A server, and an engine that has proved it: once, as the proof is 80 requests."""
    server = TokenServer()
    async with server.run(), engine_at(server.url) as engine:
        await engine.check()
        yield server, engine


@pytest.fixture
def model(proved) -> Callable[..., tuple[TokenServer, VllmEngine]]:
    """``model(says, ..., fault=)`` -> the server as new, but for what its model says from here on, and the engine."""

    def saying(*says: str, fault: str = "") -> tuple[TokenServer, VllmEngine]:
        server, engine = proved
        vars(server).update(vars(TokenServer(list(says) or [LOOK], fault, url=server.url)))
        engine.unspliced.clear()
        return server, engine

    return saying


def carrying_on(request: ModelRequest, reply: EngineReply, *results: str) -> ModelRequest:
    """The harness's next request: the turn as it understood it, the results of its calls, or else a user's word."""
    told = history(reply.turn, results)
    said = told if results else (*told, user("And now?"))
    ids = reply.prompt_ids + reply.sampled_ids
    carried = Continuation("c", ids, len(request.messages) + 1, cut=reply.turn.stop is StopReason.LENGTH)
    return replace(request, messages=(*request.messages, *said), continues=carried)


async def twice(engine: VllmEngine, session: Session | None = None) -> tuple[EngineReply, EngineReply]:
    """A call, and one that carries it on."""
    _, first = await play(engine, ask(), session, SAMPLING)
    _, second = await play(engine, carrying_on(ask(), first, "a.py"), session, SAMPLING)
    return first, second


TAIL = "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


# --- exact ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_the_prompt_is_the_earlier_call_s_ids_and_the_rendering_of_what_is_new(stream):
    server = TokenServer()
    async with server.run(), engine_at(server.url, stream=stream) as engine:
        await engine.check()
        server.generated.clear()
        first, second = await twice(engine)
    assert second.prompt_ids == first.prompt_ids + first.sampled_ids + words().encode(TAIL)
    assert server.generated[0]["token_ids"] == second.prompt_ids.tolist()
    assert (first.spliced, second.spliced) == (False, True)


async def test_ids_and_log_probs_arrive_as_the_engine_sent_them(model):
    _, engine = model()
    _, second = await twice(engine)
    assert second.sampled_ids == words().encode(LOOK)
    assert second.log_probs == log_probs(len(second.sampled_ids))
    assert judge("c", second) == ()


async def test_a_spelling_the_template_would_not_give_again_stays_as_it_was_sampled(model):
    server, engine = model()
    first, second = await twice(engine)
    _, whole = await play(engine, replace(carrying_on(ask(), first, "a.py"), continues=None), sampling=SAMPLING)
    history_of = len(first.prompt_ids) + len(first.sampled_ids)
    assert second.prompt_ids[:history_of] != whole.prompt_ids[:history_of]
    assert words().decode(first.sampled_ids) in words().decode(second.prompt_ids)
    assert len(server.generated) == 1


async def test_a_turn_cut_at_its_length_is_ended_as_the_template_ends_one(model):
    _, engine = model("<think>why</think>\n\nI will look at", LOOK)
    request = ask()
    _, first = await play(engine, request, sampling=replace(SAMPLING, max_tokens=4))
    _, second = await play(engine, carrying_on(request, first), sampling=SAMPLING)
    assert first.turn.stop is StopReason.LENGTH
    tail = words().encode("<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids == first.prompt_ids + first.sampled_ids + tail


async def test_six_calls_are_one_sequence_in_which_every_prompt_begins_with_all_before_it(model):
    _, engine = model()
    request, before = ask(), array("i")
    for _ in range(6):
        _, reply = await play(engine, request, sampling=SAMPLING)
        assert reply.prompt_ids[: len(before)] == before
        before = reply.prompt_ids + reply.sampled_ids
        request = carrying_on(request, reply, "a.py")


# --- the turn ---------------------------------------------------------------------------------------------------


async def test_the_turn_is_what_the_server_s_own_parsers_make_of_the_ids(model):
    server, engine = model()
    _, second = await twice(engine)
    assert (second.turn.reasoning, second.turn.text, second.turn.stop) == ("why", "", StopReason.TOOL_CALLS)
    assert [(call.name, json.loads(call.arguments)) for call in second.turn.tool_calls] == [("bash", {"command": "ls"})]
    asked = server.derendered[0]
    assert asked["generate_response"]["prompt_token_ids"] == server.generated[0]["token_ids"]
    assert asked["chat_request"]["tools"] == [{"type": "function", "function": dict(ask().tools[0])}]


async def test_the_ids_of_calls_differ_through_a_session(model):
    _, engine = model(LOOK.replace("<|im_end|>", LOOK[LOOK.index("<tool_call>") :]))
    first, second = await twice(engine)
    told = [call.id for reply in (first, second) for call in reply.turn.tool_calls]
    assert len(set(told)) == len(told) == 4


async def test_a_reader_is_shown_the_turn_when_it_is_done(model):
    _, engine = model()
    _, first = await play(engine, ask(), sampling=SAMPLING)
    deltas, second = await play(engine, carrying_on(ask(), first, "a.py"), sampling=SAMPLING)
    call = second.turn.tool_calls[0]
    assert deltas == [
        Delta("reasoning", "why"),
        Delta("tool_open", id=call.id, name="bash"),
        Delta("tool_args", call.arguments),
    ]


async def test_the_token_that_ends_a_turn_is_kept_and_is_not_text(model):
    server, engine = model(LOOK, "<think>so</think>Done.<|im_end|>")
    _, second = await twice(engine)
    assert (second.turn.text, second.turn.stop) == ("Done.", StopReason.STOP)
    assert second.sampled_ids[-1] == END
    assert server.derendered[0]["generate_response"]["choices"][0]["token_ids"] == second.sampled_ids[:-1].tolist()


async def test_an_answer_that_is_only_the_end_is_an_empty_turn(model):
    server, engine = model(LOOK, "<|im_end|>")
    _, second = await twice(engine)
    assert (second.turn.text, second.turn.tool_calls, second.sampled_ids) == ("", (), array("i", [END]))
    assert server.derendered == []


async def test_what_the_length_cut_off_is_read_to_its_last_token(model):
    server, engine = model(LOOK, "<think>so</think>One two three four five six seven")
    _, first = await play(engine, ask(), sampling=SAMPLING)
    _, second = await play(engine, carrying_on(ask(), first, "a.py"), sampling=replace(SAMPLING, max_tokens=6))
    assert second.turn.stop is StopReason.LENGTH
    assert server.derendered[0]["generate_response"]["choices"][0]["token_ids"] == second.sampled_ids.tolist()


# --- sampling ---------------------------------------------------------------------------------------------------


async def test_the_session_s_sampling_is_resolved_by_the_server_as_for_a_chat(model):
    sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=33)
    server, engine = model()
    _, first = await play(engine, ask(), sampling=SAMPLING)
    await play(engine, carrying_on(ask(), first, "a.py"), Session("s"), sampling)
    params = server.generated[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["max_tokens"]) == (0.7, 0.9, 33)
    assert params["repetition_penalty"] == 1.1  # the model's own default
    assert params["logprobs"] == 0
    assert "seed" not in params  # a null is not sent where an absence means the default


async def test_calls_that_may_not_be_parallel_are_held_to_the_grammar_of_their_own_tools(model):
    server, engine = model()
    _, first = await play(engine, ask(), sampling=SAMPLING)
    request = replace(carrying_on(ask(), first, "a.py"), parallel_tool_calls=False)
    _, second = await play(engine, request, sampling=SAMPLING)
    assert second.spliced
    assert server.generated[0]["sampling_params"]["structured_outputs"] == {"structural_tag": ["bash"]}
    assert server.generated[0]["sampling_params"]["max_tokens"] == SAMPLING.max_tokens
    assert second.prompt_ids == first.prompt_ids + first.sampled_ids + words().encode(TAIL)


async def test_tools_the_server_has_no_grammar_for_are_left_to_a_chat_and_counted(model):
    server, engine = model(fault="grammar")
    _, first = await play(engine, ask(), sampling=SAMPLING)
    request = replace(carrying_on(ask(), first, "a.py"), parallel_tool_calls=False)
    _, second = await play(engine, request, sampling=SAMPLING)
    assert not second.spliced
    assert (len(server.chats), server.generated) == (2, [])
    (reason,) = engine.unspliced
    assert "no grammar for this schema" in reason


async def test_without_a_cap_the_model_s_own_holds(model):
    server, engine = model()
    server.cap = 40
    _, first = await play(engine, ask(), sampling=SAMPLING)
    await play(engine, carrying_on(ask(), first, "a.py"), sampling=Sampling(temperature=1.0))
    assert server.generated[0]["sampling_params"]["max_tokens"] == 40


async def test_a_server_that_repeats_the_prompt_does_not_double_it(model):
    server, engine = model(fault="echo")
    first, second = await twice(engine)
    assert second.spliced
    assert second.prompt_ids == first.prompt_ids + first.sampled_ids + words().encode(TAIL)
    assert server.derendered[-1]["generate_response"]["prompt_token_ids"] == second.prompt_ids.tolist()


async def test_a_server_that_sampled_behind_other_ids_is_no_source_of_truth(model):
    server, engine = model(fault="other_prompt")
    _, first = await play(engine, ask(), sampling=SAMPLING)
    with pytest.raises(EngineError, match="behind other ids"):
        await play(engine, carrying_on(ask(), first, "a.py"), sampling=SAMPLING)
    assert server.derendered == []


# --- the window -------------------------------------------------------------------------------------------------


async def long_prompt(engine: VllmEngine, tokens: int) -> ModelRequest:
    """A request whose spliced prompt is ``tokens`` long."""
    _, first = await play(engine, ask(), sampling=SAMPLING)
    request = carrying_on(ask(), first, "a.py")
    missing = tokens - len(first.prompt_ids) - len(first.sampled_ids) - len(words().encode(TAIL))
    carried = replace(request.continues, ids=array("i", [198] * missing) + request.continues.ids)
    return replace(request, continues=carried)


async def test_a_prompt_that_fills_the_window_is_an_overflow_in_words_a_harness_knows(model):
    server, engine = model()
    request = await long_prompt(engine, 4096)
    with pytest.raises(EngineOverflow, match="maximum context length is 4096"):
        await play(engine, request, sampling=SAMPLING)
    assert server.generated == []


async def test_a_cap_beyond_the_window_ends_where_the_window_does(model):
    server, engine = model()
    _, reply = await play(engine, await long_prompt(engine, 4091), sampling=SAMPLING)
    assert server.generated[0]["sampling_params"]["max_tokens"] == 5
    assert (len(reply.sampled_ids), reply.turn.stop) == (5, StopReason.LENGTH)


# --- what is rendered whole -------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", "none", "bash"])
async def test_a_tool_choice_that_needs_a_grammar_is_a_chat_and_counted(model, choice):
    server, engine = model()
    _, first = await play(engine, ask(), sampling=SAMPLING)
    request = replace(carrying_on(ask(), first, "a.py"), tool_choice=choice)
    _, second = await play(engine, request, sampling=SAMPLING)
    assert not second.spliced
    assert server.generated == []
    assert list(engine.unspliced.values()) == [1]
    assert choice in next(iter(engine.unspliced))


async def test_a_call_that_carries_on_nothing_is_a_chat_and_not_counted(model):
    server, engine = model()
    await play(engine, ask(), sampling=SAMPLING)
    assert (server.generated, server.rendered, engine.unspliced) == ([], [], {})


async def test_switched_off_nothing_is_spliced_and_nothing_asked(model):
    server, _ = model()
    async with engine_at(server.url, splice="off") as engine:
        _, second = await twice(engine)
        assert not second.spliced
        assert (server.rendered, server.generated) == ([], [])
        assert (await engine.check()).notes[-1] == "prompts are rendered whole (engine.splice=off)"


# --- the proof --------------------------------------------------------------------------------------------------


async def test_the_proof_is_told(model):
    _, engine = model()
    assert "begins with the exact ids" in (await engine.check()).notes[-1]


@pytest.mark.parametrize("fault", ["disabled", "moody"])
async def test_a_server_that_cannot_splice_is_refused_where_it_must_and_used_whole_where_it_may(fault):
    server = TokenServer(fault=fault)
    async with server.run():
        async with engine_at(server.url, splice="on") as engine:
            with pytest.raises(EngineError, match="cannot splice") as refused:
                await engine.check()
        async with engine_at(server.url) as engine:
            told = (await engine.check()).notes[-1]
            _, second = await twice(engine)
    assert "--enable-scale-out" in str(refused.value)
    assert "rendered whole" in told
    assert not second.spliced
    assert (DISABLED in told) == (fault == "disabled")


async def test_every_replica_is_proved_for_itself():
    able, unable = TokenServer(), TokenServer(fault="disabled")
    async with able.run(), unable.run(), engine_at(able.url, unable.url) as engine:
        told = (await engine.check()).notes
        spliced = {name: (await twice(engine, Session(name)))[1].spliced for name in map(str, range(12))}
        stayed = {name: engine._replicas.order(Session(name))[0] == f"{able.url}/v1" for name in spliced}
    assert unable.url in "".join(told)
    assert spliced == stayed
    assert set(spliced.values()) == {True, False}


async def test_a_replica_that_must_splice_and_cannot_is_named():
    able, unable = TokenServer(), TokenServer(fault="disabled")
    async with able.run(), unable.run(), engine_at(able.url, unable.url, splice="on") as engine:
        with pytest.raises(EngineError, match=unable.url):
            await engine.check()


# --- replicas ---------------------------------------------------------------------------------------------------


async def test_a_session_s_calls_stay_on_one_replica_spliced_or_not():
    one, other = TokenServer(), TokenServer()
    async with one.run(), other.run(), engine_at(one.url, other.url) as engine:
        await engine.check()
        for server in (one, other):
            server.chats.clear()
            server.generated.clear()
        for name in map(str, range(8)):
            await twice(engine, Session(name))
    assert len(one.chats) == len(one.generated)
    assert len(other.chats) == len(other.generated)
    assert {len(one.generated) > 0, len(other.generated) > 0} == {True}


async def test_a_lost_replica_s_sessions_are_spliced_on_another():
    staying, lost = TokenServer(), TokenServer()
    async with staying.run(), contextlib.AsyncExitStack() as until_lost:
        await until_lost.enter_async_context(lost.run())
        async with engine_at(staying.url, lost.url) as engine:
            await engine.check()
            theirs = next(Session(s) for s in map(str, range(99)) if lost.url in engine._replicas.order(Session(s))[0])
            _, first = await play(engine, ask(), theirs, SAMPLING)
            staying.generated.clear()
            await until_lost.aclose()
            _, second = await play(engine, carrying_on(ask(), first, "a.py"), theirs, SAMPLING)
    assert second.spliced
    assert len(staying.generated) == 1


# --- what goes wrong --------------------------------------------------------------------------------------------


async def test_a_call_that_is_given_up_stops_the_generation(model):
    server, engine = model(fault="hang")
    _, first = await play(engine, ask(), sampling=SAMPLING)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(play(engine, carrying_on(ask(), first, "a.py"), sampling=SAMPLING))
        await asyncio.wait_for(server.started.wait(), 10)
        task.cancel()
    await asyncio.wait_for(server.aborted.wait(), 10)


@pytest.mark.parametrize(
    ("fault", "words_of_it"),
    [
        ("die", "was lost"),
        ("eof", "without a finish reason"),
        ("error_event", "EngineCore died"),
        ("unreadable", "could not be read back as a turn: .*cannot be parsed"),
        ("mute", "without a message"),
    ],
)
async def test_a_failed_generation_is_an_engine_error_and_never_half_a_turn(model, fault, words_of_it):
    _, engine = model(fault=fault)
    _, first = await play(engine, ask(), sampling=SAMPLING)
    with pytest.raises(EngineError, match=words_of_it) as failed:
        await play(engine, carrying_on(ask(), first, "a.py"), sampling=SAMPLING)
    assert type(failed.value) is EngineError


# --- versions ---------------------------------------------------------------------------------------------------


async def test_the_policy_version_is_that_of_the_answer(model):
    server, engine = model()
    server.version = "step-7"
    _, second = await twice(engine)
    assert (second.policy_version, second.versioned) == ("step-7", True)


async def test_weights_no_trainer_named_have_one_name_in_chats_and_spliced_calls(model):
    _, engine = model()
    first, second = await twice(engine)
    assert first.policy_version == second.policy_version == "tiny@fp"
    assert not second.versioned
