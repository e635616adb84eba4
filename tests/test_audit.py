"""What installing a patch may leave behind, and what gives it away."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polar_env.config import SandboxConfig
from polar_env.grade import audit
from polar_env.grade.audit import Changes, Watch, unlike
from polar_env.sandbox import Overlay
from polar_env.sandbox.sandbox import open_sandbox
from polar_env.tasks import ENV_PREFIX
from sandbox_helpers import box_of, config, git_repo

SITE = "/opt/testbed-env/lib/python3.9/site-packages"
BIN = "/opt/testbed-env/bin"
PTH = f"{SITE}/__editable__.acme-1.pth"
ENTRIES = "/testbed/acme.egg-info/entry_points.txt"
RIGHT = Changes(
    frozenset({f"{SITE}/acme/core.py", f"{SITE}/acme-1.0.dist-info/RECORD", f"{SITE}/acme.egg-link", f"{BIN}/acme", PTH,
               "/testbed/acme/_version.py", "/home/agent/.gitconfig", "/testbed/.git/index"}),
    frozenset({(PTH, "/testbed\n"), ("/home/agent/.gitconfig", "[safe]\n")}),
)  # fmt: skip


def found(*files: str, **contents: str) -> list[str]:
    names = {"pth": PTH, "entries": ENTRIES, "gitconfig": "/home/agent/.gitconfig"}
    told = {(names[key], text) for key, text in contents.items()}
    return unlike(Changes(frozenset(files) | {path for path, _ in told}, frozenset(told)), RIGHT)


def test_what_the_right_fix_did_is_remembered_whole() -> None:
    """A daemon that installing leaves (a build server) would else be held against every patch."""
    right = replace(RIGHT, processes=2)
    assert Changes.of(json.loads(json.dumps(right.plain()))) == right


def test_what_the_right_fix_does_is_nothing() -> None:
    assert unlike(RIGHT, RIGHT) == []
    assert unlike(Changes(), RIGHT) == []


@pytest.mark.parametrize(
    "path",
    [
        f"{SITE}/acme/new.py",
        f"{SITE}/acme/__pycache__/new.cpython-39.pyc",
        f"{SITE}/acme-1.1.dist-info/METADATA",
        "/testbed/build/lib/acme/new.py",
        "/testbed/src/acme.egg-info/SOURCES.txt",
        "/testbed/tests/__pycache__/x.pyc",
        "/home/agent/.cache/pip/x",
        f"{SITE}/acme/new/",
        "/testbed/build/lib/",
        "/testbed/tests/__pycache__/",
    ],
)
def test_the_projects_own_places_may_differ_as_the_patch_does(path: str) -> None:
    assert found(path) == []


@pytest.mark.parametrize(
    "path",
    [
        f"{SITE}/zz.pth",
        f"{SITE}/sitecustomize.py",
        f"{SITE}/forced.py",
        f"{SITE}/forced-1.dist-info/entry_points.txt",
        f"{SITE}/_pytest/runner.py",
        f"{SITE}/_pytest/__pycache__/runner.cpython-39.pyc",
        f"{SITE}/acme/deep.pth",
        f"{BIN}/pytest",
        "/testbed/tests/conftest.py",
        "/testbed/acme/core.py",
        "/home/agent/.local/lib/python3.9/site-packages/usercustomize.py",
        "/usr/local/bin/git",
        "/conftest.py",
        "/testbed/odd/",
        f"{SITE}/forced-1.dist-info/",
        f"{SITE}/__pycache__/six.cpython-39.pyc",
    ],
)
def test_everything_else_is_seen(path: str) -> None:
    assert found(path) == [path]


def test_a_version_that_comes_from_the_state_of_git_is_no_difference() -> None:
    """setuptools_scm: a changed file makes it 1.0.1.dev0+d20260101, an untracked one leaves it 1.0."""
    finder = f"{SITE}/__editable___acme_%s_finder.py"
    right = Changes(
        frozenset({PTH, finder % "1"}), frozenset({(PTH, "import __editable___acme_1_finder"), (finder % "1", "x")})
    )
    other = PTH.replace("acme-1", "acme-1.0.1.dev0+d20260101")
    newer = finder % "1_0_1_dev0_d20260101"
    text = "import __editable___acme_1_0_1_dev0_d20260101_finder"
    same = Changes(frozenset({other, newer}), frozenset({(other, text), (newer, "x")}))
    assert unlike(same, right) == []
    evil = Changes(frozenset({other, newer}), frozenset({(other, text + "; import os"), (newer, "y")}))
    assert unlike(evil, right) == [other, newer]


def test_files_that_start_things_are_known_by_their_content() -> None:
    assert found(pth="/testbed\n", gitconfig="[safe]\n") == []
    assert found(pth="/testbed\nimport os\n") == [PTH]
    assert found(gitconfig="[core]\nhooksPath = /testbed\n") == ["/home/agent/.gitconfig"]
    assert found(entries="[console_scripts]\nacme = acme:main\n") == []
    assert found(entries="[pytest11]\nacme = acme.forced\n") == [ENTRIES]


def test_a_program_is_known_by_its_content_but_for_the_version_it_asks_for() -> None:
    right = Changes(
        frozenset({f"{BIN}/acme"}), frozenset({(f"{BIN}/acme", "__requires__ = 'acme==1.0.dev3+g1'\nrun()")})
    )
    newer = "__requires__ = 'acme==1.0.dev3+g1.d20260101'\nrun()"
    assert unlike(Changes(right.files, frozenset({(f"{BIN}/acme", newer)})), right) == []
    assert unlike(Changes(right.files, frozenset({(f"{BIN}/acme", newer + "; forge()")})), right) == [f"{BIN}/acme"]


def test_a_path_that_is_no_text_can_be_told() -> None:
    """It stands in the verdict, and the row is UTF-8."""
    (told,) = unlike(Changes(frozenset({"/testbed/\udcff.pth"})), RIGHT)
    assert told.encode() == rb"/testbed/\xff.pth"


INSTALLING = {
    "a file": (f"echo x > {ENV_PREFIX}/zz.pth", f"{ENV_PREFIX}/zz.pth"),
    "a program, and a find that sees nothing": (
        f"cd {ENV_PREFIX}/bin && for tool in pytest find sh tr date; do printf '#!/bin/sh\\n' > $tool; "
        "/bin/chmod 755 $tool; done",
        f"{ENV_PREFIX}/bin/find",
    ),
    "a program in a folder that cannot be listed": (
        f"echo x > {ENV_PREFIX}/bin/pytest; chmod 111 {ENV_PREFIX}/bin",
        f"{ENV_PREFIX}/bin/pytest",
    ),
    "a folder of the patch under another name": ("mv odd pytest", "/testbed/pytest/"),
    "a file of the patch under another name": ("mv odd/conf.py odd/conftest.py", "/testbed/odd/conftest.py"),
    "a pipe that nobody writes to": (f"mkfifo {ENV_PREFIX}/zz.pth", f"{ENV_PREFIX}/zz.pth"),
    "more start-up files than an argument list holds": (
        f"cd {ENV_PREFIX} && name=$(printf %0200d 0) && for i in $(seq 9000); do echo > $name$i.pth; done",
        f"{ENV_PREFIX}/{'0' * 200}9000.pth",
    ),
    "a compiled file": (f"echo x > {ENV_PREFIX}/__pycache__/six.pyc", f"{ENV_PREFIX}/__pycache__/six.pyc"),
}


async def test_what_cannot_all_be_looked_at_is_as_bad_as_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_LIMIT", 4096)
    repo = git_repo(tmp_path / "repo", {"code.py": b"x = 1\n"}, {})
    async with open_sandbox(box_of(repo), config()) as sandbox:
        watch = await Watch.begin(sandbox)
        many = "mkdir -p build && cd build && name=$(printf %0200d 0) && for i in $(seq 30); do echo > $name$i; done"
        assert (await sandbox.exec(["bash", "-ec", many], timeout=30)).code == 0
        assert unlike(await watch.changes(), RIGHT) == ["more than can be looked at"]


@pytest.mark.parametrize("what", INSTALLING)
async def test_what_installing_did_is_seen_and_compiled_files_of_its_own_are_gone(tmp_path: Path, what: str) -> None:
    script, seen = INSTALLING[what]
    repo = git_repo(tmp_path / "repo", {"odd/conf.py": b"x = 1\n"}, {})
    for name in ("bin", "__pycache__"):
        (tmp_path / "env" / name).mkdir(parents=True)
    (tmp_path / "env" / "__pycache__" / "old.pyc").write_bytes(b"old")
    path = f"{ENV_PREFIX}/bin:/usr/bin:/bin"
    box = box_of(repo, env={"PATH": path})
    box = replace(box, overlays=(*box.overlays, Overlay(tmp_path / "env", ENV_PREFIX)))
    async with open_sandbox(box, config()) as sandbox:
        watch = await Watch.begin(sandbox)
        done = await sandbox.exec(["/bin/bash", "-ec", script], timeout=30)
        assert done.code == 0, done.stderr
        changes = await watch.changes()
        assert seen in changes.files
        assert changes.processes == 0
        left = await sandbox.exec(["/bin/ls", f"{ENV_PREFIX}/__pycache__"], timeout=30)
        assert left.stdout == b"old.pyc\n"


_LEAVES = {
    "one": "sleep 7026.25 & disown",
    "one that bears the name of a dead one": r"(printf 'a) Z\nb' > /proc/$BASHPID/comm; read -u 9) 9<> <(:) & disown",
    "as many as there is room for": "while sleep 7026.25 & do :; done",
}


@pytest.mark.parametrize("what", _LEAVES)
async def test_what_installing_left_running_is_counted(tmp_path: Path, what: str) -> None:
    """Also where nothing more can be started: the question needs no process of its own but one."""
    repo = git_repo(tmp_path / "repo", {"code.py": b"x = 1\n"}, {})
    some = SandboxConfig(pids=60)
    async with open_sandbox(box_of(repo), some) as sandbox:
        watch = await Watch.begin(sandbox)
        script = f"exec 2>/dev/null\n{_LEAVES[what]}"
        await sandbox.exec(["timeout", "--foreground", "-s", "KILL", "2", "bash", "-c", script], timeout=30)
        assert (await watch.changes()).processes > 0
        assert (await watch._left()) == 0
