"""The scripted engine: real tokens of a real template, scripts that really edit a real repository."""

import asyncio
import json
import re
import shlex
import subprocess
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import BASH, CACHE, PATIENT, ask, play, user
from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import Session, scripts, tokenizer
from polar_env.engine.scripted import ScriptedEngine, declared_log_probs, history, spell
from polar_env.errors import EngineError, EngineOverflow
from polar_env.messages import ChatMessage, ToolSpec
from polar_env.types import Sampling, StopReason

SOURCE = "".join(f"# line {i}\n" for i in range(12)) + "def area(w, h):\n    return w + h\n" + "# tail\n" * 12
OTHER = "LIMIT = 1\n"

GOLD = """\
diff --git a/shape.py b/shape.py
--- a/shape.py
+++ b/shape.py
@@ -10,7 +10,8 @@
 # line 9
 # line 10
 # line 11
 def area(w, h):
-    return w + h
+    # width times height
+    return w * h
 # tail
 # tail
diff --git a/notes/new.txt b/notes/new.txt
new file mode 100644
--- /dev/null
+++ b/notes/new.txt
@@ -0,0 +1,2 @@
+first
+second
diff --git a/limit.py b/limit.py
--- a/limit.py
+++ b/limit.py
@@ -1 +1 @@
-LIMIT = 1
+LIMIT = 2
"""


def shell(name: str, properties: dict, *required: str) -> ToolSpec:
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(required)}}


TEXT = {"type": "string"}
CLAUDE = (
    shell("Bash", {"command": TEXT, "timeout": {"type": "number"}, "description": TEXT}, "command"),
    shell("Edit", {"file_path": TEXT, "old_string": TEXT, "new_string": TEXT}, "file_path", "old_string", "new_string"),
    shell("Read", {"file_path": TEXT}, "file_path"),
    shell("Write", {"file_path": TEXT, "content": TEXT}, "file_path", "content"),
)
CODEX = (shell("exec_command", {"cmd": TEXT, "workdir": TEXT}, "cmd"), shell("apply_patch", {"input": TEXT}, "input"))
PI = (
    shell("read", {"path": TEXT}, "path"),
    BASH,
    shell("edit", {"path": TEXT, "edits": {"type": "array"}}, "path", "edits"),
    shell("write", {"path": TEXT, "content": TEXT}, "path", "content"),
)


@pytest.fixture(scope="session")
def tokenizer_dir() -> Path:
    return tokenizer.fetch(CACHE)


@pytest.fixture
def engine(tokenizer_dir) -> ScriptedEngine:
    return ScriptedEngine(EngineConfig(kind="scripted", tokenizer=tokenizer_dir))


@pytest.fixture
def repo(tmp_path) -> Path:
    (tmp_path / "shape.py").write_text(SOURCE)
    (tmp_path / "limit.py").write_text(OTHER)
    for command in ("git init -q", "git add -A", "git -c user.name=t -c user.email=t@t commit -qm base"):
        subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    return tmp_path


def changed(repo: Path) -> set[str]:
    found = subprocess.run(
        ["git", "status", "--porcelain", "-uall"], cwd=repo, check=True, capture_output=True, text=True
    )
    return {line[3:] for line in found.stdout.splitlines()}


def area(repo: Path) -> int:
    """What the repository's function answers for 3 by 4, asked of a real Python."""
    done = subprocess.run(
        ["python3", "-c", "import shape; print(shape.area(3, 4))"], cwd=repo, capture_output=True, check=True
    )
    return int(done.stdout)


