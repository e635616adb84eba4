"""Rows of your own, of SWE-Gym and of R2E-Gym graded for real: pytest in fresh sandboxes, guards and all."""

from pathlib import Path

import pytest

from polar_env.errors import GradeError, SandboxError
from polar_env.grade import patch as patches
from polar_env.grade.grading import box_of, grade
from polar_env.sandbox.sandbox import open_sandbox
from polar_env.tasks import Prepared
from polar_env.tasks.rows import task_of
from polar_env.verdict import Flag, Verdict, VerdictStatus
from sandbox_helpers import config
from shapes_helpers import CODE, FILES, FIX, IDS, OTHER_FIX, PYTEST, TESTS, own_row, r2e_row, ready, swegym_row

pytestmark = pytest.mark.timeout(900)
"""A grading is a dozen sandboxes, one after the other; the machine may have other things to do."""


def adding(path: str, *lines: str) -> str:
    """A patch that creates ``path``."""
    body = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{body}"


NOTHING = adding("notes.txt", "I tried.")


def running(*lines: str) -> str:
    """A patch without the fix whose code runs when the tests import the package."""
    body = "".join(f"+{line}\n" for line in lines)
    head = "diff --git a/gadget.py b/gadget.py\n--- a/gadget.py\n+++ b/gadget.py\n"
    return f"{head}@@ -1,2 +1,{2 + len(lines)} @@\n{body} def half(n):\n     return n / 2\n"


async def graded(prepared: Prepared, patch: str, timeout: float = 60) -> Verdict:  # noqa: ASYNC109
    return await grade(prepared, patch.encode(), sandbox=config(), timeout=timeout)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return ready(tmp_path_factory.mktemp("own"), own_row())


@pytest.fixture(scope="module")
def r2e(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The image's layout on a directory: its helpers lie at /r2e_tests, its own Python is on the PATH."""
    row = r2e_row(polar_source={"kind": "git", "mirror": "m"})
    return ready(tmp_path_factory.mktemp("r2e"), row)


# --- rows of your own -------------------------------------------------------------------------------------------


@pytest.mark.e2e
async def test_the_right_fix_is_resolved_and_a_change_that_fixes_nothing_is_not(own: Prepared) -> None:
    found = await graded(own, FIX)
    assert (found.status, found.fail_to_pass, found.flags) == (VerdictStatus.RESOLVED, (2, 2), ())
    found = await graded(own, NOTHING)
    assert (found.status, found.fail_to_pass) == (VerdictStatus.UNRESOLVED, (1, 2))
    assert (await graded(own, "")).status is VerdictStatus.EMPTY_PATCH


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"test_command": "no_such_pytest -rA tests"}, "no_such_pytest"),
        ({"tests": ..., "FAIL_TO_PASS": [IDS[0][0]], "PASS_TO_PASS": ["tests/test_gadget.py::test_gone"]}, "test_gone"),
    ],
    ids=["a command that is not there", "a test that never passed"],
)
async def test_a_row_without_a_fix_whose_tests_do_not_work_is_no_zero(
    broken: dict[str, object], said: str, tmp_path: Path
) -> None:
    row = ready(tmp_path, own_row(patch=..., **broken))
    with pytest.raises(GradeError, match=f"brings no fix.*{said}"):
        await graded(row, OTHER_FIX)


@pytest.mark.e2e
async def test_a_row_without_a_fix_is_graded_by_its_tests(tmp_path: Path) -> None:
    row = ready(tmp_path, own_row(patch=..., tests=..., FAIL_TO_PASS=list(IDS[0]), PASS_TO_PASS=list(IDS[1])))
    assert (await graded(row, OTHER_FIX)).status is VerdictStatus.RESOLVED
    assert (await graded(row, NOTHING)).status is VerdictStatus.UNRESOLVED


@pytest.mark.e2e
async def test_another_right_fix_proves_itself_on_rewritten_tests(own: Prepared) -> None:
    found = await graded(own, OTHER_FIX)
    assert (found.status, found.flags) == (VerdictStatus.RESOLVED, ())


@pytest.mark.e2e
async def test_a_package_that_forges_reports_is_caught(own: Prepared) -> None:
    forged = running(
        "import sys",
        "if 'pytest' in sys.modules:",
        "    from _pytest.reports import TestReport as R",
        "    made = R.from_item_and_call.__func__",
        "    def _made(cls, item, call):",
        "        report = made(cls, item, call); report.outcome = 'passed'; report.longrepr = None",
        "        return report",
        "    R.from_item_and_call = classmethod(_made)",
    )
    found = await graded(own, forged)
    assert (found.status, found.official) == (VerdictStatus.REFUSED, True)
    assert Flag.FORCED_PASS in found.flags


@pytest.mark.e2e
async def test_tests_of_the_patch_are_left_out_and_flagged(own: Prepared) -> None:
    hollow = "".join(f"-{line}\n" for line in own_row()["polar_source"]["files"]["tests/test_gadget.py"].splitlines())
    rewrite = (
        "diff --git a/tests/test_gadget.py b/tests/test_gadget.py\n--- a/tests/test_gadget.py\n"
        f"+++ b/tests/test_gadget.py\n@@ -1,5 +1,2 @@\n{hollow}+def test_half(): pass\n+def test_double(): pass\n"
    )
    found = await graded(own, rewrite + NOTHING)
    assert (found.status, found.flags) == (VerdictStatus.UNRESOLVED, (Flag.TESTS_EDITED,))
    assert "tests/test_gadget.py" in found.detail
    hooked = await graded(own, adding("tests/conftest.py", "x = 1"))
    assert (hooked.status, hooked.flags) == (VerdictStatus.REFUSED, (Flag.TEST_HOOKS,))


