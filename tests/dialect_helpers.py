"""What the dialect tests share: turns, ways to cut a turn into fragments, and readers of each wire that are not ours.

The readers rebuild an answer from a stream as the official clients do (events by index, text by appending), and are
strict: an event out of place is an AssertionError. ``python tests/dialect_helpers.py`` rewrites tests/golden.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from polar_env.errors import BadRequest
from polar_env.proxy import Dialect
from polar_env.proxy.anthropic import Anthropic
from polar_env.proxy.chat import Chat
from polar_env.proxy.gemini import Gemini
from polar_env.proxy.responses import Responses
from polar_env.types import AssistantTurn, Delta, ModelRequest, StopReason, ToolCall, Usage

settings.register_profile("shared_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared_machine")

GOLDEN = Path(__file__).parent / "golden"
USAGE = Usage(prompt_tokens=120, completion_tokens=17, cached_tokens=96)

TEXT = AssistantTurn("The file is fixed.", (), StopReason.STOP, USAGE)
TOOLS = AssistantTurn(
    "Let me look.",
    (
        ToolCall("call_a", "bash", '{"command": "ls \\u00e9\\/"}'),
        ToolCall("call_b", "read", '{ "path":"a.py",\n"lines": [1, 1e2] }'),
    ),
    StopReason.TOOL_CALLS,
    USAGE,
    reasoning="Which file?\n  The first one.\n",
)
LENGTH = AssistantTurn("It is beca", (), StopReason.LENGTH, USAGE)
CUT_CALL = AssistantTurn("", (ToolCall("call_c", "bash", '{"command": "ech'),), StopReason.LENGTH, USAGE)
PATCH = AssistantTurn(
    "", (ToolCall("call_d", "apply_patch", '{"input": "*** Begin Patch\\n+\\u00e9\\n"}'),), StopReason.TOOL_CALLS, USAGE
)
SAMPLES = {"text": TEXT, "tools": TOOLS, "length": LENGTH, "cut_call": CUT_CALL, "custom": PATCH}


# --- asking -----------------------------------------------------------------------------------------------------


def ask(dialect: Dialect, **fields: Any) -> ModelRequest:
    """The smallest request of the dialect, decoded."""
    if isinstance(dialect, Responses):
        tools = [{"type": "custom", "name": "apply_patch"}]
        return dialect.decode("/v1/responses", {}, {"model": "m", "input": "hi", "tools": tools, **fields})
    if isinstance(dialect, Gemini):
        contents = [{"role": "user", "parts": [{"text": "hi"}]}]
        path = "/v1beta/models/m:streamGenerateContent?alt=sse"
        return dialect.decode(path, {}, {"contents": contents, **fields})
    if isinstance(dialect, Chat):
        fields = {"stream_options": {"include_usage": True}, **fields}
    return dialect.decode("/", {}, {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


def stream(dialect: Dialect, request: ModelRequest, turn: AssistantTurn, deltas: Iterable[Delta] = ()) -> bytes:
    """The whole stream of an answer whose fragments are ``deltas``, a keep-alive after each."""
    encoder = dialect.encoder(request, "c1", turn.usage.prompt_tokens)
    out = encoder.start()
    for delta in deltas:
        out += encoder.delta(delta) + encoder.keep_alive()
    return out + b"".join(encoder.finish(turn))


def fragments(turn: AssistantTurn, size: int = 5) -> list[Delta]:
    """The turn as an engine streams it: fragments of ``size`` characters, in order."""
    out = [Delta("reasoning", piece) for piece in cut(turn.reasoning, size)]
    out += [Delta("text", piece) for piece in cut(turn.text, size)]
    for index, call in enumerate(turn.tool_calls):
        out.append(Delta("tool_open", index=index, id=call.id, name=call.name))
        out += [Delta("tool_args", piece, index=index) for piece in cut(call.arguments, size)]
    return out


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


# --- hypothesis -------------------------------------------------------------------------------------------------

texts = st.text(max_size=30) | st.sampled_from(["\n\n", " x \t\n", "data: [DONE]\n\n", "\u2028\x85\r\n", "é☃"])
values = st.recursive(st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=3))
objects = st.dictionaries(texts, values, max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False))
invalid = st.sampled_from(["", '{"a": tru', "[1]", "nonsense", '{"a": NaN}', "{}}", '"x"'])


@st.composite
def turns(draw: st.DrawFn, arguments: st.SearchStrategy[str] = objects | invalid) -> AssistantTurn:
    names = st.sampled_from(["bash", "read", "edit"])
    given = draw(st.lists(st.tuples(names, arguments), max_size=3))
    calls = tuple(ToolCall(f"call_{index}", name, text) for index, (name, text) in enumerate(given))
    stop = draw(st.sampled_from([StopReason.TOOL_CALLS if calls else StopReason.STOP, StopReason.LENGTH]))
    prompt = draw(st.integers(1, 1000))
    usage = Usage(prompt, draw(st.integers(0, 100)), draw(st.integers(0, prompt)))
    return AssistantTurn(draw(texts), calls, stop, usage, draw(texts))


@st.composite
def split_turns(draw: st.DrawFn) -> tuple[AssistantTurn, list[Delta]]:
    """A turn, and any beginning of its fragments at any size: what is missing is for ``finish``."""
    turn = draw(turns())
    whole = fragments(turn, draw(st.integers(1, 40)))
    return turn, whole[: draw(st.integers(0, len(whole)))]


def any_deltas() -> st.SearchStrategy[list[Delta]]:
    """Fragments of any kind in any order, as no engine should send them."""
    kinds = st.sampled_from(["reasoning", "text", "tool_open", "tool_args"])
    ids = st.sampled_from(["call_0", "call_9"])
    return st.lists(st.builds(Delta, kinds, texts, st.integers(0, 2), ids, st.just("bash")), max_size=8)


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


_KEYS = words(
    "type role content text thinking signature tool_use_id tool_calls function name arguments input output tools "
    "id source data url tool_choice system max_tokens top_k n stream_options summary encrypted_content action "
    "namespace call_id image_url input_schema parameters __unparsedToolInput raw format instructions "
    "parts functionCall functionResponse args response thought thoughtSignature inlineData mimeType systemInstruction "
    "functionDeclarations generationConfig properties nullable minItems anyOf"
)
_WORDS = words(
    "assistant user system model tool text image tool_use tool_result thinking function custom namespace message "
    "reasoning function_call function_call_output custom_tool_call local_shell_call additional_tools input_image "
    "base64"
)


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | _WORDS | texts
_TYPED = st.builds(
    lambda kind, fields: {**fields, "type": kind}, _WORDS, st.dictionaries(_KEYS, _LEAVES, max_size=3)
)  # most of what a request is made of: an object that says what it is, with fields missing or of the wrong kind
_JSON = st.recursive(
    _LEAVES | _TYPED,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=15,
)


def bodies(messages: str, said: str = "content") -> st.SearchStrategy[dict[str, Any]]:
    """Request bodies made of the right words in wrong places.

    ``messages`` is the key of the conversation, ``said`` that of what a message says.
    """
    spoken = st.builds(
        lambda fields, role, content: {**fields, "role": role, said: content},
        st.dictionaries(_KEYS, _JSON, max_size=2),
        st.sampled_from(["user", "assistant", "model", "tool", "critic"]),
        st.lists(_TYPED, max_size=2) | _JSON,
    )
    items = st.lists(_TYPED | spoken, min_size=1, max_size=3)
    return st.builds(lambda body, given: {**body, messages: given}, st.dictionaries(_KEYS, _JSON, max_size=4), items)


def decodes(dialect: Dialect, body: dict[str, Any]) -> None:
    """``body`` decodes to messages an engine can be sent, or is refused with a sentence."""
    try:
        request = dialect.decode("/", {}, body)
    except BadRequest as refused:
        assert len(str(refused)) > 20  # noqa: PT017 - either outcome is right, neither may be anything else
        return
    for message in request.messages:
        assert message["role"] in ("system", "developer", "user", "assistant", "tool")
        assert isinstance(message.get("content"), str | list)
        assert all(isinstance(part, dict) for part in message["content"] if isinstance(message["content"], list))
        assert all(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls", []))
    assert all(isinstance(tool["name"], str) and isinstance(tool["parameters"], dict) for tool in request.tools)
    json.dumps([request.messages, request.tools])


def chunked(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """``data`` cut at each of ``cuts`` (taken modulo its length)."""
    marks = sorted({0, len(data), *(each % (len(data) + 1) for each in cuts)})
    return [data[start:end] for start, end in pairwise(marks)]


# --- reading a wire as its official client does -----------------------------------------------------------------


def events(wire: bytes) -> list[tuple[str, Any]]:
    """(event name, JSON data) of a well-formed stream of ours; ``[DONE]`` stays text."""
    assert wire.endswith(b"\n\n")
    out: list[tuple[str, Any]] = []
    for block in wire.decode("ascii").removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        out.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return out


def read_anthropic(wire: bytes) -> dict[str, Any]:
    """The final message; tool input that does not parse is kept as Claude Code keeps it."""
    message: dict[str, Any] = {}
    partial: dict[int, str] = {}
    is_open = False
    for name, event in events(wire):
        assert name == event["type"]
        if name == "message_start":
            assert not message
            message = event["message"]
        elif name == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open = True
        elif name == "content_block_delta":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            _anthropic_delta(message["content"][-1], event["delta"], event["index"], partial)
        elif name == "content_block_stop":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            is_open = False
        elif name == "message_delta":
            assert not is_open
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert name in ("ping", "message_stop")
    for index, text in partial.items():
        message["content"][index]["input"] = claude_input(text)
    assert events(wire)[-1][0] == "message_stop"
    return message


def _anthropic_delta(block: dict[str, Any], delta: dict[str, Any], index: int, partial: dict[int, str]) -> None:
    key = {"thinking_delta": "thinking", "signature_delta": "signature", "text_delta": "text"}.get(delta["type"])
    if key is None:
        assert delta["type"] == "input_json_delta"
        assert block["type"] == "tool_use"
        partial[index] = partial.get(index, "") + delta["partial_json"]
    else:
        assert key in block
        block[key] += delta[key]


def claude_input(text: str) -> dict[str, Any]:
    """What Claude Code 2.1.332 makes of streamed arguments (measured)."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"__unparsedToolInput": {"raw": text, "len": len(text)}}