def run_tool(name: str, arguments: dict, repo: Path) -> str:
    """What the harnesses' tools do, done to a real directory."""
    path = Path(arguments.get("file_path") or arguments.get("path") or "")
    match name.lower():
        case "read":
            return (repo / path).read_text()
        case "write":
            (repo / path).parent.mkdir(parents=True, exist_ok=True)
            (repo / path).write_text(arguments["content"])
            return "written"
        case "edit":
            pairs = arguments.get("edits") or [{"oldText": arguments["old_string"], "newText": arguments["new_string"]}]
            text = (repo / path).read_text()
            assert [text.count(pair["oldText"]) for pair in pairs] == [1] * len(pairs)
            for pair in pairs:
                text = text.replace(pair["oldText"], pair["newText"])
            (repo / path).write_text(text)
            return "edited"
    command = arguments.get("command") or arguments["cmd"]
    argv = command if isinstance(command, list) else ["bash", "-c", command]
    done = subprocess.run(argv, cwd=repo, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def converse(engine, session: Session, repo: Path, tools=(BASH,), limit=12):
    """A harness in a few lines: ask, run the tools, send the results back, until the model stops calling tools."""
    request, replies = ask(user("Fix the bug."), tools=tools), []
    while len(replies) < limit:
        _, reply = await play(engine, request, session)
        replies.append(reply)
        if not reply.turn.tool_calls:
            break
        results = tuple(run_tool(call.name, json.loads(call.arguments), repo) for call in reply.turn.tool_calls)
        request = replace(request, messages=(*request.messages, *history(reply.turn, results)))
    return replies


def is_one_chain(replies) -> bool:
    seen = [reply.prompt_ids + reply.sampled_ids for reply in replies]
    return all(after.prompt_ids[: len(before)] == before for before, after in zip(seen, replies[1:], strict=False))


# --- what the scripts do to a repository ------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [CLAUDE, CODEX, PI, (BASH,)], ids=["claude", "codex", "pi", "mini"])
async def test_fix_applies_the_whole_gold_patch_through_the_shell_tool_on_offer(engine, repo, tools):
    replies = await converse(engine, Session("s", script="fix", gold_patch=GOLD), repo, tools)
    assert changed(repo) == {"shape.py", "limit.py", "notes/new.txt"}
    assert area(repo) == 12
    assert [reply.turn.stop for reply in replies] == [StopReason.TOOL_CALLS] * 3 + [StopReason.STOP]
    assert is_one_chain(replies)


def test_a_patch_applies_from_below_the_top_in_words_that_no_guard_takes_for_a_substitution(repo):
    """Gemini CLI 0.61.0 refuses ``$(`` and backticks outside quotes, and knows no heredocs (measured)."""
    patch = "--- /dev/null\n+++ b/odd.md\n@@ -0,0 +1 @@\n+it's `x` $(y) <(z) \\n %s \"\n"
    command = scripts.apply_command(patch)
    unquoted = re.sub(r"'[^']*'|\\.", "", command)
    assert re.findall(r"[$<>]\(|`", unquoted) == []
    (repo / "deep" / "er").mkdir(parents=True)
    for shell in ("sh", "bash"):
        subprocess.run([shell, "-c", command], cwd=repo / "deep" / "er", check=True)
        assert (repo / "odd.md").read_text() == "it's `x` $(y) <(z) \\n %s \"\n"
        (repo / "odd.md").unlink()


async def test_give_up_looks_and_edits_nothing(engine, repo):
    replies = await converse(engine, Session("s", script="give_up", gold_patch=GOLD), repo)
    assert changed(repo) == set()
    assert (len(replies), replies[-1].turn.tool_calls) == (2, ())


async def test_half_edits_the_right_file_and_changes_nothing_it_does(engine, repo):
    before = area(repo)
    await converse(engine, Session("s", script="half", gold_patch=GOLD), repo)
    assert changed(repo) == {"shape.py"}
    assert area(repo) == before
    added = [line for line in (repo / "shape.py").read_text().splitlines() if line not in SOURCE.splitlines()]
    assert [line.strip()[0] for line in added] == ["#"]


async def test_partial_leaves_out_the_last_part_of_the_fix(engine, repo):
    await converse(engine, Session("s", script="partial", gold_patch=GOLD), repo)
    assert changed(repo) == {"shape.py", "notes/new.txt"}


@pytest.mark.parametrize("tools", [CLAUDE, PI], ids=["claude", "pi"])
async def test_edit_tool_applies_the_gold_patch_with_the_harness_s_own_tools(engine, repo, tools):
    replies = await converse(engine, Session("s", script="edit_tool", gold_patch=GOLD), repo, tools)
    used = {call.name.lower() for reply in replies for call in reply.turn.tool_calls}
    assert used == {"bash", "read", "edit", "write"}
    assert changed(repo) == {"shape.py", "limit.py", "notes/new.txt"}
    assert area(repo) == 12


async def test_edit_tool_falls_back_to_the_shell_where_there_is_none(engine, repo):
    await converse(engine, Session("s", script="edit_tool", gold_patch=GOLD), repo)
    assert area(repo) == 12


async def test_edit_tool_writes_codex_its_own_patch_form(engine):
    request = ask(user("Fix it."), *turn_with("Bash", "/repo"), tools=CODEX)
    _, reply = await play(engine, request, Session("s", script="edit_tool", gold_patch=GOLD))
    assert reply.turn.tool_calls[0].name == "apply_patch"
    lines = json.loads(reply.turn.tool_calls[0].arguments)["input"].splitlines()
    assert (lines[0], lines[-1]) == ("*** Begin Patch", "*** End Patch")
    assert [line for line in lines if line.startswith("*** ")][1:-1] == [
        "*** Update File: shape.py",
        "*** Add File: notes/new.txt",
        "*** Update File: limit.py",
    ]
    assert "-    return w + h" in lines
    assert lines[lines.index("*** Add File: notes/new.txt") + 1] == "+first"


def turn_with(tool: str, result: str) -> tuple[ChatMessage, ...]:
    """An assistant turn that called ``tool``, and its result."""
    call = {"id": "c0", "type": "function", "function": {"name": tool, "arguments": "{}"}}
    said: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    return said, {"role": "tool", "tool_call_id": "c0", "content": result}


async def test_think_reasons_aloud_and_stays_one_chain_until_a_new_user_message(engine, repo):
    session = Session("s", script="think", gold_patch=GOLD)
    replies = await converse(engine, session, repo)
    assert all(reply.turn.reasoning for reply in replies)
    assert is_one_chain(replies)
    asked = ask(user("Fix the bug."))
    _, first = await play(engine, asked, session)
    told = replace(asked, messages=(*asked.messages, *history(first.turn, ("ok",)), *new_instruction()))
    _, second = await play(engine, told, session)
    assert not is_one_chain([first, second])


def new_instruction() -> tuple[ChatMessage, ...]:
    return {"role": "assistant", "content": "Done."}, user("Now add a test.")


# --- endings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["fix", "give_up", "half"])
async def test_mini_swe_agent_is_ended_by_its_submit_command(engine, repo, script):
    replies = await converse(engine, Session("s", "mini_swe_agent", script=script, gold_patch=GOLD), repo, limit=4)
    commands = [json.loads(call.arguments)["command"] for reply in replies for call in reply.turn.tool_calls]
    assert "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in commands
    assert commands.index("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") == (1 if script == "give_up" else 3)


async def test_a_prompt_that_names_the_submit_command_is_believed(engine):
    told = user("Finish with `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`.")
    _, reply = await play(engine, ask(told, *turn_with("bash", "")), Session("s", script="give_up"))
    assert json.loads(reply.turn.tool_calls[0].arguments) == {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}


async def test_silent_says_nothing_but_its_end_token(engine):
    deltas, reply = await play(engine, ask(), Session("s", script="silent"))
    assert (deltas, reply.turn.text, reply.turn.tool_calls) == ([], "", ())
    assert len(reply.sampled_ids) == 1
    assert judge("c", reply) == ()


async def test_loop_never_ends_and_never_says_the_same_thing(engine, repo):
    replies = await converse(engine, Session("s", script="loop"), repo, limit=6)
    assert len({reply.turn.tool_calls[0].arguments for reply in replies}) == 6
    assert len({reply.turn.tool_calls[0].id for reply in replies}) == 6


async def test_long_stops_on_length_without_an_end_token(engine, tokenizer_dir):
    _, reply = await play(engine, ask(), Session("s", script="long"))
    assert (reply.turn.stop, reply.finish) == (StopReason.LENGTH, "length")
    assert tokenizer.load(tokenizer_dir).decode(reply.sampled_ids) == reply.turn.text
    assert judge("c", reply) == ()


async def test_the_output_cap_cuts_a_turn_and_its_half_written_call_is_no_call(engine):
    session = Session("s", script="fix", gold_patch=GOLD)
    _, whole = await play(engine, ask(), session)
    _, cut = await play(engine, ask(), session, Sampling(max_tokens=15))
    assert cut.sampled_ids == whole.sampled_ids[:15]
    assert (cut.turn.stop, cut.turn.tool_calls) == (StopReason.LENGTH, ())
    assert cut.turn.text == whole.turn.text
    assert cut.turn.usage.completion_tokens == 15


async def test_a_cap_inside_the_text_cuts_the_text(engine):
    session = Session("s", script="fix", gold_patch=GOLD)
    _, cut = await play(engine, ask(), session, Sampling(max_tokens=3))
    assert cut.turn.text == "I will look"


# --- tokens -----------------------------------------------------------------------------------------------------


async def test_every_reply_keeps_the_capture_contract(engine, repo):
    for reply in await converse(engine, Session("s", script="fix", gold_patch=GOLD), repo):
        assert judge("c", reply) == ()
        assert reply.policy_version == "scripted"
        assert len(reply.prompt_ids) == reply.turn.usage.prompt_tokens


async def test_the_prompt_is_the_request_in_the_template_and_the_sample_is_the_turn(engine, tokenizer_dir):
    system: ChatMessage = {"role": "developer", "content": "You repair code."}
    _, reply = await play(engine, ask(system, user("Fix the bug.")), Session("s", script="fix", gold_patch=GOLD))
    words = tokenizer.load(tokenizer_dir)
    prompt = words.decode(reply.prompt_ids)
    assert prompt.startswith("<|im_start|>system\nYou repair code.\n\n# Tools")
    assert prompt.endswith("<|im_start|>user\nFix the bug.<|im_end|>\n<|im_start|>assistant\n")
    call = reply.turn.tool_calls[0]
    assert words.decode(reply.sampled_ids) == (
        f'{reply.turn.text}\n<tool_call>\n{{"name": "bash", "arguments": {call.arguments}}}\n</tool_call><|im_end|>'
    )


async def test_deltas_joined_are_the_turn_in_several_pieces(engine):
    deltas, reply = await play(engine, ask(), Session("s", script="think", gold_patch=GOLD))
    kinds = [delta.kind for delta in deltas]
    assert kinds == sorted(kinds, key=["reasoning", "text", "tool_open", "tool_args"].index)
    joined = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in set(kinds)}
    assert joined["reasoning"] == reply.turn.reasoning
    assert joined["text"] == reply.turn.text
    assert joined["tool_args"] == reply.turn.tool_calls[0].arguments
    opened = next(delta for delta in deltas if delta.kind == "tool_open")
    assert (opened.id, opened.name) == (reply.turn.tool_calls[0].id, "bash")
    assert kinds.count("text") > 1


