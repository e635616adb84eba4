"""Qwen Code, opencode and Gemini CLI as values: launch, marks, endings. What all presets share is in test_harness."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from harness_helpers import INSTRUCTION, a_job, build, ended
from polar_env.harness import HOME, Launch
from polar_env.types import CallKind, Outcome


def lines(*events: object) -> str:
    return "".join(f"{json.dumps(event)}\n" for event in events)


def settings_of(launch: Launch) -> dict[str, Any]:
    ((_, data),) = launch.files.items()
    return json.loads(data)


# --- launch -----------------------------------------------------------------------------------------------------


def test_qwen_code_gets_window_answer_and_turn_limits():
    launch = build("qwen_code").launch(a_job(context_window=60000, max_output_tokens=2000, max_turns=7))
    generation = settings_of(launch)["model"]["generationConfig"]
    assert generation["contextWindowSize"] == 60000
    assert generation["samplingParams"] == {"max_tokens": 2000}, "temperature is the session's policy, not the client's"
    assert launch.argv[launch.argv.index("--max-session-turns") + 1] == "7"
    assert (launch.env["OPENAI_BASE_URL"], launch.env["OPENAI_API_KEY"]) == ("http://127.0.0.1:8080/v1", "the-key")
    assert launch.stdin == INSTRUCTION.encode()


def test_qwen_code_makes_no_calls_of_its_own_and_rewrites_no_history():
    launch = build("qwen_code").launch(a_job())
    settings = settings_of(launch)
    assert settings["memory"] == {"enableManagedAutoMemory": False, "enableManagedAutoDream": False}
    assert set(settings["context"]["clearContextOnIdle"].values()) == {-1}
    assert launch.env["QWEN_USAGE_STATISTICS_ENABLED"] == "false"
    assert settings["privacy"] == {"usageStatisticsEnabled": False}, "it heeds the variable and the setting apart"


def test_opencode_is_configured_by_its_environment_and_reads_the_instruction_unquoted():
    launch = build("opencode").launch(a_job(model="Qwen/Qwen3-8B", context_window=20000, max_output_tokens=4096))
    config = json.loads(launch.env["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["polar"]
    assert provider["options"] == {"baseURL": "http://127.0.0.1:8080/v1", "apiKey": "the-key", "timeout": False}
    assert provider["models"]["Qwen/Qwen3-8B"]["limit"] == {"context": 20000, "output": 4096}
    assert launch.argv[launch.argv.index("--model") + 1] == config["small_model"] == "polar/Qwen/Qwen3-8B"
    assert launch.stdin == INSTRUCTION.encode()
    assert "--title" in launch.argv, "else the model is asked for one first"


def test_opencode_is_told_that_its_own_package_is_there():
    """Else it asks the package registry, whatever it was told of updates and plugins."""
    files = build("opencode").launch(a_job()).files
    lock = json.loads(files[f"{HOME}/.config/opencode/package-lock.json"])
    assert "@opencode-ai/plugin" in lock["packages"][""]["dependencies"]
    assert [path for path in files if path.startswith(f"{HOME}/.config/opencode/node_modules/")]


async def test_opencode_starts_with_ripgrep_where_it_looks_for_it(tmp_path: Path):
    """The start script on a home of this test's own, with a program in place of opencode."""
    launch = build("opencode", extra_args=("an argument",)).launch(a_job())
    at = launch.argv.index("/bin/sh", 1)
    script = launch.argv[at + 2].replace(HOME, str(tmp_path))
    argv = ("/bin/sh", "-c", script, "opencode", "printf", "%s|", *launch.argv[at + 5 :])
    process = await asyncio.create_subprocess_exec(*argv, stdout=-1)
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().startswith("run|--format|json|")
    assert out.decode().endswith("|an argument|")
    assert (tmp_path / ".cache/opencode/bin/rg").readlink() == Path("/opt/harness/ripgrep/bin/rg")


