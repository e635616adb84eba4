"""Rows in, tasks out: every place rows can come from, and every way a row can be wrong."""

import gzip
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.errors import ConfigError
from polar_env.tasks.embedded_rows import embedded_rows, tree_digest
from polar_env.tasks.rows import load, resolve, task_of
from polar_env.tasks.sources import copy_embedded, sdist_table
from tasks_helpers import BASE, good_row, swebench_data, write_jsonl


@pytest.fixture(autouse=True)
def no_data_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLAR_SWEBENCH_DATA", raising=False)


# --- where rows come from ---------------------------------------------------------------------------------------


def test_a_jsonl_row_becomes_a_task(tmp_path: Path) -> None:
    (task,) = load(str(write_jsonl(tmp_path / "rows.jsonl", good_row())))
    assert task.task_id == "acme__gadget-1"
    assert task.row["FAIL_TO_PASS"] == ["t.py::test_a"]
    assert task.source == {"kind": "image", "image": "acme/gadget:latest"}


def test_gzip_blank_lines_and_lists_of_ids_are_fine(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(json.dumps(good_row(FAIL_TO_PASS=["t.py::test_a"], PASS_TO_PASS=["t.py::test_b"])) + "\n\n")
    (task,) = load(str(tmp_path / "rows.jsonl.gz"))
    assert task.row["PASS_TO_PASS"] == ["t.py::test_b"]


def test_parquet_and_jsonl_give_the_same_task(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([good_row()]), tmp_path / "rows.parquet")
    write_jsonl(tmp_path / "rows.jsonl", good_row())
    assert load(str(tmp_path / "rows.parquet")) == load(str(tmp_path / "rows.jsonl"))


def test_a_folder_is_all_its_row_files_and_the_verified_one_wins(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "Lite.jsonl", good_row(version="lite"), good_row(instance_id="acme__gadget-2"))
    write_jsonl(tmp_path / "Verified.jsonl", good_row(version="verified"))
    write_jsonl(tmp_path / "index.jsonl", {"instance_id": "acme__gadget-1", "log": "x"})
    (tmp_path / "notes.md").write_text("not rows")
    tasks = load(str(tmp_path))
    assert [(task.task_id, task.row["version"]) for task in tasks] == [
        ("acme__gadget-1", "verified"),
        ("acme__gadget-2", "1.0"),
    ]
    assert "Verified.jsonl, Lite.jsonl" in resolve(str(tmp_path)).detail


def test_no_data_means_the_embedded_tasks_and_says_why() -> None:
    source = resolve("")
    assert (source.kind, load("")) == ("embedded", load("embedded"))
    assert "POLAR_SWEBENCH_DATA is not set" in source.detail


def test_the_data_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "rows.jsonl", good_row())
    monkeypatch.setenv("POLAR_SWEBENCH_DATA", str(tmp_path))
    assert [task.task_id for task in load("")] == ["acme__gadget-1"]
    assert "POLAR_SWEBENCH_DATA" in resolve("").detail
    assert resolve("embedded").kind == "embedded"


def test_hub_names_and_splits() -> None:
    assert (resolve("hub:acme/set").dataset, resolve("hub:acme/set").split) == ("acme/set", "test")
    assert resolve("hub:acme/set:dev").split == "dev"


def test_a_hub_that_cannot_be_reached_says_what_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"acme/none.*--data PATH or POLAR_SWEBENCH_DATA"):
        load("hub:acme/none")


@pytest.mark.parametrize("data", ["/nowhere", "nothing.parquet", ""])
def test_a_place_without_rows_is_named(tmp_path: Path, data: str) -> None:
    with pytest.raises(ConfigError, match=r"no rows at .*: give a \.parquet"):
        load(data or str(tmp_path))


