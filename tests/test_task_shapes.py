"""Rows that are not SWE-bench's: recognised by their fields, checked field by field, made into tasks."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.errors import ConfigError
from polar_env.grade.phases import of_row
from polar_env.tasks.prepare import eval_rewrites
from polar_env.tasks.r2e_rows import command, patch_of
from polar_env.tasks.rows import SHAPES, load, task_of
from polar_env.tasks.sources import write_files
from polar_env.tasks.swegym_rows import eval_script, image
from shapes_helpers import FIX, IDS, TEST_PATCH, TESTS, commit_of, own_row, r2e_log, r2e_row, swegym_row
from tasks_helpers import good_row, write_jsonl

Make = Callable[..., dict[str, Any]]


# --- which shape ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "grader", "name"),
    [
        (good_row(), "swebench", "acme__gadget-1"),
        (own_row(), "tests_pass", "own__gadget-1"),
        (swegym_row(), "swebench", "getmoto__moto-7023"),
        (r2e_row(), "r2e", "pillow__4bc3bd6a4bc3"),
    ],
)
def test_a_row_is_known_by_its_fields(tmp_path: Path, row: dict[str, Any], grader: str, name: str) -> None:
    (task,) = load(str(write_jsonl(tmp_path / "rows.jsonl", row)))
    assert (task.grader, task.task_id) == (grader, name)
    assert load(str(tmp_path / "rows.jsonl"), [name]) == (task,)


@pytest.mark.parametrize(("make", "told"), [(own_row, "tests_pass"), (swegym_row, "swe_gym"), (r2e_row, "r2e")])
def test_the_rows_own_word_says_the_same(make: Make, told: str) -> None:
    with_word = task_of(make(polar_grader=told))
    assert with_word.grader == task_of(make()).grader
    assert told in SHAPES


@pytest.mark.parametrize("make", [own_row, swegym_row, r2e_row])
def test_every_shape_is_told_the_issue_and_only_that(make: Make) -> None:
    said = task_of(make()).instruction
    assert "<issue>\nhalf(5) must be 2.\n</issue>" in said
    assert "test_half" not in said


@pytest.mark.parametrize("make", [good_row, own_row, swegym_row, r2e_row])
def test_a_task_may_travel_as_its_row_and_is_the_same_at_the_other_end(make: Make) -> None:
    """`polar dataset --embed` carries ``task.row`` to servers that have no data."""
    task = task_of(make())
    assert task_of(json.loads(json.dumps(task.row))) == task


def test_a_folder_may_hold_rows_of_every_shape_and_parquet_too(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([swegym_row()]), tmp_path / "gym.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([r2e_row()]), tmp_path / "r2e.parquet")
    write_jsonl(tmp_path / "own.jsonl", own_row())
    assert [task.grader for task in load(str(tmp_path))] == ["swebench", "tests_pass", "r2e"]


BAD: list[tuple[Make, dict[str, Any], str]] = [
    (own_row, {"problem_statement": ...}, "field 'problem_statement' is missing; a row of kind tests_pass needs it"),
    (own_row, {"tests": []}, "no test is listed that must pass"),
    (own_row, {"tests": ...}, "field 'tests' is missing"),
    (own_row, {"tests": "t.py::a"}, "field 'tests' must be a list of test ids"),
    (own_row, {"FAIL_TO_PASS": IDS[0]}, "field 'tests' stands beside FAIL_TO_PASS"),
    (own_row, {"polar_source": ...}, "field 'polar_source' is missing"),
    (own_row, {"polar_source": {"kind": "tape"}}, "'kind' is one of sdist, git, files"),
    (own_row, {"polar_source": {"kind": "files"}}, "polar_source of kind files must give 'files'"),
    (own_row, {"polar_source": {"kind": "git", "mirror": "m"}}, "field 'base_commit' is missing"),
    (own_row, {"results": "junit"}, "field 'results' must be pytest, junit:PATH"),
    (own_row, {"results": "pytest:x.xml"}, "field 'results' must be pytest, junit:PATH"),
    (own_row, {"results": "nose"}, "field 'results' must be pytest, junit:PATH or parse_log_..., not 'nose'"),
    (own_row, {"test_files": ..., "test_file": {}}, "field 'test_file' is unknown; did you mean 'test_files'?"),
    (own_row, {"tests": ..., "FAIL_TO_PASS": IDS, "PASS_TO_PAS": IDS}, "did you mean 'PASS_TO_PASS'?"),
    (own_row, {"test_command": "python -m pytest -q tests"}, "field 'test_command' runs pytest without -rA"),
    (own_row, {"install": ["pip"]}, "field 'install' must be a text, not ['pip']"),
    (own_row, {"test_files": {"/etc/passwd": "x"}}, "field 'test_files' names '/etc/passwd'"),
    (own_row, {"test_files": {"a/../../b": "x"}}, "field 'test_files' names 'a/../../b'"),
    (own_row, {"test_files": {"a.py": 1}}, "field 'test_files' must give a text or null for a.py"),
    (own_row, {"test_files": {"a.py": "\ud800"}}, "field 'test_files' must give a text or null for a.py"),
    (own_row, {"test_files": ["a.py"]}, "field 'test_files' must be an object"),
    (own_row, {"test_patch": TEST_PATCH}, "tests/test_gadget.py is in 'test_files' and in 'test_patch'"),
    (swegym_row, {"base_commit": ...}, "field 'base_commit' is missing; rows of SWE-Gym have it"),
    (swegym_row, {"FAIL_TO_PASS": []}, "field 'FAIL_TO_PASS' is empty"),
    (r2e_row, {"execution_result_content": ...}, "'execution_result_content' is missing; rows of R2E-Gym-Subset"),
    (r2e_row, {"execution_result_content": "{}"}, "has no test_file_names and test_file_codes"),
    (r2e_row, {"execution_result_content": "["}, "field 'execution_result_content' is not JSON"),
    (r2e_row, {"expected_output_json": "{}"}, "must give a status to each test"),
    (r2e_row, {"expected_output_json": '{"a": 1}'}, "must give a status to each test"),
    (r2e_row, {"expected_output_json": "[]"}, "field 'expected_output_json' must be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "changes", "words"), BAD)
def test_a_bad_row_of_any_shape_is_named_with_its_field(make: Make, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_of(make(**changes), "rows.jsonl line 7")
    assert str(caught.value).startswith("rows.jsonl line 7 (")
    assert words in str(caught.value)


# --- rows of your own -------------------------------------------------------------------------------------------


def test_the_command_runs_where_the_repository_is_and_after_the_tests_arrived() -> None:
    task = task_of(own_row(install="pip install -e .", build="make -C tests"))
    parts = of_row(task.row)
    assert parts is not None
    assert "cd /testbed\npip install -e ." in parts.install
    assert "cd /testbed\nmake -C tests" in parts.build
    assert "cd /testbed\npython -m pytest -rA" in parts.test
    assert task.source["install"] == "pip install -e .", "the environment is made with it, too"


def test_without_install_and_build_nothing_runs_before_the_tests() -> None:
    parts = of_row(task_of(own_row()).row)
    assert parts is not None
    assert (parts.install, parts.build) == ("", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"test_command": "pytest -rA"},
        {"test_command": "pytest -qrA tests"},
        {"test_command": "pytest -rpf"},
        {"test_command": "make test"},
        {"test_command": "pytest --junit-xml=/tmp/x", "results": "junit:/tmp/x"},
        {"test_command": "pytest -v", "results": "parse_log_pytest_v2"},
    ],
)
def test_a_command_that_tells_its_results_is_taken(fields: dict[str, Any]) -> None:
    assert task_of(own_row(**fields)).grader == "tests_pass"


def test_lists_of_swe_benchs_kind_are_taken_as_they_are() -> None:
    row = own_row(tests=..., FAIL_TO_PASS=json.dumps(IDS[0]), PASS_TO_PASS=IDS[1])
    assert task_of(row).row["FAIL_TO_PASS"] == IDS[0]
    assert task_of(row).row["PASS_TO_PASS"] == IDS[1]


def test_a_row_without_a_commit_gets_one_that_tells_repositories_apart() -> None:
    one, other = (task_of(own_row(polar_source={"kind": "files", "files": {"a": text}})) for text in "xy")
    assert len(str(one.row["base_commit"])) == 40
    assert one.row["base_commit"] != other.row["base_commit"]
    assert (
        one.row["base_commit"]
        == task_of(own_row(polar_source={"kind": "files", "files": {"a": "x"}})).row["base_commit"]
    )


PATHS = st.from_regex(r"([a-z]{1,5}/)?[a-z]{1,5}\.py", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"))


@given(st.dictionaries(PATHS, TEXTS, max_size=4))
def test_files_of_a_row_become_the_tree(files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, Path(folder))
        assert {path: (Path(folder) / path).read_text("utf-8") for path in files} == files


@pytest.mark.parametrize("path", ["/a", "../a", "a/../../b", ".git/hooks/post-checkout", ""])
def test_a_file_out_of_the_repository_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="relative to the repository"):
        write_files({path: "x"}, tmp_path)


# --- SWE-Gym ----------------------------------------------------------------------------------------------------


def test_swe_gyms_image_has_its_own_spelling() -> None:
    assert image("Project-MONAI__MONAI-4775") == "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-4775:latest"
    assert task_of(swegym_row()).source["image"] == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7023:latest"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "pytest -n0 -rA tests/test_gadget.py"),
        ({"repo": "dask/dask"}, "pytest -n0 -rA  --color=no tests/test_gadget.py"),
        ({"repo": "pandas-dev/pandas"}, "pytest -rA --tb=long tests/test_gadget.py"),
        ({"repo": "Project-MONAI/MONAI"}, "pytest -rA  tests/test_gadget.py"),
        ({"repo": "python/mypy", "version": "1.6"}, 'pytest -n0 -rA -k "testA or testB"'),
        ({"repo": "python/mypy", "version": "1.10"}, 'pytest -rA -k "testA or testB"'),
    ],
)
def test_swe_gyms_command_is_its_repositorys(fields: dict[str, Any], line: str) -> None:
    patch = TEST_PATCH + "diff --git a/x.json b/x.json\n--- a/x.json\n+++ b/x.json\n@@ -1 +1 @@\n-a\n+[case testA]\n"
    if "mypy" in fields.get("repo", ""):
        patch += "+[case testB]\n"
    parts = of_row(task_of(swegym_row(test_patch=patch, **fields)).row)
    assert parts is not None
    assert f"\n{line}\n" in parts.test
    assert "git checkout" not in parts.test + parts.install


@pytest.mark.parametrize(
    ("repo", "version", "has", "has_not"),
    [
        ("getmoto/moto", "5.0", "make init", "pip install"),
        ("conan-io/conan", "1.59", "cython<3", "nothing"),
        ("conan-io/conan", "2.4", "conans/requirements_dev.txt", "cython<3"),
        ("python/mypy", "0.920", "pytest-xdist", "nothing"),
        ("python/mypy", "1.0", "test-requirements.txt", "pytest-xdist"),
        ("pandas-dev/pandas", "2.1", "'numpy<2'", "nothing"),
        ("pandas-dev/pandas", "2.2", "--no-build-isolation", "'numpy<2'"),
        ("iterative/dvc", "3.3", "pytest<8", "nothing"),
        ("iterative/dvc", "3.5", "all_remotes", "pytest<8"),
        ("pydantic/pydantic", "2.7", "make install", "nothing"),
    ],
)
def test_swe_gyms_install_is_that_of_the_version_and_no_part_of_the_tests(
    repo: str, version: str, has: str, has_not: str
) -> None:
    parts = of_row({"eval_script": eval_script(swegym_row(repo=repo, version=version))})
    assert parts is not None
    assert has in parts.install
    assert has_not not in parts.install
    assert has not in parts.test


def test_swe_gyms_script_is_pointed_at_an_environment_of_ours() -> None:
    task = task_of(swegym_row(polar_source={"kind": "git", "mirror": "m"}))
    script = str(task.row["eval_script"])
    for old, new in eval_rewrites(task, "f" * 40):
        script = script.replace(old, new)
    assert "conda" not in script
    assert "a" * 40 not in script


def test_only_pydantics_log_has_a_parser_of_its_own() -> None:
    assert task_of(swegym_row()).row["log_parser"] == "parse_log_pytest"
    assert task_of(swegym_row(repo="pydantic/pydantic")).row["log_parser"] == "swe_gym_pydantic"


# --- R2E-Gym ----------------------------------------------------------------------------------------------------


def test_r2es_tests_come_from_the_row_and_are_hidden_in_its_image() -> None:
    task = task_of(r2e_row())
    assert task.row["polar_files"] == {"r2e_tests/__init__.py": "", "r2e_tests/test_1.py": TESTS}
    assert task.source["image"] == "namanjain12/pillow_final:4bc3bd6a"
    assert {"/r2e_tests", "/testbed/r2e_tests", "/testbed/run_tests.sh", "/root/run_tests.sh"} <= {*task.source["hide"]}


def test_what_the_commit_repairs_is_read_from_its_logs() -> None:
    row = task_of(r2e_row()).row
    assert row["FAIL_TO_PASS"] == ["r2e_tests/test_1.py::test_half"]
    assert row["PASS_TO_PASS"] == ["r2e_tests/test_1.py::test_double", "r2e_tests/test_1.py::TestBoth::test_back"]
    assert row["base_commit"] == "b" * 40


FIXED = r2e_log(test_double="PASSED", test_half="PASSED", TestBoth__test_back="PASSED")


@pytest.mark.parametrize("old", [None, "", FIXED])
def test_without_a_log_that_shows_the_bug_every_test_that_passes_must(old: str | None) -> None:
    ran = json.loads(r2e_row()["execution_result_content"]) | {"old_commit_res_stdout": old}
    row = task_of(r2e_row(execution_result_content=json.dumps(ran))).row
    assert (len(row["FAIL_TO_PASS"]), row["PASS_TO_PASS"]) == (3, [])


def test_r2es_right_fix_is_the_commit_without_its_tests() -> None:
    new = "\n".join(
        [
            "diff --git a/pkg/more.py b/pkg/more.py",
            "new file mode 100644",
            "index 0000000..e69de29",
            "--- /dev/null",
            "+++ b/pkg/more.py",
            "@@ -0,0 +1 @@",
            "+x = 1",
            "\\ No newline at end of file",
            "",
        ]
    )
    others = "".join(
        FIX.replace("gadget.py", path) for path in ("tests/test_a.py", "Tests/b.py", "c_test.py", "notes.md")
    )
    assert patch_of(commit_of(FIX + others + new)) == FIX + new
    assert task_of(r2e_row()).row["patch"] == FIX


def test_a_commit_that_cannot_be_read_is_no_fix_and_no_error() -> None:
    for commit in ({}, {"file_diffs": [{}]}, {"file_diffs": None}, {"file_diffs": [{"header": None}]}):
        assert patch_of(commit) == ""
    assert task_of(r2e_row(parsed_commit_content=...)).row["patch"] == ""


@pytest.mark.parametrize(
    ("repo", "files", "built_here", "line"),
    [
        ("sympy", ["test_1.py"], False, "SyntaxWarning' .venv/bin/python -W ignore -m pytest -rA r2e_tests"),
        ("sympy", ["test_1.py"], True, "SyntaxWarning' python -W ignore -m pytest -rA r2e_tests"),
        (
            "orange3",
            ["test_1.py"],
            False,
            "--auto-servernum .venv/bin/python -W ignore -m pytest -rA r2e_tests",
        ),
        (
            "tornado",
            ["test_1.py", "a_runner.py"],
            False,
            ".venv/bin/python -W ignore r2e_tests/a_runner.py",
        ),
    ],
)
def test_r2es_command_is_that_of_its_images(repo: str, files: list[str], built_here: bool, line: str) -> None:
    assert command(repo, files, built_here).endswith(line)
