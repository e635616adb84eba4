"""The NeMo-RL engine against a worker's endpoint with its very rules, on a real tokenizer and template."""

import asyncio
import contextlib
import functools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import PATIENT, ask, opened, play, user
from nemo_rl_helpers import Worker, join, letter_by_letter, words
from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import Session
from polar_env.engine.fence import Fence
from polar_env.engine.nemo_rl import NemoRlEngine
from polar_env.errors import EngineError, EngineOverflow, EngineRefused
from polar_env.types import Continuation, Delta, EngineReply, HoleKind, ModelRequest, Sampling, StopReason

TRAIN = Sampling(1.0, 1.0, None, 512)
LOOK = 'I look.<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'


engine_at = functools.partial(opened, NemoRlEngine, kind="nemo_rl")


@contextlib.asynccontextmanager
async def working(worker: Worker | None = None, **settings):
    worker = worker or Worker()
    async with worker.run(), engine_at(worker.url, **settings) as engine:
        yield worker, engine


def carried_on(request: ModelRequest, reply: EngineReply, *new) -> ModelRequest:
    """The harness's next request: the reply as it was told, and what is new behind it."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.turn.tool_calls
    ]
    said = {"role": "assistant", "content": reply.turn.text, **({"tool_calls": calls} if calls else {})}
    messages = (*request.messages, said, *new)
    ids = reply.prompt_ids + reply.sampled_ids
    continued = Continuation("c0", ids, len(request.messages) + 1, cut=reply.turn.stop is StopReason.LENGTH)
    return ask(*messages, continues=continued)


# --- a good answer ----------------------------------------------------------------------------------------------


async def test_ids_and_log_probs_are_the_workers_own():
    async with working(Worker([LOOK])) as (_, engine):
        deltas, reply = await play(engine, ask(), sampling=TRAIN)
    assert reply.prompt_ids == words().render(ask().messages, ask().tools)
    assert reply.sampled_ids == array("i", [*letter_by_letter(LOOK), *words().encode(words().eos)])
    assert reply.log_probs[:3] == array("f", [-0.125, -0.25, -0.375])
    assert [(call.name, call.arguments) for call in reply.turn.tool_calls] == [("bash", '{"command": "ls"}')]
    assert (reply.turn.text, reply.turn.stop, reply.finish) == ("I look.", StopReason.TOOL_CALLS, "tool_calls")
    assert judge("c", reply) == ()
    assert [delta.kind for delta in deltas] == ["text", "tool_open", "tool_args"]
    assert deltas[0] == Delta("text", "I look.")


async def test_what_is_asked_is_what_the_worker_demands():
    async with working() as (worker, engine):
        await play(engine, ask(), Session("s"), Sampling(1.0, 1.0, None, 99))
    body = worker.requests[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (1.0, 1.0, 99)
    assert (body["logprobs"], body["top_logprobs"], body["stream"]) == (True, 0, False)
    assert {"top_k", "session_id", "required_prefix_token_ids", "model"}.isdisjoint(body)


async def test_sampling_that_is_left_open_is_said_all_the_same():
    """Left out, top_p would come from the model's generation_config.json: off the policy, unseen."""
    async with working() as (worker, engine):
        await play(engine, ask(), sampling=Sampling())
    assert (worker.requests[0]["temperature"], worker.requests[0]["top_p"]) == (1.0, 1.0)


async def test_validation_samples_with_its_own_profile():
    async with working(Worker(val_temperature=0.6, val_top_p=0.95)) as (_, engine):
        _, reply = await play(engine, ask(), sampling=Sampling(0.6, 0.95))
    assert judge("c", reply) == ()


async def test_a_turn_cut_at_its_length_says_so():
    async with working() as (_, engine):
        _, reply = await play(engine, ask(), sampling=Sampling(1.0, 1.0, None, 3))
    assert (reply.turn.stop, len(reply.sampled_ids)) == (StopReason.LENGTH, 3)
    assert judge("c", reply) == ()


