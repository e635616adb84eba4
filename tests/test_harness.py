"""Harness presets as values: what they launch, how they tell calls apart, and how they read an event stream."""

import asyncio
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_helpers import INSTRUCTION, a_job, build, ended
from polar_env.errors import ConfigError, HarnessError
from polar_env.harness import HARNESSES, HOME, Harness, Launch
from polar_env.harness.mini_swe_agent import LAUNCHER, LAUNCHER_FILE
from polar_env.harness.quiet import without
from polar_env.harness.reading import last_event
from polar_env.types import CallKind, Outcome

CATALOG = {
    "models": [
        {"slug": "lite", "use_responses_lite": True, "context_window": 1},
        {"slug": "code", "use_responses_lite": False, "tool_mode": "code_mode_only"},
        {"slug": "plain", "use_responses_lite": False, "context_window": 272000, "upgrade": {"model": "lite"}},
    ]
}


async def ready(name: str, store: Path, **config: Any) -> Harness:
    """The harness, installed as far as ``launch`` needs it: Codex asks the CLI in the store for its catalog."""
    if name == "shell":
        config.setdefault("command", ("my-agent", "{instruction_file}"))
    harness = build(name, **config)
    if name == "codex":
        await codex_in(store).install(store)
        await harness.install(store)
    return harness


def codex_in(store: Path, printed: object = CATALOG) -> Harness:
    """Put a program that prints a catalog where the installed Codex would be."""
    program = store / "harness" / "codex-0.169.0" / "bin" / "codex"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\ncat <<'END'\na warning\n{json.dumps(printed)}\nEND\n", encoding="utf-8")
    program.chmod(0o755)
    return build("codex")


def everything_said(launch: Launch) -> bytes:
    """All that a launch carries except the environment."""
    return b"\0".join([*(part.encode() for part in launch.argv), *launch.files.values(), launch.stdin or b""])


# --- launch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARNESSES)
async def test_the_whole_group_gets_one_launch_but_for_the_key(name: str, tmp_path: Path):
    harness = await ready(name, tmp_path)
    one, other = harness.launch(a_job(key="key-1")), harness.launch(a_job(key="key-2"))
    assert one != other
    assert (one.argv, one.stdin) == (other.argv, other.stdin)

    def without_key(launch: Launch, key: str) -> str:
        files = {path: data.decode() for path, data in launch.files.items()}
        return json.dumps([dict(launch.env), files], sort_keys=True).replace(key, "KEY")

    assert without_key(one, "key-1") == without_key(other, "key-2")


@pytest.mark.parametrize("name", HARNESSES)
async def test_neither_key_nor_instruction_is_in_the_argv(name: str, tmp_path: Path):
    """Every process of the sandbox can read an argv, and an argv has a length limit and its own quoting."""
    launch = (await ready(name, tmp_path)).launch(a_job(instruction="--fix it\n", key="the-key"))
    assert not [part for part in launch.argv if "the-key" in part or "--fix it" in part]
    assert b"--fix it" in everything_said(launch)


@pytest.mark.parametrize("name", HARNESSES)
async def test_home_and_every_file_are_at_fixed_paths_below_home(name: str, tmp_path: Path):
    launch = (await ready(name, tmp_path)).launch(a_job())
    assert launch.env["HOME"] == HOME
    assert all(path.startswith(f"{HOME}/") for path in launch.files)
    assert "PATH" not in launch.env, "the agent's own commands must find the task's programs, not the harness's"


@pytest.mark.parametrize("name", HARNESSES)
async def test_extra_arguments_reach_the_command(name: str, tmp_path: Path):
    launch = (await ready(name, tmp_path, extra_args=("--extra", "1"))).launch(a_job())
    at = launch.argv.index("--extra")
    assert launch.argv[at : at + 2] == ("--extra", "1")


def test_claude_code_is_told_window_answer_and_turn_limits():
    launch = build("claude_code").launch(a_job(context_window=40000, max_output_tokens=2000, max_turns=7))
    assert launch.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert launch.env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2000"
    assert launch.argv[launch.argv.index("--max-turns") + 1] == "7"
    assert launch.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080", "it adds /v1 itself"
    assert launch.stdin == INSTRUCTION.encode()


