"""Google generateContent: what Gemini CLI says is what the model reads, and what the model says is what it gets."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialect_helpers import (
    CUT_CALL,
    GOLDEN,
    LENGTH,
    SAMPLES,
    TEXT,
    TOOLS,
    USAGE,
    any_deltas,
    bodies,
    chunked,
    decodes,
    events,
    fragments,
    golden_reply,
    golden_stream,
    official_wire,
    read_gemini,
    split_turns,
    stream,
    turns,
)
from polar_env.errors import BadRequest
from polar_env.proxy import render
from polar_env.proxy.gemini import Gemini
from polar_env.proxy.gemini_stream import sign, unsign
from polar_env.proxy.sse import Parser
from polar_env.types import AssistantTurn, Delta, ModelRequest, Sampling, StopReason, ToolCall, Usage

API = Gemini()
PIXEL = "iVBORw0KGgo="
SSE = "/v1beta/models/m:streamGenerateContent?alt=sse"


def decode(contents: Any = None, path: str = SSE, **fields: Any) -> ModelRequest:
    contents = [user("hi")] if contents is None else contents
    return API.decode(path, {}, {"contents": contents, **fields})


def chat(*contents: dict[str, Any], **fields: Any) -> list[Any]:
    return list(decode(list(contents), **fields).messages)


def part(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [part(each) for each in parts]}


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": [part(each) for each in parts]}


def calls(name: str, args: Any = None, signature: str = "", **fields: Any) -> dict[str, Any]:
    signed = {"thoughtSignature": signature} if signature else {}
    return {"functionCall": {"name": name, "args": args or {}, **fields}, **signed}


def result(name: str, output: Any = "done", **fields: Any) -> dict[str, Any]:
    response = output if isinstance(output, dict) else {"output": output}
    return {"functionResponse": {"name": name, "response": response, **fields}}


def ids(message: Any) -> list[str]:
    return [call["id"] for call in message["tool_calls"]]


def answered(*contents: dict[str, Any]) -> list[tuple[str, str]]:
    """(id, text) of the tool results."""
    read = [message for message in chat(*contents) if message["role"] == "tool"]
    return [(message["tool_call_id"], message["content"]) for message in read]


# --- routes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "operation"),
    [
        ("POST", "/v1beta/models/gemini-3-pro:streamGenerateContent?alt=sse", "generate"),
        ("POST", "/v1beta/models/gemini-3-pro:generateContent", "generate"),
        ("POST", "/v1/models/org/name:generateContent", "generate"),
        ("POST", "/v1alpha/models/m:generateContent/", "generate"),
        ("POST", "/models/a:b:generateContent?key=k", "generate"),
        ("POST", "/v1beta/models/m:countTokens", "count_tokens"),
        ("GET", "/v1beta/models", "models"),
        ("GET", "/v1beta/models?pageSize=50", "models"),
        ("POST", "/v1beta/models/m:embedContent", None),
        ("GET", "/v1beta/models/m:generateContent", None),
        ("POST", "/v1beta/models/:generateContent", None),
        ("POST", "/v1/chat/completions", None),
        ("GET", "/v1/models", None),
    ],
)
def test_routes(method: str, path: str, operation: str | None):
    assert API.matches(method, path) == operation


@pytest.mark.parametrize(
    ("path", "model", "stream", "sse"),
    [
        (SSE, "m", True, True),
        ("/models/org/m:streamGenerateContent?key=k&alt=sse", "org/m", True, True),
        ("/v1/models/m:streamGenerateContent", "m", True, False),
        ("/v1/models/m:streamGenerateContent?alt=json", "m", True, False),
        ("/v1/models/a:b:generateContent?alt=sse", "a:b", False, True),
    ],
)
def test_the_path_says_which_model_and_how_to_answer(path: str, model: str, stream: bool, sse: bool):
    request = decode(path=path)
    assert (request.model, request.stream, request.sse) == (model, stream, sse)


def test_tokens_are_counted_of_contents_or_of_a_whole_request():
    inner = {"model": "models/m", "contents": [user("hi")], "systemInstruction": {"parts": [{"text": "Be brief."}]}}
    request = API.decode("/v1beta/models/m:countTokens", {}, {"generateContentRequest": inner})
    assert [message["role"] for message in request.messages] == ["system", "user"]
    assert not request.stream
    assert API.decode("/elsewhere", {}, inner).model == "m"


# --- what the model reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
def test_the_system_instruction_comes_first(name: str):
    for value in ({"role": "user", "parts": [{"text": "Be brief."}]}, "Be brief."):
        assert chat(user("hi"), **{name: value}) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ]


def test_texts_of_a_user_stay_apart_and_blank_ones_stay():
    assert chat(user("a", "\n "))[0]["content"] == [render.text_part("a"), render.text_part("\n ")]


def test_images_become_image_urls_in_place():
    inline = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    snake = {"inline_data": {"mime_type": "image/png", "data": PIXEL}}
    linked = {"fileData": {"mimeType": "image/png", "fileUri": "https://example.org/a.png"}}
    url = f"data:image/png;base64,{PIXEL}"
    assert chat(user("see", inline, snake, linked))[0]["content"] == [
        render.text_part("see"),
        *(render.image_part(each) for each in (url, url, "https://example.org/a.png")),
    ]


def test_a_model_turn_is_one_assistant_message():
    thought = {"text": "hm", "thought": True}
    assert chat(said(thought, "Let me ", "look.", calls("bash", {"command": "ls"}, id="call_a"))) == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_a", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
            ],
        }
    ]


def test_a_turn_kept_chunk_by_chunk_is_still_one_message():
    messages = chat(user("go"), said("Hel"), said("lo"), said(), user("and?"))
    assert [message["content"] for message in messages] == ["go", "Hello", "and?"]


def test_results_come_in_the_order_received_and_before_what_the_user_adds():
    image = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    turn = said(calls("bash", id="a"), calls("read", id="b"))
    messages = chat(turn, user(result("read", "two", id="b"), image, result("bash", "one", id="a")))
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool", "user"]
    assert [message.get("tool_call_id") for message in messages[1:3]] == ["b", "a"]


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ({"output": "one\n"}, "one\n"),
        ({"error": "No such file"}, "No such file"),
        ({"name": "bash", "content": "from the AI SDK"}, "from the AI SDK"),
        ({"result": ""}, ""),
        ({"output": "x", "exit_code": 1}, '{"output": "x", "exit_code": 1}'),
        ({"output": {"a": 1}}, '{"output": {"a": 1}}'),
        ({"name": "other"}, '{"name": "other"}'),
        ({}, ""),
    ],
)
def test_a_result_that_is_only_text_is_that_text_and_any_other_is_json(response: dict[str, Any], content: str):
    assert answered(said(calls("bash", id="a")), user(result("bash", response, id="a"))) == [("a", content)]


def test_a_result_may_hold_an_image():
    image = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    (_, message) = chat(said(calls("read", id="a")), user(result("read", "see", id="a", parts=[image])))
    assert message["content"] == [render.text_part("see"), render.image_part(f"data:image/png;base64,{PIXEL}")]


def test_the_names_that_gemini_cli_puts_before_ids_are_taken_off():
    """Gemini CLI 0.61.0 sends ``bash__call_a`` for the id call_a (measured), in calls and results."""
    turn = said(calls("bash", id="bash__call_a"), calls("read", id="read__call_b", signature=sign(id="call_b")))
    results = user(result("read", id="read__call_b"), result("bash", id="bash__call_a"))
    assert ids(chat(turn)[0]) == ["call_a", "call_b"]
    assert [call_id for call_id, _ in answered(turn, results)] == ["call_b", "call_a"]


def test_dropped_ids_are_restored_and_results_matched_by_name_and_order():
    """Pi and opencode send no ids with this API (measured)."""
    signed = [calls(name, signature=sign(id=each)) for name, each in (("bash", "x"), ("read", "y"), ("bash", "z"))]
    given = user(result("bash", "1"), result("read", "2"), result("bash", "3"))
    assert answered(said(*signed), given) == [("x", "1"), ("y", "2"), ("z", "3")]
    swapped = user(result("read", "2"), result("bash", "1"), result("bash", "3"))
    assert answered(said(*signed), swapped) == [("y", "2"), ("x", "1"), ("z", "3")]


def test_without_ids_and_signatures_each_call_has_an_id_of_its_own_that_stays():
    first = (user("go"), said(calls("bash"), calls("bash")), user(result("bash", "1"), result("renamed", "2")))
    second = (*first, said(calls("bash")), user(result("bash", "3")))
    assert [text for _, text in answered(*second)] == ["1", "2", "3"]
    given = [call_id for call_id, _ in answered(*second)]
    assert len(set(given)) == 3
    assert given == [each for message in chat(*second) if "tool_calls" in message for each in ids(message)]
    assert given[:2] == [call_id for call_id, _ in answered(*first)]


def test_a_result_of_no_known_call_keeps_its_id():
    turn = said(calls("bash", id="a"))
    assert answered(turn, user(result("bash", id="a"), result("bash", id="a"))) == [("a", "done"), ("a", "done")]
    assert answered(turn, user(result("bash", id="other")))[0][0] == "other"
    assert answered(user(result("bash")))[0][0] == "call_0"


def test_a_conversation_may_end_with_the_model():
    assert chat(user("go"), said("MAXIMUM STEPS"))[-1] == {"role": "assistant", "content": "MAXIMUM STEPS"}


# --- what signatures bring back ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "read"), [(["  think\n"], "  think\n"), (["think"], "  think\n"), ([], "  think\n"), (["new"], "new")]
)
def test_our_signature_restores_thoughts_that_were_dropped_but_not_edited_ones(shown: list[str], read: str):
    thoughts = [{"text": text, "thought": True} for text in shown]
    turn = said(*thoughts, calls("bash", signature=sign(id="a", reasoning="  think\n")))
    assert chat(turn)[0]["reasoning_content"] == read


@pytest.mark.parametrize("style", ["thoughtSignature", "thought_signature"])
def test_arguments_come_back_to_the_letter_unless_the_client_changed_them(style: str):
    exact = '{ "n":1.0, "text":"\\u00e9\\/" }'

    def arguments(args: Any) -> str:
        call = {"functionCall": {"name": "bash", "args": args}, style: sign(id="a", arguments=exact)}
        return chat(said(call))[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments({"n": 1, "text": "é/"}) == exact
    assert arguments({"text": "é/", "n": 1}) == exact
    assert arguments({"n": True, "text": "é/"}) == '{"n": true, "text": "é/"}'
    assert arguments({"n": 1}) == '{"n": 1}'


@pytest.mark.parametrize(
    "signature",
    ["", "skip_thought_signature_validator", "EqQB", "%%%", "cG9sYXIxLns=", "cG9sYXIxLlsxXQ==", "é", None, 7],
)
def test_a_foreign_signature_says_nothing(signature: Any):
    assert unsign(signature) == {}


def test_signatures_are_base64_or_pi_drops_them():
    """Pi 1.6.0: /^[A-Za-z0-9+/]+={0,2}$/ and a length that four divides. Google's Python SDK sends them URL-safe."""
    signature = sign(reasoning="??>>~~\ud83d", id="é")
    assert len(signature) % 4 == 0
    assert signature.rstrip("=").replace("+", "").replace("/", "").isalnum()
    ours = {"reasoning": "??>>~~\ud83d", "id": "é"}
    assert unsign(signature) == unsign(signature.replace("+", "-").replace("/", "_")) == ours


