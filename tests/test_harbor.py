"""Harbor task folders: what is read of them, what is refused, and what an agent earns in them."""

import asyncio
import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harbor_helpers import ANSWER, ANSWERED, EXAMPLES, LOCAL, folder, graded, prepared
from polar_env.config import RewardConfig, SandboxConfig
from polar_env.errors import ConfigError, GradeError
from polar_env.grade import grading, harbor
from polar_env.grade.tools import replaced
from polar_env.grade.verifier import REWARD_FILES, REWARD_LIMIT, reward_of
from polar_env.reward import decide
from polar_env.tasks import Prepared, rows
from polar_env.tasks import harbor as folders
from polar_env.tasks.harbor import settings_of
from polar_env.tasks.harbor_prepare import image_of, lay_out, read_dockerfile
from polar_env.types import Outcome
from polar_env.verdict import Flag, Verdict, VerdictStatus

BUBBLEWRAP, DOCKER = SandboxConfig(), SandboxConfig(provider="docker")


def reward(verdict: Verdict) -> float:
    decision = decide(Outcome.COMPLETED, verdict, True, RewardConfig())
    assert not decision.masked
    return decision.reward


# --- folders of folders -------------------------------------------------------------------------------------------


def test_the_example_is_read_as_it_stands() -> None:
    (task,) = rows.load(str(EXAMPLES), ["word-count"])
    assert (task.task_id, task.grader) == ("word-count", "harbor")
    assert task.instruction == (EXAMPLES / "word-count" / "instruction.md").read_text()
    settings = settings_of(task)
    assert (settings["agent_timeout"], settings["verifier_timeout"]) == (300.0, 60.0)
    assert (settings["grade_in"], settings["verifier_env"]) == ("agent", {"EXPECTED": "counts.txt"})


def test_a_folder_of_task_folders_is_data_and_so_is_one_task_folder(tmp_path: Path) -> None:
    for name in ("b", "deep/er/a", ".hidden", "b/environment/inner"):
        folder(tmp_path / name)
    assert [task.task_id for task in rows.load(str(tmp_path))] == ["b", "a"]
    assert [task.task_id for task in rows.load(f"harbor:{tmp_path}", ["a"])] == ["a"]
    assert [task.task_id for task in rows.load(str(tmp_path / "b"))] == ["b"]
    assert "2 Harbor task folders" in rows.resolve(str(tmp_path)).detail
    with pytest.raises(ConfigError, match="no task 'c' among 2"):
        rows.load(str(tmp_path), ["c"])


def test_a_task_is_found_again_by_its_row(tmp_path: Path) -> None:
    """What `polar dataset` writes and a server reads: plain JSON that names the folder."""
    task = rows.load(str(folder(tmp_path / "t")))[0]
    again = rows.task_of(json.loads(json.dumps(dict(task.row))))
    assert again == task


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("one/t", "two/t"):
        folder(tmp_path / name)
    with pytest.raises(ConfigError, match="have one name"):
        rows.load(str(tmp_path))