async def test_count_tokens_renders_and_samples_nothing():
    async with working() as (worker, engine):
        assert await engine.count_tokens(ask()) == len(words().render(ask().messages, ask().tools))
    assert worker.requests == []


# --- whose weights ------------------------------------------------------------------------------------------------


async def test_without_a_declared_version_the_reply_says_that_it_knows_none():
    async with working() as (_, engine):
        _, reply = await play(engine, ask(), sampling=TRAIN)
    assert (reply.policy_version, reply.versioned) == ("org/policy@unversioned", False)


async def test_the_configured_version_is_the_replys_until_a_trainer_declares_another():
    async with working(policy_version="step-12") as (_, engine):
        fence = Fence(engine)
        _, first = await play(fence, ask(), sampling=TRAIN)
        fence.declare("step-13")
        _, second = await play(fence, ask(), sampling=TRAIN)
    assert (first.policy_version, second.policy_version) == ("step-12", "step-13")


# --- a history that carries on ------------------------------------------------------------------------------------


async def test_the_next_prompt_begins_with_the_very_ids_and_ends_as_the_template_has_it():
    result = {"role": "tool", "tool_call_id": "call-1", "content": "a.py"}
    async with working(Worker([LOOK, "Done."])) as (_, engine):
        _, first = await play(engine, ask(), sampling=TRAIN)
        request = carried_on(ask(), first, result)
        _, second = await play(engine, request, sampling=TRAIN)
    before = first.prompt_ids + first.sampled_ids
    assert second.spliced
    assert second.prompt_ids[: len(before)] == before
    rendered = words().render(request.messages, request.tools)
    assert rendered[: len(before)] != before, "the rendering spells the turn otherwise: that would have been trained"
    new = words().decode(second.prompt_ids[len(before) :])
    assert new == "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert judge("c", second) == ()


async def test_a_turn_that_was_cut_gets_the_templates_end_token_behind_it():
    async with working(Worker(["A long story.", "Done."])) as (_, engine):
        _, first = await play(engine, ask(), sampling=Sampling(1.0, 1.0, None, 4))
        _, second = await play(engine, carried_on(ask(), first, user("Go on.")), sampling=TRAIN)
    before = first.prompt_ids + first.sampled_ids
    assert second.spliced
    assert second.prompt_ids[: len(before) + 1] == before + words().encode("<|im_end|>")


async def test_ten_turns_are_one_sequence():
    async with working(Worker(["Hm.", LOOK, "Well <think>x</think>."] * 4)) as (_, engine):
        request, sequence = ask(), array("i")
        for turn in range(10):
            _, reply = await play(engine, request, sampling=TRAIN)
            assert reply.prompt_ids[: len(sequence)] == sequence
            assert reply.spliced is (turn > 0)
            sequence = reply.prompt_ids + reply.sampled_ids
            request = carried_on(request, reply, user(f"And {turn}?"))


async def test_no_ids_are_sent_for_a_history_that_was_edited():
    """The worker would put them there whatever the messages say."""
    async with working() as (worker, engine):
        await play(engine, ask(), sampling=TRAIN)
        edited = ask(user("Something else."), {"role": "assistant", "content": "Hello."}, user("Go on."))
        _, second = await play(engine, edited, sampling=TRAIN)
    assert "required_prefix_token_ids" not in worker.requests[1]
    assert second.prompt_ids == words().render(edited.messages, edited.tools)
    assert not second.spliced


@pytest.mark.parametrize(
    "more",
    [
        (user("And?"), {"role": "assistant", "content": "Not sampled."}, user("Go on.")),
        (),
        (user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]),),
    ],
    ids=["an assistant message nobody sampled", "nothing new", "an image"],
)
async def test_no_ids_are_sent_where_the_worker_would_join_them_wrongly(more):
    async with working() as (worker, engine):
        _, first = await play(engine, ask(), sampling=TRAIN)
        with contextlib.suppress(EngineError):
            await play(engine, carried_on(ask(), first, *more), sampling=TRAIN)
    assert all("required_prefix_token_ids" not in body for body in worker.requests)