def test_gemini_cli_names_its_model_and_its_way_to_log_in():
    launch = build("gemini_cli").launch(a_job(model="policy", max_turns=7))
    settings = settings_of(launch)
    assert launch.argv[launch.argv.index("--model") + 1] == "policy", "else a router is asked first"
    assert settings["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert settings["model"] == {"maxSessionTurns": 7, "disableLoopDetection": True}
    assert (launch.env["GOOGLE_GEMINI_BASE_URL"], launch.env["GEMINI_API_KEY"]) == ("http://127.0.0.1:8080", "the-key")
    assert launch.stdin == INSTRUCTION.encode()


# --- classify ---------------------------------------------------------------------------------------------------

SUMMARISER = "You are the component that summarizes a conversation when its context is full."
WORKER = "You are a general-purpose subagent working for a parent agent. Complete the task."
EXPLORER = "You are a file search specialist agent. You read only."
MEMORY = "You are now acting as the managed memory extraction subagent for an assistant."
TOOLS = [{"type": "function", "function": {"name": "run_shell_command"}}]


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ("You are Qwen Code, an agent.", CallKind.AGENT),
        (SUMMARISER, CallKind.COMPACTION),
        (WORKER, CallKind.SUB_AGENT),
        (EXPLORER, CallKind.SUB_AGENT),
        (MEMORY, CallKind.SIDE),
    ],
)
def test_qwen_code_calls_are_told_apart_by_their_system_prompt_tools_or_not(system: str, kind: CallKind):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "fix it"}]
    for body in ({"messages": messages}, {"messages": messages, "tools": TOOLS}):
        found, thread = build("qwen_code").classify({}, body)
        assert (found, bool(thread)) == (kind, kind is CallKind.SUB_AGENT)


def qwen_worker(*said: str, system: str = WORKER) -> dict[str, Any]:
    roles = ("user", "assistant", "tool", "user")
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return {"messages": [{"role": "system", "content": system}, *turns], "tools": TOOLS}


def gemini_worker(*said: str, system: str = "You work.") -> dict[str, Any]:
    roles = ("user", "model", "user", "user")
    contents = [{"role": role, "parts": [{"text": text}]} for role, text in zip(roles, said, strict=False)]
    instruction = {"parts": [{"text": system}]}
    return {"systemInstruction": instruction, "contents": contents, "tools": declared("complete_task")}


@pytest.mark.parametrize(("name", "asked"), [("qwen_code", qwen_worker), ("gemini_cli", gemini_worker)])
def test_a_sub_agent_without_a_name_is_named_by_what_it_was_told(name: str, asked: Any):
    harness = build(name)
    kind, thread = harness.classify({}, asked("look"))
    assert kind is CallKind.SUB_AGENT
    assert harness.classify({}, asked("look", "I look.", "a file", "now?")) == (kind, thread)
    others = (asked("look again"), asked("look", system=f"{WORKER} Be quick."))
    assert len({thread, *(harness.classify({}, other)[1] for other in others)}) == 3


def test_a_summary_that_a_sub_agent_of_qwen_code_asks_for_is_its_own():
    harness = build("qwen_code")
    body = qwen_worker("look", "I look.", "a file", SUMMARISER)
    assert harness.classify({}, body) == (CallKind.COMPACTION, harness.classify({}, qwen_worker("look"))[1])


def test_qwen_code_asks_for_a_summary_behind_the_whole_history_too():
    asked = [{"role": "system", "content": "You are Qwen Code, an agent."}, {"role": "user", "content": "fix it"}]
    body = {"messages": [*asked, {"role": "user", "content": SUMMARISER}], "tools": TOOLS}
    assert build("qwen_code").classify({}, body) == (CallKind.COMPACTION, "")
    quoted = {"messages": [*asked, {"role": "user", "content": f"The prompt says: {SUMMARISER}"}], "tools": TOOLS}
    assert build("qwen_code").classify({}, quoted) == (CallKind.AGENT, "")


CHILD = {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}
COMPACTOR = "You are a context summarization agent. Read the transcript."


@pytest.mark.parametrize(
    ("headers", "system", "tools", "expected"),
    [
        ({"x-session-id": "ses_1"}, "You are opencode.", TOOLS, (CallKind.AGENT, "")),
        (CHILD, "You are opencode.", TOOLS, (CallKind.SUB_AGENT, "ses_2")),
        (CHILD, COMPACTOR, [], (CallKind.COMPACTION, "ses_2")),
        ({"x-session-id": "ses_1"}, COMPACTOR, [], (CallKind.COMPACTION, "")),
        ({"x-session-id": "ses_1"}, COMPACTOR, TOOLS, (CallKind.AGENT, "")),
        ({"x-session-id": "ses_1"}, "You are a title generator. Output a title.", [], (CallKind.SIDE, "")),
    ],
)
def test_opencode_calls_are_told_apart(headers: dict[str, str], system: str, tools: list[Any], expected: Any):
    body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "…"}], "tools": tools}
    assert build("opencode").classify(headers, body) == expected