async def test_a_retried_request_gets_the_same_reply_and_the_group_starts_alike(engine):
    request = ask()
    _, one = await play(engine, request, Session("one", script="fix", gold_patch=GOLD))
    _, two = await play(engine, request, Session("two", script="fix", gold_patch=GOLD))
    _, half = await play(engine, request, Session("three", script="half", gold_patch=GOLD))
    assert one == two
    assert half.prompt_ids == one.prompt_ids


async def test_arguments_come_back_re_serialised_and_still_render_to_the_sampled_ids(engine):
    """Claude Code and Pi parse arguments and write them again, spaced and escaped their own way."""
    session = Session("s", script="fix", gold_patch=GOLD.replace("first", "première ☃"))
    asked = ask(user("Fix."), *turn_with("bash", "x"))
    _, reply = await play(engine, asked, session)
    call = reply.turn.tool_calls[0]
    compact = json.dumps(json.loads(call.arguments), separators=(",", ":"), ensure_ascii=True)
    assert compact != call.arguments
    echoed = history(replace(reply.turn, tool_calls=(replace(call, arguments=compact),)), ("ok",))
    _, after = await play(engine, replace(asked, messages=(*asked.messages, *echoed)), session)
    assert is_one_chain([reply, after])


async def test_a_prompt_that_fills_the_window_is_an_overflow(tokenizer_dir):
    engine = ScriptedEngine(EngineConfig(kind="scripted", tokenizer=tokenizer_dir, max_model_len=50))
    with pytest.raises(EngineOverflow, match="maximum context length is 50 tokens"):
        await play(engine, ask(user("word " * 60), tools=()))