async def test_codex_config_is_toml_that_points_at_the_proxy_and_at_the_catalog(tmp_path: Path):
    launch = (await ready("codex", tmp_path)).launch(a_job(model='odd"name', max_output_tokens=4096))
    config = tomllib.loads(launch.files[f"{HOME}/.codex/config.toml"].decode())
    provider = config["model_providers"][config["model_provider"]]
    assert (config["model"], provider["base_url"]) == ('odd"name', "http://127.0.0.1:8080/v1")
    assert launch.env[provider["env_key"]] == "the-key"
    assert config["model_catalog_json"] in launch.files
    assert config["model_auto_compact_token_limit"] == 65536 - 2 * 4096


async def test_codex_catalog_is_the_plain_entry_of_the_installed_cli_under_our_name(tmp_path: Path):
    launch = (await ready("codex", tmp_path)).launch(a_job(model="policy", context_window=30000))
    (entry,) = json.loads(launch.files[f"{HOME}/.codex/models.json"])["models"]
    assert (entry["slug"], entry["context_window"], entry["max_context_window"]) == ("policy", 30000, 30000)
    assert (entry["use_responses_lite"], entry["supports_search_tool"], entry["upgrade"]) == (False, False, None)


def test_codex_cannot_be_launched_before_it_is_installed():
    with pytest.raises(HarnessError, match=r"call install\(\) before launch"):
        build("codex").launch(a_job())


@pytest.mark.parametrize(
    ("printed", "reason"),
    [({"no": "models"}, "printed no catalog"), ({"models": [{"use_responses_lite": True}]}, "no model entry")],
)
async def test_a_codex_without_a_usable_catalog_is_refused_and_nothing_is_kept(
    tmp_path: Path, printed: object, reason: str
):
    with pytest.raises(HarnessError, match=reason):
        await codex_in(tmp_path, printed).install(tmp_path)
    assert not (tmp_path / "harness" / "codex-0.169.0-catalog").exists()


def test_pi_gets_its_provider_and_window_by_file():
    launch = build("pi").launch(a_job(model="Qwen/Qwen3-8B", context_window=20000, max_output_tokens=4096))
    provider = json.loads(launch.files[f"{HOME}/.pi/agent/models.json"])["providers"]["polar"]
    assert (provider["baseUrl"], provider["api"], provider["apiKey"]) == (
        "http://127.0.0.1:8080/v1",
        "openai-completions",
        "the-key",
    )
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"], model["maxTokens"]) == ("Qwen/Qwen3-8B", 20000, 4096)
    compaction = json.loads(launch.files[f"{HOME}/.pi/agent/settings.json"])["compaction"]
    assert compaction["reserveTokens"] + compaction["keepRecentTokens"] < 20000


@settings(max_examples=60)
@given(st.text())
def test_mini_swe_agent_reads_back_any_instruction_from_its_yaml(instruction: str):
    launch = build("mini_swe_agent").launch(a_job(instruction=instruction, max_turns=9))
    (config,) = [yaml.safe_load(data) for path, data in launch.files.items() if path.endswith(".yaml")]
    assert config["run"]["task"] == instruction
    assert config["agent"] == {"step_limit": 9, "cost_limit": 0}
    assert config["model"]["model_name"] == "openai/Qwen/Qwen3-8B"


def test_shell_replaces_the_instruction_file_and_names_the_model_for_every_client():
    launch = build("shell", command=("agent", "--task={instruction_file}"), extra_args=("{instruction_file}",)).launch(
        a_job()
    )
    ((path, data),) = launch.files.items()
    assert launch.argv == ("agent", f"--task={path}", path)
    assert data == INSTRUCTION.encode()
    assert launch.env["POLAR_BASE_URL"] == launch.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert launch.env["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/v1"
    assert {launch.env[f"{who}_API_KEY"] for who in ("POLAR", "OPENAI", "ANTHROPIC")} == {"the-key"}


def test_shell_without_a_command_is_refused_with_an_example():
    with pytest.raises(ConfigError, match=r"harness\.command"):
        build("shell")


# --- classify ---------------------------------------------------------------------------------------------------


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}], **more}