def test_a_place_without_task_folders_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none holds a task\.toml"):
        rows.load(f"harbor:{tmp_path}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(ConfigError, match=r"old/task.yaml is Terminal-Bench's first format.*harbor tasks migrate"):
        rows.load(f"harbor:{tmp_path}")
    with pytest.raises(ConfigError, match="is no directory"):
        rows.load(f"harbor:{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match=r"holds no task\.toml"):
        rows.task_of({"instance_id": "t", "polar_grader": "harbor", "folder": str(tmp_path)})


# --- task.toml ----------------------------------------------------------------------------------------------------


def read(place: Path, toml: str, **files: str) -> Any:
    return rows.load(str(folder(place / "t", toml, **files)))[0]


def test_defaults_are_the_format_s(tmp_path: Path) -> None:
    settings = settings_of(read(tmp_path, '[environment]\ndocker_image = "a:1"\n'))
    assert (settings["agent_timeout"], settings["verifier_timeout"], settings["build_timeout"]) == (None, 600.0, 600.0)
    assert (settings["cpus"], settings["memory_mb"], settings["env"]) == (None, None, {})


@pytest.mark.parametrize(
    ("toml", "grade_in"),
    [
        ("", "agent"),
        ('[verifier]\nenvironment_mode = "shared"\n', "agent"),
        ('[verifier]\nenvironment_mode = "separate"\n', "fresh"),
        ('[metadata.polar]\ngrade_in = "fresh"\n', "fresh"),
        ('[metadata.polar]\ngrade_in = "agent"\n[verifier]\nenvironment_mode = "separate"\n', "agent"),
    ],
)
def test_where_a_task_is_graded_follows_the_folder_and_then_ours(tmp_path: Path, toml: str, grade_in: str) -> None:
    task = read(tmp_path, f'{toml}[environment]\ndocker_image = "a:1"\n')
    assert settings_of(task)["grade_in"] == grade_in
    other = "agent" if grade_in == "fresh" else "fresh"
    assert settings_of(rows.task_of({**task.row, "grade_in": other}))["grade_in"] == other, "a row says otherwise"


@pytest.mark.parametrize(
    ("written", "mib"),
    [('memory = "2G"', 2048), ('memory = "512M"', 512), ('memory = "1.5 GB"', 1536), ("memory_mb = 100", 100)],
)
def test_memory_is_read_in_the_old_and_the_new_form(tmp_path: Path, written: str, mib: int) -> None:
    settings = settings_of(read(tmp_path, f'[environment]\ndocker_image = "a:1"\n{written}\n'))
    assert settings["memory_mb"] == mib


def test_a_variable_stands_for_its_default_and_never_for_this_machine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "sk-secret")
    env = '[environment]\ndocker_image = "a:1"\nenv = { A = "x${API_KEY:-none}y", B = "$HOME" }\n'
    assert settings_of(read(tmp_path, env))["env"] == {"A": "xnoney", "B": "$HOME"}
    for table, key in (("verifier", "verifier.env"), ("solution", "solution.env")):
        text = f'[environment]\ndocker_image = "a:1"\n[{table}]\nenv = {{ A = "${{API_KEY}}" }}\n'
        with pytest.raises(ConfigError, match=f"t/task.toml: key '{key}'.*API_KEY.*write the value") as refused:
            read(tmp_path, text)
        assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[environment", "t/task.toml cannot be read"),
        ("[agent]\ntimeout_sec = -1\n", r"key 'agent.timeout_sec': .*greater than 0, not -1"),
        ('[agent]\ntimeout_sec = "long"\n', "key 'agent.timeout_sec'"),
        ("[verifier]\ntimeout_sec = inf\n", "key 'verifier.timeout_sec'"),
        ("[environment]\nenv = { A = 1 }\n", "key 'environment.env.A'"),
        ('[environment]\nmemory = "lots"\ndocker_image = "a"\n', "key 'environment.memory': 'lots' is no size"),
        ('[environment]\nworkdir = "app"\ndocker_image = "a"\n', "key 'environment.workdir': 'app' is not an absolute"),
        ('[environment]\nnetwork_mode = "some"\n', "key 'environment.network_mode'"),
        ('[environment]\ngpus = 1\ndocker_image = "a"\n', "key 'environment.gpus': no sandbox of ours gives a GPU"),
        ('[environment]\nos = "windows"\n', "key 'environment.os': only Linux"),
        ('[environment]\nskills_dir = "/s"\n', "key 'environment.skills_dir'"),
        ('[[environment.mcp_servers]]\nname = "m"\n', "key 'environment.mcp_servers'"),
        ('[environment.healthcheck]\ncommand = "true"\n', "key 'environment.healthcheck'"),
        ('[[steps]]\nname = "one"\n', "key 'steps': multi-step tasks are not supported"),
        ('[agent]\nuser = "agent"\n', "key 'agent.user'"),
        ("[verifier]\nuser = 1000\n", "key 'verifier.user'"),
        ('[verifier.environment]\ndocker_image = "b"\n', "key 'verifier.environment'"),
        ('[[verifier.collect]]\ncommand = "true"\n', "key 'verifier.collect'"),
        ('artifacts = ["/etc/x"]\n[verifier]\nenvironment_mode = "separate"\n', "key 'artifacts'.*grade_in"),
        ('[metadata.polar]\npolar_source = { kind = "cloud" }\n', "polar_source.kind must be one of local"),
        ('[metadata.polar]\npolar_source = "x"\n', "'polar_source' is not JSON"),
        ('[metadata.polar]\ngrade_in = "there"\npolar_source = { kind = "local" }\n', "grade_in must be one of"),
        ("", "nothing says what the task runs in: set environment.docker_image"),
    ],
)
def test_what_cannot_be_used_or_kept_is_refused_by_file_and_key(tmp_path: Path, toml: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        read(tmp_path, toml)
    assert str(tmp_path / "t") in str(refused.value)


def test_what_cannot_be_kept_is_all_right_where_it_asks_for_nothing(tmp_path: Path) -> None:
    toml = 'artifacts = ["/etc/x"]\n[agent]\nuser = "root"\n[environment]\ngpus = 0\nos = "Linux"\nmcp_servers = []\n'
    assert read(tmp_path, f'{toml}docker_image = "a"\n').source == {"kind": "image", "image": "a"}


def test_artifacts_of_the_work_tree_go_to_a_separate_verifier_with_its_change(tmp_path: Path) -> None:
    toml = 'artifacts = ["/app/out.txt"]\n[verifier]\nenvironment_mode = "separate"\n[environment]\nworkdir = "/app"\n'
    assert settings_of(read(tmp_path, f'{toml}docker_image = "a"\n'))["grade_in"] == "fresh"


def test_an_unknown_key_is_passed_over_and_a_misspelt_one_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        read(tmp_path, 'flavour = 1\n[environment]\ndocker_image = "a"\nmemory_mib = 5\n')
    assert "key 'memory_mib' of [environment] is not known; is it 'memory_mb'?" in caplog.text
    assert "flavour" not in caplog.text


@pytest.mark.parametrize("name", ["tests__test_sh", "instruction_md"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"t/(tests/test.sh is missing|instruction.md cannot be read)"):
        read(tmp_path, LOCAL, **{name: ""})


def test_a_task_of_several_containers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment/docker-compose.yaml: tasks of several containers"):
        read(tmp_path, LOCAL, **{"environment__docker-compose.yaml": "services: {}\n"})


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("Do it.\n\n# canary later\n", "Do it.\n\n# canary later\n"),
        ("\n\nDo it.", "\n\nDo it."),
        ("<!-- CANARY GUID 1 -->\n# canary 2\n\nDo it.\n", "Do it.\n"),
        ("# A title\nDo it.\n", "# A title\nDo it.\n"),
    ],
)
def test_the_instruction_is_as_given_without_canary_lines_at_its_top(tmp_path: Path, written: str, asked: str) -> None:
    assert read(tmp_path, LOCAL, instruction_md=written).instruction == asked


