"""The hidden tests' files: made on the host, and put in place whatever lies there."""

from typing import Any

import pytest

from polar_env.errors import GradeError
from polar_env.grade.hidden import Hidden, hidden, make, named, place, touched
from polar_env.sandbox.sandbox import open_sandbox
from polar_env.tasks import Prepared
from sandbox_helpers import box_of, config, git_repo, prepared_of

OLD = b"def test_a():\n    assert True\n"
PATCH = b"""diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1,2 +1,2 @@
 def test_a():
-    assert True
+    assert not False
diff --git a/tests/run.sh b/tests/run.sh
new file mode 100755
--- /dev/null
+++ b/tests/run.sh
@@ -0,0 +1 @@
+true
diff --git a/tests/gone.py b/tests/gone.py
deleted file mode 100644
--- a/tests/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-x = 1
"""
NEW = OLD.replace(b"True", b"not False")
ROW: dict[str, Any] = {
    "base_commit": "0" * 40,
    "test_patch": PATCH.decode(),
    "FAIL_TO_PASS": ["tests/test_a.py::test_a[x::y]"],
    "PASS_TO_PASS": '["tests/deep/test_b.py::B::test_b", "test_c (tests.test_c.C)"]',
}
FILES = {"tests/test_a.py": OLD, "tests/gone.py": b"x = 1\n", "tests/deep/test_b.py": b"b = 1\n", "code.py": b""}
MADE = Hidden(
    {"tests/deep/test_b.py": b"b = 1\n", "tests/gone.py": None, "tests/run.sh": b"true\n", "tests/test_a.py": NEW},
    frozenset({"tests/run.sh"}),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_of(git_repo(tmp_path_factory.mktemp("hidden") / "repo", FILES, {}), ROW)


def test_which_files_are_the_tests() -> None:
    assert touched(ROW) == {"tests/test_a.py", "tests/run.sh", "tests/gone.py"}
    assert named(ROW) == {"tests/test_a.py", "tests/deep/test_b.py"}


async def test_the_files_are_what_the_test_patch_makes_of_the_base(prepared: Prepared) -> None:
    assert await hidden(prepared) == MADE


async def test_a_repository_in_an_image_gives_the_same(prepared: Prepared) -> None:
    assert prepared.repo is not None
    in_image = Prepared(prepared.task, prepared.base_commit, repo=None, env=None, git_dir=None, image="x")
    async with open_sandbox(box_of(prepared.repo), config()) as sandbox:
        assert await hidden(in_image, sandbox) == MADE


def test_a_test_patch_that_does_not_fit_is_the_tasks_fault() -> None:
    with pytest.raises(GradeError, match="does not apply"):
        make({"tests/test_a.py": b"other\n"}, ["tests/test_a.py"], PATCH)


IN_THE_WAY = {
    "nothing": "true",
    "other content": "echo pass > tests/test_a.py; touch tests/gone.py",
    "a link": "mkdir mine; echo pass > mine/t.py; ln -sf ../mine/t.py tests/test_a.py",
    "the folder is a link": "mv tests mine; ln -s mine tests",
    "the folder is a file": "rm -r tests; echo x > tests",
    "a folder": "rm tests/test_a.py; mkdir -p tests/test_a.py/x tests/run.sh; touch tests/test_a.py/x/y",
    "closed": "chmod 000 tests/deep tests/test_a.py; chmod 500 tests; chmod 500 .",
    "a compiled file": "mkdir -p tests/__pycache__; echo x > tests/__pycache__/test_a.cpython-39.pyc",
    "a compiled file that cannot be removed": (
        "mkdir -p tests/__pycache__ code/__pycache__; echo x > tests/__pycache__/test_a.cpython-39.pyc; "
        "echo x > code/__pycache__/x.pyc; chmod 111 tests/__pycache__ code/__pycache__ code"
    ),
    "a find of its own": "mkdir bin; printf '#!/bin/sh\\n' > bin/find; chmod 755 bin/find; mkdir tests/__pycache__",
}


@pytest.mark.parametrize("way", IN_THE_WAY)
async def test_the_files_are_put_in_place_whatever_lies_there(prepared: Prepared, way: str) -> None:
    assert prepared.repo is not None
    async with open_sandbox(box_of(prepared.repo), config()) as sandbox:
        await sandbox.exec(["bash", "-ec", IN_THE_WAY[way]], timeout=30)
        assert await place(sandbox, MADE) == ""
        look = (
            "test ! -L tests && test ! -e tests/gone.py && test -x tests/run.sh && find . -name __pycache__ -o -type l"
        )
        done = await sandbox.exec(["bash", "-ec", look], timeout=30)
        assert (done.code, done.stdout) == (0, b"")
        for path, data in MADE.files.items():
            if data is not None:
                assert await sandbox.read(f"/testbed/{path}") == data


async def test_what_cannot_be_put_in_place_says_why(prepared: Prepared) -> None:
    """In a fresh sandbox it can, so what the patch did is to blame: a finding, never an error that masks."""
    assert prepared.repo is not None
    async with open_sandbox(box_of(prepared.repo), config()) as sandbox:
        impossible = Hidden({"tests": b"a file", "tests/test_a.py": NEW})
        assert (await place(sandbox, impossible)).startswith("the tests could not be put in place: ")
