"""Programs made to outlive their sandbox, to change the machine it runs on, or to stop what else runs there."""

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import pytest

from polar_env.sandbox import cgroups, trees
from polar_env.sandbox.limits import Limits
from polar_env.sandbox.sandbox import open_sandbox
from sandbox_helpers import box_of, config, git_repo, host_processes, until_gone, until_running

PYTHON = "/usr/bin/python3"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return git_repo(tmp_path / "repo", {"code.py": b"broken\n"}, {})


_OUTLIVES = """
import ctypes, signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
time.sleep(7200)
"""


async def test_a_program_cut_off_in_the_middle_is_gone_when_its_sandbox_is_closed(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.kill()
        late = asyncio.ensure_future(sandbox.exec([PYTHON, "-c", _OUTLIVES, "7203.25"], timeout=60))
        await until_running("7203.25")
        late.cancel()
    assert not host_processes("7203.25") or await until_gone("7203.25", 1.0)


def test_a_group_is_removed_with_what_still_runs_in_it() -> None:
    groups = Limits(memory_mib=64, pids=50, automatic=True).groups()
    if not groups.folders:
        pytest.skip("control groups may not be written here")
    script = "read -r; sleep 7204.25 & sleep 7204.25"
    with subprocess.Popen(["bash", "-c", script], stdin=subprocess.PIPE) as running:
        for path in groups.procs:
            Path(path).write_text(str(running.pid))
        assert running.stdin is not None
        running.stdin.write(b"go\n")
        running.stdin.flush()
        while len(Path(groups.procs[0]).read_text().split()) < 3:
            time.sleep(0.01)
        groups.remove()
        assert running.wait(5) == -signal.SIGKILL
    assert host_processes("7204.25") == []
    assert not [folder for folder in groups.folders if folder.exists()]
    groups.remove()


def test_a_group_that_stays_busy_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "PATIENCE", 0.1)
    groups = Limits(pids=50).groups()
    if not groups.folders:
        pytest.skip("control groups may not be written here")
    inner = groups.folders[0] / "inner"
    inner.mkdir()
    with pytest.raises(OSError, match="busy"):
        groups.remove()
    inner.rmdir()
    groups.remove()
    assert not groups.folders[0].exists()


def test_a_tree_deeper_than_a_path_is_long_is_removed(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    script = 'import os\nfor _ in range(500): os.mkdir("d" * 50); os.chdir("d" * 50)\nos.chmod(".", 0)'
    subprocess.run([PYTHON, "-c", script], cwd=deep, check=True)
    trees.remove(deep)
    assert not deep.exists()


def test_a_tree_that_cannot_be_removed_is_named() -> None:
    with pytest.raises(OSError, match=r"/proc/version cannot be removed"):
        trees.remove(Path("/proc/version"))
