"""The census finds what a command leaves behind, and only that. Everything left behind here is real."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from census import Census, census, counts, listeners, main, report, settle
from polar_env.sandbox.sandbox import open_sandbox
from sandbox_helpers import box_of, config

CENSUS = Path(__file__).with_name("census.py")

NOTHING = Census(processes={}, mounts={}, ports={}, namespaces={}, cgroups={}, files={})


@contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def mine(left: dict[str, list[str]], kind: str, mark: str) -> list[str]:
    """Entries of ``kind`` that carry ``mark``: other processes of the machine come and go while a test runs."""
    return [item for item in left.get(kind, []) if mark in item]


def test_a_process_left_running_is_named() -> None:
    before = census()
    with running("sleep", "30") as process:
        assert mine(census().left_behind(before), "processes", f"{process.pid}@") == [
            next(f"{key}  {name}" for key, name in census().processes.items() if key.startswith(f"{process.pid}@"))
        ]
        assert census().processes.keys() - before.processes.keys() >= {
            key for key in census().processes if key.startswith(f"{process.pid}@")
        }
    assert mine(census().left_behind(before), "processes", f"{process.pid}@") == []


def test_a_process_nobody_waited_for_is_a_leftover_too() -> None:
    before = census()
    process = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert "(zombie)" in mine(census().left_behind(before), "processes", f"{process.pid}@")[0]
    process.communicate()


def test_a_reused_pid_is_another_process() -> None:
    then = Census({"7@100": "sleep 30"}, {}, {}, {}, {}, {})
    now = Census({"7@900": "node cli.js"}, {}, {}, {}, {}, {})
    assert now.left_behind(then) == {"processes": ["7@900  node cli.js"]}


def test_arguments_are_not_written_down() -> None:
    with running(sys.executable, "-c", "input()", "--api-key=sk-very-secret", "sk-other-secret") as process:
        named = next(name for key, name in census().processes.items() if key.startswith(f"{process.pid}@"))
    assert "secret" not in named
    assert "python" in named


def test_a_listening_port_is_found_and_a_closed_one_is_not() -> None:
    before = census()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert len(mine(census().left_behind(before), "ports", f"0100007F:{port}")) == 1
        assert len(mine(census().left_behind(before), "ports", f"inode {os.fstat(server.fileno()).st_ino}")) == 1
    assert mine(census().left_behind(before), "ports", f":{port}") == []


def test_a_temporary_folder_of_ours_is_found() -> None:
    before = census()
    with tempfile.TemporaryDirectory(prefix="polar-census-", dir="/tmp") as folder:
        assert mine(census().left_behind(before), "files", folder) == [folder]
    assert mine(census().left_behind(before), "files", folder) == []


def test_a_network_namespace_is_found_while_someone_is_in_it() -> None:
    before = census()
    hold = "import os; os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET); print('in', flush=True); input()"
    if not hasattr(os, "unshare"):
        pytest.skip("os.unshare needs Python 3.12")
    with running(sys.executable, "-c", hold) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"in\n":
            pytest.skip("this machine allows no new network namespace")
        assert len(mine(census().left_behind(before), "namespaces", f"pid {process.pid}")) == 1


def test_a_mount_is_found(tmp_path: Path) -> None:
    """A private mount namespace holds the mount: the machine's own table is not touched."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import census, subprocess; before = census.census();"
        "subprocess.run(['mount', '-t', 'tmpfs', 'polar-census', sys.argv[2]], check=True);"
        "print(census.census().left_behind(before)['mounts'])"
    )
    argv = ["unshare", "--mount", "--map-root-user", sys.executable, "-c", script, str(CENSUS.parent), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("this machine allows no new mount namespace")
    assert f"tmpfs {tmp_path}" in done.stdout, done.stderr


def test_what_ends_within_the_grace_is_not_left_behind() -> None:
    before = census()
    ending = subprocess.Popen(["sleep", "0.4"], start_new_session=True)
    assert mine(settle(before, grace=0.0), "processes", f"{ending.pid}@")
    ending.wait()
    assert not mine(settle(before, grace=0.0), "processes", f"{ending.pid}@")


def test_the_report_counts_and_names() -> None:
    left = Census({"7@9": "node"}, {"1": "overlay /a", "2": "tmpfs /b"}, {}, {}, {}, {}).left_behind(NOTHING)
    assert report(left).splitlines() == [
        "census: left behind: 1 processes, 2 mounts",
        "  processes: 7@9  node",
        "  mounts: 1  overlay /a",
        "  mounts: 2  tmpfs /b",
    ]
    assert report({}) == "census: nothing left behind"
    assert counts(NOTHING).startswith("0 processes, 0 mounts, 0 ports")


def test_the_script_runs_a_command_and_fails_on_what_it_left(tmp_path: Path) -> None:
    leave = (
        "import subprocess; quiet = {'stdin': -3, 'stdout': -3, 'stderr': -3, 'start_new_session': True};"
        "print(subprocess.Popen(['sleep', '60'], **quiet).pid)"
    )
    argv = [
        sys.executable,
        str(CENSUS),
        "--grace",
        "0",
        str(tmp_path / "before.json"),
        "--",
        sys.executable,
        "-c",
        leave,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    pid = next(line for line in done.stdout.splitlines() if line.isdigit())
    os.kill(int(pid), signal.SIGKILL)
    assert done.returncode == 1
    assert f"processes: {pid}@" in done.stdout
    assert json.loads((tmp_path / "before.json").read_text(encoding="utf-8"))["mounts"]


def test_the_script_keeps_the_exit_code_of_the_command(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        str(CENSUS),
        str(tmp_path / "before.json"),
        "--grace",
        "0",
        "--",
        sys.executable,
        "-c",
        "exit(7)",
    ]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 7


def test_a_census_can_be_compared_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "before.json"
    assert main([str(path)]) == 0
    with running("sleep", "30") as process:
        assert main(["--since", str(path), "--grace", "0"]) == 1
        assert f"{process.pid}@" in capsys.readouterr().out


def test_the_listeners_of_a_process_are_named_and_no_other_sockets(tmp_path: Path) -> None:
    code = """
import socket, sys
tcp, six, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET6), socket.socket(socket.AF_UNIX)
unix.bind(sys.argv[1]); unix.listen(); idle = socket.socket()
print(tcp.getsockname()[1], flush=True); sys.stdin.read()
"""
    with running(sys.executable, "-c", code, str(tmp_path / "socket")) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        told = sorted(listeners([process.pid]).values())
        assert told == [f"tcp 0100007F:{port}", f"unix {tmp_path / 'socket'}"]
    assert listeners([process.pid]) == {}


async def test_a_listener_in_a_sandboxs_own_network_is_ours_until_it_is_closed(tmp_path: Path) -> None:
    before = listeners([os.getpid()])
    async with open_sandbox(box_of(tmp_path), config()) as sandbox:
        with sandbox.listener(8080):
            held = listeners([os.getpid()])
            assert [held[inode] for inode in held.keys() - before.keys()] == ["in another namespace"]
    assert listeners([os.getpid()]).keys() <= before.keys()
