"""What an agent left behind becomes a patch; what a patch may not do."""

import io
import subprocess
import tarfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_env.errors import SandboxError
from polar_env.grade import patch as patches
from polar_env.grade.diff import sections
from polar_env.grade.patch import extract, snapshot
from polar_env.grade.swebench import box_of
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.tasks import Prepared
from sandbox_helpers import config, git_repo, prepared_of

FILES: dict[str, bytes] = {
    "pkg/__init__.py": b"",
    "pkg/code.py": b"def f():\n    return 1\n",
    "pkg/win.py": b"a = 1\r\nb = 2\r\n",
    "pkg/latin.txt": b"caf\xe9\n",
    "bin/tool": b"#!/bin/sh\n",
    "tests/test_code.py": b"from pkg.code import f\n\ndef test_f():\n    assert f() == 2\n",
    ".gitignore": b"*.log\n/generated.py\n",
}
IGNORED = {"generated.py": b"version = 1\n", "pkg.egg-info/PKG-INFO": b"Name: pkg\n"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_of(git_repo(tmp_path_factory.mktemp("patch") / "repo", FILES, IGNORED))


@pytest.fixture
async def sandbox(prepared: Prepared) -> AsyncGenerator[Sandbox]:
    async with open_sandbox(box_of(prepared, config()), config()) as running:
        yield running


async def after(sandbox: Sandbox, prepared: Prepared, script: str) -> bytes:
    """The patch after an agent ran ``script`` in the repository."""
    done = await sandbox.exec(["bash", "-ec", script], timeout=30)
    assert done.code == 0, done.stderr
    await sandbox.kill()
    return await extract(sandbox, prepared)


def applied(prepared: Prepared, patch: bytes, tmp_path: Path) -> dict[str, bytes]:
    """Files of a clone of the pristine repository after ``git apply`` of the patch."""
    assert prepared.repo is not None
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(prepared.repo), str(clone)], check=True)
    for name, data in IGNORED.items():
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_bytes(data)
    if patch:
        subprocess.run(["git", "apply", "-"], input=patch, cwd=clone, check=True)
    return {
        str(path.relative_to(clone)): path.read_bytes()
        for path in clone.rglob("*")
        if path.is_file() and ".git/" not in f"{path.relative_to(clone)}/"
    }


