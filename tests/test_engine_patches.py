"""Unified diffs as values, checked against git itself."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import PATIENT
from polar_env.engine import patches, scripts
from polar_env.errors import EngineError

lines = st.text(st.characters(codec="utf-8", exclude_characters="\n", exclude_categories=("Cs",)), max_size=8)


@st.composite
def edits(draw) -> tuple[list[str], list[str]]:
    """A file before and after."""
    before = draw(st.lists(lines, min_size=1, max_size=30))
    after = [line for line in before if draw(st.booleans()) or draw(st.booleans())]
    for _ in range(draw(st.integers(1, 4))):
        after.insert(draw(st.integers(0, len(after))), draw(lines))
    return before, after


def diff(folder: Path, before: list[str], after: list[str]) -> str:
    """git's own diff between the two; ``folder`` is left with the old file."""
    folder.mkdir(exist_ok=True)
    for name, text in (("b.py", after), ("a.py", before)):
        (folder / name).write_text("".join(f"{line}\n" for line in text), newline="")
    command = ["git", "diff", "--no-index", "--text", "-U2", "a.py", "b.py"]
    raw = subprocess.run(command, cwd=folder, capture_output=True, check=False).stdout.decode()
    return raw.replace("b/b.py", "b/a.py")


def applied(folder: Path, patch: str) -> str:
    done = subprocess.run(["git", "apply", "-"], cwd=folder, input=patch.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    with (folder / "a.py").open(newline="") as file:
        return file.read()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("patches")


@settings(PATIENT, max_examples=40)
@given(edits())
def test_a_diff_read_and_written_again_is_the_same_change(scratch, edit):
    before, after = edit
    patch = diff(scratch, before, after)
    if "@@" in patch and "rename" not in patch:
        assert applied(scratch, patches.write(patches.parse(patch))) == "".join(f"{line}\n" for line in after)


@settings(PATIENT, max_examples=40)
@given(edits())
def test_a_comment_where_the_fix_belongs_applies_and_adds_that_line_alone(scratch, edit):
    before, after = edit
    patch = diff(scratch, before, after)
    if "@@" in patch:
        result = applied(scratch, patches.comment_only(patches.parse(patch))).split("\n")
        added = [line for line in result if line.strip().startswith("# TODO: this does not")]
        assert len(added) == 1
        result.remove(added[0])
        assert result == [*before, ""]


def test_a_comment_never_splits_a_continued_line():
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,3 @@\n x = 1 + \\\n-    2\n+    3\n y = x\n"
    assert patches.comment_only(patches.parse(patch)).splitlines()[3:] == [
        " x = 1 + \\",
        "     2",
        "+# TODO: this does not handle every case yet",
        " y = x",
    ]


def test_a_comment_goes_into_python_when_the_fix_touches_it():
    patch = "--- a/CHANGES\n+++ b/CHANGES\n@@ -1 +1 @@\n-a\n+b\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
    assert [file.path for file in patches.parse(patches.comment_only(patches.parse(patch)))] == ["x.py"]


def test_removed_lines_that_look_like_headers_stay_content():
    patch = "--- a/x.sql\n+++ b/x.sql\n@@ -1,2 +1 @@\n--- drop it\n keep\n-- \n2.40\n"
    (file,) = patches.parse(patch)
    assert file.hunks[0].lines == ("--- drop it", " keep")
    assert (file.hunks[0].old, file.hunks[0].new) == ("-- drop it\nkeep\n", "keep\n")


def test_a_missing_newline_at_the_end_is_kept():
    patch = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"
    assert patches.write(patches.parse(patch)) == patch.replace("-1 +1", "-1,1 +1,1")
    assert "+# TODO" in patches.comment_only(patches.parse(patch))


def test_a_fix_that_only_deletes_files_has_no_half():
    patch = "--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"
    with pytest.raises(EngineError, match="only deletes"):
        patches.comment_only(patches.parse(patch))
    assert patches.parse(patch)[0].path == "x"
    assert "*** Delete File: x" in scripts.envelope(patches.parse(patch))


def test_one_hunk_cannot_be_cut_so_it_becomes_a_comment():
    two = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n@@ -9 +9 @@\n-c\n+d\n"
    assert patches.without_last(patches.parse(two)) == "--- a/x.py\n+++ b/x.py\n@@ -1,1 +1,1 @@\n-a\n+b\n"
    one = patches.parse(patches.without_last(patches.parse(two)))
    assert patches.without_last(one) == patches.comment_only(one)


@pytest.mark.parametrize("patch", ["", "GIT binary patch\nliteral 3\n", "diff --git a/x b/x\nold mode 100644\n"])
def test_a_patch_without_text_is_refused(patch):
    with pytest.raises(EngineError, match="without a text hunk"):
        patches.parse(patch)