async def test_splice_off_sends_none():
    async with working(splice="off") as (worker, engine):
        _, first = await play(engine, ask(), sampling=TRAIN)
        _, second = await play(engine, carried_on(ask(), first, user("Go on.")), sampling=TRAIN)
    assert "required_prefix_token_ids" not in worker.requests[1]
    assert not second.spliced


async def test_a_worker_that_did_something_else_with_the_ids_is_not_believed():
    async with working(Worker(fault="ignores_ids")) as (_, engine):
        _, first = await play(engine, ask(), sampling=TRAIN)
        _, second = await play(engine, carried_on(ask(), first, user("Go on.")), sampling=TRAIN)
    assert not second.spliced


async def test_a_worker_that_cannot_join_these_ids_renders_the_prompt_whole():
    worker = Worker()
    async with working(worker) as (_, engine):
        _, first = await play(engine, ask(), sampling=TRAIN)
        worker.fault = "cannot_join"
        request = carried_on(ask(), first, user("Go on."))
        _, second = await play(engine, request, sampling=TRAIN)
    assert ["required_prefix_token_ids" in body for body in worker.requests] == [False, True, False]
    assert not second.spliced
    assert second.prompt_ids == words().render(request.messages, request.tools)


ids = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(lambda found: array("i", found))


@PATIENT
@given(ids, ids, ids, ids)
def test_the_join_keeps_what_was_sampled_and_what_is_new(before, turn, given_ids, new):
    """The worker's join, of which everything above depends: for any ids, spelled in any way."""
    end = 99
    history = before + turn + array("i", [end])
    joined = join(given_ids + array("i", [end]), history, history + new, end)
    assert joined == given_ids + array("i", [end]) + new
    assert join(given_ids, history, history + new, end) == joined


# --- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(0.7, 1.0), Sampling(1.0, 0.9)])
async def test_sampling_of_no_profile_is_an_engine_error_and_not_the_requests_fault(sampling):
    async with working() as (_, engine):
        with pytest.raises(EngineError, match="answered 500") as caught:
            await play(engine, ask(), sampling=sampling)
    assert not isinstance(caught.value, EngineRefused)


async def test_what_a_worker_stumbles_over_is_the_requests_fault_once_it_is_known_to_be_well():
    image = user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}])
    async with working() as (worker, engine):
        with pytest.raises(EngineRefused, match=r"^the engine fails on this request and on no other$"):
            await play(engine, ask(image), sampling=TRAIN)
    asked = [body["messages"][0]["content"] for body in worker.requests]
    assert asked == [image["content"], image["content"], "Say hello."]
    assert worker.requests[-1]["max_tokens"] == 1


async def test_a_failure_that_passes_is_nobodys_fault():
    async with working(Worker(fault="blinks")) as (worker, engine):
        _, reply = await play(engine, ask(), sampling=TRAIN)
    assert judge("c", reply) == ()
    assert len(worker.requests) == 2


async def test_top_k_is_refused_before_the_worker_can():
    async with working() as (worker, engine):
        with pytest.raises(EngineError, match=r"without top_k, not 20; unset proxy\.top_k"):
            await play(engine, ask(), sampling=Sampling(1.0, 1.0, 20))
    assert worker.requests == []


async def test_a_prompt_that_does_not_fit_is_an_overflow():
    async with working(Worker(window=64)) as (_, engine):
        with pytest.raises(EngineOverflow, match="maximum context length is 64 tokens"):
            await play(engine, ask(user("word " * 80)), sampling=TRAIN)


async def test_a_cap_beyond_the_window_is_clamped_by_the_worker_and_asked_once():
    async with working(Worker(window=4096)) as (worker, engine):
        await play(engine, ask(), sampling=Sampling(1.0, 1.0, None, 100_000))
    assert len(worker.requests) == 1


async def test_a_bad_schema_is_the_requests_fault():
    async with working(Worker(fault="bad_schema")) as (_, engine):
        with pytest.raises(EngineRefused, match="'strin' is not a type"):
            await play(engine, ask(), sampling=TRAIN)