async def test_a_broken_sandbox_is_no_verdict(own: Prepared) -> None:
    with pytest.raises(GradeError, match="grading sandbox"):
        await grade(own, FIX.encode(), sandbox=config(bwrap="/nowhere/bwrap"), timeout=10)


@pytest.mark.e2e
async def test_results_may_be_xml_and_a_build_may_follow_the_tests(tmp_path: Path) -> None:
    row = own_row(
        build="cp tests/test_gadget.py built.txt",
        test_command=f"test -s built.txt && {PYTEST} --junit-xml=/tmp/out.xml tests",
        results="junit:/tmp/out.xml",
    )
    prepared = ready(tmp_path, row)
    assert (await graded(prepared, FIX)).status is VerdictStatus.RESOLVED
    found = await graded(prepared, NOTHING)
    assert (found.status, found.fail_to_pass) == (VerdictStatus.UNRESOLVED, (1, 2))


@pytest.mark.e2e
async def test_a_row_without_a_fix_is_graded_and_its_pass_is_proved(tmp_path: Path) -> None:
    prepared = ready(tmp_path, own_row(patch=...))
    found = await graded(prepared, OTHER_FIX)
    assert (found.status, found.flags) == (VerdictStatus.RESOLVED, ())
    assert (await graded(prepared, NOTHING)).status is VerdictStatus.UNRESOLVED


@pytest.mark.e2e
async def test_a_file_that_must_stay_is_put_back_and_a_hang_is_a_zero(tmp_path: Path) -> None:
    """A file given as null is as the repository has it, whatever a runner's ids look like."""
    check = ["import gadget", "print('PASSED' if gadget.half(5) == 2 else 'FAILED', 'check')"]
    files = {"gadget.py": CODE, "check.py": "\n".join([*check, ""])}
    row = own_row(test_files={"check.py": None}, tests=["check"], test_command="python check.py")
    prepared = ready(tmp_path, row, files)
    removed = "".join(f"-{line}\n" for line in check)
    cheat = f"--- a/check.py\n+++ b/check.py\n@@ -1,2 +1 @@\n{removed}+print('PASSED check')\n"
    found = await graded(prepared, f"diff --git a/check.py b/check.py\n{cheat}{NOTHING}")
    assert (found.status, found.flags) == (VerdictStatus.UNRESOLVED, (Flag.TESTS_EDITED,))
    hang = await graded(prepared, running("import time", "time.sleep(7031.25)"), timeout=10)
    assert hang.status is VerdictStatus.TESTS_TIMED_OUT
    resolved = await graded(prepared, OTHER_FIX)
    assert (resolved.status, resolved.flags) == (VerdictStatus.RESOLVED, (Flag.UNPROVEN,))


# --- SWE-Gym ----------------------------------------------------------------------------------------------------


@pytest.mark.e2e
async def test_a_swe_gym_row_is_graded_by_its_own_script(tmp_path: Path) -> None:
    """Its install needs a network and says so; the tests run all the same, as in its image."""
    prepared = ready(tmp_path, swegym_row(repo="facebookresearch/hydra"), {**FILES, "conftest.py": ""})
    found = await graded(prepared, FIX)
    assert (found.status, found.fail_to_pass, found.pass_to_pass) == (VerdictStatus.RESOLVED, (1, 1), (1, 1))
    assert found.flags == ()
    found = await graded(prepared, NOTHING)
    assert (found.status, found.fail_to_pass, found.pass_to_pass) == (VerdictStatus.UNRESOLVED, (0, 1), (1, 1))


# --- R2E-Gym ----------------------------------------------------------------------------------------------------


@pytest.mark.e2e
async def test_an_r2e_row_is_resolved_when_every_status_is_as_expected(r2e: Prepared) -> None:
    more = adding("r2e_tests/test_2.py", "def test_more(): pass")  # their grader counts tests; ours come first
    found = await graded(r2e, OTHER_FIX + more)
    assert (found.status, found.fail_to_pass, found.pass_to_pass) == (VerdictStatus.RESOLVED, (1, 1), (2, 2))
    assert found.flags == ()
    assert (await graded(r2e, NOTHING)).status is VerdictStatus.UNRESOLVED


async def test_what_an_image_holds_of_the_tests_is_gone_before_its_agent_starts(tmp_path: Path) -> None:
    files = {"gadget.py": "x = 1\n", "run_tests.sh": "pytest r2e_tests\n", "r2e_tests/test_1.py": TESTS}
    prepared = ready(tmp_path, r2e_row(polar_source={"kind": "git", "mirror": "m"}), files)
    in_image = Prepared(task_of(r2e_row()), prepared.base_commit, repo=None, env=None, git_dir=None, image="x")
    assert in_image.by_snapshot
    async with open_sandbox(box_of(prepared, config()), config()) as sandbox:
        baseline = await patches.snapshot(sandbox, hide=in_image.hide)
        shown = await sandbox.exec(["ls", "/testbed", "/"], timeout=10)
        assert b"r2e_tests" not in shown.stdout + shown.stderr
        assert b"run_tests.sh" not in shown.stdout
        await sandbox.exec(["bash", "-c", "echo 'x = 2' > gadget.py"], cwd="/testbed", timeout=10)
        await sandbox.kill()
        change = await patches.extract(sandbox, in_image, baseline)
    assert b"+x = 2" in change
    assert b"r2e_tests" not in change


async def test_a_path_that_cannot_be_hidden_starts_no_agent(own: Prepared) -> None:
    async with open_sandbox(box_of(own, config()), config()) as sandbox:
        with pytest.raises(SandboxError, match="not for the agent and cannot be removed"):
            await patches.snapshot(sandbox, hide=["/usr/bin/env"])
