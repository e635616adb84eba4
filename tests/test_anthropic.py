"""Anthropic Messages: what Claude Code says is what the model reads, and what the model says is what it gets."""

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
    bodies,
    decodes,
    events,
    fragments,
    golden_reply,
    golden_stream,
    objects,
    official_wire,
    read_anthropic,
    split_turns,
    stream,
    turns,
)
from polar_env.errors import BadRequest
from polar_env.proxy import render
from polar_env.proxy.anthropic import Anthropic
from polar_env.types import AssistantTurn, Delta, ModelRequest, Sampling, StopReason, ToolCall, Usage

API = Anthropic()
PIXEL = "iVBORw0KGgo="


def decode(messages: Any = None, **fields: Any) -> ModelRequest:
    messages = [{"role": "user", "content": "hi"}] if messages is None else messages
    return API.decode("/v1/messages", {}, {"model": "m", "max_tokens": 10, "messages": messages, **fields})


def chat(*messages: dict[str, Any], **fields: Any) -> list[Any]:
    return list(decode(list(messages), **fields).messages)


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


# --- routes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "operation"),
    [
        ("POST", "/v1/messages", "generate"),
        ("POST", "/v1/messages?beta=true", "generate"),
        ("POST", "/v1/messages/", "generate"),
        ("POST", "/v1/messages/count_tokens?beta=true", "count_tokens"),
        ("GET", "/v1/models", "models"),
        ("HEAD", "/", "health"),
        ("HEAD", "/api/hello", "health"),
        ("GET", "/v1/messages", None),
        ("POST", "/v1/messages/batches", None),
        ("POST", "/v1/chat/completions", None),
    ],
)
def test_routes(method: str, path: str, operation: str | None):
    assert API.matches(method, path) == operation


# --- what the model reads ---------------------------------------------------------------------------------------


def test_system_text_comes_first():
    assert chat(user(text("hi")), system="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_system_blocks_stay_apart_and_lose_their_cache_marks():
    blocks = [text("x-anthropic-billing-header: a"), {**text("Be brief."), "cache_control": {"type": "ephemeral"}}]
    assert chat(user(text("hi")), system=blocks)[0]["content"] == [blocks[0], text("Be brief.")]


def test_a_system_message_inside_the_conversation_keeps_its_place():
    roles = [
        message["role"]
        for message in chat(
            user(text("a")),
            {"role": "system", "content": "Today is Monday."},
            said(text("b")),
            {"role": "system", "content": [text("Reminder.")]},
            user(text("c")),
            system="top",
        )
    ]
    assert roles == ["system", "user", "system", "assistant", "system", "user"]


def test_one_text_is_the_same_message_as_a_string_or_as_a_block():
    assert chat({"role": "user", "content": "hi"}) == chat(user({**text("hi"), "cache_control": {"type": "ephemeral"}}))


def test_images_become_image_urls_in_place():
    base64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    assert chat(user(text("see"), base64, linked, text("both")))[0]["content"] == [
        text("see"),
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        text("both"),
    ]


def test_an_assistant_turn_carries_reasoning_text_and_calls():
    signed = {"type": "thinking", "thinking": "hm", "signature": render.seal("hm")}
    call = {"type": "tool_use", "id": "call_a", "name": "bash", "input": {"command": "ls"}}
    assert chat(said(signed, text("Let me look."), call)) == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_a", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
            ],
        }
    ]


def test_tool_results_of_no_call_keep_their_order_and_come_before_what_the_user_adds():
    second = {"type": "tool_result", "tool_use_id": "b", "content": [text("two"), text("lines")]}
    first = {"type": "tool_result", "tool_use_id": "a", "content": "one", "is_error": True}
    assert chat(user(second, text("<system-reminder>"), first)) == [
        {"role": "tool", "tool_call_id": "b", "content": [text("two"), text("lines")]},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "user", "content": "<system-reminder>"},
    ]