def test_a_part_that_is_only_our_signature_is_not_counted():
    request = decode([said("x", {"thoughtSignature": sign(reasoning="hm")}, {"thoughtSignature": "EqQB"})])
    assert request.messages[0].get("reasoning_content") == "hm"
    assert request.ignored == ("parts:thoughtSignature",)


# --- tools and settings -----------------------------------------------------------------------------------------


def test_tools_keep_their_json_schema_and_googles_own_are_counted():
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    declared = [
        {"name": "bash", "description": "Run.", "parametersJsonSchema": schema},
        {"name": "plain"},
        {"description": "nameless"},
    ]
    request = decode(tools=[{"functionDeclarations": declared}, {"googleSearch": {}}])
    assert request.tools == (
        {"name": "bash", "parameters": schema, "description": "Run."},
        {"name": "plain", "parameters": {"type": "object", "properties": {}}},
    )
    assert request.ignored == ("tools:", "tools:googleSearch")


def test_googles_schemas_become_json_schemas():
    google = {
        "type": "OBJECT",
        "propertyOrdering": ["type"],
        "properties": {
            "type": {"type": "STRING", "nullable": True, "enum": ["A"]},
            "paths": {"type": "ARRAY", "minItems": "1", "items": {"type": "STRING"}},
            "either": {"anyOf": [{"type": "NUMBER"}, {"type": ["string", "null"]}]},
            "map": {"type": "OBJECT", "additionalProperties": {"type": "BOOLEAN"}},
            "shut": {"type": "OBJECT", "additionalProperties": False},
        },
        "required": ["paths"],
    }
    (tool,) = decode(tools=[{"function_declarations": [{"name": "x", "parameters": google}]}]).tools
    assert tool["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["A"]},
            "paths": {"type": "array", "minItems": 1, "items": {"type": "string"}},
            "either": {"anyOf": [{"type": "number"}, {"type": ["string", "null"]}]},
            "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "shut": {"type": "object", "additionalProperties": False},
        },
        "required": ["paths"],
    }


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        (None, "auto"),
        ({"mode": "AUTO"}, "auto"),
        ({"mode": "VALIDATED"}, "auto"),
        ({"mode": "ANY"}, "required"),
        ({"mode": "any", "allowedFunctionNames": ["bash"]}, "bash"),
        ({"mode": "ANY", "allowed_function_names": ["bash", "read"]}, "required"),
        ({"mode": "NONE"}, "none"),
    ],
)
def test_tool_choice(config: Any, choice: str):
    assert decode(toolConfig={"functionCallingConfig": config}).tool_choice == choice


