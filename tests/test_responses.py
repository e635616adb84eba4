"""OpenAI Responses: what Codex says is what the model reads, and what the model says is what Codex gets."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialect_helpers import (
    CUT_CALL,
    GOLDEN,
    LENGTH,
    PATCH,
    SAMPLES,
    TEXT,
    TOOLS,
    USAGE,
    any_deltas,
    bodies,
    decodes,
    events,
    fragments,
    golden_reply,
    golden_stream,
    official_wire,
    read_responses,
    said,
    split_turns,
    stream,
    turns,
)
from polar_env.errors import BadRequest
from polar_env.proxy import render
from polar_env.proxy.responses import Responses
from polar_env.types import AssistantTurn, Delta, ModelRequest, Sampling, StopReason, ToolCall, Usage

API = Responses()
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: hunk+"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Start one.", "parameters": {"type": "object"}},
        {"type": "function", "name": "wait", "parameters": {"type": "object"}},
        {"type": "custom", "name": "exec"},
    ],
}


def decode(items: Any = "hi", **fields: Any) -> ModelRequest:
    return API.decode("/v1/responses", {}, {"model": "m", "input": items, **fields})


def chat(*items: dict[str, Any], **fields: Any) -> list[Any]:
    return list(decode(list(items), **fields).messages)


def user(*texts: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in texts]}


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def call(call_id: str, name: str = "bash", arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def output(call_id: str, content: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "id": "fco_1", "call_id": call_id, "output": content}


def turn_of(*calls: ToolCall) -> AssistantTurn:
    return AssistantTurn("", calls, StopReason.TOOL_CALLS, USAGE)


@pytest.mark.parametrize(
    ("method", "path", "operation"),
    [
        ("POST", "/v1/responses", "generate"),
        ("POST", "/responses", "generate"),
        ("GET", "/v1/responses", "websocket"),
        ("GET", "/responses?x", "websocket"),
        ("POST", "/v1/responses/input_tokens", "count_tokens"),
        ("GET", "/v1/models", "models"),
        ("GET", "/v1/responses/resp_1", None),
        ("POST", "/v1/messages", None),
    ],
)
def test_routes(method: str, path: str, operation: str | None):
    assert API.matches(method, path) == operation


# --- what the model reads ---------------------------------------------------------------------------------------


def test_instructions_come_first_and_a_string_is_the_users():
    assert list(decode("hi", instructions="Be brief.").messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_messages_keep_their_roles_order_and_parts():
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high"}
    assert chat(
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "base"}]},
        {"role": "system", "content": "sys"},
        {"role": "user", "content": [*user("see", "this")["content"], image]},
    ) == [
        {"role": "developer", "content": "base"},
        {"role": "system", "content": "sys"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "text", "text": "this"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "high"}},
            ],
        },
    ]


def test_reasoning_text_and_calls_of_one_turn_are_one_message():
    sealed = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": render.seal("hm\n"),
    }
    messages = chat(
        user("go"), sealed, answer("Look."), call("a"), call("b", arguments='{ "x":tru'), output("a", "1"),
        output("b", "2"), answer("Done."), user("more"),
    )  # fmt: skip
    assert messages == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "Look.",
            "reasoning_content": "hm\n",
            "tool_calls": [render.chat_call("a", "bash", "{}"), render.chat_call("b", "bash", '{ "x":tru')],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "more"},
    ]


def test_two_turns_that_touch_are_told_apart_by_our_item_ids():
    messages = chat(answer("one", id="msg_k1_0"), call("a", id="fc_k1_1"), answer("two", id="msg_k2_0"), answer("!"))
    assert [message["content"] for message in messages] == ["one", "two!"]


def test_foreign_reasoning_is_read_as_shown():
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    raw = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "raw"}]}
    assert chat({"type": "reasoning", "summary": summary})[0]["reasoning_content"] == "a\n\nb"
    assert chat(raw)[0]["reasoning_content"] == "raw"


def test_a_tool_output_may_be_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "https://example.org/a.png"}]
    assert chat(output("a", parts))[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    ]


def test_a_freeform_call_is_read_as_a_function_of_one_string():
    item = {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "*** é\n"}
    assert chat(item, output("a", "ok", "custom_tool_call_output")) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [render.chat_call("a", "apply_patch", '{"input": "*** é\\n"}')],
        },
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]


def test_a_shell_call_is_read_as_a_function():
    action = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None, "working_directory": "x"}
    shell = {"type": "local_shell_call", "id": "lsh_1", "call_id": "a", "action": action, "status": "completed"}
    messages = chat(shell, {"type": "local_shell_call_output", "id": "a", "output": "total 0"})
    arguments = '{"command": ["ls", "-l"], "working_directory": "x"}'
    assert messages[0]["tool_calls"] == [render.chat_call("a", "local_shell", arguments)]
    assert messages[1] == {"role": "tool", "tool_call_id": "a", "content": "total 0"}


def test_odd_items_are_counted_and_never_refused():
    request = decode(
        [
            {"type": "web_search_call", "id": "ws_1"},
            {
                "role": "critic",
                "content": [{"type": "input_file", "file_id": "f"}, {"type": "refusal", "refusal": "no"}],
            },
        ]
    )
    assert request.messages == ({"role": "user", "content": "no"},)
    assert request.ignored == ("input:web_search_call", "role:critic", "content:input_file")


# --- tools and settings -----------------------------------------------------------------------------------------


def test_functions_freeform_tools_and_hosted_ones():
    schema = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    function = {
        "type": "function",
        "name": "exec_command",
        "description": "Run.",
        "parameters": schema,
        "strict": False,
    }
    request = decode(tools=[function, APPLY_PATCH, {"type": "web_search"}, {"type": "tool_search"}])
    assert request.tools == (
        {"name": "exec_command", "parameters": schema, "description": "Run."},
        {
            "name": "apply_patch",
            "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
            "description": "Edit files.\n\n`input` follows this lark grammar:\nstart: hunk+",
        },
    )
    assert request.custom_tools == {"apply_patch"}
    assert request.ignored == ("tools:web_search", "tools:tool_search")


def test_a_namespace_is_laid_flat_and_its_own_words_are_kept_once():
    request = decode(tools=[AGENTS, {"type": "function", "name": "spawn", "parameters": {"type": "object"}}])
    assert [tool["name"] for tool in request.tools] == ["agents__spawn", "agents__wait", "agents__exec", "spawn"]
    assert [tool.get("description") for tool in request.tools] == ["Sub-agents.\n\nStart one.", None, None, None]
    assert request.namespaces == dict.fromkeys(("agents__spawn", "agents__wait", "agents__exec"), "agents")
    assert request.custom_tools == {"agents__exec"}


def test_additional_tools_are_offered_like_the_others_and_are_no_message():
    request = decode([{"type": "additional_tools", "role": "developer", "tools": [AGENTS, APPLY_PATCH]}, user("hi")])
    assert [tool["name"] for tool in request.tools] == ["agents__spawn", "agents__wait", "agents__exec", "apply_patch"]
    assert request.messages == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("given_choice", "choice"),
    [
        (None, "auto"),
        ("required", "required"),
        ("odd", "auto"),
        ({"type": "function", "name": "bash"}, "bash"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "required"),
        ({"type": "web_search"}, "auto"),
    ],
)
def test_tool_choice(given_choice: Any, choice: str):
    assert decode(tool_choice=given_choice).tool_choice == choice


def test_what_was_asked_is_recorded_and_what_is_not_understood_is_named():
    request = decode(
        max_output_tokens=64, temperature=1.0, top_p=0.5, stream=True, parallel_tool_calls=False, store=False,
        include=["reasoning.encrypted_content"], prompt_cache_key="k", client_metadata={"a": "b"},
        reasoning={"summary": "auto"}, previous_response_id=None,
    )  # fmt: skip
    assert request.asked == Sampling(temperature=1.0, top_p=0.5, max_tokens=64)
    assert (request.stream, request.parallel_tool_calls) == (True, False)
    assert request.ignored == ("reasoning",)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: this endpoint keeps no responses; send the whole"),
        ({"conversation": "conv_1"}, "conversation: this endpoint keeps no conversations"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "item_reference: .* send the items themselves"),
        ({"input": ""}, "'input' is missing or empty"),
        ({"input": None}, "'input' is missing or empty"),
        ({"input": ["hi"]}, r"input\[0\] is not a JSON object"),
    ],
)
def test_what_needs_a_memory_or_says_nothing_is_refused(fields: dict[str, Any], sentence: str):
    with pytest.raises(BadRequest, match=sentence):
        API.decode("/v1/responses", {}, {"model": "m", "input": "hi", **fields})


@given(bodies("input"))
def test_no_body_breaks_the_decoder(body: dict[str, Any]):
    decodes(API, body)


# --- what the harness gets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_golden_transcripts(sample: str):
    assert golden_stream("responses", sample) == (GOLDEN / f"responses_{sample}.sse").read_bytes()
    assert golden_reply("responses", sample) == (GOLDEN / f"responses_{sample}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("turn", "status", "reason"),
    [
        (TEXT, "completed", None),
        (TOOLS, "completed", None),
        (LENGTH, "incomplete", {"reason": "max_output_tokens"}),
        (CUT_CALL, "incomplete", {"reason": "max_output_tokens"}),
        (AssistantTurn("x", (), StopReason.ABORT, Usage(1, 1)), "incomplete", {"reason": "max_output_tokens"}),
    ],
)
def test_a_cut_turn_is_never_completed(turn: AssistantTurn, status: str, reason: Any):
    for final in (API.reply(decode(), turn, "c"), read_responses(stream(API, decode(), turn))):
        assert (final["status"], final["incomplete_details"]) == (status, reason)


def test_usage_says_what_was_cached():
    usage = API.reply(decode(), AssistantTurn("", (), StopReason.STOP, Usage(100, 7, 64)), "c")["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 64}
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (100, 7, 107)


def test_a_freeform_call_goes_out_verbatim():
    (item,) = API.reply(decode(tools=[APPLY_PATCH]), PATCH, "c")["output"]
    assert (item["type"], item["call_id"], item["input"]) == ("custom_tool_call", "call_d", "*** Begin Patch\n+é\n")


@pytest.mark.parametrize("arguments", ["*** Begin", '{"input": 1}', '{"input": "a", "b": 1}', '{"patch": "x"}', ""])
def test_freeform_arguments_of_another_shape_are_the_input_themselves(arguments: str):
    request = decode(tools=[APPLY_PATCH])
    turn = turn_of(ToolCall("a", "apply_patch", arguments))
    assert API.reply(request, turn, "c")["output"][0]["input"] == arguments
    assert read_responses(stream(API, request, turn, fragments(turn)))["output"][0]["input"] == arguments


def test_a_namespaced_call_goes_out_with_its_namespace_and_comes_back():
    request = decode(tools=[AGENTS])
    spawn = ToolCall("a", "agents__spawn", '{"x": 1}')
    turn = turn_of(spawn, ToolCall("b", "agents__exec", '{"input": "1+1"}'))
    items = API.reply(request, turn, "c")["output"]
    assert [(item["type"], item["namespace"], item["name"]) for item in items] == [
        ("function_call", "agents", "spawn"),
        ("custom_tool_call", "agents", "exec"),
    ]
    assert chat(*items) == [render.turn_message(turn)]
    assert read_responses(stream(API, request, turn, fragments(turn)))["output"] == [
        {**item, "id": item["id"].replace("_c_", "_c1_")} for item in items
    ]


def test_a_tool_whose_own_name_starts_like_its_namespace_keeps_it():
    tool = {"type": "function", "name": "a__b", "parameters": {}}
    request = decode(tools=[{"type": "namespace", "name": "a", "tools": [tool]}])
    assert request.tools[0]["name"] == "a__a__b"
    assert API.reply(request, turn_of(ToolCall("i", "a__a__b", "{}")), "c")["output"][0]["name"] == "a__b"


def test_the_built_in_shell_gets_its_own_kind_of_call():
    request = decode(tools=[{"type": "local_shell"}])
    good = ToolCall("a", "local_shell", '{"command": ["ls"], "timeout_ms": 9}')
    bad = ToolCall("b", "local_shell", '{"command": "ls"}')
    turn = turn_of(good, bad)
    for final in (API.reply(request, turn, "c1"), read_responses(stream(API, request, turn, fragments(turn)))):
        first, second = final["output"]
        assert first["action"] == {"type": "exec", "env": {}, "command": ["ls"], "timeout_ms": 9}
        assert (first["type"], first["call_id"]) == ("local_shell_call", "a")
        assert (second["type"], second["arguments"]) == ("function_call", bad.arguments)
        assert chat(first, second) == [render.turn_message(turn)]


def test_a_function_that_happens_to_be_called_local_shell_stays_a_function():
    request = decode(tools=[{"type": "function", "name": "local_shell", "parameters": {"type": "object"}}])
    turn = turn_of(ToolCall("a", "local_shell", '{"command": ["ls"]}'))
    assert API.reply(request, turn, "c")["output"][0]["type"] == "function_call"


def test_argument_text_streams_byte_for_byte():
    wire = stream(API, decode(), TOOLS, fragments(TOOLS))
    sent = [event["delta"] for name, event in events(wire) if name == "response.function_call_arguments.delta"]
    assert len(sent) > 2
    assert "".join(sent) == "".join(each.arguments for each in TOOLS.tool_calls)


def test_no_tool_can_start_before_the_end_is_released():
    encoder = API.encoder(decode(), "c", 0)
    free = encoder.start() + b"".join(map(encoder.delta, fragments(TOOLS)))
    before, held = encoder.finish(TOOLS)

    def done(wire: bytes) -> list[str]:
        return [event["item"]["type"] for name, event in events(wire) if name == "response.output_item.done"]

    assert done(free + before) == ["reasoning", "message"]
    assert done(held) == ["function_call", "function_call"]


def test_the_keep_alive_is_in_progress_and_counts_in_the_sequence():
    encoder = API.encoder(decode(), "c", 0)
    read = events(encoder.start() + encoder.keep_alive() + encoder.keep_alive())
    assert [name for name, _ in read] == ["response.created"] + ["response.in_progress"] * 3
    assert [event["sequence_number"] for _, event in read] == [0, 1, 2, 3]


@given(split_turns())
def test_a_stream_adds_up_to_the_reply_however_it_was_split(case: tuple[AssistantTurn, list[Delta]]):
    turn, deltas = case
    request = decode(tools=[{"type": "custom", "name": "edit"}])
    assert read_responses(stream(API, request, turn, deltas)) == API.reply(request, turn, "c1")


@given(turns(), any_deltas())
def test_a_stream_that_contradicts_the_turn_is_still_valid(turn: AssistantTurn, deltas: list[Delta]):
    final = read_responses(stream(API, decode(), turn, deltas))
    ids = {item["call_id"] for item in final["output"] if item["type"] == "function_call"}
    assert {each.id for each in turn.tool_calls} <= ids


def test_what_was_streamed_stands_and_what_was_not_follows():
    turn = AssistantTurn("new", (ToolCall("b", "read", "{}"),), StopReason.TOOL_CALLS, USAGE)
    before = [Delta("text", "old"), Delta("tool_open", id="a", name="bash"), Delta("tool_args", "{")]
    final = read_responses(stream(API, decode(), turn, before))
    assert [said(item) for item in final["output"]] == ["old", "{", "{}"]
    assert final["status"] == "completed"


inputs = st.text(max_size=20).map(lambda text: render.dump({"input": text}))


@given(turns(inputs))
def test_an_echoed_reply_is_the_turn_again(turn: AssistantTurn):
    request = decode(tools=[{"type": "custom", "name": "edit"}])
    said_something = [render.turn_message(turn)] if turn.text or turn.reasoning or turn.tool_calls else []
    assert chat(user("x"), *API.reply(request, turn, "c")["output"])[1:] == said_something


@given(turns())
def test_an_echoed_function_call_keeps_arguments_that_are_not_json(turn: AssistantTurn):
    output_items = read_responses(stream(API, decode(), turn, fragments(turn)))["output"]
    assert chat(user("x"), *output_items)[1:] == ([render.turn_message(turn)] if output_items else [])


# --- errors and lists -------------------------------------------------------------------------------------------


def test_error_bodies():
    assert API.error(429, "slow down")["error"]["code"] == "rate_limit_exceeded"


def test_overflow_has_the_code_codex_knows_and_the_words_pi_knows():
    error = API.overflow("maximum context length is 4096 tokens, you requested 5000 tokens")["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("Your input exceeds the context window of this model. This model's maximum")


def test_models_and_token_counts():
    assert [model["id"] for model in API.models(["a"])["data"]] == ["a"]
    assert API.token_count(3) == {"object": "response.input_tokens", "input_tokens": 3}


# --- the official client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_events_and_bodies_satisfy_the_official_types(sample: str):
    types = pytest.importorskip("openai.types.responses")
    from pydantic import TypeAdapter

    judge = TypeAdapter(types.ResponseStreamEvent)
    for name, event in events(golden_stream("responses", sample)):
        assert judge.validate_python(event).type == name
    types.Response.model_validate(json.loads(golden_reply("responses", sample)))


def test_the_official_client_reads_the_stream_and_its_echo_is_the_turn():
    openai = pytest.importorskip("openai")

    def wire(body: dict[str, Any]) -> bytes:
        return stream(API, API.decode("/v1/responses", {}, body), TOOLS, fragments(TOOLS))

    client = openai.OpenAI(api_key="k", base_url="http://model/v1", http_client=official_wire(wire))
    with client.responses.stream(model="m", input="Fix it.") as read:
        final = read.get_final_response()
    assert final.output_text == TOOLS.text
    assert final.usage.input_tokens_details.cached_tokens == 96
    assert chat(*(item.to_dict() for item in final.output)) == [render.turn_message(TOOLS)]


def test_results_are_read_in_the_order_of_their_calls() -> None:
    """Templates show them without ids: in the order they were done in, one would pass for the other's."""
    results = [{"type": "function_call_output", "call_id": name, "output": name} for name in ("b", "a")]
    messages = chat(call("a"), call("b"), *results)
    assert [message.get("tool_call_id") for message in messages] == [None, "a", "b"]