START = {**FILES, **IGNORED}
EDIT = "sed -i 's/return 1/return 2/' pkg/code.py"
FIXED = {**START, "pkg/code.py": b"def f():\n    return 2\n"}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param("true", START, id="nothing"),
        pytest.param(EDIT, FIXED, id="edited"),
        pytest.param(f"{EDIT}; git add -A", FIXED, id="staged"),
        pytest.param(f"{EDIT}; git commit -qam x", FIXED, id="committed"),
        pytest.param(f"git checkout -qb other; {EDIT}; git commit -qam x; git checkout -q -", START, id="elsewhere"),
        pytest.param(f"{EDIT}; git stash -q; git stash pop -q", FIXED, id="stashed and back"),
        pytest.param(f"{EDIT}; rm -rf .git", FIXED, id="git directory removed"),
        pytest.param(f"{EDIT}; git update-index --assume-unchanged pkg/code.py", FIXED, id="assume-unchanged"),
        pytest.param(f"{EDIT}; git config diff.noprefix true; git config color.ui always", FIXED, id="diff settings"),
        pytest.param(f"{EDIT}; git config diff.external /bin/false; git config core.pager false", FIXED, id="external"),
        pytest.param(f"{EDIT}; echo '* binary filter=x' > .git/info/attributes", FIXED, id="attributes"),
        pytest.param(f"{EDIT}; git config core.fsmonitor /bin/false", FIXED, id="monitor"),
        pytest.param("printf 'x = 1' > new.py", {**START, "new.py": b"x = 1"}, id="untracked, no newline at the end"),
        pytest.param("echo hi > run.log", {**START, "run.log": b"hi\n"}, id="ignored and new"),
        pytest.param("echo 'v = 2' > generated.py", {**START, "generated.py": b"v = 2\n"}, id="old"),
        pytest.param("echo '*' > .gitignore; echo y > y", {**START, ".gitignore": b"*\n", "y": b"y\n"}, id="all"),
        pytest.param(r"printf 'c\r\n' >> pkg/win.py", {**START, "pkg/win.py": FILES["pkg/win.py"] + b"c\r\n"}, id="CR"),
        pytest.param(r"printf '\xe8\n' >> pkg/latin.txt", {**START, "pkg/latin.txt": b"caf\xe9\n\xe8\n"}, id="latin-1"),
        pytest.param(r"printf '\0\1\2' > blob", {**START, "blob": b"\0\1\2"}, id="binary"),
        pytest.param("rm pkg/win.py", {k: v for k, v in START.items() if k != "pkg/win.py"}, id="deleted"),
        pytest.param(
            "git mv -f pkg/win.py pkg/unix.py",
            {**{k: v for k, v in START.items() if k != "pkg/win.py"}, "pkg/unix.py": FILES["pkg/win.py"]},
            id="renamed",
        ),
        pytest.param("mkdir sub; cd sub; git init -q; echo s > s.py; git add .; git commit -qm s",
                     {**START, "sub/s.py": b"s\n"}, id="nested repository"),
        pytest.param("touch 'a b' $'new\\nline' ünï", {**START, "a b": b"", "new\nline": b"", "ünï": b""}, id="names"),
        pytest.param(f"{EDIT}; git update-index --skip-worktree pkg/code.py", FIXED, id="skip-worktree"),
        pytest.param(f"{EDIT}; git commit -qam x; git commit -q --amend -m y; git gc -q", FIXED, id="amended"),
        pytest.param(f"{EDIT}; touch .git/index.lock .git/HEAD.lock", FIXED, id="locks left"),
        pytest.param(f"{EDIT}; mv .git /tmp/elsewhere; echo 'gitdir: /tmp/elsewhere' > .git", FIXED, id="a .git file"),
        pytest.param(f"{EDIT}; rm -rf .git; git init -q; git add -A; git commit -qm mine", FIXED, id="own history"),
        pytest.param(f"{EDIT}; git worktree add -q /tmp/other; git submodule add -q ./ mod 2>/dev/null || :", FIXED,
                     id="a worktree"),
        pytest.param("rm -r bin; echo b > bin", {**{k: v for k, v in START.items() if k != "bin/tool"}, "bin": b"b\n"},
                     id="a folder became a file"),
        pytest.param("rm pkg/win.py; mkdir pkg/win.py; echo x > pkg/win.py/x",
                     {**{k: v for k, v in START.items() if k != "pkg/win.py"}, "pkg/win.py/x": b"x\n"},
                     id="a file became a folder"),
        pytest.param("printf '* text eol=crlf ident\\n' > pkg/.gitattributes; printf '$Id$\\n' > pkg/id",
                     {**START, "pkg/.gitattributes": b"* text eol=crlf ident\n", "pkg/id": b"$Id$\n"}, id="line ends"),
        pytest.param("chmod 000 pkg/code.py pkg", START, id="made unreadable"),
        pytest.param(f"{EDIT}; chmod 000 .", FIXED, id="made unreadable as a whole"),
        pytest.param("mkfifo pipe", START, id="a FIFO"),
        pytest.param("mkdir -p build/lib dist pkg/__pycache__ .pytest_cache/v node_modules/x x.egg-info; "
                     "touch build/lib/a.py dist/w.whl pkg/__pycache__/c.pyc .pytest_cache/v/x node_modules/x/y.js "
                     "x.egg-info/PKG-INFO a.so .coverage; echo changed > pkg.egg-info/PKG-INFO", START, id="junk"),
    ],
)  # fmt: skip
async def test_the_patch_rebuilds_what_the_agent_left(
    sandbox: Sandbox, prepared: Prepared, tmp_path: Path, script: str, expected: dict[str, bytes]
) -> None:
    patch = await after(sandbox, prepared, script)
    assert applied(prepared, patch, tmp_path) == expected
    assert (patch == b"") == (expected == START)


async def test_modes_and_links_are_part_of_the_patch(sandbox: Sandbox, prepared: Prepared) -> None:
    patch = await after(sandbox, prepared, "chmod +x bin/tool; ln -s code.py pkg/alias.py")
    assert b"old mode 100644\nnew mode 100755\n" in patch
    assert b"new file mode 120000" in patch


async def test_no_hook_filter_or_text_conversion_of_the_agent_runs(sandbox: Sandbox, prepared: Prepared) -> None:
    patch = await after(
        sandbox, prepared,
        f"{EDIT}; for h in pre-commit post-index-change; do printf '#!/bin/sh\\ntouch ~/ran' > .git/hooks/$h; "
        "chmod +x .git/hooks/$h; done; git config filter.x.clean 'touch ~/ran; cat'; "
        "git config diff.x.textconv 'touch ~/ran; cat'; echo '*.py filter=x diff=x' > .git/info/attributes; "
        "printf '[core]\\n\\thooksPath = .git/hooks\\n[alias]\\n\\tadd = !touch ~/ran\\n' > ~/.gitconfig",
    )  # fmt: skip
    assert b"+    return 2" in patch
    with pytest.raises(SandboxError):
        await sandbox.read("/home/agent/ran")