def test_what_was_asked_is_recorded_and_what_is_not_understood_is_named():
    settings = {
        "temperature": 1, "topP": 0.95, "top_k": 64, "maxOutputTokens": 100, "candidateCount": 1,
        "thinkingConfig": {"includeThoughts": True}, "responseMimeType": None,
    }  # fmt: skip
    request = decode(generationConfig=settings, safetySettings=[], store=True, labels={})
    assert request.asked == Sampling(temperature=1, top_p=0.95, top_k=64, max_tokens=100)
    assert request.ignored == ("store", "generationConfig:thinkingConfig")


def test_odd_parts_and_roles_are_counted_and_never_refused():
    audio = {"inlineData": {"mimeType": "audio/wav", "data": "AA"}}
    request = decode([{"role": "critic", "parts": [audio, {}]}, {"parts": "x"}, said({"executableCode": {}})])
    assert [message["role"] for message in request.messages] == ["user", "user", "assistant"]
    assert [message["content"] for message in request.messages] == ["", "", ""]
    assert request.ignored == ("role:critic", "parts:inlineData", "parts:", "parts:executableCode")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "'contents' is missing or empty"),
        ({"contents": []}, "'contents' is missing or empty"),
        ({"contents": ["hi"]}, r"contents\[0\] is not a JSON object"),
        ([], "the body is not a JSON object"),
        ({"contents": [{}], "generationConfig": {"candidateCount": 2}}, "candidateCount=2 asks for several answers"),
        ({"contents": [{}], "cachedContent": "cachedContents/x"}, "this endpoint keeps no contents"),
    ],
)
def test_what_would_change_its_meaning_is_refused(body: Any, sentence: str):
    with pytest.raises(BadRequest, match=sentence):
        API.decode(SSE, {}, body)


