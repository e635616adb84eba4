"""What a patch says before it is run: refusals, what is left out, flags; and that no real fix is touched by any."""

import gzip
import json
from typing import Any

import pytest

from polar_env.grade.review import Kept, keep, review, same_change
from polar_env.reward import FLAGS
from polar_env.verdict import Flag
from sandbox_helpers import data_folder


def diff(path: str, body: str = "@@ -1 +1 @@\n-a\n+b\n", extra: str = "") -> str:
    return f"diff --git a/{path} b/{path}\n{extra}--- a/{path}\n+++ b/{path}\n{body}"


# --- judging ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "reason", "flag"),
    [
        (diff("conftest.py"), "conftest.py changes how tests run", Flag.TEST_HOOKS),
        (diff("tests/deep/conftest.py", extra="new file mode 100644\n"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("sitecustomize.py"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("src/evil.pth"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("pytest.ini"), "changes how tests run", Flag.TEST_HOOKS),
        ('diff --git "a/\\143onftest.py" "b/\\143onftest.py"\n', "conftest.py changes", Flag.TEST_HOOKS),
        ("diff --git a/a.py b/conftest.py\nrename from a.py\nrename to conftest.py\n", "tests run", Flag.TEST_HOOKS),
        (diff("../outside.py"), "outside the repository", Flag.OUTSIDE),
        (diff("a/../../b.py"), "outside the repository", Flag.OUTSIDE),
        ("--- a/x\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "outside the repository", Flag.OUTSIDE),
        (diff(".git/hooks/post-checkout"), "git's own", Flag.GIT_FILES),
        (diff("sub/.GIT/config"), "git's own", Flag.GIT_FILES),
        ("--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+a\n", "git's own", Flag.GIT_FILES),
        (diff("link", "@@ -0,0 +1 @@\n+/etc/passwd\n", "new file mode 120000\n"), "symbolic link out", Flag.OUTSIDE),
        (diff("a/link", "@@ -0,0 +1 @@\n+../../x\n", "new file mode 120000\n"), "symbolic link out", Flag.OUTSIDE),
        (diff("a/link", "@@ -0,0 +1 @@\n+up/../x\n", "new file mode 120000\n"), "symbolic link out", Flag.OUTSIDE),
        (diff("a/link", "@@ -0,0 +1 @@\n+./..//../x\n", "new file mode 120000\n"), "symbolic link out", Flag.OUTSIDE),
        (diff("link", "@@ -0,0 +1 @@\n+.git/hooks\n", "new file mode 120000\n"), "symbolic link out", Flag.OUTSIDE),
        (diff("pytest.py"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("pytest.cpython-39-x86_64-linux-gnu.so"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("tests/_pytest.abi3.so"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("_pytest/runner.py"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("tests/unittest.py"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("evil.dist-info/entry_points.txt"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("evil.egg-info/entry_points.txt"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("tests/__pycache__/test_a.cpython-39.pyc"), "changes how tests run", Flag.TEST_HOOKS),
        (diff("sub/.gitattributes"), "git's own", Flag.GIT_FILES),
        (diff("code.py") * 101, "101 files", Flag.OVERSIZED),
        (diff("code.py", "@@ -0,0 +1 @@\n+" + "x" * 1_000_000 + "\n"), "bytes", Flag.OVERSIZED),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(patch: str, reason: str, flag: Flag) -> None:
    found = review(patch.encode())
    assert found is not None
    assert reason in found.reason
    assert found.flag is flag


@pytest.mark.parametrize(
    "patch",
    [
        "",
        diff("src/code.py"),
        diff("tests/test_new.py", extra="new file mode 100644\n"),
        diff("setup.py"),
        diff("docs/conftest.py.rst"),
        diff("a/link", "@@ -0,0 +1 @@\n+../b\n", "new file mode 120000\n"),
        diff("a/b/link", "@@ -0,0 +1 @@\n+../../c/..d/e\n", "new file mode 120000\n"),
        diff("odd..name/..x.py"),
        diff(".github/workflows/ci.yml"),
        diff("src/_pytest/runner.py"),
        diff("src/pkg/unittest.py"),
        diff("docs/pytest.rst"),
    ],
)
def test_what_is_not_refused(patch: str) -> None:
    assert review(patch.encode()) is None


ROW: dict[str, Any] = {
    "test_patch": diff("tests/test_a.py") + diff("tests/new.py", extra="new file mode 100644\n"),
    "FAIL_TO_PASS": '["tests/test_a.py::test_x"]',
    "PASS_TO_PASS": ["tests/test_old.py::test_y[a::b]"],
}


def test_files_the_tests_bring_or_are_named_by_are_left_out_and_the_rest_is_untouched() -> None:
    theirs = diff("tests/test_a.py") + diff("tests/new.py") + diff("tests/test_old.py")
    kept = keep((diff("src/a.py") + theirs + diff("src/b.py")).encode(), ROW)
    names = ("tests/new.py", "tests/test_a.py", "tests/test_old.py")
    assert kept == Kept((diff("src/a.py") + diff("src/b.py")).encode(), names, frozenset({Flag.TESTS_EDITED}))
    assert keep(diff("src/a.py").encode(), ROW) == Kept(diff("src/a.py").encode())


def test_a_file_renamed_onto_a_test_file_is_left_out() -> None:
    renamed = b"diff --git a/x.py b/tests/new.py\nsimilarity index 100%\nrename from x.py\nrename to tests/new.py\n"
    assert keep(renamed, ROW) == Kept(b"", ("tests/new.py",), frozenset({Flag.TESTS_EDITED}))


NEW = "new file mode 100644\n"


@pytest.mark.parametrize(
    ("path", "extra", "stays"),
    [
        ("tests/helpers.py", "", False),
        ("pkg/testing/compare.py", "", False),
        ("test/conf.json", "deleted file mode 100644\n", False),
        ("tests/helpers/__init__.py", NEW, False),  # found before tests/helpers.py
        ("tests/test_mine.py", NEW, True),
        ("tests.py", "", True),
        ("src/latest/a.py", "", True),
    ],
)
def test_what_hidden_tests_may_use_is_left_as_the_base_has_it(path: str, extra: str, stays: bool) -> None:
    """``def check(found, wanted): pass`` in a helper passes every test that only asks it."""
    kept = keep((diff("src/a.py") + diff(path, extra=extra)).encode(), ROW)
    assert kept.left_out == (() if stays else (path,))
    assert kept.flags == (frozenset() if stays else {Flag.TESTS_EDITED})
    assert kept.patch.startswith(diff("src/a.py").encode())


@pytest.mark.parametrize("row", [{**ROW, "test_patch": ""}, {**ROW, "patch": diff("tests/helpers.py")}])
def test_where_a_fix_may_lie_among_the_tests_it_is_graded(row: dict[str, Any]) -> None:
    """A row of one's own, that does not split its change or whose own fix is there."""
    patch = diff("tests/helpers.py").encode()
    assert keep(patch, row) == Kept(patch)


def test_a_nested_repository_is_left_out_and_the_fix_beside_it_is_graded() -> None:
    link = diff("sub", "@@ -0,0 +1 @@\n+Subproject commit 1\n", "new file mode 160000\n")
    kept = keep((diff("src/a.py") + link).encode(), ROW)
    assert kept == Kept(diff("src/a.py").encode(), ("sub",), frozenset({Flag.NESTED_REPOSITORY}))


@pytest.mark.parametrize(
    ("patch", "flag"),
    [
        (diff("setup.py"), Flag.BUILD_FILES),
        (diff("sub/pyproject.toml"), Flag.BUILD_FILES),
        (diff("code.py", "@@ -1 +1 @@\n-a\n+print('>>>>> Start Test Output')\n"), Flag.LOG_MARKERS),
    ],
)
def test_what_is_told_and_graded_all_the_same(patch: str, flag: Flag) -> None:
    assert keep(patch.encode(), ROW) == Kept(patch.encode(), flags=frozenset({flag}))


def test_the_same_change_is_known_by_its_hunks() -> None:
    plain = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@ def f():\n-a\n+b\n c\n"
    made = "diff --git a/x.py b/x.py\nindex 1..2 100644\n--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
    assert same_change(plain.encode(), made.encode())
    assert not same_change(plain.encode(), made.replace("+b", "+d").encode())
    assert not same_change(plain.encode(), (made + diff("notes.txt")).encode())
    assert not same_change(plain.encode(), (made.replace("+b", "+d") + made).encode()), "the last is not all"
    assert not same_change(b"", made.encode())


# --- real corpora -----------------------------------------------------------------------------------------------

DATA = data_folder()
needs_data = pytest.mark.skipif(DATA is None, reason="no SWE-bench data (set POLAR_SWEBENCH_DATA)")


def rows(name: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    assert DATA is not None
    return pq.read_table(DATA / name).to_pylist()


def attacks() -> list[dict[str, Any]]:
    if DATA is None or not (DATA / "attack_cases.jsonl.gz").exists():
        return []
    with gzip.open(DATA / "attack_cases.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@needs_data
@pytest.mark.parametrize(
    "name", ["SWE-bench_Verified_test.parquet", "SWE-bench_Lite_dev.parquet", "SWE-bench_Multilingual_test.parquet"]
)
def test_every_gold_patch_is_graded_whole(name: str) -> None:
    """A denylist that hits one real fix would punish what we want to teach."""
    for row in rows(name):
        gold = row["patch"].encode()
        assert review(gold) is None, row["instance_id"]
        kept = keep(gold, row)
        assert (kept.patch, kept.left_out) == (gold, ()), row["instance_id"]
        assert all(FLAGS[flag] == "report" for flag in kept.flags), row["instance_id"]
        assert same_change(gold, gold)


@pytest.mark.skipif(not attacks(), reason="no attack corpus (set POLAR_SWEBENCH_DATA)")
@pytest.mark.parametrize("case", attacks(), ids=lambda case: f"{case['iid']}-{case['attack']}")
def test_attacks_on_the_official_grader_are_met_before_a_test_runs(case: dict[str, Any]) -> None:
    """Refused outright, or the files they need never arrive; patches with the real fix alone are untouched."""
    if case["attack"] == "huge_20MB":
        return  # the corpus keeps only its name; the size limit has its own test
    row = next(r for r in rows("SWE-bench_Verified_test.parquet") if r["instance_id"] == case["iid"])
    patch = case["patch"].encode()
    met = review(patch) is not None or keep(patch, row).patch.strip() != patch.strip()
    hooks = ("conftest", "ini_", "edit_", "delete_", "precreate", "traversal", "git_hook",
             "gold_submodule", "gold_hang", "gold_kill")  # fmt: skip
    assert met == case["attack"].startswith(hooks)
