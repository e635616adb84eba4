"""Chat Completions: what Pi, Qwen Code, opencode and mini-swe-agent say is what the model reads, and back."""

import json
from typing import Any

import pytest
from hypothesis import given

from dialect_helpers import (
    CUT_CALL,
    GOLDEN,
    LENGTH,
    SAMPLES,
    TEXT,
    TOOLS,
    any_deltas,
    ask,
    bodies,
    decodes,
    events,
    fragments,
    golden_reply,
    golden_stream,
    official_wire,
    read_chat,
    split_turns,
    stream,
    turns,
)
from polar_env.errors import BadRequest
from polar_env.proxy import render
from polar_env.proxy.chat import Chat
from polar_env.types import AssistantTurn, Delta, ModelRequest, Sampling, StopReason, ToolCall, Usage

API = Chat()


def decode(messages: Any = None, **fields: Any) -> ModelRequest:
    messages = [{"role": "user", "content": "hi"}] if messages is None else messages
    return API.decode("/v1/chat/completions", {}, {"model": "m", "messages": messages, **fields})


def chat(*messages: dict[str, Any]) -> list[Any]:
    return list(decode(list(messages)).messages)


def call(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


@pytest.mark.parametrize(
    ("method", "path", "operation"),
    [
        ("POST", "/v1/chat/completions", "generate"),
        ("POST", "/chat/completions?x=1", "generate"),
        ("GET", "/v1/models", "models"),
        ("GET", "/v1/chat/completions", None),
        ("POST", "/v1/completions", None),
    ],
)
def test_routes(method: str, path: str, operation: str | None):
    assert API.matches(method, path) == operation


# --- what the model reads ---------------------------------------------------------------------------------------


def test_every_role_keeps_its_place():
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "e"},
        {"role": "assistant", "content": "MAXIMUM STEPS"},
    ]
    assert chat(*messages) == messages


def test_one_text_is_the_same_message_as_a_string_or_as_a_part():
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for role in ("system", "user", "assistant", "tool"):
        assert chat({"role": role, "content": [part]}) == chat({"role": role, "content": "hi"})


def test_other_parts_stay_as_they_are():
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    ]
    assert chat({"role": "user", "content": parts, "name": "ann"}) == [
        {"role": "user", "content": parts, "name": "ann"}
    ]


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_missing_and_null_content_are_an_empty_text(message: dict[str, Any]):
    message["tool_calls"] = [call("a", "{}")]
    assert chat(message) == [{"role": "assistant", "content": "", "tool_calls": [call("a", "{}")]}]


def test_arguments_keep_every_byte_and_objects_become_text():
    odd = '{  "command" :   "echo \\u00e9\\/" ,\n "x": tru'
    (message,) = chat({"role": "assistant", "content": None, "tool_calls": [call("a", odd), call("b", {"é": 1})]})
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == [odd, '{"é": 1}']


def test_what_is_left_of_a_broken_answer_is_no_turn_of_the_model():
    """opencode keeps an empty message before the answer it then got; an empty answer elsewhere was one."""
    nothing, said = {"role": "assistant", "content": ""}, {"role": "assistant", "content": "Now."}
    asked = {"role": "user", "content": "go"}
    request = decode([asked, nothing, said, asked, nothing])
    assert list(request.messages) == [asked, said, asked, nothing]
    assert "messages:nothing" in request.ignored
    thought = {**nothing, "reasoning_content": "Hm."}
    assert chat(asked, thought, said) == [asked, thought, said]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_by_either_name(key: str):
    assert chat({"role": "assistant", "content": "x", key: " hm\n"})[0]["reasoning_content"] == " hm\n"


def test_a_tool_result_may_be_parts():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat({"role": "tool", "tool_call_id": "a", "content": parts}) == [
        {"role": "tool", "tool_call_id": "a", "content": parts}
    ]


def test_an_assistant_of_several_texts_is_one_text():
    content = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}, {"type": "audio"}]
    request = decode([{"role": "assistant", "content": content}])
    assert request.messages == ({"role": "assistant", "content": "abc"},)
    assert request.ignored == ("content:audio",)


def test_parts_that_say_nothing_are_counted_and_never_refused():
    request = decode([{"role": "user", "content": [{"type": "text"}, 7, {"type": "text", "text": "x"}]}])
    assert request.messages == ({"role": "user", "content": "x"},)
    assert request.ignored == ("content:text", "content:")


# --- tools and settings -----------------------------------------------------------------------------------------