@given(bodies("contents", "parts"))
def test_no_body_breaks_the_decoder(body: dict[str, Any]):
    decodes(API, body)


# --- what the harness gets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_golden_transcripts(sample: str):
    assert golden_stream("gemini", sample) == (GOLDEN / f"gemini_{sample}.sse").read_bytes()
    assert golden_reply("gemini", sample) == (GOLDEN / f"gemini_{sample}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (TEXT, "STOP"),
        (TOOLS, "STOP"),
        (LENGTH, "MAX_TOKENS"),
        (CUT_CALL, "MAX_TOKENS"),
        (AssistantTurn("x", (), StopReason.ABORT, Usage(1, 1)), "MAX_TOKENS"),
    ],
)
def test_stop_reasons_are_faithful(turn: AssistantTurn, reason: str):
    assert API.reply(decode(), turn, "c")["candidates"][0]["finishReason"] == reason
    assert read_gemini(stream(API, decode(), turn))["candidates"][0]["finishReason"] == reason


def test_usage_is_honest_and_counts_cached_tokens_within_the_prompt():
    usage = API.reply(decode(), AssistantTurn("", (), StopReason.STOP, Usage(100, 7, 64)), "c")["usageMetadata"]
    assert usage == {
        "promptTokenCount": 100,
        "candidatesTokenCount": 7,
        "totalTokenCount": 107,
        "cachedContentTokenCount": 64,
    }


def test_calls_are_whole_and_cannot_start_before_the_end_is_released():
    encoder = API.encoder(decode(), "c", 0)
    free = encoder.start() + b"".join(map(encoder.delta, fragments(TOOLS)))
    before, held = encoder.finish(TOOLS)
    assert b"functionCall" not in free + before
    ((_, last),) = events(held)
    parts = last["candidates"][0]["content"]["parts"]
    assert [each["functionCall"]["id"] for each in parts if "functionCall" in each] == ["call_a", "call_b"]


