"""The command line: what each subcommand prints, and how it refuses."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from engine_helpers import Answer, VllmServer
from nemo_rl_helpers import Worker
from polar_env import engine
from polar_env.cli import ENGINES, main
from polar_env.gym import ROOT
from polar_env.tasks.rows import task_of
from tasks_helpers import good_row, write_jsonl


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What polar says on standard error when it refuses: one sentence, exit code 2."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("polar: ")
    assert printed.err.count("\n") == 1
    return printed.err


def composed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["config", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


# --- config and gym-root ----------------------------------------------------------------------------------------


def test_the_configuration_is_printed_as_composed(capsys: pytest.CaptureFixture[str]):
    config = composed(capsys, "proxy.max_calls=50", "harness=codex", "budget.agent=900")
    assert (config["proxy"]["max_calls"], config["harness"]["name"], config["budget"]["agent"]) == (50, "codex", 900)
    assert config["engine"]["kind"] == "vllm"


def test_flags_are_shorthands_of_overrides(capsys: pytest.CaptureFixture[str]):
    flags = composed(
        capsys, "--engine", "scripted", "--data", "my rows, all.jsonl", "--model-url", "http://a/v1,http://b/v1"
    )
    assert flags["engine"]["kind"] == "scripted"
    assert flags["data"] == "my rows, all.jsonl"
    assert flags["engine"]["base_urls"] == ["http://a/v1", "http://b/v1"]


def test_an_override_wins_over_the_flag(capsys: pytest.CaptureFixture[str]):
    assert composed(capsys, "--engine", "scripted", "engine.kind=vllm")["engine"]["kind"] == "vllm"


def test_the_cache_follows_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLAR_CACHE", "/node-local/polar cache")
    assert composed(capsys)["store"]["cache"] == "/node-local/polar cache"


def test_the_shell_harness_s_command_is_given_as_the_example_says(capsys: pytest.CaptureFixture[str]):
    command = 'harness.command=[python,/path/in/the/sandbox/tiny_agent.py,"{instruction_file}"]'
    config = composed(capsys, "harness=shell", command)
    assert config["harness"]["command"] == ["python", "/path/in/the/sandbox/tiny_agent.py", "{instruction_file}"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("proxy.max_cals=50", "did you mean 'max_calls'"),
        ("harnes.name=codex", "did you mean 'harness'"),
        ("proxy.max_calls=many", "proxy.max_calls"),
        ("harness=codx", "did you mean 'codex'"),
        ("concurrency=0", "concurrency: Input should be greater than or equal to 1"),
    ],
)
def test_a_wrong_override_is_refused_in_words(capsys: pytest.CaptureFixture[str], override: str, words: str):
    assert words in refused(capsys, "config", override)


def test_the_root_for_gym_is_printed_and_holds_the_servers(capsys: pytest.CaptureFixture[str]):
    assert main(["gym-root"]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert printed == ROOT
    assert (printed / "resources_servers" / "polar" / "app.py").is_file()


def test_this_environment_is_linked_for_gym_s_servers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["gym-root", "--venvs", "venvs"]) == 0
    assert capsys.readouterr().out == f"{ROOT}\n"
    links = sorted(tmp_path.glob("venvs/*/*/.venv"))
    assert [link.readlink() for link in links] == [Path(sys.prefix)] * 3


def misused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What polar says of words it cannot mean: the usage, then one sentence; nothing has begun."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: polar")
    return printed.err.splitlines()[-1]


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["config", "--engine", "tgi"], ["dataset"]])
def test_what_is_no_command_is_refused_with_the_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]):
    assert "error: " in misused(capsys, *arguments)


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("dmeo", "demo"),
        ("harness lst", "list"),
        ("config --engine vlm", "vllm"),
        ("export --format tlr in out", "trl"),
        ("control puase --url http://x", "pause"),
        ("demo --rolouts 3", "--rollouts"),
        ("proxy --controlport=3", "--control-port"),
        ("submit slrum --recipe x", "slurm"),
    ],
)
def test_a_word_that_is_nearly_right_is_answered_with_the_right_one(
    capsys: pytest.CaptureFixture[str], words: str, nearest: str
):
    assert f"did you mean {nearest!r}?" in misused(capsys, *words.split())


NUMBERS = {
    "demo --rollouts": ["0", "-1", "1.5", "nan", "many", ""],
    "rollout --index": ["-1", "nan", "1e3"],
    "proxy --port": ["-1", "65536", "http"],
    "proxy --control-port": ["-1", "65536"],
    "control pause --url http://x --timeout": ["0", "-1", "nan", "inf", "soon"],
    "export --format trl in out --max-tokens": ["0", "-5", "nan", "1.5"],
    "submit ray --address http://x --command true --nodes": ["0", "-1"],
    "submit ray --address http://x --command true --gpus": ["-1", "nan"],
}


@pytest.mark.parametrize(("words", "text"), [(words, text) for words, texts in NUMBERS.items() for text in texts])
def test_a_number_that_cannot_be_meant_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, text: str
):
    monkeypatch.chdir(tmp_path)
    Path("in").touch()
    *command, option = words.split()
    said = misused(capsys, *command, f"{option}={text}")
    assert f"argument {option}: {text!r} is no" in said
    assert not Path("out").exists()


PATHS = {
    "demo --out": ["file", "file/below"],
    "dataset --data embedded --out": ["folder", "file/below", "new/"],
    "gym-root --venvs": ["file", "file/below"],
    "harness run shell --prompt x --repo": ["file", "nowhere"],
    "rebuild": ["file", "nowhere"],
    "verify --sessions folder": ["folder", "nowhere"],
    "verify file --sessions": ["file", "nowhere"],
    "export --format trl": ["nowhere out", "file folder", "file file/below"],
    "export --format sft file out --sessions": ["file", "nowhere"],
    "recipe --out": ["file", "file/below"],
}


@pytest.mark.parametrize(("words", "path"), [(words, path) for words, paths in PATHS.items() for path in paths])
def test_a_path_that_cannot_be_meant_is_refused_and_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, path: str
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("folder").mkdir()
    said = misused(capsys, *words.split(), *path.split())
    assert any(reason in said for reason in ("is a file", "is a folder", "there is no", "cannot be made"))
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["file", "folder"]
    assert Path("file").read_text() == "kept"


@pytest.mark.parametrize("key", ["store.cache", "store.sessions"])
@pytest.mark.parametrize("command", ["demo", "proxy"])
def test_a_store_that_is_a_file_is_refused_before_every_rollout_fails_on_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, key: str
):
    (tmp_path / "file").touch()
    assert f"{key}: '{tmp_path}/file' cannot be made" in refused(capsys, *command.split(), f"{key}={tmp_path}/file")


def test_an_export_never_replaces_what_it_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    assert "name another OUT" in refused(
        capsys, "export", "--format", "trl", str(rows), str(tmp_path / "." / "rows.jsonl")
    )
    assert rows.read_text() == "{}\n"


# --- dataset ----------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_dataset_has_a_line_per_task_and_harness(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "train.jsonl"
    assert main(["dataset", "--data", "embedded", "--harness", "codex,pi", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"6 rows in {out}\n"
    rows = lines(out)
    assert [row["harness"] for row in rows] == ["codex", "pi"] * 3
    assert {row["data"] for row in rows} == {"embedded"}
    assert len({row["task_id"] for row in rows}) == 3


def test_a_dataset_names_its_data_so_that_a_server_elsewhere_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_jsonl(tmp_path / "rows.jsonl", good_row())
    monkeypatch.chdir(tmp_path)
    assert main(["dataset", "--data", "rows.jsonl", "--out", "out.jsonl"]) == 0
    (row,) = lines(tmp_path / "out.jsonl")
    assert row["data"] == str(tmp_path / "rows.jsonl")


def test_a_dataset_may_carry_its_tasks(tmp_path: Path):
    source, out = write_jsonl(tmp_path / "rows.jsonl", good_row(), good_row(instance_id="b__b-2")), tmp_path / "o.jsonl"
    assert main(["dataset", "--data", str(source), "--task", "b__b-2", "--embed", "--out", str(out)]) == 0
    (row,) = lines(out)
    assert task_of(row["instance"]).task_id == row["task_id"] == "b__b-2"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "/nowhere/rows.parquet"], "no rows at /nowhere/rows.parquet"),
        (["--data", "embedded", "--task", "polar-env__expiry-3"], "polar-env__expiry-2"),
        (["--data", "embedded", "--harness", "claude"], "unknown harness 'claude'; known: claude_code"),
        (["--data", "embedded", "--harness", "no_such:Thing"], "cannot be imported"),
    ],
)
def test_a_dataset_that_cannot_be_is_refused_and_not_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], words: str
):
    assert words in refused(capsys, "dataset", *arguments, "--out", str(tmp_path / "o.jsonl"))
    assert not (tmp_path / "o.jsonl").exists()


# --- check ------------------------------------------------------------------------------------------------------


async def test_an_engine_that_gives_ids_and_log_probs_passes_the_check(capsys: pytest.CaptureFixture[str]):
    async with VllmServer(window=4096).run() as engine:
        assert await asyncio.to_thread(main, ["check", "--model-url", engine.url]) == 0
    printed = capsys.readouterr().out
    assert "model tiny: window 4096 tokens" in printed
    assert "ids and log-probs are the model's" in printed
    assert "\n- log-probs are" in printed


def test_the_engines_on_the_command_line_are_those_there_are():
    assert set(ENGINES) == set(engine.ENGINES)


@pytest.mark.parametrize("kind", [kind for kind in ENGINES if kind != "scripted"])
def test_every_engine_can_be_named_and_says_what_it_lacks(capsys: pytest.CaptureFixture[str], kind: str):
    assert "engine.base_urls is empty" in refused(capsys, "check", "--engine", kind)


async def test_the_check_of_a_nemo_rl_worker_says_what_nobody_tells_it(capsys: pytest.CaptureFixture[str]):
    async with Worker().run() as worker:
        assert await asyncio.to_thread(main, ["check", "--engine", "nemo_rl", "--model-url", worker.url]) == 0
    printed = capsys.readouterr().out
    assert "model org/policy: window 4096 tokens, policy version org/policy@unversioned" in printed
    assert "\n- a continued prompt begins with the exact ids (splice)" in printed
    assert "\n- the endpoint tells no policy version: set engine.policy_version" in printed


async def test_the_check_of_a_chat_api_says_that_nothing_trains_on_it(capsys: pytest.CaptureFixture[str]):
    async with VllmServer(answer=Answer(with_ids=False)).run() as api:
        assert await asyncio.to_thread(main, ["check", "--engine", "text", "--model-url", api.url]) == 0
    assert "NO TOKEN IDS: rollouts are text" in capsys.readouterr().out


async def test_an_engine_that_gives_none_is_refused_with_the_remedy(capsys: pytest.CaptureFixture[str]):
    async with VllmServer(answer=Answer(with_ids=False)).run() as engine:
        words = await asyncio.to_thread(refused, capsys, "check", "--model-url", engine.url)
    assert "return_token_ids" in words


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "engine.base_urls is empty"), (["--model-url", "http://127.0.0.1:9"], "127.0.0.1:9")]
)
def test_an_engine_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str):
    assert words in refused(capsys, "check", *arguments)


async def test_interrupting_ends_quietly_with_the_shell_s_code():
    code = "import sys; from polar_env.cli import main; sys.exit(main())"
    async with VllmServer(fault="hang").run() as engine:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, "check", "--model-url", engine.url, stderr=asyncio.subprocess.PIPE
        )
        await engine.started.wait()
        os.kill(process.pid, signal.SIGINT)
        _, printed = await process.communicate()
    assert (process.returncode, printed) == (130, b"")


# --- rollout and demo -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--harness", "claude,codex"], "one harness on one task"),
        (["--task", "a,b"], "one harness on one task"),
        (["--harness", "shel"], "unknown harness 'shel'"),
        (["--data", "/nowhere"], "no rows at /nowhere"),
        (["--data", "embedded"], "engine.base_urls is empty"),
        (["--data", "embedded", "--task", "nobody"], "no task 'nobody'"),
        (["proxi.max_calls=3"], "did you mean 'proxy'"),
    ],
)
def test_a_rollout_that_cannot_begin_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str):
    assert words in refused(capsys, "rollout", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--harness", "claude_code,pie"], "unknown harness 'pie'"),
        (["engine.scrips=[fix]"], "did you mean 'scripts'"),
    ],
)
def test_a_demo_that_cannot_begin_is_refused_before_anything_is_installed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
):
    assert words in refused(capsys, "demo", "--data", "embedded", *arguments)