def test_an_instruction_of_nothing_but_a_canary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"instruction\.md is empty"):
        read(tmp_path, LOCAL, instruction_md="# canary\n\n")


def test_a_task_s_digest_follows_every_byte_and_mode_of_its_folder(tmp_path: Path) -> None:
    place = folder(tmp_path / "t")
    seen = {folders.digest(place)}
    for change in (
        lambda: (place / "tests" / "more.txt").write_text("x"),
        lambda: (place / "tests" / "more.txt").write_text("y"),
        lambda: (place / "tests" / "more.txt").chmod(0o755),
        lambda: (place / "tests" / "more.txt").rename(place / "tests" / "moved.txt"),
        lambda: (place / "link").symlink_to("tests"),
    ):
        change()
        seen.add(folders.digest(place))
    assert len(seen) == 6


def test_tests_are_files_of_some_size_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder(tmp_path / "t", tests__deep__data_sh="x") / "tests"
    assert folders.files_of(place)["deep/data.sh"] == (b"x", 0o755)
    assert folders.files_of(tmp_path / "none") == {}
    monkeypatch.setattr(folders, "LARGEST", 10)
    with pytest.raises(ConfigError, match="holds more than 10 bytes"):
        folders.files_of(place)
    monkeypatch.undo()
    (place / "etc").symlink_to("/etc")
    with pytest.raises(ConfigError, match="tests/etc is a link"):
        folders.files_of(place)


# --- what it runs in ----------------------------------------------------------------------------------------------


def test_an_image_is_for_providers_that_run_images(tmp_path: Path) -> None:
    task = read(tmp_path, '[environment]\ndocker_image = "a:1"\nworkdir = "/w"\n')
    assert image_of(task, DOCKER) == "a:1"
    with pytest.raises(
        ConfigError, match=r"t comes as image, which the bubblewrap sandbox cannot run.*kind = \"local\""
    ):
        image_of(task, BUBBLEWRAP)
    sif = rows.task_of({**task.row, "polar_source": {"kind": "sif", "path": "/images/a.sif"}})
    assert image_of(sif, SandboxConfig(provider="apptainer")) == "/images/a.sif"
    with pytest.raises(ConfigError, match="comes as sif, which the docker sandbox cannot run"):
        image_of(sif, DOCKER)
    nameless = rows.task_of({**task.row, "polar_source": {"kind": "image"}})
    with pytest.raises(ConfigError, match="needs 'image'"):
        image_of(nameless, DOCKER)


