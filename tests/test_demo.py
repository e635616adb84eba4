"""The demo without Gym: which tasks it takes, what it posts, and what it makes of the answers."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_helpers import VllmServer
from polar_env import demo
from polar_env.config import compose, load
from polar_env.demo import Demo
from polar_env.errors import ConfigError, EngineError, SandboxError
from polar_env.gym import launch, rows
from polar_env.gym.resources_server import settings as served
from polar_env.types import Outcome
from polar_env.verdict import VerdictStatus
from tasks_helpers import good_row, write_jsonl
from trajectory_helpers import Conversation, ledger, rollout

SCRIPTED = {"engine": {"kind": "scripted"}, "data": "embedded"}


def made(**fields: Any) -> Demo:
    return Demo(config=load(SCRIPTED), harnesses=("pi",), **fields)


def posted(index: int, harness: str = "pi", group: int = 0) -> dict[str, Any]:
    return {"task_id": "t", "harness": harness, "_ng_task_index": group, "_ng_rollout_index": index}


def answered(solved: bool = True, first: int = 1, **outcome: Any) -> dict[str, Any]:
    """A result row; rollouts of one group share their first prompt."""
    talk = Conversation()
    talk.turn([first, 2], [3, 4])
    status = VerdictStatus.RESOLVED if solved else VerdictStatus.UNRESOLVED
    result = rollout(ledger(*talk.records), status=status, **outcome)
    return rows.row(result, {"input": "x"}, model="policy", max_tokens=None)


GROUP = [(posted(index), answered(solved=index < 2)) for index in range(4)]
"""A group as the default scripts must end: fix, fix, give up, half."""


# --- what is run ------------------------------------------------------------------------------------------------


def test_the_first_embedded_task_stands_in_where_there_are_no_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("POLAR_SWEBENCH_DATA", raising=False)
    chosen = demo.choose(Demo(config=load(SCRIPTED | {"data": ""})))
    assert [task.source["kind"] for task in chosen] == ["embedded"]
    assert "no data was given" in capsys.readouterr().out  # the reader is told


def test_of_real_rows_the_lightest_is_taken(tmp_path: Path):
    names = ("acme__gadget-1", demo.LIGHT[2], demo.LIGHT[1])
    data = write_jsonl(tmp_path / "rows.jsonl", *(good_row(instance_id=name) for name in names))
    chosen = demo.choose(Demo(config=load(SCRIPTED | {"data": str(data)})))
    assert [task.task_id for task in chosen] == [demo.LIGHT[1]]


def test_rows_of_one_s_own_are_taken_from_the_start(tmp_path: Path):
    data = write_jsonl(tmp_path / "rows.jsonl", good_row(), good_row(instance_id="b__b-2"))
    chosen = demo.choose(Demo(config=load(SCRIPTED | {"data": str(data)})))
    assert [task.task_id for task in chosen] == ["acme__gadget-1"]


def test_named_tasks_are_taken_as_named():
    wanted = ("polar-env__spans-1", "polar-env__expiry-2")
    assert tuple(task.task_id for task in demo.choose(made(tasks=wanted))) == wanted


def test_data_without_a_task_is_refused(tmp_path: Path):
    data = write_jsonl(tmp_path / "rows.jsonl", good_row(FAIL_TO_PASS="[]"))
    with pytest.raises(ConfigError, match="no task in rows of"):
        demo.choose(Demo(config=load(SCRIPTED | {"data": str(data)})))


def test_a_group_has_one_row_per_rollout_alike_but_for_the_index():
    (task,) = demo.choose(made())
    posts = demo.group_rows(Demo(config=load(SCRIPTED), harnesses=("pi", "codex"), rollouts=3), 1, task)
    assert [(row["harness"], row["_ng_task_index"], row["_ng_rollout_index"]) for row in posts] == [
        ("pi", 2, 0),
        ("pi", 2, 1),
        ("pi", 2, 2),
        ("codex", 3, 0),
        ("codex", 3, 1),
        ("codex", 3, 2),
    ]
    first, second = ({**row, "_ng_rollout_index": 0} for row in posts[:2])
    assert first == second


def test_servers_get_the_configuration_with_paths_that_hold_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_jsonl(tmp_path / "rows.jsonl", good_row())
    monkeypatch.chdir(tmp_path)
    config = compose(["engine=scripted", "data=rows.jsonl", "store.cache=cache", "proxy.max_calls=7"])
    plain = demo.settings(config)
    assert plain["data"] == str(tmp_path / "rows.jsonl")
    assert plain["store"] == {"cache": str(tmp_path / "cache"), "sessions": str(tmp_path / "out" / "sessions")}
    monkeypatch.chdir("/")
    again = served(json.loads(json.dumps(plain)), {})
    assert (again.proxy, again.engine) == (config.proxy, config.engine)


def real_policy(url: str, tmp_path: Path) -> Demo:
    config = load(
        {
            "engine": {"kind": "vllm", "base_urls": [url]},
            "harness": {"name": "shell", "command": ["true"]},
            "store": {"cache": str(tmp_path)},
            "data": "embedded",
        }
    )
    return Demo(config=config, harnesses=("shell",), out=tmp_path / "out")


async def test_everything_is_made_ready_in_sight(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async with VllmServer(model="tiny-coder").run() as server:
        await demo.ready(real_policy(server.url, tmp_path), ())
    said = capsys.readouterr().out
    assert "harness shell: installing" in said
    assert "engine vllm: tiny-coder, window 64" in said
    assert "token ids and log-probabilities are the model's own" in said


def test_a_dead_engine_is_told_before_anything_is_installed_or_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        demo.run(real_policy("http://127.0.0.1:9/v1", tmp_path))
    assert "installing" not in capsys.readouterr().out


def test_an_output_folder_that_cannot_be_made_is_told_first(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        demo.run(made(out=tmp_path / "file" / "out"))


# --- what came of it --------------------------------------------------------------------------------------------


def test_a_group_that_ended_as_its_scripts_must_is_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert demo.report(made(out=tmp_path / "out"), GROUP) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == list(demo.COLUMNS)
    assert printed.count("completed") == 4
    assert "all valid for NeMo-RL and as expected" in printed
    written = (tmp_path / "out" / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reward"] for line in written] == [1.0, 1.0, 0.0, 0.0]


def test_no_result_is_no_success(tmp_path: Path):
    assert demo.report(made(out=tmp_path), []) == 1


@pytest.mark.parametrize(
    ("index", "answer", "words"),
    [
        (0, answered(solved=False), "script fix must get reward 1.0, got 0.0"),
        (2, answered(solved=True), "script give_up must get reward 0.0, got 1.0"),
        (3, answered(solved=False, outcome=Outcome.SANDBOX_ERROR), "masked=True"),
        (1, answered() | {"reward": float("nan")}, "rule 2"),
        (1, answered(first=9), "rule 8"),
    ],
    ids=["unsolved", "too good", "masked", "invalid", "split group"],
)
def test_a_wrong_row_fails_the_demo_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], index: int, answer: dict[str, Any], words: str
):
    results = [*GROUP]
    results[index] = (posted(index), answer)
    assert demo.report(made(out=tmp_path), results) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert any(words in line for line in wrong)


def test_groups_of_different_harnesses_need_not_share_a_prompt(tmp_path: Path):
    other = [(posted(index, "codex", group=1), answered(solved=index < 2, first=9)) for index in range(4)]
    assert demo.report(made(out=tmp_path), [*GROUP, *other]) == 0


def test_rows_that_are_all_masked_are_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = load({"engine": {"kind": "vllm", "base_urls": ["http://gpu/v1"]}})
    lost = [(posted(index), answered(solved=False, outcome=Outcome.ENGINE_ERROR)) for index in range(4)]
    assert demo.report(Demo(config=config, out=tmp_path), lost) == 1
    assert "every row is masked" in capsys.readouterr().out


def test_of_a_real_policy_no_reward_is_expected(tmp_path: Path):
    config = load({"engine": {"kind": "vllm", "base_urls": ["http://gpu/v1"]}})
    lost = [(posted(index), answered(solved=False)) for index in range(4)]
    assert demo.report(Demo(config=config, out=tmp_path), lost) == 0
    assert demo.report(made(out=tmp_path), lost) == 1


def test_a_script_of_one_s_own_may_get_any_reward(tmp_path: Path):
    own = Demo(config=load({"engine": {"kind": "scripted", "scripts": ["mine:policy"]}}), out=tmp_path)
    assert demo.report(own, [(posted(0), answered(solved=True)), (posted(1), answered(solved=False))]) == 0


def test_the_table_is_aligned_and_says_what_is_masked():
    lines = [demo.line(posted(0), answered()), demo.line(posted(11), answered(outcome=Outcome.NO_CALLS))]
    head, first, second = demo.table(lines).splitlines()
    assert len({len(head), len(first), len(second)}) == 1
    assert second[head.index("reward") :].startswith("0.0 masked")
    assert first[head.index("seconds") :].strip() == "15.5"  # the agent's 12.5 and the grader's 3


def test_rows_of_an_earlier_run_stay_when_new_ones_cannot_be_written(tmp_path: Path, capsys) -> None:
    (tmp_path / "rollouts.jsonl").write_text("earlier\n")
    (tmp_path / "rollouts.part").mkdir()  # nothing can be written there
    with pytest.raises(ConfigError, match="another --out"):
        demo.report(made(out=tmp_path), GROUP)
    assert (tmp_path / "rollouts.jsonl").read_text() == "earlier\n"
    assert "t #0" in capsys.readouterr().out  # the table is shown before


def test_rows_of_an_earlier_run_are_kept_under_a_number_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for earlier in ("first", "second"):
        (tmp_path / "rollouts.jsonl").write_text(earlier)
        assert demo.report(made(out=tmp_path), GROUP) == 0
    assert (tmp_path / "rollouts.1.jsonl").read_text() == "first"
    assert (tmp_path / "rollouts.2.jsonl").read_text() == "second"
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 4
    assert f"{tmp_path}/rollouts.jsonl of an earlier run is now {tmp_path}/rollouts.2.jsonl" in capsys.readouterr().out


def test_a_folder_another_demo_writes_to_is_refused_before_anything_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with demo.alone(tmp_path), pytest.raises(ConfigError, match=r"another polar demo is writing to .*--out"):
        demo.run(made(out=tmp_path))
    assert capsys.readouterr().out == ""
    with demo.alone(tmp_path):
        assert list(tmp_path.iterdir()) == []


# --- interrupted ------------------------------------------------------------------------------------------------


def test_what_had_ended_when_it_was_interrupted_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rollouts.jsonl").write_text("earlier")
    demo.interrupted(made(out=tmp_path), GROUP[:3])
    rows = (tmp_path / "interrupted.jsonl").read_text().splitlines()
    assert [json.loads(row)["reward"] for row in rows] == [1.0, 1.0, 0.0]
    assert (tmp_path / "rollouts.jsonl").read_text() == "earlier"
    assert f"3 rollouts had ended, their rows are in {tmp_path}/interrupted.jsonl" in capsys.readouterr().out


def names_below(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*")]


async def test_ctrl_c_says_in_one_line_what_was_kept_and_where(tmp_path: Path):
    async with VllmServer(fault="hang").run() as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "import sys; from polar_env.cli import main; sys.exit(main())"),
            *("demo", "--data", "embedded", "--engine", "vllm", "--model-url", engine.url, "--out", "mine"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await engine.started.wait()
        process.send_signal(signal.SIGINT)
        printed, wrong = await process.communicate()
    assert (process.returncode, wrong) == (130, b"")
    last = printed.decode().splitlines()[-1]
    assert "interrupted: 0 rollouts had ended; logs of all that began are in mine/sessions" in last
    assert names_below(tmp_path) == ["mine"]


async def test_gym_s_servers_that_die_under_the_rollouts_are_a_sentence(monkeypatch: pytest.MonkeyPatch):
    async def lost() -> None:
        raise ZeroDivisionError("as its HTTP client would")

    class Collecting:
        def run_examples(self, **asked: Any) -> list[Any]:
            return [lost()]

    monkeypatch.setattr(launch, "RolloutCollectionHelper", Collecting)
    with pytest.raises(SandboxError, match="lost with NeMo Gym's servers: ZeroDivisionError"):
        await demo.collect([posted(0)], None, [])
