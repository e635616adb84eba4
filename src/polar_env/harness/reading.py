"""What every preset needs to read a harness: its event stream on stdout and the marks in its model requests.

Both are foreign: a stream may be cut anywhere by a kill, and a line may be something the agent itself printed. Nothing
here raises on any input.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard, cast

from polar_env.types import CallKind, HarnessExit, Outcome

TAIL_CHARS = 2000
"""How much of a harness's own words an error keeps: enough for a stack trace's end, little enough for a table."""


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """True for a JSON object."""
    return isinstance(value, dict)


def mapping(value: object) -> dict[str, Any]:
    """``value`` when it is a JSON object, else an empty one."""
    return value if is_object(value) else {}


def items(value: object) -> list[Any]:
    """``value`` when it is a JSON array, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def string(value: object) -> str:
    """``value`` when it is text, else the empty string."""
    return value if isinstance(value, str) else ""


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of ``text``, in order; anything else is passed over."""
    for line in text.split("\n"):
        if line.lstrip().startswith("{"):
            try:
                value: object = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if is_object(value):
                yield value


def last_event(text: str, kind: str) -> dict[str, Any]:
    """The last JSON line of ``text`` whose ``type`` is ``kind``, else an empty object: what the agent printed itself
    comes before it."""
    found: dict[str, Any] = {}
    for event in json_lines(text):
        found = event if event.get("type") == kind else found
    return found


def last_result(text: str, unsaid: str = "") -> tuple[dict[str, Any], str]:
    """(the last ``result`` event, the last words the assistant said before it) of a stream-json run; empty where there
    are none. Words that begin with ``unsaid`` are the CLI's own."""
    result: dict[str, Any] = {}
    said = ""
    for event in json_lines(text):
        if event.get("type") == "result":
            result = event
        elif event.get("type") == "assistant":
            words = flat_text(mapping(event.get("message")).get("content"))
            said = said if unsaid and words.startswith(unsaid) else words or said
    return result, said


def tail(text: str) -> str:
    """The end of ``text``, at most TAIL_CHARS characters."""
    text = text.strip()
    return text if len(text) <= TAIL_CHARS else f"…{text[-TAIL_CHARS:]}"


def died(name: str, exit: HarnessExit) -> str:
    """Why there is nothing to read: exit code and last words."""
    words = tail(exit.stderr) or tail(exit.stdout) or "no output"
    return f"{name} ended with exit code {exit.code} and no final event; last words: {words}"


def timeout(name: str, exit: HarnessExit) -> str:
    """Detail of a run that was killed at its deadline."""
    return f"{name} was killed at its deadline after {exit.seconds:.0f} s"


OVERFLOW_WORDS = (
    "prompt is too long",
    "prompt_too_long",
    "maximum context length",
    "context_length_exceeded",
    "ran out of room in the model's context window",
    "input exceeds the context window",
    "contextwindowexceeded",
    "exceeds the maximum number of tokens allowed",
    "context is too large to send",
)
"""How the wire APIs and the harnesses say that the context is full (design: harnesses §9, "context too long").

They are foreign words without a code beside them; this is the only place where text decides an outcome.
"""


def failure(detail: str) -> Outcome:
    """The outcome of a failure the harness put in words: overflow or any other error of the agent."""
    lowered = detail.lower()
    return Outcome.CONTEXT_OVERFLOW if any(words in lowered for words in OVERFLOW_WORDS) else Outcome.AGENT_ERROR


STEADY_DATE = "2026-01-01"
"""What the engine is shown where a harness's prompt names the day: any day will do, as long as it is one."""
STEADY_DAY = "Thursday, January 1, 2026"
"""The same day in words."""


# --- marks in a request -----------------------------------------------------------------------------------------


def flat_text(content: object) -> str:
    """Text of a message content in any wire API: a string, or parts that carry ``text``."""
    if isinstance(content, str):
        return content
    return "\n".join(string(mapping(part).get("text")) for part in items(content) if mapping(part).get("text"))


def turns(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request: Anthropic and Chat ``messages``, Responses ``input``, Gemini ``contents``."""
    for key in ("messages", "input", "contents"):
        found = [mapping(item) for item in items(body.get(key))]
        if found:
            return found
    return []


def system_text(body: Mapping[str, Any]) -> str:
    """The system prompt, wherever the wire API keeps it."""
    for key in ("system", "instructions"):
        if text := flat_text(body.get(key)):
            return text
    if text := flat_text(mapping(body.get("systemInstruction")).get("parts")):
        return text
    for turn in turns(body)[:1]:
        if turn.get("role") in ("system", "developer"):
            return flat_text(turn.get("content"))
    return ""


def told(body: Mapping[str, Any]) -> str:
    """A name for the sub-agent of a CLI that gives it none: a digest of its system prompt and its first message, which
    stay the same for as long as it lives. Two that were told the same are told apart in ``proxy.threads``."""
    said = [turn for turn in turns(body) if turn.get("role") not in ("system", "developer")]
    first = said[0] if said else {}
    words = f"{system_text(body)}\0{flat_text(first.get('content', first.get('parts')))}"
    return f"told-{hashlib.sha256(words.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def last_text(body: Mapping[str, Any]) -> str:
    """The last text block of the last user message; empty when the conversation ends in anything else."""
    for turn in turns(body)[-1:]:
        if turn.get("role") != "user":
            return ""
        content: object = turn.get("content", turn.get("parts"))
        if isinstance(content, str):
            return content
        return string(mapping(items(content)[-1]).get("text")) if items(content) else ""
    return ""


SYSTEM_MARKS: tuple[tuple[str, CallKind], ...] = (
    ("You are a context summarization assistant", CallKind.COMPACTION),
    ("You are a context summarization agent", CallKind.COMPACTION),
    ("You are the component that summarizes a conversation", CallKind.COMPACTION),
    ("You are a specialized system component responsible for distilling chat history", CallKind.COMPACTION),
    ("You are a title generator", CallKind.SIDE),
    ("You are a general-purpose subagent working for a parent agent", CallKind.SUB_AGENT),
    ("You are a file search specialist agent", CallKind.SUB_AGENT),
    ("You are now acting as the managed memory extraction subagent", CallKind.SIDE),
    ("You are a specialized Task Routing AI", CallKind.SIDE),
    ("You are a diagnostic agent that determines whether", CallKind.SIDE),
)
"""First words of the system prompts that harnesses use for calls beside the main line (design: harnesses §10)."""


def kind_by_system(body: Mapping[str, Any]) -> CallKind:
    """The kind of a call told by the first words of its system prompt; AGENT when none of the marks is there."""
    text = system_text(body).lstrip()
    return next((kind for mark, kind in SYSTEM_MARKS if text.startswith(mark)), CallKind.AGENT)