async def test_an_image_s_limits_and_time_are_the_task_s_where_they_are_less(tmp_path: Path) -> None:
    toml = (
        '[agent]\ntimeout_sec = 9\n[environment]\ndocker_image = "a:1"\nworkdir = "/w"\nmemory_mb = 512\ncpus = 1.5\n'
    )
    ready = await prepared(folder(tmp_path / "t", toml), tmp_path / "store", DOCKER)
    assert (ready.image, ready.workdir, ready.patience, ready.whole, ready.repo) == ("a:1", "/w", 9.0, True, None)
    box = grading.box_of(ready, SandboxConfig(provider="docker", memory_mib=4096, cpus=1))
    assert (box.memory_mib, box.cpus, box.workdir) == (512, 1, "/w")


def test_a_dockerfile_is_built_by_docker_alone(tmp_path: Path) -> None:
    task = read(tmp_path, "", environment__Dockerfile="FROM a\n")
    assert image_of(task, DOCKER) == f"polar-harbor:{folders.digest(tmp_path / 't')}"
    with pytest.raises(ConfigError, match="only the docker sandbox builds"):
        image_of(task, SandboxConfig(provider="daytona"))


def test_files_beside_a_ready_image_are_refused_and_not_left_out(tmp_path: Path) -> None:
    task = read(tmp_path, '[environment]\ndocker_image = "a:1"\n', environment__data_txt="x")
    with pytest.raises(ConfigError, match="Harbor puts these files into the working directory"):
        image_of(task, DOCKER)


def laid_out(place: Path, dockerfile: str, *files: str) -> tuple[dict[str, str], dict[str, str], str]:
    """(file -> text in the working directory, environment, working directory)."""
    context, repo = place / "environment", place / "repo"
    for name in files:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    context.mkdir(exist_ok=True)
    repo.mkdir()
    (context / "Dockerfile").write_text(dockerfile)
    layout = read_dockerfile(context / "Dockerfile")
    lay_out(layout, context, layout.workdir, repo)
    made = {str(path.relative_to(repo)): path.read_text() for path in sorted(repo.rglob("*")) if path.is_file()}
    return made, layout.env, layout.workdir


def test_a_simple_dockerfile_is_a_directory(tmp_path: Path) -> None:
    text = """# syntax=docker/dockerfile:1
FROM debian:12 AS base
LABEL what="a task"
WORKDIR /srv
WORKDIR app
ENV A=1 B="two words"
ENV C three words
COPY one.txt two.txt \\
     in/
COPY tree /srv/app/tree2
COPY ["one.txt", "named.txt"]
USER root
CMD ["bash", "-c", "it's"]
"""
    made, env, workdir = laid_out(tmp_path, text, "one.txt", "two.txt", "tree/a", "tree/b/c")
    assert made == {
        "in/one.txt": "one.txt",
        "in/two.txt": "two.txt",
        "named.txt": "one.txt",
        "tree2/a": "tree/a",
        "tree2/b/c": "tree/b/c",
    }
    assert (env, workdir) == ({"A": "1", "B": "two words", "C": "three words"}, "/srv/app")


def test_copying_the_whole_context_copies_the_whole_context(tmp_path: Path) -> None:
    made, _, _ = laid_out(tmp_path, "FROM a\nWORKDIR /app\nCOPY . .\n", "x/y")
    assert made.keys() == {"Dockerfile", "x/y"}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("RUN apt-get install -y gcc", "line 3: RUN cannot be served by a local environment"),
        ("USER agent", "line 3: USER cannot be served"),
        ("ADD a b", "line 3: ADD cannot be served"),
        ("ARG X=1", "line 3: ARG cannot be served"),
        ("COPY --from=base a b", "line 3: COPY: only COPY SOURCE... TARGET, without options"),
        ("COPY a", "only COPY SOURCE... TARGET"),
        ("COPY *.py .", "line 3: COPY: '\\*.py' would have to be expanded"),
        ("ENV A=$B", "line 3: ENV: '\\$B' would have to be expanded"),
        ("ENV", "write ENV NAME=value"),
        ("COPY a /etc/a", "COPY to /etc/a is outside the working directory /app"),
        ("COPY ../../secret .", r"COPY ../../secret: there is no such file in"),
        ("COPY nothing .", "COPY nothing: there is no such file"),
    ],
)
def test_what_a_directory_cannot_stand_for_is_refused_by_line(tmp_path: Path, lines: str, says: str) -> None:
    (tmp_path / "secret").write_text("x")
    with pytest.raises(ConfigError, match=says):
        laid_out(tmp_path, f"FROM a\nWORKDIR /app\n{lines}\n", "a")