def test_tools_keep_their_schema():
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    function = {"name": "bash", "description": "Run.", "parameters": schema, "strict": True}
    request = decode(
        tools=[{"type": "function", "function": function}, {"type": "function", "function": {"name": "x"}}]
    )
    assert request.tools == (
        {"name": "bash", "parameters": schema, "description": "Run."},
        {"name": "x", "parameters": {"type": "object", "properties": {}}},
    )


@pytest.mark.parametrize(
    ("given_choice", "choice"),
    [
        (None, "auto"),
        ("none", "none"),
        ("required", "required"),
        ("sometimes", "auto"),
        ({"type": "function", "function": {"name": "bash"}}, "bash"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "required"),
    ],
)
def test_tool_choice(given_choice: Any, choice: str):
    assert decode(tool_choice=given_choice).tool_choice == choice


def test_what_was_asked_is_recorded_and_what_is_not_understood_is_named():
    request = decode(
        [{"role": "user", "content": "hi", "annotations": [], "refusal": None}, {"role": "critic", "content": "x"}],
        max_tokens=9, max_completion_tokens=32, temperature=0, top_p=0.9, top_k=5, n=1, stream=True, store=False,
        reasoning_effort="high", seed=None, parallel_tool_calls=False, tools=[{"type": "custom", "custom": {}}],
    )  # fmt: skip
    assert request.asked == Sampling(temperature=0, top_p=0.9, top_k=5, max_tokens=32)
    assert (request.stream, request.parallel_tool_calls) == (True, False)
    assert request.ignored == ("reasoning_effort", "messages:annotations", "role:critic", "tools:custom")
    assert request.messages[1] == {"role": "user", "content": "x"}


def test_max_tokens_counts_where_its_newer_name_is_absent():
    assert decode(max_tokens=9).asked.max_tokens == 9
    assert decode(max_tokens=True, top_k=float("inf"), temperature=10**400).asked == Sampling()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n": 2}, "n=2 asks for several answers to one request; send n=1"),
        ({"messages": []}, "'messages' is missing or empty"),
        ({"messages": [None]}, r"messages\[0\] is not a JSON object"),
    ],
)
def test_only_what_would_change_meaning_is_refused(fields: dict[str, Any], sentence: str):
    with pytest.raises(BadRequest, match=sentence):
        API.decode("/", {}, {"messages": [{"role": "user", "content": "hi"}], **fields})


@given(bodies("messages"))
def test_no_body_breaks_the_decoder(body: dict[str, Any]):
    decodes(API, body)


# --- what the harness gets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_golden_transcripts(sample: str):
    assert golden_stream("chat", sample) == (GOLDEN / f"chat_{sample}.sse").read_bytes()
    assert golden_reply("chat", sample) == (GOLDEN / f"chat_{sample}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (TEXT, "stop"),
        (TOOLS, "tool_calls"),
        (LENGTH, "length"),
        (CUT_CALL, "length"),
        (AssistantTurn("", (ToolCall("a", "b", "{}"),), StopReason.STOP, Usage(1, 1)), "tool_calls"),
        (AssistantTurn("x", (), StopReason.TOOL_CALLS, Usage(1, 1)), "stop"),
        (AssistantTurn("x", (), StopReason.ABORT, Usage(1, 1)), "length"),
    ],
)
def test_finish_reasons_are_faithful(turn: AssistantTurn, reason: str):
    assert API.reply(decode(), turn, "c")["choices"][0]["finish_reason"] == reason
    assert read_chat(stream(API, decode(), turn))["finish_reason"] == reason


def test_usage_says_what_was_cached():
    assert API.reply(decode(), AssistantTurn("", (), StopReason.STOP, Usage(100, 7, 64)), "c")["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "total_tokens": 107,
        "prompt_tokens_details": {"cached_tokens": 64},
    }


def test_usage_streams_only_when_asked_for():
    assert read_chat(stream(API, decode(), TEXT))["usage"] is None
    wanted = decode(stream_options={"include_usage": True})
    assert read_chat(stream(API, wanted, TEXT))["usage"]["prompt_tokens"] == 120


def test_a_turn_of_calls_alone_has_null_content():
    assert API.reply(decode(), CUT_CALL, "c")["choices"][0]["message"]["content"] is None
    assert API.reply(decode(), AssistantTurn("", (), StopReason.STOP, Usage(1, 1)), "c")["choices"][0]["message"] == {
        "role": "assistant",
        "content": "",
    }


