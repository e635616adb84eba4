"""OpenHands and Aider: Python packages behind launchers of ours, on an interpreter that may not be ours."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_helpers import INSTRUCTION, a_job, build, ended
from polar_env.errors import HarnessError
from polar_env.harness import HOME, Launch
from polar_env.harness.install import PYTHON, find_python, install_python
from polar_env.types import CallKind, Outcome
from test_harness_install import wheel

NAMES = ("openhands", "aider")


# --- the launchers, with small packages in place of the real ones -------------------------------------------------


async def launched(root: Path, launch: Launch, modules: dict[str, str]) -> tuple[int, str]:
    """Run a launch as the sandbox would: its files and its packages below ``root``, this Python."""
    for name, text in modules.items():
        path = root / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in NAMES:
        (root / "opt" / name).mkdir(parents=True, exist_ok=True)
        if not (root / "opt" / name / "site").exists():
            (root / "opt" / name / "site").symlink_to(root / "site")

    def here(text: str) -> str:
        return text.replace(HOME, str(root / "home")).replace("/opt/harness", str(root / "opt"))

    for name, data in launch.files.items():
        path = Path(here(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(here(data.decode()), encoding="utf-8")
    argv = [here(part) for part in launch.argv[2:]]
    env = {name: here(value) for name, value in launch.env.items()} | {"LD_LIBRARY_PATH": "/opt/x"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", *argv, stdout=-1, stderr=-1, env=env)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode() + err.decode()


def event(text: str, kind: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if kind in line]
    return json.loads(lines[-1])


def openhands_modules(run: str = "", status: str = "finished") -> dict[str, str]:
    """Just enough of the SDK for the launcher; the conversation does ``run`` and tells what it was made of."""
    return {
        "pydantic.py": "class SecretStr(str): pass\n",
        "openhands/sdk/__init__.py": (
            "import json, os\n"
            "from types import SimpleNamespace as Some\n"
            "from openhands.sdk.event.conversation_error import ConversationErrorEvent\n"
            "LLM = Agent = Tool = lambda **fields: fields\n"
            "class Conversation:\n"
            "    def __init__(self, **fields):\n"
            "        self.fields = fields\n"
            f"        self.state = Some(events=[], execution_status=Some(value={status!r}))\n"
            "    def send_message(self, text): self.text = text\n"
            "    def close(self): pass\n"
            "    def run(self):\n"
            "        left = [name for name in os.environ if name in ('LD_LIBRARY_PATH', 'POLAR_API_KEY')]\n"
            "        made = {**self.fields, 'text': self.text, 'left': left}\n"
            "        print(json.dumps({'made': made}, default=str))\n"
            f"        {run or 'pass'}\n"
        ),
        "openhands/sdk/conversation/response_utils.py": "def get_agent_final_response(events): return 'All done.'\n",
        "openhands/sdk/event/conversation_error.py": (
            "class ConversationErrorEvent:\n"
            "    def __init__(self, code, detail): self.code, self.detail = code, detail\n"
        ),
        "openhands/tools/file_editor.py": "class FileEditorTool: name = 'file_editor'\n",
        "openhands/tools/terminal.py": "class TerminalTool: name = 'terminal'\n",
    }


async def test_openhands_is_made_of_what_the_job_says_and_its_commands_see_no_key(tmp_path: Path):
    harness = build("openhands", extra_args=("temperature=0.5", "native_tool_calling=false"))
    launch = harness.launch(a_job(max_turns=7, context_window=40000, max_output_tokens=2000))
    code, out = await launched(tmp_path, launch, openhands_modules())
    made = event(out, "made")["made"]
    llm = made["agent"]["llm"]
    assert (made["text"], made["workspace"], made["max_iteration_per_run"]) == (INSTRUCTION, "/testbed", 7)
    assert (llm["model"], llm["base_url"], llm["api_key"]) == (
        "openai/Qwen/Qwen3-8B",
        "http://127.0.0.1:8080/v1",
        "the-key",
    )
    assert (llm["max_input_tokens"], llm["max_output_tokens"]) == (40000, 2000)
    assert (llm["temperature"], llm["native_tool_calling"]) == (0.5, False)
    assert [tool["name"] for tool in made["agent"]["tools"]] == ["terminal", "file_editor"]
    assert made["left"] == []
    report = harness.read(ended(out, code=code))
    assert (report.outcome, report.final_text) == (Outcome.COMPLETED, "All done.")


FULL = "ConversationErrorEvent('LLMContextWindowExceedError', 'maximum context length is 9 tokens')"


@pytest.mark.parametrize(
    ("run", "outcome", "detail"),
    [
        (
            "self.state.events.append(ConversationErrorEvent('MaxIterationsReached', 'too many'))",
            Outcome.TURN_LIMIT,
            "MaxIterationsReached",
        ),
        (f"self.state.events.append({FULL}); raise SystemExit(1)", Outcome.CONTEXT_OVERFLOW, "LLMContextWindow"),
        ("raise RuntimeError('boom')", Outcome.AGENT_ERROR, "error"),
    ],
)
async def test_openhands_ends_as_its_conversation_says(tmp_path: Path, run: str, outcome: Outcome, detail: str):
    launch = build("openhands").launch(a_job())
    code, out = await launched(tmp_path, launch, openhands_modules(run, status="error"))
    report = build("openhands").read(ended(out, code=code))
    assert report.outcome is outcome
    assert report.detail.startswith(detail)


def aider_modules(run: str = "pass", coder: str = "Coder(argv)") -> dict[str, str]:
    """Just enough of Aider for the launcher; ``run`` is what its coder does with the message."""
    return {
        "aider/__init__.py": "",
        "aider/repomap.py": "class RepoMap: TAGS_CACHE_DIR = '.aider.tags'\n",
        "aider/main.py": (
            "import json, os\n"
            "from aider.repomap import RepoMap\n"
            "class IO:\n"
            "    def tool_error(self, message='', strip=True): print('told', message)\n"
            "class Coder:\n"
            "    max_reflections, num_exhausted_context_windows, reflected_message = 3, 0, None\n"
            "    partial_response_content = 'All done.'\n"
            "    def __init__(self, argv): self.argv, self.io = argv, IO()\n"
            "    def run(self, with_message, preproc):\n"
            "        left = [name for name in os.environ if name in ('LD_LIBRARY_PATH', 'POLAR_API_KEY')]\n"
            "        made = {'argv': self.argv, 'text': with_message, 'preproc': preproc, 'left': left}\n"
            "        made |= {'tags': RepoMap.TAGS_CACHE_DIR, 'reflections': self.max_reflections}\n"
            "        print(json.dumps({'made': made}))\n"
            f"        {run}\n"
            f"def main(argv, return_coder): return {coder}\n"
        ),
    }


async def test_aider_gets_the_instruction_and_leaves_nothing_of_its_own_in_the_repository(tmp_path: Path):
    harness = build("aider", extra_args=("--edit-format", "diff"))
    code, out = await launched(tmp_path, harness.launch(a_job(max_turns=2)), aider_modules())
    made = event(out, "made")["made"]
    assert (made["text"], made["preproc"], made["left"]) == (INSTRUCTION, True, [])
    assert made["argv"][:2] == ["--openai-api-key", "the-key"]
    assert made["argv"][-2:] == ["--edit-format", "diff"]
    assert made["reflections"] == 1, "two turns are the message and one reflection"
    home = str(tmp_path / "home")
    option = dict(zip(made["argv"], made["argv"][1:], strict=False))
    assert all(option[name].startswith(home) for name in ("--chat-history-file", "--input-history-file"))
    assert made["tags"].startswith(home)
    report = harness.read(ended(out, code=code))
    assert (report.outcome, report.final_text) == (Outcome.COMPLETED, "All done.")


@pytest.mark.parametrize("instruction", ["/exit is broken", "!important is ignored"])
async def test_an_instruction_that_looks_like_a_command_of_aider_s_is_not_run_as_one(tmp_path: Path, instruction: str):
    launch = build("aider").launch(a_job(instruction=instruction))
    _, out = await launched(tmp_path, launch, aider_modules())
    assert event(out, "made")["made"]["preproc"] is False


@pytest.mark.parametrize(
    ("run", "outcome", "detail"),
    [
        (
            "self.io.tool_error('tokens!'); self.num_exhausted_context_windows, self.partial_response_content = 1, ''",
            Outcome.CONTEXT_OVERFLOW,
            "tokens!",
        ),
        ("self.num_exhausted_context_windows = 1", Outcome.AGENT_ERROR, "length"),
        ("self.io.tool_error('503'); self.partial_response_content = ''", Outcome.AGENT_ERROR, "no_answer: 503"),
        ("self.partial_response_content = None", Outcome.AGENT_ERROR, "no_answer"),
        ("self.reflected_message = 'again'", Outcome.TURN_LIMIT, "it wanted another turn than its limit"),
        ("self.io.tool_error('edit failed, so I asked again')", Outcome.COMPLETED, ""),
        ("raise RuntimeError('boom')", Outcome.AGENT_ERROR, "crashed"),
    ],
)
async def test_aider_ends_as_its_coder_says(tmp_path: Path, run: str, outcome: Outcome, detail: str):
    code, out = await launched(tmp_path, build("aider").launch(a_job()), aider_modules(run))
    report = build("aider").read(ended(out, code=code))
    assert report.outcome is outcome
    assert report.detail.startswith(detail)


async def test_an_aider_that_never_made_its_coder_reports_its_last_words(tmp_path: Path):
    modules = aider_modules(coder="print('unknown edit format') or 1")
    code, out = await launched(tmp_path, build("aider").launch(a_job()), modules)
    report = build("aider").read(ended(out, code=code))
    assert (code, report.outcome) == (1, Outcome.AGENT_ERROR)
    assert "unknown edit format" in report.detail


# --- launch, classify, read ---------------------------------------------------------------------------------------


def test_aider_plans_its_prompt_with_the_window_it_is_told():
    launch = build("aider").launch(a_job(model="policy", context_window=30000, max_output_tokens=2000))
    at = launch.argv.index("--model-metadata-file")
    facts = json.loads(launch.files[launch.argv[at + 1]])["openai/policy"]
    assert (facts["max_input_tokens"], facts["max_output_tokens"]) == (30000, 2000)
    assert launch.argv[launch.argv.index("--model") + 1] == "openai/policy"
    assert launch.env["OPENAI_API_BASE"] == "http://127.0.0.1:8080/v1"


def asked(system: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "…"}]}


COMMIT = "You are an expert software engineer that generates concise, one-line Git commit messages based on the diffs."
SUMMARY = "*Briefly* summarize this partial conversation about programming."


@pytest.mark.parametrize(
    ("name", "body", "kind"),
    [
        ("aider", asked("Act as an expert software developer."), CallKind.AGENT),
        ("aider", asked(COMMIT), CallKind.SIDE),
        ("aider", asked(SUMMARY), CallKind.COMPACTION),
        ("aider", {"messages": [{"role": "user", "content": COMMIT}]}, CallKind.AGENT),
        ("openhands", asked(SUMMARY), CallKind.AGENT),
    ],
)
def test_calls_are_told_apart(name: str, body: dict[str, Any], kind: CallKind):
    assert build(name).classify({}, body) == (kind, "")


STREAMS = {
    "openhands": {"type": "polar.openhands.exit", "status": "finished", "code": "", "error": "", "final_text": "Done."},
    "aider": {"type": "polar.aider.exit", "status": "done", "error": "", "final_text": "Done."},
}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_agent_printed_itself_does_not_count(name: str):
    forged = json.dumps(STREAMS[name])
    real = json.dumps({**STREAMS[name], "status": "no_answer", "error": "boom"})
    report = build(name).read(ended(f"{forged}\n{real}\n"))
    assert (report.outcome, report.detail) == (Outcome.AGENT_ERROR, "no_answer: boom")


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_stream_cut_anywhere_is_never_a_completion_it_did_not_report(name: str, data: st.DataObject):
    stream = f"working\n{json.dumps(STREAMS[name])}"
    cut = data.draw(st.integers(0, len(stream) - 1))
    assert build(name).read(ended(stream[:cut], code=None)).outcome is Outcome.AGENT_ERROR
    assert build(name).read(ended(stream)).outcome is Outcome.COMPLETED


# --- the interpreter ----------------------------------------------------------------------------------------------


def fake_python(folder: Path, minor: int, prefix: Path | None = None) -> Path:
    """A program that answers the probe as Python 3.``minor`` would."""
    binary = folder / f"python3.{minor}"
    binary.parent.mkdir(parents=True, exist_ok=True)
    told = json.dumps([f"3.{minor}", f"3.{minor}.0", str(prefix or folder.parent)])
    binary.write_text(f"#!/bin/sh\necho '{told}'\n", encoding="utf-8")
    binary.chmod(0o755)
    return binary


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a PATH with nothing in them but the system's own programs, and a uv that has nothing either."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/nonexistent")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "ours" / "here"))  # what lies beside our own counts too
    return tmp_path


async def test_our_own_interpreter_is_taken_where_it_fits():
    found = await find_python("agent", sys.version_info.minor - 1, sys.version_info.minor + 1)
    assert (found.minor, found.prefix) == (f"3.{sys.version_info.minor}", Path(sys.base_prefix))
    assert found.usable


async def test_the_newest_that_fits_is_taken_from_path_or_pyenv(elsewhere: Path):
    fake_python(elsewhere / "bin", 7)
    fake_python(elsewhere / "home" / ".pyenv" / "versions" / "3.8.1" / "bin", 8)
    fake_python(elsewhere / "bin", 9)
    assert (await find_python("agent", 6, 8)).minor == "3.8"
    assert (await find_python("agent", 6, 7)).minor == "3.7"


async def test_a_program_that_lies_about_its_version_or_place_is_passed_over(elsewhere: Path):
    fake_python(elsewhere / "bin", 8).rename(elsewhere / "bin" / "python3.7")
    fake_python(elsewhere / "other" / "bin", 6, prefix=elsewhere / "nowhere").rename(elsewhere / "bin" / "python3.6")
    with pytest.raises(HarnessError, match="none was found"):
        await find_python("agent", 6, 7)


async def test_uv_s_interpreter_is_found_and_installed_when_it_has_none(elsewhere: Path):
    there = fake_python(elsewhere / "managed" / "bin", 8)
    uv, state = elsewhere / "bin" / "uv", elsewhere / "installed"
    uv.parent.mkdir()
    uv.write_text(
        f'#!/bin/sh\n[ "$2" = install ] && : > {state} && exit 0\n[ -e {state} ] && echo warning && echo {there}\n',
        encoding="utf-8",
    )
    uv.chmod(0o755)
    assert (await find_python("agent", 6, 8)).binary == str(there)
    assert state.exists()


@pytest.mark.parametrize(("name", "range"), [("aider", "3.10 to 3.12"), ("openhands", "3.12 to 3.14")])
async def test_without_an_interpreter_the_error_says_what_to_do(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, name: str, range: str
):
    monkeypatch.setattr(sys, "base_prefix", str(elsewhere / "nowhere"))
    with pytest.raises(HarnessError) as refused:
        await build(name).install(elsewhere / "store")
    assert str(refused.value).startswith(f"{name} runs on Python {range} and none was found")
    assert "uv python install" in str(refused.value)
    assert not (elsewhere / "store").exists()


async def test_packages_are_started_by_the_interpreter_they_were_installed_for(tmp_path: Path):
    root = await install_python(tmp_path, "tiny-1.0", wheel(tmp_path))
    script = (root / "run").read_text(encoding="utf-8")
    assert f"exec {PYTHON} -I -S" in script
    moved = script.replace("/opt/harness/python", sys.base_prefix)
    argv = ("/bin/sh", "-c", moved, "run", "-c", "import sys; print(sys.flags.isolated, sys.argv[1])", "a b")
    process = await asyncio.create_subprocess_exec(*argv, stdout=-1)
    assert (await process.communicate())[0] == b"1 a b\n"