COMPACT = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Summarise."
RESULT = {"type": "tool_result", "content": COMPACT}
AGENT_HEADER = {"x-claude-code-agent-id": "a1"}


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {"messages": [user("fix it")]}, (CallKind.AGENT, "")),
        ({}, {"messages": [user("fix it"), {"role": "user", "content": COMPACT}]}, (CallKind.COMPACTION, "")),
        (AGENT_HEADER, {"messages": [user("look")]}, (CallKind.SUB_AGENT, "a1")),
        (AGENT_HEADER, {"messages": [user(COMPACT)]}, (CallKind.COMPACTION, "a1")),
        ({}, {"messages": [user(COMPACT), user("and then?")]}, (CallKind.AGENT, "")),
        ({}, {"messages": [{"role": "assistant", "content": COMPACT}]}, (CallKind.AGENT, "")),
        ({}, {"messages": [{"role": "user", "content": [RESULT]}]}, (CallKind.AGENT, "")),
        ({}, {}, (CallKind.AGENT, "")),
    ],
)  # fmt: skip
def test_claude_code_calls_are_told_apart(headers: dict[str, str], body: dict[str, Any], expected: tuple[Any, str]):
    assert build("claude_code").classify(headers, body) == expected


def turn_metadata(kind: str) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps({"request_kind": kind, "window_number": 0}), "thread-id": "t1"}


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        (turn_metadata("turn"), {}, (CallKind.AGENT, "")),
        (turn_metadata("compaction"), {}, (CallKind.COMPACTION, "")),
        ({**turn_metadata("turn"), "x-openai-subagent": "collab_spawn"}, {}, (CallKind.SUB_AGENT, "t1")),
        ({**turn_metadata("turn"), "x-codex-parent-thread-id": "t0"}, {}, (CallKind.SUB_AGENT, "t1")),
        ({**turn_metadata("compaction"), "x-openai-subagent": "collab_spawn"}, {}, (CallKind.COMPACTION, "t1")),
        ({**turn_metadata("turn"), "x-openai-subagent": "compact"}, {}, (CallKind.COMPACTION, "t1")),
        (turn_metadata("turn"), {"generate": False}, (CallKind.SIDE, "")),
        ({"x-codex-turn-metadata": "{not json"}, {}, (CallKind.AGENT, "")),
    ],
)
def test_codex_calls_are_told_apart(headers: dict[str, str], body: dict[str, Any], expected: tuple[Any, str]):
    assert build("codex").classify(headers, body) == expected


SUMMARISER = "You are a context summarization assistant. Read the conversation."


def test_pi_compaction_is_a_call_without_tools_under_its_own_system_prompt():
    harness = build("pi")
    body = {"messages": [{"role": "system", "content": SUMMARISER}, user("…")]}
    assert harness.classify({}, body) == (CallKind.COMPACTION, "")
    assert harness.classify({}, {**body, "tools": [{"type": "function"}]}) == (CallKind.AGENT, "")
    assert harness.classify({}, {"messages": [user(SUMMARISER)]}) == (CallKind.AGENT, "")


def test_every_call_of_mini_swe_agent_is_the_agent_s():
    assert build("mini_swe_agent").classify({}, {"messages": [user(COMPACT)]}) == (CallKind.AGENT, "")


TITLE, WORKER = "You are a title generator. …", "You are a general-purpose subagent working for a parent agent"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"system": SUMMARISER}, CallKind.COMPACTION),
        ({"system": [{"type": "text", "text": TITLE}]}, CallKind.SIDE),
        ({"instructions": WORKER}, CallKind.SUB_AGENT),
        ({"systemInstruction": {"parts": [{"text": TITLE}]}}, CallKind.SIDE),
        ({"input": [{"role": "developer", "content": [{"type": "input_text", "text": TITLE}]}]}, CallKind.SIDE),
        ({"contents": [{"role": "user", "parts": [{"text": TITLE}]}]}, CallKind.AGENT),
        ({"system": "You are an agent."}, CallKind.AGENT),
    ],
)
def test_shell_knows_the_side_calls_of_other_harnesses_in_every_wire_api(body: dict[str, Any], kind: CallKind):
    assert build("shell", command=("x",)).classify({}, body) == (kind, "")