async def test_count_tokens_is_the_length_of_the_prompt(engine):
    request = ask()
    _, reply = await play(engine, request, Session("s", script="silent"))
    assert await engine.count_tokens(request) == len(reply.prompt_ids)


async def test_check_says_that_the_log_probs_are_declared(engine):
    facts = await engine.check()
    assert (facts.real_tensors, facts.policy_version, facts.max_model_len) == (False, "scripted", 131072)
    assert "declared" in facts.notes[0]
    await engine.aclose()


async def test_check_refuses_a_template_that_does_not_repeat_what_was_sampled(tokenizer_dir, tmp_path):
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<tool_call>\\n", "<call>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    engine = ScriptedEngine(EngineConfig(kind="scripted", tokenizer=tmp_path))
    with pytest.raises(EngineError, match=r"use a Qwen2\.5 or Qwen3 tokenizer"):
        await engine.check()


async def test_check_refuses_an_unknown_script_before_any_rollout(tokenizer_dir):
    engine = ScriptedEngine(EngineConfig(kind="scripted", tokenizer=tokenizer_dir, scripts=("fix", "fxi")))
    with pytest.raises(EngineError, match=r"unknown script 'fxi'.*give_up"):
        await engine.check()


@PATIENT
@given(st.lists(st.integers(0, 151_935), max_size=50))
def test_declared_log_probs_are_finite_negative_and_the_same_every_time(ids):
    tokens = array("i", ids)
    values = declared_log_probs(tokens)
    assert len(values) == len(ids)
    assert all(-2.0 <= value < 0 for value in values)
    assert declared_log_probs(tokens) == values