def test_text_streams_as_it_comes_but_for_its_last_sign():
    encoder = API.encoder(decode(), "c", 0)
    (_, first), (_, second) = events(encoder.delta(Delta("text", "Hel")) + encoder.delta(Delta("text", "lo")))
    assert [chunk["candidates"][0]["content"]["parts"] for chunk in (first, second)] == [[part("He")], [part("ll")]]
    before, held = encoder.finish(AssistantTurn("Hello", (), StopReason.STOP, USAGE))
    assert before == b""
    assert events(held)[0][1]["candidates"][0]["content"]["parts"] == [part("o")]


def test_reasoning_is_signed_where_every_client_keeps_it():
    """On the first fragment of the text (Gemini CLI drops later ones'), else on the call, else on the thought."""

    def signed(turn: AssistantTurn) -> list[str]:
        wire = stream(API, decode(), turn, fragments(turn, 3))
        chunks = [event["candidates"][0]["content"]["parts"] for _, event in events(wire) if event["candidates"]]
        where = [each for parts in chunks for each in parts if unsign(each.get("thoughtSignature")).get("reasoning")]
        return [next(key for key in each if key != "thoughtSignature") + each.get("text", "") for each in where]

    call = (ToolCall("a", "bash", "{}"),)
    assert signed(AssistantTurn("Let me look.", call, StopReason.TOOL_CALLS, USAGE, "hm")) == ["textLe"]
    assert signed(AssistantTurn("", call * 2, StopReason.TOOL_CALLS, USAGE, "hm")) == ["functionCall"]
    assert signed(AssistantTurn("", (), StopReason.STOP, USAGE, "hm")) == ["textm"]


def test_a_keep_alive_is_a_chunk_without_candidates():
    ((name, chunk),) = events(API.encoder(decode(), "c", 0).keep_alive())
    assert (name, chunk["candidates"], chunk["usageMetadata"]) == ("", [], {})
    ((_, chunk),) = events(API.encoder(decode(), "c", 5).keep_alive())
    assert chunk["usageMetadata"] == {"promptTokenCount": 5, "totalTokenCount": 5}


def test_without_sse_the_same_chunks_are_one_json_array():
    array = stream(API, decode(path="/v1beta/models/m:streamGenerateContent"), TOOLS, fragments(TOOLS))
    assert json.loads(array) == [event for _, event in events(stream(API, decode(), TOOLS, fragments(TOOLS)))]
    assert array.startswith(b"[{")


@given(split_turns(), st.lists(st.integers(0, 10_000), max_size=6))
def test_any_split_of_a_turn_in_any_chunks_reads_as_the_whole_reply(
    case: tuple[AssistantTurn, list[Delta]], cuts: list[int]
):
    turn, deltas = case
    wire = stream(API, decode(), turn, deltas)
    assert read_gemini(wire) == API.reply(decode(), turn, "c1")
    parser = Parser()
    read = [event.json() for piece in chunked(wire, cuts) for event in parser.feed(piece)]
    assert read == [event for _, event in events(wire)]


@given(turns(), any_deltas())
def test_fragments_in_any_order_still_make_a_well_formed_stream(turn: AssistantTurn, deltas: list[Delta]):
    read_gemini(stream(API, decode(), turn, deltas))


# --- what comes back --------------------------------------------------------------------------------------------


def canonical(turn: AssistantTurn) -> Any:
    return render.turn_message(turn)