@pytest.mark.parametrize("workdir", ["", "/", "/usr/src", "/tests", "/app/../etc"])
async def test_a_local_task_works_in_a_folder_of_its_own(tmp_path: Path, workdir: str) -> None:
    place = folder(tmp_path / "t", LOCAL.replace('workdir = "/app"\n', f'workdir = "{workdir}"\n' if workdir else ""))
    with pytest.raises(ConfigError, match="a local task cannot work in"):
        await prepared(place, tmp_path / "store")


async def test_a_local_task_is_made_once_and_anew_when_its_folder_changes(tmp_path: Path) -> None:
    place = folder(tmp_path / "t", environment__Dockerfile="FROM a\nCOPY data.txt /app/\n", environment__data_txt="x")
    place.joinpath("environment", "data_txt").rename(place / "environment" / "data.txt")
    one = await prepared(place, tmp_path / "store")
    assert one.repo is not None
    assert (one.repo / "data.txt").read_text() == "x"
    assert (await prepared(place, tmp_path / "store")).repo == one.repo
    (place / "environment" / "data.txt").write_text("y")
    two = await prepared(place, tmp_path / "store")
    assert two.repo is not None
    assert (two.repo / "data.txt").read_text() == "y"


# --- the reward file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("reward.txt", "1\n", 1.0),
        ("reward.txt", " 0.25 ", 0.25),
        ("reward.json", "0.5", 0.5),
        ("reward.json", '{"reward": 1, "speed": 99}', 1.0),
        ("reward.json", '{"accuracy": 0.75}', 0.75),
    ],
)
def test_a_reward_is_a_number_between_0_and_1(name: str, text: str, found: float) -> None:
    assert reward_of(name, text.encode()) == (found, "")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("reward.txt", "", "holds no number: b''"),
        ("reward.txt", "passed", "holds no number"),
        ("reward.txt", "nan", "no finite number"),
        ("reward.txt", "1e999", "no finite number"),
        ("reward.txt", "5", "holds 5, and rewards lie between 0 and 1"),
        ("reward.txt", "-0.1", "rewards lie between 0 and 1"),
        ("reward.json", "{", "holds no JSON"),
        ("reward.json", "NaN", "no finite number"),
        ("reward.json", '"1"', "no finite number"),
        ("reward.json", '{"a": 1, "b": 1}', "no 'reward' among a, b"),
        ("reward.json", "{}", "no 'reward' among no names"),
        ("reward.json", '{"reward": null}', "no finite number"),
        ("reward.json", "[" * 60000, "holds no JSON"),
        ("reward.json", "9" * 4000, "no finite number"),
    ],
)
def test_what_is_no_reward_says_why(name: str, text: str, says: str) -> None:
    found, why = reward_of(name, text.encode())
    assert found is None
    assert says in why


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode) | st.floats().map(lambda f: str(f).encode()))
def test_any_bytes_are_a_reward_or_a_reason(data: bytes) -> None:
    for name in REWARD_FILES:
        found, why = reward_of(name, data)
        assert (found is None) == bool(why)
        assert found is None or 0.0 <= found <= 1.0


@given(st.floats(0.0, 1.0))
def test_every_reward_in_range_is_read_back(value: float) -> None:
    for name, text in (("reward.txt", repr(value)), ("reward.json", json.dumps({"reward": value}))):
        assert reward_of(name, text.encode()) == (value, "")


# --- tools that an agent replaced ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "C /usr/bin/bash",
        "D /bin/sh",
        "C /usr/local/bin/pytest",
        "C /usr/lib/x86_64-linux-gnu/libc.so.6",
        "C /lib64/ld-linux-x86-64.so",
        "C /usr/local/lib/python3.12/json/decoder.py",
        "A /etc/ld.so.preload",
        "A /usr/local/bin/bash",
        "A /usr/local/bin/python3.12",
        "C /root/.local/bin/uvx",
        "A /root/.local/bin/env",
        "C /opt/venv/bin/python",
        "A /usr/lib/python3/dist-packages/evil.pth",
        "A /usr/local/lib/python3.12/sitecustomize.py",
        "A /root/.local/lib/python3.11/site-packages/usercustomize.py",
        "C /usr/local/lib/python3.12/site-packages/_pytest/runner.py",
        "A /opt/venv/lib/python3.12/site-packages/evil.dist-info/entry_points.txt",
    ],
)
def test_a_tool_the_verifier_may_run_is_told_when_it_is_the_agent_s_own(line: str) -> None:
    folder_of_it = f"C {line[2:].rpartition('/')[0]}"
    assert replaced([folder_of_it, line]) == [line[2:]]
    assert replaced([folder_of_it, line], {line[2:]}) == [], "the solution does the same"