def test_results_are_told_in_the_order_of_their_calls_because_templates_write_no_ids():
    calls = [{"type": "tool_use", "id": name, "name": "Bash", "input": {}} for name in "abc"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": f"of {name}"} for name in ("c", "x", "a", "b")]
    told = chat(user(text("go")), {"role": "assistant", "content": calls}, user(*results), user(text("and on")))
    assert [message.get("tool_call_id", message["role"]) for message in told] == [
        *("user", "assistant", "a", "b", "c", "x", "user"),
    ]


def test_a_tool_result_may_hold_an_image():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    (message,) = chat(user({"type": "tool_result", "tool_use_id": "a", "content": [image]}))
    assert message["content"][0]["image_url"]["url"].endswith(PIXEL)


@pytest.mark.parametrize(("is_error", "content"), [(True, "Error"), (False, "")])
def test_only_a_silent_failure_is_given_a_word(is_error: bool, content: str):
    (message,) = chat(user({"type": "tool_result", "tool_use_id": "a", "is_error": is_error}))
    assert message["content"] == content


def test_a_conversation_may_end_with_the_assistant():
    assert chat(user(text("go")), {"role": "assistant", "content": "MAXIMUM STEPS"})[-1] == {
        "role": "assistant",
        "content": "MAXIMUM STEPS",
    }


def test_arguments_that_claude_could_not_parse_come_back_as_they_were():
    kept = {"__unparsedToolInput": {"raw": '{"command": "ech', "len": 16}}
    (message,) = chat(said({"type": "tool_use", "id": "a", "name": "bash", "input": kept}))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"command": "ech'


def test_documents_of_text_and_references_to_tools_are_read():
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "page"}}
    reference = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "web"}]}
    messages = chat(user(reference, document))
    assert [message["content"] for message in messages] == ["Tool loaded: web", "page"]


# --- thinking ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "read"), [("  think\n", "  think\n"), ("think", "  think\n"), ("", "  think\n"), ("edited", "edited")]
)
def test_our_signature_restores_what_was_trimmed_or_hidden_but_not_what_was_edited(shown: str, read: str):
    block = {"type": "thinking", "thinking": shown, "signature": render.seal("  think\n")}
    assert chat(said(block))[0]["reasoning_content"] == read


@pytest.mark.parametrize("signature", ["", "EqQB", "polar1.%%%", "polar1./w==", None])
def test_a_foreign_signature_leaves_the_thinking_as_shown(signature: str | None):
    block = {"type": "thinking", "thinking": "shown ", "signature": signature}
    assert chat(said(block))[0]["reasoning_content"] == "shown "


def test_redacted_thinking_of_ours_is_read_and_a_foreign_one_is_counted():
    ours = {"type": "redacted_thinking", "data": render.seal("secret")}
    request = decode([said(ours, {"type": "redacted_thinking", "data": "EmwKAh"}, text("x"))])
    assert request.messages[0].get("reasoning_content") == "secret"
    assert request.ignored == ("content:redacted_thinking",)


# --- tools and settings -----------------------------------------------------------------------------------------


def test_tools_keep_their_schema_and_hosted_ones_are_counted():
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    request = decode(
        tools=[
            {"name": "bash", "description": "Run.", "input_schema": schema, "cache_control": {}},
            {"name": "plain", "input_schema": {"type": "object"}},
            {"name": "web_search", "type": "web_search_20250305"},
        ]
    )
    assert request.tools == (
        {"name": "bash", "parameters": schema, "description": "Run."},
        {"name": "plain", "parameters": {"type": "object"}},
    )
    assert request.ignored == ("tools:web_search_20250305",)


def test_a_deferred_tool_shows_once_the_conversation_has_loaded_it():
    tools = [{"name": "web", "input_schema": {}, "defer_loading": True}]
    loaded = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "web"}]}
    assert decode(tools=tools).ignored == ("tools:deferred:web",)
    assert [tool["name"] for tool in decode([user(loaded)], tools=tools).tools] == ["web"]