def javascript(value: Any) -> Any:
    """The value after JSON.parse and JSON.stringify: numbers are doubles, keys that are numbers come first."""
    if isinstance(value, dict):
        numbered = sorted((key for key in value if key.isdecimal()), key=int)
        return {key: javascript(value[key]) for key in (*numbered, *(key for key in value if key not in numbered))}
    if isinstance(value, list):
        return list(map(javascript, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if float(value).is_integer() and abs(value) < 1e21 else float(value)
    return value


def gemini_cli(parts: list[Any]) -> list[Any]:
    """What Gemini CLI 0.61.0 keeps of a turn: no thoughts, and the name before each id (measured)."""
    kept = javascript([each for each in parts if not each.get("thought")])
    for each in kept:
        if call := each.get("functionCall"):
            call["id"] = f"{call['name']}__{call['id']}"
    return kept


def pi(parts: list[Any]) -> list[Any]:
    """What Pi 1.6.0 and opencode keep: everything but the ids (measured)."""
    kept = javascript(parts)
    for each in kept:
        each.get("functionCall", {}).pop("id", None)
    return kept


@pytest.mark.parametrize("client", [list, gemini_cli, pi])
@given(turn=turns())
def test_an_echoed_turn_is_the_turn_again_to_the_letter(client: Any, turn: AssistantTurn):
    """Arguments with odd spacing, escapes and numbers, or that are no JSON at all; ids; reasoning."""
    for answer in (API.reply(decode(), turn, "c"), read_gemini(stream(API, decode(), turn, fragments(turn)))):
        parts = client(answer["candidates"][0]["content"]["parts"])
        results = [result(call.name, call.id) for call in turn.tool_calls]
        (echoed, *rest) = chat(said(*parts), user(*results))
        lost = client is gemini_cli and not (turn.text or turn.tool_calls)  # reasoning had nothing to ride on
        assert echoed == canonical(AssistantTurn("", (), turn.stop, turn.usage) if lost else turn)
        assert [message["tool_call_id"] for message in rest if message["role"] == "tool"] == [
            call.id for call in turn.tool_calls
        ]


@given(st.lists(turns(), min_size=1, max_size=3))
def test_a_whole_conversation_comes_back_message_by_message(spoken: list[AssistantTurn]):
    contents, expected = [user("go")], [{"role": "user", "content": "go"}]
    for turn in spoken:
        reply = API.reply(decode(), turn, "c")["candidates"][0]["content"]
        results = [result(call.name, f"of {call.id}") for call in turn.tool_calls]
        contents += [{**reply, "parts": pi(reply["parts"])}, user(*results, "next")]
        expected.append(canonical(turn))
        expected += [{"role": "tool", "tool_call_id": call.id, "content": f"of {call.id}"} for call in turn.tool_calls]
        expected.append({"role": "user", "content": "next"})
    assert chat(*contents) == expected


# --- errors and lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (404, "NOT_FOUND"),
        (410, "FAILED_PRECONDITION"),
        (413, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (503, "UNAVAILABLE"),
    ],
)
def test_error_bodies(status: int, name: str):
    assert API.error(status, "why") == {"error": {"code": status, "message": "why", "status": name}}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (
            "maximum context length is 40 tokens, your prompt contains at least 50 input tokens",
            "The input token count (50) exceeds the maximum number of tokens allowed (40).",
        ),
        ("too much", "The input token count exceeds the maximum number of tokens allowed: too much"),
    ],
)
def test_overflow_says_the_words_that_make_pi_and_opencode_compact(engine: str, words: str):
    assert API.overflow(engine) == {"error": {"code": 400, "message": words, "status": "INVALID_ARGUMENT"}}


def test_models_and_token_counts():
    assert [model["name"] for model in API.models(["a", "b"])["models"]] == ["models/a", "models/b"]
    assert API.token_count(42) == {"totalTokens": 42}


# --- the official client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_chunks_and_bodies_satisfy_the_official_types(sample: str):
    types = pytest.importorskip("google.genai.types")
    for _, event in events(golden_stream("gemini", sample)):
        types.GenerateContentResponse.model_validate(event)
    types.GenerateContentResponse.model_validate(json.loads(golden_reply("gemini", sample)))


def test_the_official_chat_keeps_the_turn_it_streamed():
    genai = pytest.importorskip("google.genai")
    from google.genai import types

    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> bytes:
        bodies.append(body)
        encoder = API.encoder(API.decode(SSE, {}, body), "c1", 0)
        return b"".join([encoder.start(), *map(encoder.delta, fragments(TOOLS)), *encoder.finish(TOOLS)])

    options = types.HttpOptions(base_url="http://model", httpx_client=official_wire(answer))
    bash = types.Tool(function_declarations=[types.FunctionDeclaration(name="bash")])
    client = genai.Client(api_key="k", http_options=options)
    config = types.GenerateContentConfig(
        tools=[bash], automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True)
    )
    talk = client.chats.create(model="m", config=config)
    for asked in ("Fix it.", "And now?"):
        *_, last = talk.send_message_stream(asked)
    assert last.usage_metadata is not None
    assert last.usage_metadata.cached_content_token_count == 96
    echoed: Any = API.decode(SSE, {}, bodies[1]).messages
    assert [message["role"] for message in echoed] == ["user", "assistant", "user"]
    assert echoed[1] == canonical(TOOLS)