def test_shell_takes_a_parent_session_for_the_mark_of_a_sub_agent():
    headers = {"x-parent-session-id": "ses_1", "x-session-id": "ses_2"}
    assert build("shell", command=("x",)).classify(headers, {}) == (CallKind.SUB_AGENT, "ses_2")


# --- read -------------------------------------------------------------------------------------------------------


def lines(*events: object) -> str:
    return "".join(f"{event if isinstance(event, str) else json.dumps(event)}\n" for event in events)


def said(text: str) -> dict[str, Any]:
    return {"type": "assistant", "message": {"content": [{"type": "text", "text": text}]}}


CLAUDE_OK = {"type": "result", "subtype": "success", "is_error": False, "result": "All done."}


MAX_TURNS = {"type": "result", "subtype": "error_max_turns", "is_error": True, "num_turns": 9}
TOO_LONG = {**CLAUDE_OK, "is_error": True, "terminal_reason": "prompt_too_long", "result": ""}
OVERFLOW = {**CLAUDE_OK, "is_error": True, "result": "Prompt is too long"}


@pytest.mark.parametrize(
    ("result", "outcome", "detail"),
    [
        (CLAUDE_OK, Outcome.COMPLETED, ""),
        ({**CLAUDE_OK, "is_error": True, "result": "API Error: 500"}, Outcome.AGENT_ERROR, "success API Error: 500"),
        (MAX_TURNS, Outcome.TURN_LIMIT, "max turns after 9"),
        (TOO_LONG, Outcome.CONTEXT_OVERFLOW, "prompt_too_long"),
        (OVERFLOW, Outcome.CONTEXT_OVERFLOW, "success Prompt is too long"),
        ({"type": "result", "subtype": "error_during_execution"}, Outcome.AGENT_ERROR, "error_during_execution"),
    ],
)  # fmt: skip
def test_claude_code_ends_as_its_result_event_says(result: dict[str, Any], outcome: Outcome, detail: str):
    report = build("claude_code").read(ended(lines({"type": "system"}, said("Working."), result)))
    assert (report.outcome, report.detail) == (outcome, detail)


def test_claude_code_with_two_results_ended_as_the_last_one_says():
    """Sub-agents that finish later make a second result."""
    first = {**CLAUDE_OK, "is_error": True, "result": "API Error"}
    report = build("claude_code").read(ended(lines(first, CLAUDE_OK)))
    assert (report.outcome, report.final_text) == (Outcome.COMPLETED, "All done.")


CODEX_SAID = {"type": "item.completed", "item": {"type": "agent_message", "text": "All done."}}
CODEX_RETRY = {"type": "error", "message": "Reconnecting... 1/5"}


@pytest.mark.parametrize(
    ("events", "outcome", "detail"),
    [
        ([CODEX_RETRY, CODEX_SAID, {"type": "turn.completed", "usage": {}}], Outcome.COMPLETED, ""),
        ([CODEX_RETRY, {"type": "turn.failed", "error": {"message": "boom"}}], Outcome.AGENT_ERROR, "boom"),
        (
            [{"type": "turn.failed", "error": {"message": "Codex ran out of room in the model's context window."}}],
            Outcome.CONTEXT_OVERFLOW,
            "Codex ran out of room in the model's context window.",
        ),
        ([CODEX_SAID, CODEX_RETRY], Outcome.AGENT_ERROR, "Reconnecting... 1/5"),
    ],
)
def test_codex_ends_as_its_last_turn_event_says(events: list[Any], outcome: Outcome, detail: str):
    report = build("codex").read(ended(lines(*events)))
    assert (report.outcome, report.detail) == (outcome, detail)
    assert report.final_text == ("All done." if CODEX_SAID in events else "")


