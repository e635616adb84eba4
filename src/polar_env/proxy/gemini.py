"""Google generateContent, streamGenerateContent and countTokens, as Gemini CLI, Pi and opencode speak it.

Source: ai.google.dev, "Generating content", "Function calling", "Thought signatures"; echoes as measured (design:
harnesses, sections 8 and 12). Field names are read in camelCase and, as Google's own JSON reader does, in snake_case.

This API carries arguments as objects, never as text, and clients send them back re-serialised; Gemini CLI puts the
tool's name before the call's id (``bash__call_a``), Pi and opencode drop the id, Gemini CLI drops thoughts. All of them
return ``thoughtSignature``: ours (see ``gemini_stream``) restores the exact arguments, the id and the reasoning.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qs

from polar_env.messages import ChatMessage, ChatToolCall, ToolSpec
from polar_env.proxy import render
from polar_env.proxy.gemini_stream import GeminiEncoder, restore, unsign, whole
from polar_env.proxy.render import Notes, Part, array, obj, text_of
from polar_env.types import AssistantTurn, ModelRequest, Sampling, WireApi

_ROUTE = re.compile(r"(?:/v\d\w*)?/(?:models|tunedModels)/(?P<model>.+):(?P<method>\w+)/?")
_METHODS = {"generateContent": "generate", "streamGenerateContent": "generate", "countTokens": "count_tokens"}
_KNOWN = render.words(
    "model contents systemInstruction system_instruction tools toolConfig tool_config"
    " generationConfig generation_config safetySettings safety_settings labels"
)
_SETTINGS = render.words("temperature topP topK maxOutputTokens candidateCount")
_MODES = {"ANY": "required", "NONE": "none"}
_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_RESULT_KEYS = ("output", "error", "result", "content")
"""Where clients put a tool's text: Gemini CLI, Pi ``output`` or ``error``; SDKs ``result``; the AI SDK ``content``."""