async def test_a_wrong_model_says_what_to_change():
    async with working(model="other") as (_, engine):
        with pytest.raises(EngineError, match=r"404.*`other` does not exist.*check engine\.model"):
            await play(engine, ask(), sampling=TRAIN)


async def test_missing_ids_are_a_hole_and_short_log_probs_too():
    for fault, kind in (("no_ids", HoleKind.MISSING_IDS), ("short", HoleKind.LENGTH_MISMATCH)):
        async with working(Worker(fault=fault)) as (_, engine):
            _, reply = await play(engine, ask(), sampling=TRAIN)
        assert kind in {hole.kind for hole in judge("c", reply)}


async def test_cancelling_closes_the_request_which_aborts_the_generation():
    async with working(Worker(fault="hang")) as (worker, engine):
        task = asyncio.ensure_future(play(engine, ask(), sampling=TRAIN))
        await worker.started.wait()
        task.cancel()
        await asyncio.wait_for(worker.aborted.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_session_stays_on_its_rank_and_its_prefix_with_it():
    async with Worker().run() as one, Worker().run() as two, engine_at(one.url, f"{two.url}/v1") as engine:
        for name in "abcdefgh":
            request = ask(user(f"I am {name}."))
            for _ in range(3):
                _, reply = await play(engine, request, Session(name), TRAIN)
                request = carried_on(request, reply, user("Go on."))
    homes = [{body["messages"][0]["content"] for body in worker.requests} for worker in (one, two)]
    assert homes[0] | homes[1] == {f"I am {name}." for name in "abcdefgh"}
    assert homes[0].isdisjoint(homes[1])
    assert all(homes)


# --- the start-up proof -----------------------------------------------------------------------------------------


async def test_check_says_what_it_proved():
    async with working() as (worker, engine):
        facts = await engine.check()
    assert (facts.model, facts.max_model_len, facts.real_tensors) == ("org/policy", 4096, True)
    assert "exact ids (splice)" in facts.notes[0]
    assert "engine.policy_version" in facts.notes[1]
    assert [body["max_tokens"] for body in worker.requests] == [8, 8]


async def test_check_shows_the_declared_version():
    async with working(policy_version="step-3") as (_, engine):
        facts = await engine.check()
    assert (facts.policy_version, facts.notes[1]) == ("step-3", "the policy version is declared: step-3")


async def test_check_with_another_profile_than_the_recipes_says_which_keys_to_set():
    async with working(Worker(temperature=0.8)) as (_, engine):
        with pytest.raises(
            EngineError, match=r"temperature 1 and top_p 1 were asked for; set engine\.check_temperature"
        ):
            await engine.check()
    async with working(Worker(temperature=0.8), check_temperature=0.8) as (_, engine):
        assert (await engine.check()).model == "org/policy"


@pytest.mark.parametrize("fault", ["ignores_ids", "cannot_join"])
async def test_check_does_not_take_a_stable_rendering_for_a_splice(fault):
    async with working(Worker(["x"], fault=fault)) as (_, engine):
        assert "prompts are rendered whole" in (await engine.check()).notes[0]
    async with working(Worker(["x"], fault=fault), splice="on") as (_, engine):
        with pytest.raises(EngineError, match=r"cannot splice .*; set engine\.splice=off"):
            await engine.check()


async def test_check_refuses_an_endpoint_that_gives_no_ids():
    async with working(Worker(fault="no_ids")) as (_, engine):
        with pytest.raises(EngineError, match=r"does not give what training needs \(missing_ids"):
            await engine.check()


async def test_check_refuses_workers_of_different_models():
    async with Worker().run() as one, Worker(window=99).run() as two, engine_at(one.url, two.url) as engine:
        with pytest.raises(EngineError, match="different models"):
            await engine.check()


def test_an_engine_without_an_address_is_refused_at_once():
    with pytest.raises(EngineError, match="policy_base_url"):
        NemoRlEngine(EngineConfig(kind="nemo_rl"))