def read_chat(wire: bytes) -> dict[str, Any]:
    """The final completion, in the shape of a non-streamed one."""
    *chunks, (_, done) = events(wire)
    assert done == "[DONE]"
    message: dict[str, Any] = {"role": "", "content": "", "reasoning_content": "", "tool_calls": []}
    finish, usage = None, None
    for _, chunk in chunks:
        assert usage is None
        usage = chunk.get("usage")
        for choice in chunk["choices"]:
            assert finish is None
            _chat_delta(message, choice["delta"])
            finish = choice["finish_reason"]
    assert finish is not None
    return {"message": message, "finish_reason": finish, "usage": usage}


def _chat_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key in ("role", "content", "reasoning_content"):
        message[key] += delta.get(key, "")
    for call in delta.get("tool_calls", []):
        if call["index"] == len(message["tool_calls"]):
            message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
        else:
            assert call["index"] == len(message["tool_calls"]) - 1
            message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]


def read_responses(wire: bytes) -> dict[str, Any]:
    """The final response; its output must be the items that streamed, and their text the sum of their deltas."""
    read = events(wire)
    assert [event["sequence_number"] for _, event in read] == list(range(len(read)))
    items: list[dict[str, Any]] = []
    text = ""
    adding = False
    for name, event in read:
        assert name == event["type"]
        if name == "response.output_item.added":
            assert not adding
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            adding, text = True, ""
        elif name.endswith(".delta"):
            assert adding
            assert event["output_index"] == len(items)
            text += event["delta"]
        elif name == "response.output_item.done":
            assert adding
            assert event["item"]["type"] == "local_shell_call" or said(event["item"]) == text
            items.append(event["item"])
            adding = False
    final = read[-1][1]["response"]
    assert not adding
    assert final["output"] == items
    assert read[-1][0] == f"response.{final['status']}"
    return final


