"""The official evaluation in a fresh sandbox, on a small repository whose tests run with unittest."""

import asyncio
import gzip
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_env.errors import GradeError
from polar_env.grade import report as official
from polar_env.grade.swebench import grade, prewarm
from polar_env.tasks import Prepared
from polar_env.verdict import Flag, Verdict, VerdictStatus
from sandbox_helpers import config, data_folder, git_repo, prepared_of

CODE = b"def f():\n    return 1\n\n\ndef g():\n    return 3\n"
TESTS = """import unittest
import code_under_test as c


class T(unittest.TestCase):
    def test_g(self):
        self.assertEqual(c.g(), 3)
"""
TEST_PATCH = """diff --git a/tests/test_old.py b/tests/test_old.py
--- a/tests/test_old.py
+++ b/tests/test_old.py
@@ -5,3 +5,6 @@
 class T(unittest.TestCase):
     def test_g(self):
         self.assertEqual(c.g(), 3)
+
+    def test_f(self):
+        self.assertEqual(c.f(), 2)
diff --git a/tests/test_new.py b/tests/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1,7 @@
+import unittest
+import code_under_test as c
+
+
+class N(unittest.TestCase):
+    def test_both(self):
+        self.assertEqual(c.f() + c.g(), 5)
"""
GOLD = """diff --git a/code_under_test.py b/code_under_test.py
--- a/code_under_test.py
+++ b/code_under_test.py
@@ -1,5 +1,5 @@
 def f():
-    return 1
+    return 2
{blank}{blank} def g():
""".format(blank=" \n")


def name(case: str, test: str) -> str:
    """A test's name in ``unittest -v``'s output, which gained the method's name in Python 3.11."""
    dotted = f"tests.{case}.{test}" if sys.version_info >= (3, 11) else f"tests.{case}"
    return f"{test} ({dotted})"