def pi_message(text: str, stop: str = "stop", **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"type": "message_end", "message": {"role": "assistant", "content": content, "stopReason": stop, **more}}


PI_END = {"type": "agent_end", "messages": []}
PI_TOOL = {"type": "message_end", "message": {"role": "toolResult", "content": []}}


@pytest.mark.parametrize(
    ("events", "outcome", "detail"),
    [
        ([pi_message("Hm.", "toolUse"), PI_TOOL, pi_message("All done."), PI_END], Outcome.COMPLETED, ""),
        ([pi_message("", "error", errorMessage="500: boom"), PI_END], Outcome.AGENT_ERROR, "500: boom"),
        ([pi_message("", "error", errorMessage="503"), pi_message("All done."), PI_END], Outcome.COMPLETED, ""),
        ([pi_message("", "aborted"), PI_END], Outcome.AGENT_ERROR, "the model call failed"),
        (
            [pi_message("", "error", errorMessage="400: This model's maximum context length is 9 tokens."), PI_END],
            Outcome.CONTEXT_OVERFLOW,
            "400: This model's maximum context length is 9 tokens.",
        ),
    ],
)
def test_pi_ends_as_its_last_assistant_message_says_whatever_the_exit_code(
    events: list[Any], outcome: Outcome, detail: str
):
    report = build("pi").read(ended(lines(*events), code=0))
    assert (report.outcome, report.detail) == (outcome, detail)


def mini_exit(status: str, error: str = "", text: str = "All done.") -> dict[str, Any]:
    return {"type": "polar.mini_swe_agent.exit", "exit_status": status, "error": error, "final_text": text}


@pytest.mark.parametrize(
    ("event", "outcome", "detail"),
    [
        (mini_exit("Submitted"), Outcome.COMPLETED, ""),
        (mini_exit("LimitsExceeded"), Outcome.TURN_LIMIT, "LimitsExceeded"),
        (mini_exit("RepeatedFormatError"), Outcome.AGENT_ERROR, "RepeatedFormatError"),
        (mini_exit("APIError", "boom"), Outcome.AGENT_ERROR, "APIError: boom"),
        (mini_exit("ContextWindowExceededError"), Outcome.CONTEXT_OVERFLOW, "ContextWindowExceededError"),
    ],
)  # fmt: skip
def test_mini_swe_agent_ends_as_its_trajectory_says(event: dict[str, Any], outcome: Outcome, detail: str):
    forged = mini_exit("Submitted", text="printed by the agent's own command")
    report = build("mini_swe_agent").read(ended(lines("step 1", forged, event)))
    assert (report.outcome, report.detail, report.final_text) == (outcome, detail, "All done.")


@pytest.mark.parametrize(
    ("exit", "outcome", "detail"),
    [
        (ended("the answer\n"), Outcome.COMPLETED, ""),
        (ended("", "Traceback: boom\n", 3), Outcome.AGENT_ERROR, "exit code 3; last words: Traceback: boom"),
        (ended("", "", 1), Outcome.AGENT_ERROR, "exit code 1; last words: no output"),
    ],
)
def test_shell_ends_as_its_exit_code_says(exit: Any, outcome: Outcome, detail: str):
    report = build("shell", command=("x",)).read(exit)
    assert (report.outcome, report.detail) == (outcome, detail)


STREAMS = {
    "claude_code": lines(said("So far."), CLAUDE_OK),
    "codex": lines({**CODEX_SAID, "item": {"type": "agent_message", "text": "So far."}}, {"type": "turn.completed"}),
    "pi": lines(pi_message("So far."), PI_END),
    "mini_swe_agent": lines("working", mini_exit("Submitted")),
    "qwen_code": lines(said("So far."), CLAUDE_OK),
    "opencode": lines({"type": "step_start"}, {"type": "step_finish", "part": {"reason": "stop"}}),
    "gemini_cli": lines(
        {"type": "message", "role": "assistant", "content": "Hm."}, {"type": "result", "status": "success"}
    ),
}


def reader(name: str) -> Harness:
    return build(name, command=("x",)) if name == "shell" else build(name)


