"""Programs made to outlive their sandbox, to change the machine it runs on, or to stop what else runs there."""

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import pytest

from polar_env.config import ProxyConfig
from polar_env.proxy.server import CONNECTIONS, ProxyServer
from polar_env.sandbox import cgroups, trees
from polar_env.sandbox.limits import Limits
from polar_env.sandbox.sandbox import open_sandbox
from proxy_helpers import PlayedEngine
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


@pytest.mark.parametrize("killed", [False, True], ids=["the agent", "what a grading runs"])
async def test_no_program_takes_off_what_ends_it(repo: Path, killed: bool) -> None:
    """The signal of a parent's death can be taken off by who gets it. After ``kill`` nothing else held a command."""
    marker = f"72{killed:d}1.25"
    async with open_sandbox(box_of(repo), config()) as sandbox:
        if killed:
            await sandbox.kill()
        ran = await sandbox.exec([PYTHON, "-c", _OUTLIVES, marker], timeout=0.7)
        assert ran.timed_out
        assert await until_gone(marker)


async def test_a_program_cut_off_in_the_middle_is_gone_when_its_sandbox_is_closed(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.kill()
        late = asyncio.ensure_future(sandbox.exec([PYTHON, "-c", _OUTLIVES, "7203.25"], timeout=60))
        await until_running("7203.25")
        late.cancel()
    assert not host_processes("7203.25") or await until_gone("7203.25", 1.0)


async def test_a_command_after_a_kill_ends_as_a_shell_tells(repo: Path) -> None:
    """It is no process 1, which would not even be hit by its own SIGTERM, and what it leaves behind ends with it."""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.kill()
        assert (await sandbox.exec(["bash", "-c", "kill -TERM $$; sleep 9"], timeout=20)).code == 143
        assert (
            await sandbox.exec(["bash", "-c", "(sleep 1 & ) ; kill -INT 1; kill -9 1; exit 7"], timeout=20)
        ).code == 7
        assert (await sandbox.exec(["no-such-program"], timeout=20)).code == 127


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


def _null_mode() -> int:
    return Path("/dev/null").stat().st_mode


def _mend_null(mode: int) -> None:
    Path("/dev/null").chmod(mode & 0o7777)


def _oom_score(pid: int) -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text()


_SEES = """
import os
os.fchmod(0, 0o600)
"""


async def test_the_hosts_null_device_is_not_given_to_a_command(repo: Path) -> None:
    """As root its mode would be the agent's to change: on the host's own mount, through standard input."""
    before = _null_mode()
    try:
        async with open_sandbox(box_of(repo), config()) as sandbox:
            tried = await sandbox.exec([PYTHON, "-c", _SEES], timeout=10)
            assert b"Read-only file system" in tried.stderr or b"not permitted" in tried.stderr
            assert (await sandbox.exec(["bash", "-c", "cat; [ -c /dev/stdin ]"], timeout=10)).code == 0
        assert _null_mode() == before
    finally:
        if _null_mode() != before:
            _mend_null(before)


async def test_the_agent_does_not_choose_who_dies_when_the_machine_runs_out_of_memory(repo: Path) -> None:
    """Its init, first of all: the sandbox would be gone, and its rollout masked."""
    tries = "for at in /proc/1 /proc/1/task/1; do echo 1000 > $at/oom_score_adj; done 2>&1; cat /proc/1/oom_score_adj"
    async with open_sandbox(box_of(repo), config()) as sandbox:
        told = (await sandbox.exec(["bash", "-c", tries], timeout=10)).stdout.decode()
        own = _oom_score(sandbox.pid)
    assert told.endswith(own)
    assert int(own) < 1000


async def test_ending_a_sandbox_full_of_files_holds_nobody_up(repo: Path) -> None:
    """The kernel frees its file systems inside the call that lets go of the last namespace: seconds for a full one."""
    held: list[float] = []

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            held.append(time.monotonic() - before)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        async with open_sandbox(box_of(repo), config()) as sandbox:
            await sandbox.exec(["bash", "-c", "mkdir m; cd m; seq 60000 | xargs touch"], timeout=60)
            held.clear()
            began = time.monotonic()
        took = time.monotonic() - began
        watching.cancel()
    assert max(held) < 0.8 * took, "who waits for it waits alone"


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


_WATCHES = """
import ctypes, time
libc, made = ctypes.CDLL(None), 0
while libc.inotify_init1(0) >= 0: made += 1
print(made, flush=True)
time.sleep(7205.25)
"""


async def test_one_sandbox_does_not_take_every_inotify_instance_of_the_machine(repo: Path) -> None:
    """They are counted for the host's user, who is the agent's: watchers everywhere else would fail."""
    most = int(await asyncio.to_thread(Path("/proc/sys/fs/inotify/max_user_instances").read_text))
    async with open_sandbox(box_of(repo), config()) as sandbox:
        ran = await sandbox.exec([PYTHON, "-c", _WATCHES], timeout=1.5)
        assert 0 < int(ran.stdout) <= most // 2
        refused = await sandbox.exec(["bash", "-c", "echo 9999 > /proc/sys/user/max_inotify_instances"], timeout=10)
        assert refused.code != 0


_CONNECTS = """
import socket, time
held = []
for _ in range(200):
    try: held.append(socket.create_connection(("127.0.0.1", 8000), timeout=0.02))
    except OSError: pass
print("tried", flush=True)
time.sleep(0.2)
"""


async def test_one_agents_connections_do_not_take_every_open_file_of_ours(repo: Path) -> None:
    """All rollouts of a process live on its open files, and an agent may open as many connections as it likes."""
    async with ProxyServer(PlayedEngine(), ProxyConfig()) as proxy, open_sandbox(box_of(repo), config()) as sandbox:
        async with proxy.listen(sandbox.listener(8000), CONNECTIONS), asyncio.TaskGroup() as group:
            before = _open_files()
            flood = group.create_task(sandbox.exec([PYTHON, "-c", _CONNECTS], timeout=20))
            most = 0
            while not flood.done():
                await asyncio.sleep(0.05)
                most = max(most, _open_files() - before)
        assert b"tried" in flood.result().stdout
        assert CONNECTIONS <= most <= 3 * CONNECTIONS, "those queued in the kernel are taken before they are reset"
        async with proxy.listen(sandbox.listener(8001), CONNECTIONS):
            ask = r'exec 3<>/dev/tcp/127.0.0.1/8001; printf "GET / HTTP/1.1\r\nHost: x\r\n\r\n" >&3; head -n 1 <&3'
            told = await sandbox.exec(["bash", "-c", ask], timeout=10)
        assert b"200" in told.stdout


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