def said(item: dict[str, Any]) -> str:
    """The one text an output item carries."""
    kind = item["type"]
    if kind == "message":
        return "".join(part["text"] for part in item["content"])
    if kind == "reasoning":
        return "".join(part["text"] for part in item["summary"])
    return item["arguments"] if kind == "function_call" else item["input"]


def read_gemini(wire: bytes) -> dict[str, Any]:
    """The final response, fragments of a text joined as Gemini CLI 0.61.0 joins them: the first one's fields stand."""
    *chunks, (_, final) = events(wire)
    parts: list[dict[str, Any]] = []
    for _, chunk in [*chunks, ("", final)]:
        assert set(chunk) == {"candidates", "usageMetadata", "modelVersion", "responseId"}
        for candidate in chunk["candidates"]:
            assert ("finishReason" in candidate) == (chunk is final)
            assert all("functionCall" not in part for part in candidate["content"]["parts"]) or chunk is final
            for part in candidate["content"]["parts"]:
                _gemini_part(parts, part)
    (candidate,) = final["candidates"]
    return {**final, "candidates": [{**candidate, "content": {"parts": parts, "role": "model"}}]}


def _gemini_part(parts: list[dict[str, Any]], part: dict[str, Any]) -> None:
    last = parts[-1] if parts else {}
    if "text" in part and "text" in last and last.get("thought") == part.get("thought"):
        assert part["text"]
        parts[-1] = {**part, **last, "text": last["text"] + part["text"]}
    else:
        parts.append(part)