@pytest.mark.parametrize("name", HARNESSES)
def test_a_run_killed_at_its_deadline_is_a_timeout_whatever_it_printed(name: str):
    report = reader(name).read(ended(STREAMS.get(name, "So far."), code=None, timed_out=True))
    assert report.outcome is Outcome.AGENT_TIMEOUT
    assert report.detail == f"{name} was killed at its deadline after 12 s"


@pytest.mark.parametrize("name", STREAMS)
def test_a_cli_that_dies_before_its_first_event_reports_its_last_words(name: str):
    report = reader(name).read(ended("", "node: cannot open shared object\n" + "x" * 5000, 127))
    assert report.outcome is Outcome.AGENT_ERROR
    assert "exit code 127" in report.detail
    assert len(report.detail) < 2200


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data())
def test_a_stream_cut_anywhere_is_never_a_completion_it_did_not_report(name: str, data: st.DataObject):
    stream = STREAMS[name].rstrip("\n")
    cut = data.draw(st.integers(0, len(stream) - 1))
    assert reader(name).read(ended(stream[:cut], code=None)).outcome is Outcome.AGENT_ERROR
    assert reader(name).read(ended(stream)).outcome is Outcome.COMPLETED


TYPES = st.sampled_from(
    [
        "result",
        "assistant",
        "item.completed",
        "turn.failed",
        "error",
        "message_end",
        "polar.mini_swe_agent.exit",
        "text",
        "step_start",
        "step_finish",
        "message",
        "tool_use",
    ]
)
KEYS = st.sampled_from(
    [
        "type",
        "message",
        "item",
        "error",
        "role",
        "content",
        "subtype",
        "result",
        "exit_status",
        "text",
        "part",
        "reason",
        "data",
        "name",
        "status",
        "functionDeclarations",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | TYPES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=6,
)
EVENT = st.builds(lambda kind, rest: {**rest, "type": kind}, TYPES, st.dictionaries(KEYS, JSON, max_size=5))


def every_reader() -> list[Harness]:
    return [reader(name) for name in HARNESSES]


def test_of_events_of_one_kind_the_last_counts_and_what_an_agent_prints_of_another_does_not():
    printed = 'words\n{"type": "end", "n": 1}\n{"type": "other"}\n{"type": "end", "n": 2}\n{"type": "end", "n"'
    assert last_event(printed, "end") == {"type": "end", "n": 2}
    assert last_event(printed, "begin") == {}


@settings(max_examples=60)
@given(
    events=st.lists(EVENT | JSON | st.text(max_size=8), max_size=5),
    stderr=st.text(max_size=8),
    code=st.none() | st.integers(-64, 255),
)
def test_reading_never_fails_on_what_a_harness_may_print(events: list[Any], stderr: str, code: int | None):
    for report in [harness.read(ended(lines(*events), stderr, code)) for harness in every_reader()]:
        assert isinstance(report.final_text, str)
        assert report.detail or report.outcome is Outcome.COMPLETED


BODY_KEYS = st.sampled_from(["messages", "input", "contents", "system", "tools"])


@settings(max_examples=60)
@given(body=st.dictionaries(BODY_KEYS, JSON, max_size=3), meta=st.text(max_size=8))
def test_classifying_never_fails_on_what_a_harness_may_send(body: dict[str, Any], meta: str):
    for harness in every_reader():
        kind, thread = harness.classify({"x-codex-turn-metadata": meta}, body)
        assert isinstance(kind, CallKind)
        assert thread == ""


def test_a_line_of_absurd_depth_is_passed_over():
    deep = '{"a":' * 100_000
    assert reader("claude_code").read(ended(lines(deep, CLAUDE_OK))).outcome is Outcome.COMPLETED


# --- dropping chatter -------------------------------------------------------------------------------------------


async def test_chatter_is_dropped_and_input_errors_and_exit_code_are_the_program_s():
    """A printf stands for the harness: one event per token, then the ending."""
    program = """read line; printf '{"a":1}\\n{"b":"%s"}\\n{"a":2}\\n' "$line"; echo oops >&2; exit 7"""
    argv = without(('^{"a":', '^{"c":'), ("sh", "-c", program))
    process = await asyncio.create_subprocess_exec(*argv, stdin=-1, stdout=-1, stderr=-1)
    out, err = await process.communicate(b"from stdin\n")
    assert (out, err, process.returncode) == (b'{"b":"from stdin"}\n', b"oops\n", 7)


@pytest.mark.parametrize(
    ("name", "line", "kept"),
    [
        ("pi", '{"type":"message_update","usage":{}}', False),
        ("pi", '{"type":"tool_execution_update","toolCallId":"1"}', False),
        ("pi", '{"type":"agent_end","messages":[]}', True),
        ("pi", '{"type":"message_end","message":{"content":[{"type":"message_update"}]}}', True),
        ("codex", '{"type":"item.completed","item":{"id":"item_1","type":"command_execution"}}', False),
        ("codex", '{"type":"item.started","item":{"id":"item_1","type":"command_execution"}}', False),
        ("codex", '{"type":"item.completed","item":{"id":"item_1","type":"agent_message"}}', True),
        ("qwen_code", '{"type":"user","message":{"role":"user"}}', False),
        ("qwen_code", '{"type":"result","result":"{\\"type\\":\\"user\\""}', True),
        ("opencode", '{"type":"tool_use","part":{}}', False),
        ("opencode", '{"type":"step_finish","part":{"reason":"stop"}}', True),
        ("gemini_cli", '{"type":"tool_result","output":"x"}', False),
        ("gemini_cli", '{"type":"tool_use","tool_name":"x"}', True),
    ],
)
async def test_what_decides_the_ending_is_never_taken_for_chatter(tmp_path: Path, name: str, line: str, kept: bool):
    launch = (await ready(name, tmp_path)).launch(a_job())
    wrapper = launch.argv[: launch.argv.index("harness") + 1]
    process = await asyncio.create_subprocess_exec(*wrapper, "echo", line, stdout=-1)
    out, _ = await process.communicate()
    assert out.decode() == (f"{line}\n" if kept else "")


# --- mini-swe-agent's launcher ----------------------------------------------------------------------------------


async def launched(tmp_path: Path, program: str) -> tuple[int, str]:
    """Run the launcher as the sandbox would, with ``program`` in place of the package's command."""
    package = tmp_path / "site" / "minisweagent" / "run"
    package.mkdir(parents=True)
    (package / "mini.py").write_text(program, encoding="utf-8")
    paths = {"/opt/harness/mini_swe_agent": str(tmp_path), str(Path(LAUNCHER_FILE).parent): str(tmp_path)}
    source = LAUNCHER
    for fixed, here in paths.items():
        source = source.replace(fixed, here)
    script = tmp_path / "launch.py"
    script.write_text(source, encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(script), stdout=-1, stderr=-1, env={"LD_LIBRARY_PATH": "/opt/x"}
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


TRAJECTORY = {
    "messages": [
        {"role": "assistant", "content": "Look."},
        {"role": "exit", "content": "x", "extra": {"exit_status": "LimitsExceeded", "submission": ""}},
    ]
}


async def test_the_launcher_reports_the_trajectory_s_ending_and_hides_its_own_variables(tmp_path: Path):
    code, out = await launched(
        tmp_path,
        "import os, pathlib\n"
        "def app():\n"
        "    print('LD', os.environ.get('LD_LIBRARY_PATH'))\n"
        f"    pathlib.Path({str(tmp_path / 'polar.traj.json')!r}).write_text({json.dumps(TRAJECTORY)!r})\n",
    )
    report = build("mini_swe_agent").read(ended(out, code=code))
    assert (code, report.outcome, report.final_text) == (0, Outcome.TURN_LIMIT, "Look.")
    assert "LD None" in out


async def test_the_launcher_keeps_the_failure_of_a_program_that_never_wrote_a_trajectory(tmp_path: Path):
    code, out = await launched(tmp_path, "def app():\n    raise SystemExit(3)\n")
    report = build("mini_swe_agent").read(ended(out, code=code))
    assert (code, report.outcome) == (3, Outcome.AGENT_ERROR)