class Gemini:
    """The generateContent API as a Dialect."""

    wire = WireApi.GEMINI

    def matches(self, method: str, path: str) -> str | None:
        """The operation of a route, whatever its query, model name and API version; ``None`` for a foreign one."""
        method, path = method.upper(), path.partition("?")[0]
        if method == "GET":
            return "models" if path.rstrip("/") in ("/v1beta/models", "/v1alpha/models") else None
        route = _ROUTE.fullmatch(path) if method == "POST" else None
        return _METHODS.get(route["method"]) if route else None

    def decode(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> ModelRequest:
        """The request in Chat form. Model, operation and ``alt`` (``sse``, or one JSON array) are in ``path``.

        Raises BadRequest when there are no contents, for several candidates, and for a cache we do not keep.
        """
        if isinstance(body, Mapping):  # countTokens may hold the whole request it asks about
            body = obj(_get(body, "generateContentRequest")) or body
        raw = render.conversation(body, "contents")
        settings = obj(_get(body, "generationConfig"))
        _refuse_what_changes_meaning(body, settings)
        route, model, stream, sse = path.partition("?"), text_of(body.get("model")).removeprefix("models/"), False, True
        if found := _ROUTE.fullmatch(route[0]):
            model, stream = found["model"], found["method"] == "streamGenerateContent"
            sse = parse_qs(route[2]).get("alt") == ["sse"]
        history = _History(_get(body, "systemInstruction"))
        for role, parts in _turns(raw, history.notes):
            history.add(role, parts)
        tools = tuple(_tools(array(body.get("tools")), history.notes))
        _note_settings(settings, history.notes)
        return ModelRequest(
            wire=self.wire,
            model=model,
            messages=tuple(history.messages),
            tools=tools,
            tool_choice=_tool_choice(body),
            stream=stream,
            asked=_asked(settings),
            ignored=history.notes.unknown(body, _KNOWN),
            sse=sse,
        )

    def reply(self, request: ModelRequest, turn: AssistantTurn, call_id: str) -> dict[str, Any]:
        """A whole response: one candidate with thought, text and functionCall parts."""
        return whole(request, turn, call_id)

    def encoder(self, request: ModelRequest, call_id: str, prompt_tokens: int) -> GeminiEncoder:
        """``prompt_tokens`` (0: not known yet) is what keep-alives say of usage; the last chunk has the whole."""
        return GeminiEncoder(request, call_id, prompt_tokens)

    def error(self, status: int, message: str) -> dict[str, Any]:
        """An error body; the canonical code follows the HTTP status (google.rpc.Code)."""
        name = _STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        return {"error": {"code": status, "message": message, "status": name}}

    def overflow(self, message: str) -> dict[str, Any]:
        """ "The input token count (N) exceeds …": on these words Pi and opencode compact; Gemini CLI never does."""
        sizes = render.context_sizes(message)
        if sizes is None:
            return self.error(400, f"The input token count exceeds the maximum number of tokens allowed: {message}")
        words = f"The input token count ({sizes[0]}) exceeds the maximum number of tokens allowed ({sizes[1]})."
        return self.error(400, words)

    def models(self, names: Iterable[str]) -> dict[str, Any]:
        methods = ["generateContent", "countTokens"]
        both = {"version": "", "supportedGenerationMethods": methods}
        return {"models": [{"name": f"models/{name}", "displayName": name, **both} for name in names]}

    def token_count(self, count: int) -> dict[str, Any]:
        return {"totalTokens": count}


@cache
def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def _get(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    return fields.get(_snake(name)) if value is None else value


# --- decode: settings -------------------------------------------------------------------------------------------


def _refuse_what_changes_meaning(body: Mapping[str, Any], settings: dict[str, Any]) -> None:
    candidates = render.number(_get(settings, "candidateCount"))
    if candidates is not None and candidates > 1:
        render.refuse(f"candidateCount={candidates:g} asks for several answers to one request; send 1, once per answer")
    if _get(body, "cachedContent") is not None:
        render.refuse("cachedContent: this endpoint keeps no contents; send the whole conversation in 'contents'")


def _asked(settings: dict[str, Any]) -> Sampling:
    names = {"temperature": "temperature", "top_p": "topP", "top_k": "topK", "limit": "maxOutputTokens"}
    return render.sampling({ours: _get(settings, theirs) for ours, theirs in names.items()}, "limit")


def _note_settings(settings: dict[str, Any], notes: Notes) -> None:
    known = _SETTINGS | {_snake(name) for name in _SETTINGS}
    for name, value in settings.items():
        if name not in known and value is not None:
            notes.ignore(f"generationConfig:{name}")


def _tool_choice(body: Mapping[str, Any]) -> str:
    config = obj(_get(obj(_get(body, "toolConfig")), "functionCallingConfig"))
    choice = _MODES.get(text_of(config.get("mode")).upper(), "auto")
    allowed = array(_get(config, "allowedFunctionNames"))
    return text_of(allowed[0]) or choice if choice == "required" and len(allowed) == 1 else choice


# --- decode: history --------------------------------------------------------------------------------------------


def _turns(contents: list[dict[str, Any]], notes: Notes) -> list[tuple[str, list[Part]]]:
    """(role, parts) in order. Adjacent model contents are one turn: SDK chats keep each chunk of a stream as one."""
    turns: list[tuple[str, list[Part]]] = []
    for content in contents:
        role = text_of(content.get("role"))
        if role not in ("", "user", "model", "function"):
            notes.ignore(f"role:{role}")
        role = "model" if role == "model" else "user"
        parts = [obj(part) for part in array(content.get("parts"))]
        if role == "model" and turns and turns[-1][0] == "model":
            turns[-1][1].extend(parts)
        else:
            turns.append((role, parts))
    return turns


@dataclass(frozen=True, slots=True)
class _Pending:
    """A call whose result has not come yet: its id as the client has it, and as the model had it."""

    name: str
    theirs: str
    ours: str


class _History:
    """Contents in, Chat messages out."""

    def __init__(self, system: object) -> None:
        self.notes = Notes()
        self.messages: list[ChatMessage] = []
        self._pending: list[_Pending] = []
        parts = [{"text": system}] if isinstance(system, str) else array(obj(system).get("parts"))
        if content := self._content([obj(part) for part in parts]):
            self.messages.append({"role": "system", "content": content})

    def add(self, role: str, parts: list[Part]) -> None:
        if role == "model":
            self.messages.append(self._said(parts))
        else:
            self._heard(parts)

    def _said(self, parts: list[Part]) -> ChatMessage:
        """One assistant turn. Sealed reasoning is what we sent; thoughts that say something else are an edit."""
        sealed: list[str] = []
        shown: list[str] = []
        text: list[str] = []
        calls: list[ChatToolCall] = []
        self._pending = []
        for part in parts:
            ours = unsign(_get(part, "thoughtSignature"))
            sealed.append(text_of(ours.get("reasoning")))
            if isinstance(_get(part, "functionCall"), dict):
                calls.append(self._call(obj(_get(part, "functionCall")), ours, len(calls)))
            elif isinstance(part.get("text"), str):
                (shown if part.get("thought") is True else text).append(part["text"])
            elif not ours:
                self._ignore(part)
        reasoning = "".join(shown)
        if whole := "".join(sealed):
            reasoning = render.unseal(render.seal(whole), reasoning)
        return render.assistant_message("".join(text), calls, reasoning)

    def _call(self, call: dict[str, Any], ours: dict[str, Any], index: int) -> ChatToolCall:
        """The call with the id and arguments the model had. Without either id: one that depends on its place only."""
        name, theirs = text_of(call.get("name")), text_of(call.get("id"))
        place = f"call_{len(self.messages)}_{index}"
        call_id = text_of(ours.get("id")) or theirs.removeprefix(f"{name}__") or place
        self._pending.append(_Pending(name, theirs, call_id))
        return render.chat_call(call_id, name, restore(ours, call.get("args")))

    def _heard(self, parts: list[Part]) -> None:
        """Tool results in the order received, then what the user added."""
        results = [obj(_get(part, "functionResponse")) for part in parts]
        rest = [part for part, result in zip(parts, results, strict=True) if not result]
        results = [result for result in results if result]
        self.messages += [self._result(result) for result in results]
        content = self._content(rest)
        if content or not results:
            self.messages.append({"role": "user", "content": content})

    def _result(self, result: dict[str, Any]) -> ChatMessage:
        content = self._content([*_result_parts(result), *map(obj, array(result.get("parts")))])
        return {"role": "tool", "tool_call_id": self._answered(result), "content": content}

    def _answered(self, result: dict[str, Any]) -> str:
        """The id of the call this is the result of: by id, else by name, else by order, among those still open."""
        name, theirs = text_of(result.get("name")), text_of(result.get("id"))
        by_id = [call for call in self._pending if theirs and theirs in (call.theirs, call.ours)]
        by_name = [call for call in self._pending if call.name == name and not (theirs and call.theirs)]
        by_order = [] if theirs else self._pending
        for call in (by_id or by_name or by_order)[:1]:
            self._pending.remove(call)
            return call.ours
        return theirs.removeprefix(f"{name}__") or f"call_{len(self.messages)}"

    def _content(self, parts: list[Part]) -> str | list[Part]:
        read = [self._part(part) for part in parts]
        return render.content_of([part for part in read if part is not None])

    def _part(self, part: Part) -> Part | None:
        if isinstance(part.get("text"), str):
            return render.text_part(part["text"])
        for name, source in (("inlineData", "data"), ("fileData", "fileUri")):
            blob = obj(_get(part, name))
            kind, where = text_of(_get(blob, "mimeType")), text_of(_get(blob, source))
            if where and kind.startswith("image/"):
                return render.image_part(where if name == "fileData" else f"data:{kind};base64,{where}")
        self._ignore(part)
        return None

    def _ignore(self, part: Part) -> None:
        names = [name for name, value in part.items() if value is not None]
        self.notes.ignore(f"parts:{names[0] if names else ''}")


def _result_parts(result: dict[str, Any]) -> list[Part]:
    """A tool's text where the response is nothing but that, else the response as JSON.

    Chat has no error flag; tools say in words that they failed.
    """
    response = obj(result.get("response"))
    fields = {key: value for key, value in response.items() if key != "name" or value != result.get("name")}
    texts = [fields[key] for key in _RESULT_KEYS if isinstance(fields.get(key), str)]
    if len(texts) == len(fields) == 1:
        return [{"text": texts[0]}]
    return [{"text": render.dump(response)}] if response else []


# --- decode: tools ----------------------------------------------------------------------------------------------


def _tools(raw: list[Any], notes: Notes) -> Iterable[ToolSpec]:
    """Functions. What Google would run itself (search, code execution) cannot run here and is counted."""
    for tool in map(obj, raw):
        for name, value in tool.items():
            if name not in ("functionDeclarations", "function_declarations") and value is not None:
                notes.ignore(f"tools:{name}")
        for declaration in map(obj, array(_get(tool, "functionDeclarations"))):
            if isinstance(declaration.get("name"), str):
                yield _spec(declaration)
            else:
                notes.ignore("tools:")


def _spec(declaration: dict[str, Any]) -> ToolSpec:
    parameters = obj(_get(declaration, "parametersJsonSchema")) or _schema(obj(declaration.get("parameters")))
    spec: ToolSpec = {
        "name": declaration["name"],
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    if isinstance(declaration.get("description"), str):
        spec["description"] = declaration["description"]
    return spec


_COUNTS = render.words("minItems maxItems minLength maxLength minProperties maxProperties")
"""Schema fields that are int64, which Google's JSON writes as text."""


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Google's OpenAPI subset as JSON schema: types in lower case, ``nullable`` as a type, counts as numbers."""
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: _schema(obj(inner)) for name, inner in obj(value).items()}
        elif key in ("items", "additionalProperties") and (inner := obj(value)):
            out[key] = _schema(inner)
        elif key in ("anyOf", "prefixItems"):
            out[key] = [_schema(obj(inner)) for inner in array(value)]
        elif key in _COUNTS and isinstance(value, str) and value.isdecimal():
            out[key] = int(value)
        elif key not in ("nullable", "propertyOrdering", "type"):
            out[key] = value
        elif key == "type" and isinstance(value, str):
            out[key] = [value.lower(), "null"] if schema.get("nullable") is True else value.lower()
        elif key == "type":
            out[key] = value
    return out