# --- choosing a turn --------------------------------------------------------------------------------------------


def test_steps_are_counted_from_the_last_instruction():
    tool = turn_with("bash", "ok")
    reminder = user("<system-reminder>be good</system-reminder>")
    assert scripts.step_of(ask().messages) == 0
    assert scripts.step_of((user("a"), *tool)) == 1
    assert scripts.step_of((user("a"), *tool, reminder, *tool)) == 2
    assert scripts.step_of((user("a"), {"role": "assistant", "content": "text"}, *tool)) == 1
    assert scripts.step_of((user("a"), *tool, {"role": "system", "content": "s"}, *tool)) == 2
    assert scripts.step_of((user("a"), *tool, *new_instruction())) == 0


async def test_a_request_without_tools_is_answered_in_words(engine):
    _, reply = await play(engine, ask(user("Give this a title."), tools=()), Session("s", script="fix"))
    assert (reply.turn.tool_calls, reply.turn.stop) == ((), StopReason.STOP)
    assert reply.turn.text


@pytest.mark.parametrize(
    "request_",
    [
        ask(user("Write a summary of the conversation."), tools=()),
        ask(user("CRITICAL: Respond with TEXT ONLY. Make a compact summary.")),
        ask(user("Summarise."), tool_choice="none"),
    ],
)
async def test_a_request_for_a_summary_gets_one_even_where_tools_are_offered(engine, request_):
    _, reply = await play(engine, request_, Session("s", script="fix", gold_patch=GOLD))
    assert "<summary>" in reply.turn.text
    assert reply.turn.tool_calls == ()