@pytest.mark.parametrize(
    ("given_choice", "choice", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "bash"}, "bash", True),
    ],
)
def test_tool_choice(given_choice: Any, choice: str, parallel: bool):
    request = decode(tool_choice=given_choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (choice, parallel)


def test_what_was_asked_is_recorded_and_what_is_not_understood_is_named():
    request = decode(
        max_tokens=32000, temperature=0.5, top_p=1, top_k=20, stream=True, thinking={"type": "adaptive"},
        context_management={"edits": []}, metadata={"user_id": "x"}, container=None,
    )  # fmt: skip
    assert request.asked == Sampling(temperature=0.5, top_p=1, top_k=20, max_tokens=32000)
    assert request.stream
    assert request.ignored == ("thinking", "context_management")


def test_odd_parts_are_counted_and_never_refused():
    request = decode([user({"type": "video"}, "bare", 7), {"role": "critic", "content": None}, said(text("a"), 7)])
    assert [message["content"] for message in request.messages] == ["bare", "", "a"]
    assert request.ignored == ("content:video", "content:", "role:critic")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "'messages' is missing or empty"),
        ({"messages": []}, "'messages' is missing or empty"),
        ({"messages": ["hi"]}, r"messages\[0\] is not a JSON object"),
        ([], "the body is not a JSON object"),
    ],
)
def test_what_cannot_be_a_conversation_is_refused(body: Any, sentence: str):
    with pytest.raises(BadRequest, match=sentence):
        API.decode("/v1/messages", {}, body)


@given(bodies("messages"))
def test_no_body_breaks_the_decoder(body: dict[str, Any]):
    decodes(API, body)


# --- what the harness gets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_golden_transcripts(sample: str):
    assert golden_stream("anthropic", sample) == (GOLDEN / f"anthropic_{sample}.sse").read_bytes()
    assert golden_reply("anthropic", sample) == (GOLDEN / f"anthropic_{sample}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (TEXT, "end_turn"),
        (TOOLS, "tool_use"),
        (LENGTH, "max_tokens"),
        (CUT_CALL, "max_tokens"),
        (AssistantTurn("", (ToolCall("a", "b", "{}"),), StopReason.STOP, Usage(1, 1)), "tool_use"),
        (AssistantTurn("x", (), StopReason.ABORT, Usage(1, 1)), "max_tokens"),
    ],
)
def test_stop_reasons_are_faithful(turn: AssistantTurn, reason: str):
    assert API.reply(decode(), turn, "c")["stop_reason"] == reason
    assert read_anthropic(stream(API, decode(), turn))["stop_reason"] == reason


def test_usage_counts_cached_tokens_apart():
    usage = API.reply(decode(), AssistantTurn("", (), StopReason.STOP, Usage(100, 7, 64)), "c")["usage"]
    assert usage == {
        "input_tokens": 36,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 64,
        "output_tokens": 7,
    }


def test_argument_text_streams_byte_for_byte():
    wire = stream(API, decode(), TOOLS, fragments(TOOLS))
    parts = [event["delta"] for name, event in events(wire) if name == "content_block_delta"]
    sent = "".join(part["partial_json"] for part in parts if part["type"] == "input_json_delta")
    assert sent == "".join(call.arguments for call in TOOLS.tool_calls)


def test_no_tool_can_start_before_the_end_is_released():
    encoder = API.encoder(decode(), "c", 0)
    free = encoder.start() + b"".join(map(encoder.delta, fragments(TOOLS)))
    before, held = encoder.finish(TOOLS)
    opened = [event["index"] for name, event in events(free + before) if name == "content_block_start"]
    closed = [event["index"] for name, event in events(free + before) if name == "content_block_stop"]
    assert opened == [0, 1, 2]
    assert closed == [0, 1]
    assert [event["index"] for name, event in events(held) if name == "content_block_stop"] == [2, 3]


def test_the_first_word_on_usage_is_the_prompt():
    start = API.encoder(decode(), "c", 321).start()
    assert events(start)[0][1]["message"]["usage"]["input_tokens"] == 321


def test_the_keep_alive_is_a_ping_event():
    assert API.encoder(decode(), "c", 0).keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