def test_honest_work_on_a_machine_is_no_tool_replaced() -> None:
    lines = ["C /", "C /etc", "C /etc/nginx", "A /etc/nginx/site.conf", "C /usr", "C /usr/bin", "A /usr/bin/jq",
             "C /usr/local", "A /usr/local/bin/mytool", "A /app/python3", "D /app/old", "A /root/.cache/x",
             "C /usr/local/lib/python3.12/site-packages/flask/app.py", "A /usr/lib/libfoo.so.1", "C /opt/app/config",
             "C /usr/lib/python3.11/json/__pycache__/x.pyc", "A /tmp/bash", "nonsense", ""]  # fmt: skip
    assert replaced(lines) == []


# --- what an agent earns ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that a task's verifier is seen to work once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("tasks") / "answered")


async def test_the_example_pays_for_what_is_right_and_for_nothing_else(store: Path) -> None:
    ready = await prepared(EXAMPLES / "word-count", store)
    solved = await graded(ready, (EXAMPLES / "word-count" / "solution" / "solve.sh").read_text())
    assert (solved.status, solved.flags, reward(solved)) == (VerdictStatus.RESOLVED, (), 1.0)
    half = await graded(ready, "echo a.txt 4 > counts.txt")
    assert (half.status, reward(half)) == (VerdictStatus.UNRESOLVED, 0.5)
    assert reward(await graded(ready, "true")) == 0.0


@pytest.mark.parametrize(
    "planting",
    [
        "echo 1 > /logs/verifier/reward.txt",
        "mkdir /tests/sub && echo 'exit 0' > /tests/sub/test.sh; chmod 0 /tests/sub",
    ],
)
async def test_an_agent_that_plants_what_the_verifier_writes_or_is_earns_nothing_and_its_flag(
    store: Path, answered: Path, planting: str
) -> None:
    ready = await prepared(answered, store)
    found = await graded(ready, f"{ANSWER}; {planting}")
    assert found.flags == (Flag.PLANTED,)
    assert "where the verifier's own files are put" in found.detail
    assert found.status is VerdictStatus.REFUSED
    assert (found.score, reward(found)) == (1.0, 0.0), "its work is right, and its reward nothing all the same"


def unittested(place: Path, python: str) -> Path:
    """A task whose verifier is a unittest."""
    lines = ("import subprocess, unittest", "class T(unittest.TestCase):", "    def test(self):",
             "        assert subprocess.check_output(['./answer']) == b'42\\n'",
             "if __name__ == '__main__':", "    unittest.main()")  # fmt: skip
    test = f"#!/bin/bash\n{python} && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n"
    made = folder(place, tests__test_sh=test)
    (made / "tests" / "check.py").write_text("\n".join(lines))
    return made


_RUNNER = "mkdir unittest; echo 'raise SystemExit(0)' > unittest/__main__.py; touch unittest/__init__.py"


async def test_modules_that_stand_in_for_the_test_runner_earn_nothing_and_their_flag(
    store: Path, tmp_path: Path
) -> None:
    """``python -m`` looks in the work tree before it looks anywhere else."""
    run = "/usr/bin/python3 -m unittest discover -q -s /tests -p check.py"
    ready = await prepared(unittested(tmp_path / "discovered", run), store)
    for forging in (f"{_RUNNER}; chmod 0 unittest", "echo 'raise SystemExit(0)' > argparse.py"):
        found = await graded(ready, forging)
        assert (found.status, found.flags) == (VerdictStatus.REFUSED, (Flag.TEST_HOOKS,))
        assert (found.score, reward(found)) == (1.0, 0.0)
        assert "which changes what a test run means" in found.detail
    honest = await graded(ready, f"{ANSWER}; touch notes.py test.py; mkdir coverage sub; touch coverage/a sub/json.py")
    assert (honest.status, honest.flags) == (VerdictStatus.RESOLVED, ())


