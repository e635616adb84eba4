"""What a spliced call puts on vLLM's wire and takes from it, as data."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import PATIENT
from polar_env.engine.vllm_splice import derender_body, generate_body, message_chunk, turn_ids
from polar_env.engine.vllm_wire import Assembly
from polar_env.errors import EngineError


def test_calls_without_ids_get_one_of_their_answer():
    said = Assembly()
    said.feed({"request_id": "g7", "choices": [{"index": 0, "finish_reason": "stop"}]})
    call = {"function": {"name": "bash", "arguments": "{}"}}
    told = {"choices": [{"message": {"content": None, "tool_calls": [call, call]}}]}
    said.feed(message_chunk(told, {"tools": [1]}))
    assert [call.id for call in said.reply("v").turn.tool_calls] == ["call_g7_0", "call_g7_1"]


@pytest.mark.parametrize(
    ("asked", "calls"), [({}, 0), ({"tools": [1]}, 2), ({"tools": [1], "parallel_tool_calls": 0}, 1)]
)
def test_calls_that_were_not_offered_or_not_in_parallel_are_cut_as_in_a_chat(asked, calls):
    call = {"id": "t", "function": {"name": "bash", "arguments": "{}"}}
    message = {"content": "x", "tool_calls": [call, call]}
    told = message_chunk({"choices": [{"message": message}]}, asked)
    assert len(told["choices"][0]["message"]["tool_calls"]) == calls


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": None}]}, {"choices": 7}])
def test_an_answer_without_a_message_is_no_turn(answer):
    with pytest.raises(EngineError, match="without a message"):
        message_chunk(answer, {})


@PATIENT
@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_no_cap_is_beyond_the_room_behind_the_prompt(room, resolved):
    rendered = {"sampling_params": {"max_tokens": resolved, "stop": None}, "model": "m", "priority": 0}
    body = generate_body(rendered, array("i", [1, 2]), room, stream=True)
    assert body["sampling_params"] == {"max_tokens": min(room, resolved), "logprobs": 0}
    assert (body["token_ids"], body["priority"], body["stream_options"]) == ([1, 2], 0, {"include_usage": True})


@pytest.mark.parametrize(("finish", "read"), [("stop", [1, 2]), ("length", [1, 2, 3]), ("abort", [1, 2, 3])])
def test_only_a_stop_leaves_its_last_token_unread(finish, read):
    assert turn_ids(Assembly(sampled_ids=array("i", [1, 2, 3]), finish=finish)).tolist() == read


@pytest.mark.parametrize("name", ["model", "cache_salt", "priority", "reasoning_ended", "reasoning_parser_kwargs"])
def test_what_render_resolved_beside_the_sampling_goes_along_unless_it_is_null(name):
    rendered = {"sampling_params": {}, "token_ids": [9, 9], name: "x", "request_id": "r", "stream": True}
    body = generate_body(rendered, array("i", [1]), 5, stream=False)
    assert body == {"token_ids": [1], "sampling_params": {"logprobs": 0, "max_tokens": 5}, "stream": False, name: "x"}
    assert name not in generate_body(rendered | {name: None}, array("i", [1]), 5, stream=False)


def test_the_parsers_are_given_the_whole_prompt_and_the_turn_without_its_end():
    answer = Assembly(sampled_ids=array("i", [7, 8, 9]), finish="stop")
    body = derender_body({"model": "m", "tools": []}, array("i", [1, 2]), answer)
    choice = {"index": 0, "token_ids": [7, 8], "finish_reason": "stop"}
    assert body == {
        "model": "m",
        "chat_request": {"model": "m", "tools": []},
        "generate_response": {"request_id": "spliced", "prompt_token_ids": [1, 2], "choices": [choice]},
    }


def test_generated_chunks_are_taken_as_a_chat_s_are():
    """The shape recorded from vLLM 0.32: an id and a log-prob per token, the versions in the last."""
    answer = Assembly(prompt_ids=array("i", [1]))
    entry = {"token_id": 5, "logprob": -0.5, "rank": 1, "top_logprobs": []}
    choice = {"index": 0, "token_ids": [5], "logprobs": {"content": [entry]}, "finish_reason": None}
    last = {**choice, "finish_reason": "stop", "weight_versions": [{"version": "step-1", "start": 0, "end": 2}]}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    for choices in ([choice], [last], []):
        assert answer.feed({"request_id": "g", "output_mode": "tokens", "choices": choices, "usage": usage}) == []
    assert (answer.sampled_ids.tolist(), answer.log_probs.tolist()) == ([5, 5], [-0.5, -0.5])
    assert (answer.finish, answer.versions, answer.usage.completion_tokens) == ("stop", ["step-1"], 2)