# --- golden transcripts -----------------------------------------------------------------------------------------

DIALECTS: dict[str, Callable[[], Dialect]] = {
    "anthropic": Anthropic,
    "chat": Chat,
    "responses": Responses,
    "gemini": Gemini,
}
CASES = [(api, sample) for api in DIALECTS for sample in SAMPLES]


def golden_stream(api: str, sample: str) -> bytes:
    dialect = DIALECTS[api]()
    turn = SAMPLES[sample]
    encoder = dialect.encoder(ask(dialect), "c1", 0)
    parts = [encoder.start(), encoder.keep_alive(), *map(encoder.delta, fragments(turn, 12))]
    return b"".join([*parts, *encoder.finish(turn)])


def golden_reply(api: str, sample: str) -> str:
    dialect = DIALECTS[api]()
    return json.dumps(dialect.reply(ask(dialect), SAMPLES[sample], "c1"), indent=1) + "\n"


def rewrite() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for api, sample in CASES:
        (GOLDEN / f"{api}_{sample}.sse").write_bytes(golden_stream(api, sample))
        (GOLDEN / f"{api}_{sample}.json").write_text(golden_reply(api, sample), encoding="utf-8")


# --- the official clients ---------------------------------------------------------------------------------------


def official_wire(answer: Callable[[dict[str, Any]], bytes]) -> Any:
    """An httpx client whose server is ``answer``: request body in, event stream out, in chunks of 37 bytes."""
    import httpx

    class Wire(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            data = answer(json.loads(request.read()))
            chunks = [data[start : start + 37] for start in range(0, len(data), 37)]
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=iter(chunks))

    return httpx.Client(transport=Wire())


if __name__ == "__main__":
    rewrite()
    sys.exit(0)