async def test_a_module_of_any_name_is_all_right_where_no_python_looks_for_it(store: Path, tmp_path: Path) -> None:
    ready = await prepared(unittested(tmp_path / "called", "/usr/bin/python3 /tests/check.py"), store)
    assert (await graded(ready, _RUNNER)).status is VerdictStatus.UNRESOLVED
    assert (await graded(ready, f"{ANSWER}; touch queue.py")).flags == ()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("ln -s /etc/passwd /logs/verifier/reward.json; kill -9 $PPID", "is a symbolic link, not a file"),
        (f"head -c {REWARD_LIMIT + 1} /dev/zero > /logs/verifier/reward.json", f"has {REWARD_LIMIT + 1} bytes"),
        ("kill -9 $PPID", "test.sh wrote neither"),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $PPID", "test.sh was killed"),
    ],
)
async def test_a_program_of_the_agent_s_cannot_write_its_own_reward_or_mask_itself(
    store: Path, answered: Path, program: str, says: str
) -> None:
    """test.sh runs it, so it can reach the reward file: what is there in the end is judged, and never masks."""
    ready = await prepared(answered, store)
    left = f"cat > answer <<'END'\n#!/bin/bash\n{program}\nEND\nchmod +x answer"
    found = await graded(ready, left)
    assert says in found.detail
    assert reward(found) == 0.0


async def test_a_program_that_hangs_is_the_agent_s_zero_and_a_budget_too_small_is_not(
    store: Path, answered: Path
) -> None:
    ready = await prepared(answered, store)
    hangs = "printf '#!/bin/bash\\nsleep 1000\\n' > answer; chmod +x answer"
    found = await graded(ready, hangs, timeout=5.0)
    assert (found.status, reward(found)) == (VerdictStatus.TESTS_TIMED_OUT, 0.0)
    with pytest.raises(GradeError, match=r"says nothing of the agent; raise budget\.grade"):
        await graded(ready, ANSWER, timeout=0.01)


async def test_all_that_the_agent_left_in_its_work_tree_is_carried_over(store: Path, tmp_path: Path) -> None:
    """Byte for byte: what a patch leaves out (.git, build folders) and what cannot be read as it stands."""
    left = "mkdir -p .git build node_modules closed; echo x > .git/HEAD; printf '\\377\\0' > build/b.so; "
    left += "ln -s /etc/hostname link; echo n > node_modules/n; echo c > closed/c; chmod 0 closed/c closed; rm gone.txt"
    test = "#!/bin/bash\nset -e\nreward() { echo $1 > /logs/verifier/reward.txt; }\nreward 0\n[ ! -e gone.txt ]\n"
    test += "[ $(cat .git/HEAD) = x ]; [ $(stat -c %s build/b.so) = 2 ]; [ $(readlink link) = /etc/hostname ]\n"
    test += "[ $(cat node_modules/n closed/c | tr -d '\\n') = nc ]\nreward 1\n"
    place = folder(tmp_path / "t", tests__test_sh=test, solution__solve_sh=f"#!/bin/bash\n{left}\n",
                   environment__Dockerfile="FROM a\nWORKDIR /app\nCOPY . .\n")  # fmt: skip
    (place / "environment" / "gone.txt").write_text("x")
    ready = await prepared(place, store)
    await harbor.prewarm(ready, sandbox=BUBBLEWRAP)  # sees the solution leave all that, and its verifier find it


