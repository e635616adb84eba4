"""Trees made to break the extraction of a patch: each is the agent's own failure, never a mask."""

from collections.abc import AsyncGenerator

import pytest

from polar_env.config import SandboxConfig
from polar_env.grade.patch import UnreadableChangeError, extract
from polar_env.grade.swebench import box_of
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.tasks import Prepared
from sandbox_helpers import config, git_repo, prepared_of

EDIT = "echo fixed > code.py"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_of(git_repo(tmp_path_factory.mktemp("hostile") / "repo", {"code.py": b"broken\n"}, {}))


@pytest.fixture
async def sandbox(prepared: Prepared) -> AsyncGenerator[Sandbox]:
    async with open_sandbox(box_of(prepared, config()), config()) as running:
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
    ],
)
async def test_a_tree_made_to_outlast_the_extraction_is_the_agents_doing(
    sandbox: Sandbox, prepared: Prepared, script: str, word: str
) -> None:
    """Reading it would use up our time, which masks: no agent may choose that for its failures."""
    with pytest.raises(UnreadableChangeError, match=word):
        await after(sandbox, prepared, script)


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