async def test_the_same_change_gives_the_same_bytes(prepared: Prepared) -> None:
    async def once() -> bytes:
        async with open_sandbox(box_of(prepared, config()), config()) as sandbox:
            return await after(sandbox, prepared, f"{EDIT}; echo n > n.py")

    assert await once() == await once()


async def test_a_repository_only_the_image_holds_is_photographed_before_the_agent(prepared: Prepared) -> None:
    in_image = Prepared(prepared.task, prepared.base_commit, repo=None, env=None, git_dir=None, image="x")
    async with open_sandbox(box_of(prepared, config()), config()) as sandbox:
        with pytest.raises(SandboxError, match="snapshot"):
            await extract(sandbox, in_image)
        baseline = await snapshot(sandbox)
        await sandbox.exec(["bash", "-ec", EDIT], timeout=30)
        await sandbox.kill()
        assert b"+    return 2" in await extract(sandbox, in_image, baseline)


async def test_the_baseline_holds_no_history(prepared: Prepared) -> None:
    assert prepared.repo is not None
    with tarfile.open(fileobj=io.BytesIO(patches._baseline_of(prepared.repo))) as tar:
        names = tar.getnames()
    assert not [name for name in names if "refs/heads/" in name or "logs" in name or "hooks" in name]


async def test_a_repository_that_is_gone_is_the_sandboxes_failure_not_an_empty_patch(tmp_path: Path) -> None:
    gone = prepared_of(git_repo(tmp_path / "repo", FILES, {}))
    async with open_sandbox(box_of(gone, config()), config()) as sandbox:
        await sandbox.write("/tmp/.polar-git", b"in the way")
        assert await extract(sandbox, gone) == b"", "what lies in our way is removed"
        broken = io.BytesIO()
        tarfile.open(fileobj=broken, mode="w").close()
        with pytest.raises(SandboxError, match="extracting the patch"):
            await extract(sandbox, gone, broken.getvalue())


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="baseline of nowhere"):
        patches._baseline_of(tmp_path / "nowhere")


# --- reading patches --------------------------------------------------------------------------------------------


def diff(path: str, body: str = "@@ -1 +1 @@\n-a\n+b\n", extra: str = "") -> str:
    return f"diff --git a/{path} b/{path}\n{extra}--- a/{path}\n+++ b/{path}\n{body}"


_names = st.text("abcXYZ012._-/ é\"\\", min_size=1, max_size=20).filter(
    lambda n: not n.startswith(("/", "-", " ")) and "//" not in n and not n.endswith(("/", " "))
    and not {".", "..", ".git"} & set(n.lower().split("/"))
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(names=st.lists(_names, min_size=1, max_size=4, unique=True), body=st.binary(max_size=200))
def test_gits_own_patches_are_read_back_whatever_they_hold(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], body: bytes
) -> None:
    names = [n for n in names if not any(other != n and other.startswith(f"{n}/") for other in names)]
    repo = git_repo(tmp_path_factory.mktemp("diff"), {"x": b"x"}, {})
    written: set[bytes] = set()
    for name in names:
        path = repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"--- a/q\n+++ b/q\n" + body)
        written.add(name.encode())
    subprocess.run(["git", "add", "-A", "-f"], cwd=repo, check=True)
    patch = subprocess.run(["git", "diff", "--cached", "--binary"], cwd=repo, check=True, capture_output=True).stdout
    parts = sections(patch)
    assert b"".join(part.text for part in parts) == patch
    assert frozenset().union(*(part.paths for part in parts)) == written
    assert len(parts) == len(written)


def test_a_patch_without_git_headers_is_read_too() -> None:
    plain = (
        b"--- a/one.py\t2024-01-01\n+++ b/one.py\n@@ -1 +1 @@\n-a\n+b\n--- two.py\n+++ two.py\n@@ -1 +1 @@\n-a\n+b\n"
    )
    assert [part.paths for part in sections(plain)] == [{b"one.py"}, {b"two.py"}]


def test_header_lines_inside_a_hunk_are_content() -> None:
    body = "@@ -1,2 +1,2 @@\n--- a/conftest.py\n-x\n+++ b/conftest.py\n+y\n"
    (part,) = sections(diff("code.py", body).encode())
    assert part.paths == {b"code.py"}
    assert part.added == (b"++ b/conftest.py", b"y")


def test_a_hunk_that_lies_about_its_length_hides_nothing() -> None:
    lying = diff("code.py", "@@ -1,900 +1,900 @@\n-a\n+b\n") + diff("conftest.py")
    assert [part.paths for part in sections(lying.encode())] == [{b"code.py"}, {b"conftest.py"}]