@given(split_turns())
def test_a_stream_adds_up_to_the_reply_however_it_was_split(case: tuple[AssistantTurn, list[Delta]]):
    turn, deltas = case
    assert read_anthropic(stream(API, decode(), turn, deltas)) == API.reply(decode(), turn, "c1")


@given(turns(), any_deltas())
def test_a_stream_that_contradicts_the_turn_is_still_valid(turn: AssistantTurn, deltas: list[Delta]):
    message = read_anthropic(stream(API, decode(), turn, deltas))
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert {call.id for call in turn.tool_calls} <= set(ids)
    assert message["usage"] == API.reply(decode(), turn, "c1")["usage"]


@given(turns(objects))
def test_an_echoed_reply_is_the_turn_again(turn: AssistantTurn):
    reply = API.reply(decode(), turn, "c")
    assert chat({"role": "assistant", "content": reply["content"]}) == [canonical(turn)]


@given(turns())
def test_an_echoed_stream_is_the_turn_again_even_with_broken_arguments(turn: AssistantTurn):
    message = read_anthropic(stream(API, decode(), turn))
    (echoed,) = chat({"role": "assistant", "content": message["content"]})
    expected: Any = canonical(turn)
    for call in expected.get("tool_calls", []):
        call["function"]["arguments"] = call["function"]["arguments"] or "{}"
    assert echoed == expected


def canonical(turn: AssistantTurn) -> Any:
    return render.turn_message(turn)


# --- errors and lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (410, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_error_bodies(status: int, kind: str):
    assert API.error(status, "why") == {"type": "error", "error": {"type": kind, "message": "why"}}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (
            "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4500 in the "
            "messages, 500 in the completion).",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4000 tokens.",
            "prompt is too long: 4097 tokens > 4096 maximum",
        ),
        (
            "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "request 99999: maximum context length is 40 tokens, your prompt contains at least 50 input tokens",
            "prompt is too long: 50 tokens > 40 maximum",
        ),
        ("prompt is too long: 9 tokens > 8 maximum", "prompt is too long: 9 tokens > 8 maximum"),
        ("too much", "prompt is too long: too much"),
    ],
)
def test_overflow_says_the_words_that_make_claude_compact(engine: str, words: str):
    assert API.overflow(engine) == {"type": "error", "error": {"type": "invalid_request_error", "message": words}}


def test_models_and_token_counts():
    listed = API.models(["a", "b"])
    assert [model["id"] for model in listed["data"]] == ["a", "b"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    assert API.models([])["first_id"] is None
    assert API.token_count(42) == {"input_tokens": 42}


# --- the official client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_events_and_bodies_satisfy_the_official_types(sample: str):
    types = pytest.importorskip("anthropic.types")
    from pydantic import TypeAdapter

    judge = TypeAdapter(types.RawMessageStreamEvent)
    for name, event in events(golden_stream("anthropic", sample)):
        if name != "ping":
            judge.validate_python(event)
    types.Message.model_validate(json.loads(golden_reply("anthropic", sample)))


def test_the_official_client_reads_the_stream_and_its_echo_is_the_turn():
    anthropic = pytest.importorskip("anthropic")
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> bytes:
        bodies.append(body)
        request = API.decode("/v1/messages", {}, body)
        assert request.stream
        return stream(API, request, TOOLS, fragments(TOOLS))

    client = anthropic.Anthropic(api_key="k", base_url="http://model", http_client=official_wire(answer))
    asked: list[Any] = [{"role": "user", "content": "Fix it."}]
    for _ in range(2):
        with client.messages.stream(model="m", max_tokens=9, messages=asked) as read:
            final = read.get_final_message()
        asked.append({"role": "assistant", "content": final.content})
    assert final.stop_reason == "tool_use"
    assert final.usage.cache_read_input_tokens == 96
    echoed: Any = API.decode("/v1/messages", {}, bodies[1]).messages[1]
    assert echoed["reasoning_content"] == TOOLS.reasoning
    assert [call["id"] for call in echoed["tool_calls"]] == ["call_a", "call_b"]
    assert json.loads(echoed["tool_calls"][1]["function"]["arguments"]) == {"path": "a.py", "lines": [1, 100.0]}
