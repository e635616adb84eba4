"""Trees made to break the extraction of a patch: each is the agent's own failure, never a mask."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from polar_env.config import SandboxConfig
from polar_env.grade import patch as patches
from polar_env.grade.patch import UnreadableChangeError, extract
from polar_env.grade.review import review
from polar_env.grade.swebench import box_of
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.tasks import Prepared
from sandbox_helpers import config, git_repo, prepared_of

EDIT = "echo fixed > code.py"
_LINKS = """
import os
for number in range(20002):
    os.symlink("x", str(number))
"""
_DEEP = """
import os
for _ in range(20000):
    os.mkdir("d"); os.chdir("d")
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_of(git_repo(tmp_path_factory.mktemp("hostile") / "repo", {"code.py": b"broken\n"}, {}))


@pytest.fixture
async def sandbox(prepared: Prepared) -> AsyncGenerator[Sandbox]:
    few = SandboxConfig(pids=200)  # as soon full as thousands, and does not take the processors from other tests
    async with open_sandbox(box_of(prepared, few), few) as running:
        yield running


async def after(sandbox: Sandbox, prepared: Prepared, script: str) -> bytes:
    """The patch after an agent ran ``script`` in the repository."""
    await sandbox.exec(["bash", "-c", script], timeout=30)
    await sandbox.kill()
    return await extract(sandbox, prepared)


@pytest.mark.parametrize(
    ("script", "word"),
    [
        pytest.param("truncate -s 2G sparse", "256 MiB", id="one sparse file"),
        pytest.param("for i in $(seq 30); do truncate -s 100M s$i; done; chmod 000 s*", "256 MiB", id="many"),
        pytest.param("head -c 260M /dev/urandom > noise", "256 MiB", id="noise"),
        pytest.param("mkdir m; cd m; seq 100001 | xargs touch", "100000 files", id="files"),
        pytest.param("seq 1001 | xargs mkdir -m 0", "1000 closed directories", id="closed directories"),
        pytest.param("mkdir m; cd m; seq 20002 | xargs -n 1000 touch", "over 20001 files", id="many more than before"),
        pytest.param(f"python3 -c '{_LINKS}'", "over 20001 files", id="links"),
        pytest.param(f"python3 -c '{_DEEP}'", "199 folders deep", id="deep"),
        pytest.param("mkfifo .gitattributes", "no files", id="a FIFO where git looks for attributes"),
        pytest.param("mkdir s; mkfifo s/.gitattributes", "no files", id="a FIFO there, below"),
        pytest.param("mkfifo ~/f; ln -s ~/f .gitattributes", "no files", id="a link to one"),
        pytest.param(
            "seq 1000 | sed 's/$/ a/' > .gitattributes; cp -r .gitattributes s",
            "4096 bytes of .gitattributes",
            id="rules without end",
        ),
    ],
)
async def test_a_tree_made_to_outlast_the_extraction_is_the_agents_doing(
    sandbox: Sandbox, prepared: Prepared, script: str, word: str
) -> None:
    """Reading it would use up our time, which masks: no agent may choose that for its failures."""
    with pytest.raises(UnreadableChangeError, match=word):
        await after(sandbox, prepared, script)


async def test_the_agents_git_directory_is_not_walked_through(sandbox: Sandbox, prepared: Prepared) -> None:
    """It is the agent's to fill: a million directories in there would use up our time."""
    assert b"+fixed" in await after(sandbox, prepared, f"{EDIT}; mkdir -p .git/m/.git n/.git")
    left = await sandbox.exec(["ls", "-d", ".git/m/.git", "n/.git"], timeout=10)
    assert left.stdout == b".git/m/.git\n", "one elsewhere is a repository whose files count"


async def test_attributes_that_were_there_and_grew_a_little_are_read(tmp_path: Path) -> None:
    rules = b"".join(b"*.x%d -diff\n" % number for number in range(2000))
    had = prepared_of(git_repo(tmp_path / "repo", {"code.py": b"broken\n", "d e/.gitattributes": rules}, {}))
    async with open_sandbox(box_of(had, config()), config()) as sandbox:
        patch = await after(sandbox, had, f"{EDIT}; echo '*.y -diff' >> d*/.gitattributes; mkfifo .gitignore")
    assert b"+fixed" in patch
    assert b"+*.y -diff" in patch


async def test_a_patch_too_long_to_be_graded_is_cut_where_it_says_so(sandbox: Sandbox, prepared: Prepared) -> None:
    patch = await after(sandbox, prepared, f"{EDIT}; head -c 9M /dev/urandom > noise; seq 900000 > text")
    assert len(patch) == patches._MOST
    assert review(patch) is not None


async def test_what_the_agent_left_where_we_work_and_a_full_tmp_change_nothing(prepared: Prepared) -> None:
    trap = "mkdir -p /tmp/.polar-git/hooks; echo ../../home/agent > /tmp/.polar-git/commondir; chmod 0 /tmp/.polar-git"
    small = SandboxConfig(disk_mib=8)
    async with open_sandbox(box_of(prepared, small), small) as sandbox:
        patch = await after(sandbox, prepared, f"{EDIT}; {trap}; head -c 9M /dev/zero > /tmp/full || :")
    assert b"+fixed" in patch


@pytest.mark.parametrize(
    "trap",
    [
        pytest.param("(while :; do kill -9 -1; done) & kill -9 $$", id="shoots everything"),
        pytest.param("b() { b | b & }; b", id="fork bomb"),
        pytest.param("echo exit 1 > ~/.bashrc; echo 'int x;' > /tmp/sh; ln -s /tmp/sh /bin/sh", id="tools of its own"),
        pytest.param("echo > /proc/1/fd/0; kill -9 1; kill -TERM 1", id="init"),
    ],
)
async def test_no_trap_keeps_us_from_reading_what_the_agent_left(
    sandbox: Sandbox, prepared: Prepared, trap: str
) -> None:
    assert b"+fixed" in await after(sandbox, prepared, f"{EDIT}; exec 2>/dev/null; {trap}")