async def test_without_a_shell_tool_the_error_names_what_is_offered(engine):
    request = ask(tools=(shell("WebSearch", {"query": TEXT}),))
    with pytest.raises(EngineError, match="needs a shell tool and the harness offers only: WebSearch"):
        await play(engine, request, Session("s", script="give_up"))


@pytest.mark.parametrize("script", ["fix", "half", "partial"])
async def test_without_a_gold_patch_a_script_that_needs_one_says_so(engine, script):
    with pytest.raises(EngineError, match="gold patch"):
        await play(engine, ask(), Session("s", script=script))


def scene(*tools: ToolSpec) -> scripts.Scene:
    return scripts.Scene(ask(tools=tools), Session("s"))


def test_a_shell_that_takes_a_list_gets_a_list():
    listed = shell("shell", {"command": {"type": "array"}, "workdir": TEXT}, "command")
    assert scene(listed).shell("ls").arguments == {"command": ["bash", "-lc", "ls"]}


def test_required_arguments_are_filled_and_keys_follow_the_schema():
    strict = shell(
        "Bash", {"description": TEXT, "background": {"type": "boolean"}, "command": TEXT}, "command", "background"
    )
    made = scene(strict).shell("ls")
    assert list(made.arguments.items()) == [("background", False), ("command", "ls")]
    described = shell("bash", {"command": TEXT, "description": TEXT}, "command", "description")
    assert list(scene(described).shell("ls").arguments) == ["command", "description"]


async def test_a_script_of_one_s_own_is_played_by_its_dotted_path(engine):
    _, reply = await play(engine, ask(), Session("s", script="engine_helpers:own_policy"))
    assert reply.turn.text == "my own policy, step 0"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("engine_helpers:absent", "cannot be imported"),
        ("no_such_module:x", "cannot be imported"),
        ("nonsense", "unknown script"),
        ("engine_helpers:broken_policy", "playing the script .*no idea"),
    ],
)
async def test_a_script_that_cannot_play_is_an_engine_error(engine, script, told):
    with pytest.raises(EngineError, match=told):
        await play(engine, ask(), Session("s", script=script))


async def test_a_session_without_a_script_plays_the_first_of_the_configuration(tokenizer_dir):
    engine = ScriptedEngine(EngineConfig(kind="scripted", tokenizer=tokenizer_dir, scripts=("silent",)))
    _, reply = await play(engine, ask(), Session("s"))
    assert reply.turn.text == ""


def test_a_turn_with_several_calls_is_spelled_one_call_after_the_other():
    calls = (scripts.Call("bash", {"command": "ls"}), scripts.Call("bash", {"command": "pwd"}))
    assert spell(scripts.Turn("", calls)) == (
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call>'
    )


def test_a_path_with_a_quote_reaches_the_shell_whole():
    assert shlex.split(scripts.quote("it's here.py")) == ["it's here.py"]


async def test_two_sessions_may_render_at_the_same_time(engine):
    request = ask(user("word " * 2000))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(play(engine, request, Session(f"s{i}", script="silent"))) for i in range(8)]
    assert len({len(task.result()[1].prompt_ids) for task in tasks}) == 1


def test_arguments_may_be_spelt_in_the_scripts_own_way_and_the_ids_spell_them_so():
    raw = '{  "command" :   "echo h\\u00e9llo" \n}'
    odd = scripts.Turn("", (scripts.Call("bash", {"command": "echo héllo"}, raw=raw),))
    assert f'"arguments": {raw}}}' in spell(odd)
    assert spell(replace(odd, calls=(replace(odd.calls[0], raw=""),))).endswith(
        '{"name": "bash", "arguments": {"command": "echo héllo"}}\n</tool_call>'
    )