def declared(*names: str) -> list[dict[str, Any]]:
    return [{"functionDeclarations": [{"name": name} for name in names]}]


@pytest.mark.parametrize(
    ("system", "tools", "kind"),
    [
        ("You are Gemini CLI.", declared("run_shell_command"), CallKind.AGENT),
        ("You are Gemini CLI.", declared("run_shell_command", "complete_task"), CallKind.SUB_AGENT),
        (
            "You are a specialized system component responsible for distilling chat history into a snapshot.",
            [],
            CallKind.COMPACTION,
        ),
        ("\n  You are a specialized Task Routing AI. Choose.", [], CallKind.SIDE),
        ("You are a diagnostic agent that determines whether it loops.", [], CallKind.SIDE),
    ],
)
def test_gemini_cli_calls_are_told_apart(system: str, tools: list[Any], kind: CallKind):
    body = {"systemInstruction": {"parts": [{"text": system}]}, "contents": [], "tools": tools}
    found, thread = build("gemini_cli").classify({}, body)
    assert (found, bool(thread)) == (kind, kind is CallKind.SUB_AGENT)


# --- read -------------------------------------------------------------------------------------------------------


def qwen_said(text: str) -> dict[str, Any]:
    return {"type": "assistant", "message": {"content": [{"type": "text", "text": text}]}}


def qwen_failed(message: str) -> dict[str, Any]:
    return {"type": "result", "subtype": "error_during_execution", "is_error": True, "error": {"message": message}}


QWEN_DONE = {"type": "result", "subtype": "success", "is_error": False, "result": "All done."}
TOO_LARGE = "[API Error: Context is too large to send safely after automatic compression. Estimated prompt tokens: 9]"


@pytest.mark.parametrize(
    ("events", "code", "outcome", "detail", "said"),
    [
        ([qwen_said("Hm."), QWEN_DONE], 0, Outcome.COMPLETED, "", "All done."),
        ([qwen_said("Hm."), qwen_failed("[API Error: 500]")], 1, Outcome.AGENT_ERROR, "[API Error: 500]", "Hm."),
        ([qwen_said("Hm."), qwen_failed(TOO_LARGE)], 1, Outcome.CONTEXT_OVERFLOW, TOO_LARGE, "Hm."),
        ([qwen_said("Hm."), qwen_said(TOO_LARGE), qwen_failed("x")], 1, Outcome.AGENT_ERROR, "x", "Hm."),
        ([qwen_said("Hm.")], 53, Outcome.TURN_LIMIT, "max session turns", "Hm."),
        ([{"type": "result", "subtype": "error_other"}], 1, Outcome.AGENT_ERROR, "error_other", ""),
    ],
)
def test_qwen_code_ends_as_its_result_event_says_or_at_the_turn_limit_its_exit_code(
    events: list[Any], code: int, outcome: Outcome, detail: str, said: str
):
    report = build("qwen_code").read(ended(lines(*events), code=code))
    assert (report.outcome, report.detail, report.final_text) == (outcome, detail, said)


def step(reason: str) -> dict[str, Any]:
    return {"type": "step_finish", "part": {"type": "step-finish", "reason": reason}}


def opencode_said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "part": {"type": "text", "text": text, **more}}


def opencode_failed(message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"name": "APIError", "data": {"message": message, "statusCode": 400}}}


START = {"type": "step_start", "part": {"type": "step-start"}}
FULL = "This model's maximum context length is 9 tokens."