async def test_a_work_tree_too_large_to_carry_is_the_agent_s_zero(
    store: Path, answered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = await prepared(answered, store)
    await harbor.prewarm(ready, sandbox=BUBBLEWRAP)
    monkeypatch.setattr(harbor, "CARRIED_LIMIT", 100_000)
    found = await graded(ready, f"{ANSWER}; head -c 200000 /dev/zero > large")
    assert (found.status, found.flags, reward(found)) == (VerdictStatus.REFUSED, (Flag.OVERSIZED,), 0.0)


async def test_what_keeps_the_grader_busy_around_the_verifier_is_the_agent_s_zero_and_no_mask(
    store: Path, answered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million files are carried over for minutes. Where it was our measuring that left no time it is an error."""
    ready = await prepared(answered, store)
    await harbor.prewarm(ready, sandbox=BUBBLEWRAP)
    monkeypatch.setattr(harbor, "AROUND", 0.01 - 60.0)
    found = await graded(ready, ANSWER, timeout=60.0)
    assert (found.status, reward(found)) == (VerdictStatus.TESTS_TIMED_OUT, 0.0)
    assert "kept the grader busy" in found.detail
    monkeypatch.setattr(harbor, "AROUND", 0.01 - 2.0)
    with pytest.raises(GradeError, match=r"left for the verifier.*raise budget\.grade"):
        await harbor._before(time.monotonic() + 0.01, replace(await harbor._known(ready, BUBBLEWRAP), seconds=2.0),
                             asyncio.sleep(7027.25, found))  # fmt: skip


async def test_fresh_takes_the_change_of_the_work_tree_alone(store: Path, answered: Path) -> None:
    ready = await prepared(answered, store, grade_in="fresh")
    assert (await graded(ready, f"{ANSWER}; mkdir build; echo x > build/x")).status is VerdictStatus.RESOLVED
    refused = await graded(ready, f"{ANSWER}; echo 'import os' > conftest.py")
    assert (refused.status, refused.flags) == (VerdictStatus.REFUSED, (Flag.TEST_HOOKS,))


async def test_a_patch_is_graded_again_where_the_work_tree_is_what_counts(store: Path, answered: Path) -> None:
    fix = b"diff --git a/answer b/answer\nnew file mode 100755\n--- /dev/null\n+++ b/answer\n@@ -0,0 +1,2 @@\n"
    fix += b"+#!/bin/bash\n+echo 42\n"
    fresh, whole = await prepared(answered, store, grade_in="fresh"), await prepared(answered, store)
    found = await grading.grade(fresh, fix, sandbox=BUBBLEWRAP, timeout=60)
    assert found.status is VerdictStatus.RESOLVED
    broken = await grading.grade(fresh, fix.replace(b"+1,2", b"+1,9"), sandbox=BUBBLEWRAP, timeout=60)
    assert (broken.status, reward(broken)) == (VerdictStatus.PATCH_FAILED, 0.0)
    with pytest.raises(GradeError, match="cannot be graded again from a patch"):
        await grading.grade(whole, fix, sandbox=BUBBLEWRAP, timeout=60)


# --- a verifier that does not work here ---------------------------------------------------------------------------


async def refused(ready: Prepared) -> str:
    with pytest.raises(GradeError) as error:
        await harbor.prewarm(ready, sandbox=BUBBLEWRAP)
    return str(error.value)


async def test_a_task_whose_own_solution_earns_nothing_here_is_an_error_and_no_zero(
    store: Path, tmp_path: Path
) -> None:
    fetches = "#!/bin/bash\nexec 3<>/dev/tcp/192.0.2.1/80 && echo 1 > /logs/verifier/reward.txt\n"
    ready = await prepared(folder(tmp_path / "fetches", tests__test_sh=fetches), store)
    said = await refused(ready)
    assert "its own solution earns None here and doing nothing None" in said
    assert "Sandboxes have no network" in said
    assert "test.sh wrote neither" in said
    with pytest.raises(GradeError, match="its own solution earns None"):
        await graded(ready, ANSWER)


async def test_a_solution_outside_the_work_tree_is_told_where_only_that_counts(store: Path, tmp_path: Path) -> None:
    outside = "#!/bin/bash\necho 42 > ~/answer\n"
    ready = await prepared(folder(tmp_path / "out", solution__solve_sh=outside), store, grade_in="fresh")
    assert 'only the work tree counts with grade_in = "fresh"' in await refused(ready)


async def test_a_verifier_without_a_solution_must_at_least_refuse_nothing(store: Path, tmp_path: Path) -> None:
    test = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    ready = await prepared(folder(tmp_path / "free", tests__test_sh=test, solution__solve_sh=""), store)
    assert "its verifier does not work here: it gives an untouched environment the full reward" in await refused(ready)


async def test_without_a_solution_a_full_reward_is_unproven(store: Path, tmp_path: Path) -> None:
    ready = await prepared(folder(tmp_path / "unsolved", solution__solve_sh=""), store)
    found = await graded(ready, ANSWER)
    assert (found.status, found.flags, reward(found)) == (VerdictStatus.RESOLVED, (Flag.UNPROVEN,), 1.0)


async def test_a_verifier_gets_its_own_environment_and_an_agent_does_not(store: Path, tmp_path: Path) -> None:
    toml = LOCAL + 'env = { SHARED = "s" }\n[verifier]\nenv = { HIDDEN = "42" }\n[solution]\nenv = { ANSWER = "42" }\n'
    test = ANSWERED.replace("grep -qx 42", 'grep -qx "$HIDDEN$SHARED"')
    solve = "#!/bin/bash\nprintf '#!/bin/bash\\necho %s$SHARED\\n' $ANSWER > answer; chmod +x answer\n"
    ready = await prepared(folder(tmp_path / "t", toml, tests__test_sh=test, solution__solve_sh=solve), store)
    seen = "printf '#!/bin/bash\\necho %s$SHARED\\n' \"$HIDDEN\" > answer; chmod +x answer"
    assert reward(await graded(ready, seen)) == 0.0, "and the solution, which has its own, was seen to earn 1"
    assert ready.patience == math.inf