# --- rows that cannot be used -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_script": ...}, "'eval_script' is missing; rows of SWE-bench before v5 lack it"),
        ({"base_commit": ..., "base_comit": BASE}, "'base_commit' is missing; is it called 'base_comit'"),
        ({"problem_statement": "  "}, "'problem_statement' must be a non-empty text"),
        ({"version": 1.0}, "'version' must be a non-empty text, not 1.0"),
        ({"eval_type": "sometimes"}, "'eval_type' must be one of pass_and_fail, fail_only"),
        ({"FAIL_TO_PASS": "t.py::test_a"}, "'FAIL_TO_PASS' must be a list of test ids"),
        ({"PASS_TO_PASS": [1]}, "'PASS_TO_PASS' must be a list of test ids"),
        ({"PASS_TO_PASS": None}, "'PASS_TO_PASS' must be a list of test ids"),
        ({"polar_source": {"kind": "tape"}}, "polar_source must be a mapping whose 'kind' is one of sdist, git"),
        ({"polar_source": "image"}, "polar_source must be a mapping"),
    ],
)
def test_a_bad_row_is_named_with_its_field_and_its_fix(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", good_row(instance_id="acme__gadget-0"), good_row(**changes))
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert str(caught.value).startswith("rows.jsonl line 2 (acme__gadget-1)")
    assert words in str(caught.value)


@pytest.mark.parametrize("line", ["{", "[1]", '"text"'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(good_row()) + "\n" + line)
    with pytest.raises(ConfigError, match=r"rows\.jsonl line 2: .*JSONL has one object a line"):
        load(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.gz"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"neither parquet nor gzip")
    with pytest.raises(ConfigError, match="cannot be read as"):
        load(str(tmp_path / name))


def test_a_bad_row_does_not_spoil_the_tasks_that_were_asked_for(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", good_row(instance_id="bad__row-1", repo=""), good_row())
    assert [task.task_id for task in load(str(path), ["acme__gadget-1"])] == ["acme__gadget-1"]


def test_a_row_that_every_patch_resolves_is_left_out_and_refused_when_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", good_row(instance_id="empty__f2p-1", FAIL_TO_PASS="[]"), good_row())
    with caplog.at_level(logging.WARNING):
        assert [task.task_id for task in load(str(path))] == ["acme__gadget-1"]
    assert "empty__f2p-1" in caplog.text
    with pytest.raises(ConfigError, match="every patch would be resolved"):
        load(str(path), ["empty__f2p-1"])


@pytest.mark.parametrize("rows", [[], [good_row(FAIL_TO_PASS=[])]], ids=["no row", "none that can be used"])
def test_rows_of_which_no_task_is_left_are_refused(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(ConfigError, match=rf"no task in rows of .*rows\.jsonl: {len(rows)} rows were read"):
        load(str(path))


def test_another_task_of_the_same_name_in_one_file_is_not_lost_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = good_row(), good_row(), good_row(problem_statement="Another thing is broken.")
    assert len(load(str(write_jsonl(tmp_path / "rows.jsonl", *rows)))) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "rows.jsonl line 3 left out: rows.jsonl line 1 has the same instance_id acme__gadget-1, and is another task"
    ]


# --- choosing ---------------------------------------------------------------------------------------------------


def test_ids_choose_in_their_own_order_and_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", *(good_row(instance_id=f"acme__gadget-{n}") for n in range(4)))
    tasks = load(str(path), ["acme__gadget-3", "acme__gadget-1", "acme__gadget-3"])
    assert [task.task_id for task in tasks] == ["acme__gadget-3", "acme__gadget-1"]


def test_an_unknown_id_names_its_neighbours(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", good_row(instance_id="psf__requests-6028"), good_row())
    with pytest.raises(ConfigError, match=r"no task 'psf__request-6028' among 2.*psf__requests-6028"):
        load(str(path), ["psf__request-6028"])


# --- sources ----------------------------------------------------------------------------------------------------


def test_the_rows_own_source_outranks_the_sdist_table() -> None:
    own = {"kind": "git", "mirror": "mirrors/requests"}
    assert task_of(good_row(instance_id="psf__requests-6028", polar_source=own)).source == own
    assert task_of(good_row(instance_id="psf__requests-6028", polar_source=json.dumps(own))).source == own
    assert task_of(good_row(instance_id="psf__requests-6028")).source["file"] == "requests-2.27.0.tar.gz"


def test_the_sdist_table_is_complete_pinned_and_without_addresses() -> None:
    table = sdist_table()
    assert len(table) == 29
    for name, recipe in table.items():
        assert len(recipe["sha256"]) == 64, name
        assert recipe["file"].endswith(".tar.gz"), name
        assert recipe["python"] in ("3.6", "3.9", "3.11"), name
        assert all("==" in pin for pin in (*recipe["requirements"], f"pip=={recipe['pip']}")), name
        assert recipe["install"].startswith("python -m pip install "), name
        assert "://" not in json.dumps(recipe), name


def test_the_instruction_is_the_issue_and_nothing_that_varies() -> None:
    row = good_row(problem_statement="  Numbers come out wrong.\n")
    text = task_of(row).instruction
    assert "<issue>\nNumbers come out wrong.\n</issue>" in text
    assert "/testbed" in text
    assert text == task_of(row | {"instance_id": "other__name-2", "base_commit": "b" * 40}).instruction


@given(st.text().filter(str.strip))
def test_any_issue_text_survives_into_the_instruction(issue: str) -> None:
    assert issue.strip() in task_of(good_row(problem_statement=issue)).instruction


# --- our own tasks ----------------------------------------------------------------------------------------------


def test_embedded_rows_are_rows_like_any_other() -> None:
    tasks = load("embedded")
    assert len(tasks) == 3
    for task in tasks:
        assert task.source["kind"] == "embedded"
        assert set(good_row()) <= set(task.row)
        assert task.row["FAIL_TO_PASS"]
        assert not set(task.row["FAIL_TO_PASS"]) & set(task.row["PASS_TO_PASS"])
        assert f"git checkout {task.row['base_commit']} tests/" in task.row["eval_script"]


def test_an_embedded_fix_with_several_hunks_exists_so_that_half_a_fix_does_too() -> None:
    assert any(row["patch"].count("\n@@ ") >= 2 and row["patch"].count("diff --git") >= 2 for row in embedded_rows())


def test_embedded_patches_never_share_a_file_with_the_hidden_tests() -> None:
    for row in embedded_rows():
        assert "a/tests/" not in row["patch"]
        assert all(
            line.startswith("diff --git a/tests/") for line in row["test_patch"].splitlines() if "diff --git" in line
        )


def test_the_digest_of_an_embedded_tree_tells_trees_apart() -> None:
    assert len({tree_digest(name) for name in ("spans", "expiry", "rowfeed")}) == 3
    assert tree_digest("spans") == tree_digest("spans")


def outcomes(tree: Path) -> dict[str, str]:
    """Test id -> outcome of a whole pytest run over an embedded repository."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    argv = [sys.executable, "-B", "-m", "pytest", "-rA", "--rootdir", str(tree), "tests"]
    done = subprocess.run(argv, cwd=tree, env=env, check=False, capture_output=True, text=True)
    return {m[2]: m[1] for m in re.finditer(r"^(PASSED|FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)}


def apply(tree: Path, patch: str) -> None:
    subprocess.run(["git", "apply", "--unsafe-paths", "-"], cwd=tree, input=patch.encode(), check=True)


@pytest.mark.parametrize("row", embedded_rows(), ids=lambda row: row["instance_id"])
def test_the_lists_of_an_embedded_row_are_what_its_tests_do(tmp_path: Path, row: dict[str, Any]) -> None:
    to_fix, to_keep = json.loads(row["FAIL_TO_PASS"]), json.loads(row["PASS_TO_PASS"])
    copy_embedded(row["polar_source"]["path"], tmp_path)
    assert set(outcomes(tmp_path).values()) == {"PASSED"}, "the visible tests do not show the bug"
    apply(tmp_path, row["test_patch"])
    broken = outcomes(tmp_path)
    assert {name for name, outcome in broken.items() if outcome != "PASSED"} == set(to_fix)
    assert {name for name, outcome in broken.items() if outcome == "PASSED"} == set(to_keep)
    apply(tmp_path, row["patch"])
    assert outcomes(tmp_path) == dict.fromkeys([*to_fix, *to_keep], "PASSED")


@pytest.mark.parametrize("row", embedded_rows(), ids=lambda row: row["instance_id"])
def test_an_embedded_issue_gives_away_neither_fix_nor_tests(row: dict[str, Any]) -> None:
    shown = task_of(row).instruction
    for patch in (row["patch"], row["test_patch"]):
        added = [line[1:].strip() for line in patch.splitlines() if line.startswith("+") and len(line) > 30]
        assert added
        assert not [line for line in added if line in shown]


# --- the official rows ------------------------------------------------------------------------------------------


def test_official_rows_load_and_the_light_ones_come_from_their_sdists() -> None:
    light = ["psf__requests-6028", "pytest-dev__pytest-7571", "sympy__sympy-13031", "sphinx-doc__sphinx-7440"]
    tasks = load(swebench_data(), light)
    assert [task.task_id for task in tasks] == light
    assert {task.source["kind"] for task in tasks} == {"sdist"}
    assert len(tasks[0].row["PASS_TO_PASS"]) == 185