def test_no_call_is_complete_before_the_end_is_released():
    encoder = API.encoder(decode(), "c", 0)
    free = encoder.start() + b"".join(map(encoder.delta, fragments(TOOLS)))
    before, held = encoder.finish(TOOLS)
    arguments = ""
    for _, chunk in events(free + before):
        assert chunk["choices"][0]["finish_reason"] is None
        for each in chunk["choices"][0]["delta"].get("tool_calls", []):
            arguments += each["function"]["arguments"]
            with pytest.raises(ValueError, match=r"."):
                json.loads(arguments)
    assert arguments == TOOLS.tool_calls[0].arguments[:-1]
    assert held.endswith(b"data: [DONE]\n\n")


def test_the_keep_alive_is_a_chunk_that_says_nothing():
    ((_, chunk),) = events(API.encoder(decode(), "c", 0).keep_alive())
    assert chunk["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]


@given(split_turns())
def test_a_stream_adds_up_to_the_reply_however_it_was_split(case: tuple[AssistantTurn, list[Delta]]):
    turn, deltas = case
    read = read_chat(stream(API, ask(API), turn, deltas))
    reply = API.reply(decode(), turn, "c1")
    message = {"content": "", "reasoning_content": "", "tool_calls": []} | reply["choices"][0]["message"]
    assert read["message"] == message | {"content": turn.text}
    assert (read["finish_reason"], read["usage"]) == (reply["choices"][0]["finish_reason"], reply["usage"])


@given(turns(), any_deltas())
def test_a_stream_that_contradicts_the_turn_is_still_valid(turn: AssistantTurn, deltas: list[Delta]):
    message = read_chat(stream(API, decode(), turn, deltas))["message"]
    assert {each.id for each in turn.tool_calls} <= {each["id"] for each in message["tool_calls"]}


@given(turns())
def test_an_echoed_reply_is_the_turn_again(turn: AssistantTurn):
    expected = [render.turn_message(turn)]
    assert chat(API.reply(decode(), turn, "c")["choices"][0]["message"]) == expected
    assert chat(read_chat(stream(API, decode(), turn))["message"]) == expected


# --- errors and lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", None),
        (401, "invalid_request_error", "invalid_api_key"),
        (410, "invalid_request_error", "session_ended"),
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (500, "server_error", None),
        (503, "server_error", "server_is_overloaded"),
    ],
)
def test_error_bodies(status: int, kind: str, code: str | None):
    error = {"message": "why", "type": kind, "param": None, "code": code}
    assert API.error(status, "why") == {"error": error}


def test_overflow_says_the_words_of_vllm():
    error = API.overflow("prompt is too long: 5000 tokens > 4096 maximum")["error"]
    assert error["message"] == (
        "This model's maximum context length is 4096 tokens. However, your request has 5000 tokens."
    )
    assert error["code"] == "context_length_exceeded"
    assert API.overflow("no numbers")["error"]["message"] == "no numbers"


def test_models_and_token_counts():
    assert API.models(["a"]) == {
        "object": "list",
        "data": [{"id": "a", "object": "model", "created": 0, "owned_by": "polar"}],
    }
    assert API.token_count(3) == {"count": 3}


# --- the official client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_chunks_and_bodies_satisfy_the_official_types(sample: str):
    types = pytest.importorskip("openai.types.chat")
    for _, chunk in events(golden_stream("chat", sample))[:-1]:
        types.ChatCompletionChunk.model_validate(chunk)
    types.ChatCompletion.model_validate(json.loads(golden_reply("chat", sample)))


def test_the_official_client_reads_the_stream():
    openai = pytest.importorskip("openai")

    def answer(body: dict[str, Any]) -> bytes:
        return stream(API, API.decode("/v1/chat/completions", {}, body), TOOLS, fragments(TOOLS))

    client = openai.OpenAI(api_key="k", base_url="http://model/v1", http_client=official_wire(answer))
    asked: Any = [{"role": "user", "content": "Fix it."}]
    with client.chat.completions.stream(model="m", messages=asked) as read:
        final = read.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert chat(final.message.to_dict()) == [render.turn_message(TOOLS)]


def test_results_are_read_in_the_order_of_their_calls() -> None:
    """Templates show them without ids: in the order they were done in, one would pass for the other's."""
    said = {"role": "assistant", "content": "", "tool_calls": [call("a", "{}"), call("b", "{}")]}
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    assert [message.get("tool_call_id") for message in chat(said, *results)] == [None, "a", "b"]