def row_of(base: str) -> dict[str, Any]:
    files = "tests/test_old.py tests/test_new.py"
    script = [
        "#!/bin/bash", "set -uxo pipefail", "source /opt/miniconda3/bin/activate", "cd /testbed",
        "git config --global --add safe.directory /testbed", "git status", f"git -c core.fileMode=false diff {base}",
        f"git checkout {base} tests/test_old.py",
        f"git apply -v - <<'EOF_114329324912'\n{TEST_PATCH}\nEOF_114329324912", ": '>>>>> Start Test Output'",
        "python3 -m unittest -v tests.test_old tests.test_new", ": '>>>>> End Test Output'",
        f"git checkout {base} {files}",
    ]  # fmt: skip
    return {
        "instance_id": "polar__unittest-1", "repo": "polar/unittest", "version": "1", "base_commit": base, "image": "",
        "test_patch": TEST_PATCH, "patch": GOLD, "eval_script": "\n".join(script) + "\n",
        "log_parser": "parse_log_django", "eval_type": "pass_and_fail",
        "FAIL_TO_PASS": json.dumps([name("test_old.T", "test_f"), name("test_new.N", "test_both")]),
        "PASS_TO_PASS": json.dumps([name("test_old.T", "test_g")]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    files = {"code_under_test.py": CODE, "tests/__init__.py": b"", "tests/test_old.py": TESTS.encode()}
    repo = git_repo(tmp_path_factory.mktemp("grade") / "repo", files, {})
    base = "0" * 39 + "1"  # the upstream commit a row names; our repository has another
    python = Path(sys.base_prefix)
    return prepared_of(
        repo, row_of(base), mounts=((python, str(python)),),
        eval_rewrites=(("source /opt/miniconda3/bin/activate", "export ACTIVATED=1"),),
        env_vars={"PATH": f"{python}/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


async def verdict(prepared: Prepared, patch: str | bytes, timeout: float = 60) -> Verdict:  # noqa: ASYNC109
    data = patch if isinstance(patch, bytes) else patch.encode()
    return await grade(prepared, data, sandbox=config(), timeout=timeout)


def adding(path: str, *lines: str) -> str:
    """A patch that creates ``path``."""
    body = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{body}"


def running(*lines: str) -> str:
    """A patch without the fix whose code runs when the tests import the package."""
    body = "".join(f"+{line}\n" for line in lines)
    return (
        "diff --git a/code_under_test.py b/code_under_test.py\n--- a/code_under_test.py\n+++ b/code_under_test.py\n"
        f"@@ -1,2 +1,{2 + len(lines)} @@\n{body} def f():\n     return 1\n"
    )


# --- verdicts ---------------------------------------------------------------------------------------------------


async def test_the_gold_patch_is_resolved(prepared: Prepared) -> None:
    found = await verdict(prepared, GOLD)
    assert (found.status, found.fail_to_pass, found.pass_to_pass) == (VerdictStatus.RESOLVED, (2, 2), (1, 1))
    assert found.seconds > 0


async def test_a_patch_that_fixes_nothing_is_unresolved_with_counts(prepared: Prepared) -> None:
    found = await verdict(prepared, adding("notes.txt", "I tried."))
    assert (found.status, found.fail_to_pass, found.pass_to_pass) == (VerdictStatus.UNRESOLVED, (0, 2), (1, 1))


async def test_a_patch_that_breaks_what_worked_is_unresolved(prepared: Prepared) -> None:
    moved = GOLD + "@@ -5,2 +5,2 @@\n-def g():\n+def h():\n     return 3\n"
    moved = moved.replace("@@ -1,5 +1,5 @@", "@@ -1,4 +1,4 @@").replace(" def g():\n@@", "@@")
    found = await verdict(prepared, moved)
    assert (found.status, found.pass_to_pass) == (VerdictStatus.UNRESOLVED, (0, 1))


@pytest.mark.parametrize("patch", [b"", b"\n \n"])
async def test_an_empty_patch_is_found_without_running_anything(prepared: Prepared, patch: bytes) -> None:
    nowhere = config(bwrap="/nowhere/bwrap")
    assert (await grade(prepared, patch, sandbox=nowhere, timeout=1)).status is VerdictStatus.EMPTY_PATCH


async def test_a_patch_that_does_not_apply_says_why(prepared: Prepared) -> None:
    found = await verdict(prepared, GOLD.replace("def f", "def nope").replace("return 1", "return 7"))
    assert found.status is VerdictStatus.PATCH_FAILED
    assert "code_under_test.py" in found.detail


async def test_the_whole_official_chain_is_tried(prepared: Prepared) -> None:
    """Context that drifted: only the last attempt, GNU patch with fuzz, takes it."""
    drifted = GOLD.replace(" \n \n def g():\n", " \n \n def gg():\n")
    assert (await verdict(prepared, drifted)).status is VerdictStatus.RESOLVED


async def test_a_hang_is_a_timeout_and_takes_no_longer(prepared: Prepared) -> None:
    found = await verdict(prepared, running("import time", "time.sleep(7020.25)"), timeout=10)
    assert found.status is VerdictStatus.TESTS_TIMED_OUT
    assert found.seconds < 40


async def test_a_budget_too_small_for_the_right_fix_is_no_verdict_on_a_patch(prepared: Prepared) -> None:
    """It would be a 0 that trains: the same patch is resolved when there is time to install it."""
    with pytest.raises(GradeError, match=r"raise budget\.grade"):
        await verdict(prepared, running("import time", "time.sleep(7020.25)"), timeout=0.01)


async def test_output_that_is_no_text_does_not_stop_the_grader(prepared: Prepared) -> None:
    noisy = GOLD.replace("+    return 2\n", "+    import os; os.write(2, b'\\xff\\xfe\\x00\\n')\n+    return 2\n")
    assert (await verdict(prepared, noisy.replace("+1,5", "+1,6"))).status is VerdictStatus.RESOLVED


async def test_the_tests_have_no_network(prepared: Prepared) -> None:
    probe = running("import socket", "s = socket.socket()", "s.settimeout(5)", "s.connect(('192.0.2.1', 80))")
    assert (await verdict(prepared, probe)).pass_to_pass == (0, 0)


async def test_tests_that_are_shot_give_no_result_and_say_so(prepared: Prepared) -> None:
    found = await verdict(prepared, running("import os, signal", "os.kill(os.getpid(), signal.SIGKILL)"))
    assert found.status is VerdictStatus.UNRESOLVED
    assert "no test result" in found.detail


# --- tricks -----------------------------------------------------------------------------------------------------


async def test_what_changes_how_tests_run_is_refused_unrun(prepared: Prepared) -> None:
    found = await grade(prepared, adding("conftest.py", "x = 1").encode(), sandbox=config(bwrap="/no"), timeout=1)
    assert (found.status, found.detail) == (VerdictStatus.REFUSED, "conftest.py changes how tests run")
    assert found.flags == (Flag.TEST_HOOKS,)


async def test_editing_only_the_tests_is_an_empty_patch(prepared: Prepared) -> None:
    found = await verdict(prepared, adding("tests/test_new.py", "pass"))
    assert (found.status, found.flags) == (VerdictStatus.EMPTY_PATCH, (Flag.TESTS_EDITED,))
    assert "tests/test_new.py" in found.detail


async def test_a_test_file_created_beforehand_does_not_keep_the_real_one_out(prepared: Prepared) -> None:
    hollow = ("import unittest", "class N(unittest.TestCase):", "    def test_both(self): pass")
    neutered = adding("tests/test_new.py", *hollow)
    found = await verdict(prepared, neutered + adding("notes.txt", "x"))
    assert (found.status, found.fail_to_pass) == (VerdictStatus.UNRESOLVED, (0, 2))
    assert (await verdict(prepared, neutered + GOLD)).status is VerdictStatus.RESOLVED


FORGED = [name("test_old.T", "test_f"), name("test_new.N", "test_both"), name("test_old.T", "test_g")]
WRITE = ("import sys, os, atexit", "w = lambda s: os.write(2, (s + chr(10)).encode())")


async def test_markers_a_test_prints_are_broken_and_flagged(prepared: Prepared) -> None:
    """The official parser takes what stands between the first pair: with a forged pair that would be its own lines."""
    lines = [*WRITE, "m = '>' * 5 + ' '", "w(m + 'Start Test Output')", *(f"w('{test} ... ok')" for test in FORGED),
             "w(m + 'End Test Output')"]  # fmt: skip
    found = await verdict(prepared, running(*lines))
    assert (found.status, found.flags) == (VerdictStatus.UNRESOLVED, (Flag.LOG_MARKERS,))
    honest = GOLD.replace("+    return 2\n", "+    print('>>>>' + '> Patch Apply Failed')\n+    return 2\n")
    assert (await verdict(prepared, honest.replace("+1,5", "+1,6"))).status is VerdictStatus.RESOLVED


async def test_a_test_that_is_said_to_pass_after_it_failed_is_refused(prepared: Prepared) -> None:
    """The official parser takes the last word."""
    lines = [*WRITE, *(f"atexit.register(w, '{test} ... ok')" for test in FORGED)]
    found = await verdict(prepared, running(*lines))
    assert (found.status, found.flags, found.official) == (VerdictStatus.REFUSED, (Flag.CONFLICTING,), True)


async def test_results_printed_before_the_process_ends_itself_prove_nothing(prepared: Prepared) -> None:
    lines = [*WRITE, *(f"w('{test} ... ok')" for test in FORGED), "os._exit(0)"]
    found = await verdict(prepared, running(*lines))
    assert (found.status, found.flags, found.official) == (VerdictStatus.REFUSED, (Flag.FORCED_PASS,), True)


async def test_a_log_on_which_the_official_parser_computes_for_ever_is_the_patch_s_own_and_no_mask(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Django pattern looks from every such line to the end of the log."""
    monkeypatch.setattr(official, "PROCESSOR", 5.0)
    monkeypatch.setattr(official, "PER_MIB", 0.0)
    endless = running(*WRITE, "atexit.register(w, 'a ... Testing against Django installed in b\\n' * 300_000)")
    found = await verdict(prepared, endless)
    assert (found.status, found.fail_to_pass) == (VerdictStatus.UNRESOLVED, (0, 0))
    assert "the row's parser read the log it was measured on, not this" in found.detail


async def test_rewriting_the_script_while_it_runs_changes_nothing(prepared: Prepared) -> None:
    lines = ["import glob", "for p in glob.glob('/tmp/*.sh') + glob.glob('/*.sh'):",
             "    open(p, 'r+').write('echo taken over; exit 0' + chr(10) + '#' * 9000)"]  # fmt: skip
    found = await verdict(prepared, running(*lines))
    assert (found.status, found.fail_to_pass, found.pass_to_pass) == (VerdictStatus.UNRESOLVED, (0, 2), (1, 1))


async def test_nothing_of_a_grading_reaches_the_next(prepared: Prepared) -> None:
    vandal = running("import shutil", "shutil.rmtree('/testbed', ignore_errors=True)")
    assert (await verdict(prepared, vandal)).status is VerdictStatus.UNRESOLVED
    assert (await verdict(prepared, GOLD)).status is VerdictStatus.RESOLVED


# --- failures of ours -------------------------------------------------------------------------------------------


async def test_a_sandbox_that_cannot_start_is_an_error_never_a_verdict(prepared: Prepared) -> None:
    with pytest.raises(GradeError, match="grading sandbox"):
        await grade(prepared, GOLD.encode(), sandbox=config(bwrap="/nowhere/bwrap"), timeout=10)


def _say_it_was_resolved(place: Path) -> None:
    (measured,) = place.glob("right-*/facts.json")  # kept beside the prepared task
    measured.write_text(measured.read_text().replace('"resolved": false', '"resolved": true'))


async def test_a_task_whose_own_fix_fails_here_is_an_error_and_never_a_zero(prepared: Prepared, tmp_path: Path) -> None:
    """Whatever an agent does there is scored 0: the task must not be trained on."""
    row = {**prepared.task.row, "patch": GOLD.replace("return 2", "return 4")}
    assert prepared.repo is not None
    broken = replace(
        prepared, task=replace(prepared.task, row=row), repo=shutil.copytree(prepared.repo, tmp_path / "r")
    )
    with pytest.raises(GradeError, match="own fix is not resolved"):
        await verdict(broken, GOLD)
    await asyncio.to_thread(_say_it_was_resolved, tmp_path)
    await prewarm(broken, sandbox=config())
    assert (await verdict(broken, GOLD)).status is VerdictStatus.RESOLVED, "read, not measured again"


async def test_a_row_of_an_older_schema_is_named(prepared: Prepared) -> None:
    old = {k: v for k, v in prepared.task.row.items() if k not in ("eval_script", "log_parser")}
    assert prepared.repo is not None
    with pytest.raises(GradeError, match="log_parser, eval_script"):
        await verdict(prepared_of(prepared.repo, old), GOLD)


def test_the_official_script_records_the_tests_own_exit_code() -> None:
    assert "SWEBENCH_TEST_EXIT_CODE=$?" in official.eval_script(row_of("a" * 40))


def test_an_error_of_the_package_is_told_and_the_worker_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(">>>>> Start Test Output\n>>>>> End Test Output\n")
    with pytest.raises(GradeError, match="no_such_parser"):
        official.report({**row_of("a" * 40), "log_parser": "no_such_parser"}, "x", log)
    assert official.report(row_of("a" * 40), "x", log)["resolved"] is False


# --- real logs --------------------------------------------------------------------------------------------------

DATA = data_folder()


def _logs() -> list[dict[str, Any]]:
    if DATA is None or not (DATA / "logs_index.jsonl.gz").exists():
        return []
    with gzip.open(DATA / "logs_index.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def _known_rows() -> dict[str, Any]:
    import pyarrow.parquet as pq

    assert DATA is not None
    files = ("SWE-bench_Verified_test.parquet", "SWE-bench_Lite_dev.parquet")
    return {row["instance_id"]: row for file in files for row in pq.read_table(DATA / file).to_pylist()}


def _row_of(entry: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """The log's row; of an instance whose row is not here, one of its repository with the lists of the index."""
    name = entry["instance_id"]
    if name in rows:
        return rows[name]
    repo = name.rpartition("-")[0].replace("__", "/")
    told = entry["v5_tests_status"] or {}
    lists = {key: [*found["success"], *found["failure"]] for key, found in told.items() if key.endswith("_TO_PASS")}
    lists = lists if lists.get("FAIL_TO_PASS") else {"FAIL_TO_PASS": ["unknown"], "PASS_TO_PASS": []}
    return next(row for row in rows.values() if row["repo"] == repo) | {"instance_id": name} | lists


@pytest.mark.skipif(not _logs(), reason="no SWE-bench logs (set POLAR_SWEBENCH_DATA)")
def test_every_real_log_gets_the_verdict_the_official_package_gave_it(tmp_path: Path) -> None:
    """177 logs of real runs: our rows, our worker, the package's parsers and rules."""
    rows, seen = _known_rows(), 0
    for entry in _logs():
        log = tmp_path / "log"
        assert DATA is not None
        log.write_bytes(gzip.decompress((DATA / entry["file"]).read_bytes()))
        found = official.report(_row_of(entry, rows), entry["model_patch"] or "x", log)
        assert found["resolved"] == entry["v5_resolved"], entry["file"]
        seen += entry["instance_id"] in rows
    assert (len(_logs()), seen) == (177, 60)


# --- a real instance --------------------------------------------------------------------------------------------


needs_data = pytest.mark.skipif(DATA is None, reason="no SWE-bench data (set POLAR_SWEBENCH_DATA)")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """psf__requests-6028 of SWE-bench Verified, its tree from the package index's sdist."""
    from polar_env.tasks.prepare import prepare
    from polar_env.tasks.rows import load

    assert DATA is not None
    (task,) = load(str(DATA / "SWE-bench_Verified_test.parquet"), ["psf__requests-6028"])
    return asyncio.run(prepare(task, tmp_path_factory.mktemp("store"), sandbox=config()))


@pytest.mark.e2e
@pytest.mark.timeout(900)
@needs_data
async def test_a_real_instance_is_graded_as_the_official_harness_does(real: Prepared) -> None:
    gold = str(real.task.row["patch"])
    found = await verdict(real, gold, timeout=300)
    assert (found.status, found.fail_to_pass, found.pass_to_pass) == (VerdictStatus.RESOLVED, (2, 2), (185, 185))
    assert (await verdict(real, "")).status is VerdictStatus.EMPTY_PATCH
    useless = await verdict(real, adding("notes.txt", "I tried."), timeout=300)
    assert (useless.status, useless.fail_to_pass) == (VerdictStatus.UNRESOLVED, (0, 2))
    assert useless.pass_to_pass == (185, 185)
    elsewhere = await verdict(real, gold.replace("requests/utils.py", "requests/elsewhere.py"))
    assert elsewhere.status is VerdictStatus.PATCH_FAILED