@pytest.mark.parametrize(
    ("events", "code", "outcome", "detail"),
    [
        ([START, step("tool-calls"), START, opencode_said("All done."), step("stop")], 0, Outcome.COMPLETED, ""),
        ([START, opencode_said("All done."), step("length")], 0, Outcome.COMPLETED, ""),
        ([START, opencode_said("All done."), opencode_failed("boom")], 1, Outcome.AGENT_ERROR, "APIError: boom"),
        ([opencode_said("All done."), opencode_failed(FULL)], 1, Outcome.CONTEXT_OVERFLOW, f"APIError: {FULL}"),
        ([opencode_failed(FULL), START, opencode_said("All done."), step("stop")], 1, Outcome.COMPLETED, ""),
    ],
)
def test_opencode_ends_as_its_last_step_or_a_later_error_says(
    events: list[Any], code: int, outcome: Outcome, detail: str
):
    report = build("opencode").read(ended(lines(*events), code=code))
    assert (report.outcome, report.detail, report.final_text) == (outcome, detail, "All done.")


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([START, step("tool-calls")], 0),
        ([START, step("stop"), START], 1),
        ([START, step("stop")], 137),
        ([START, step("stop")], None),
        ([], 0),
    ],
)
def test_opencode_that_stops_between_steps_or_is_killed_has_not_completed(events: list[Any], code: int | None):
    report = build("opencode").read(ended(lines(*events), "out of memory", code))
    assert report.outcome is Outcome.AGENT_ERROR
    assert report.detail == f"opencode ended with exit code {code} and no final event; last words: out of memory"


def test_what_opencode_says_to_itself_after_a_compaction_is_not_the_model_s_last_word():
    stream = lines(opencode_said("All done."), opencode_said("Continue if you can.", synthetic=True), step("stop"))
    assert build("opencode").read(ended(stream)).final_text == "All done."


def gemini_said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, "delta": True}


def gemini_failed(kind: str, message: str) -> dict[str, Any]:
    return {"type": "result", "status": "error", "error": {"type": kind, "message": message}}


GEMINI_DONE = {"type": "result", "status": "success", "stats": {}}
TOOL = {"type": "tool_use", "tool_name": "run_shell_command"}
COUNT = "[API Error: The input token count (9) exceeds the maximum number of tokens allowed (8).]"


@pytest.mark.parametrize(
    ("result", "code", "outcome", "detail"),
    [
        (GEMINI_DONE, 0, Outcome.COMPLETED, ""),
        (gemini_failed("FatalTurnLimitedError", "Reached max."), 53, Outcome.TURN_LIMIT, "Reached max."),
        (gemini_failed("unknown", COUNT), 144, Outcome.CONTEXT_OVERFLOW, COUNT),
        (gemini_failed("unknown", "[API Error: boom]"), 1, Outcome.AGENT_ERROR, "[API Error: boom]"),
        (gemini_failed("FatalInputError", ""), 42, Outcome.AGENT_ERROR, "FatalInputError"),
    ],
)
def test_gemini_cli_ends_as_its_result_event_says(result: dict[str, Any], code: int, outcome: Outcome, detail: str):
    asked = {"type": "message", "role": "user", "content": INSTRUCTION}
    stream = lines(
        asked, gemini_said("I loo"), gemini_said("k."), TOOL, gemini_said("All "), gemini_said("done."), result
    )
    report = build("gemini_cli").read(ended(stream, code=code))
    assert (report.outcome, report.detail, report.final_text) == (outcome, detail, "All done.")


def test_gemini_cli_exits_with_0_after_empty_answers_and_names_the_reason_in_an_event_of_its_own():
    trouble = {"type": "error", "severity": "error", "message": "The model returned an empty response."}
    report = build("gemini_cli").read(ended(lines(trouble, {"type": "result", "status": "error"}), code=0))
    assert (report.outcome, report.detail) == (Outcome.AGENT_ERROR, "The model returned an empty response.")
    assert build("gemini_cli").read(ended(lines(trouble, GEMINI_DONE))).outcome is Outcome.COMPLETED
    assert build("gemini_cli").read(ended(lines(trouble), "Killed", 137)).detail.endswith("last words: Killed")


def test_gemini_cli_that_calls_a_tool_last_still_has_its_last_words():
    stream = lines(gemini_said("I look."), TOOL, gemini_failed("FatalTurnLimitedError", ""))
    report = build("gemini_cli").read(ended(stream, code=53))
    assert (report.outcome, report.detail, report.final_text) == (
        Outcome.TURN_LIMIT,
        "FatalTurnLimitedError",
        "I look.",
    )
