"""A server outlives the process that started it by seconds, whatever way that one died."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from polar_env.gym import lifeline
from polar_env.sandbox import janitor

_SERVER = """
import signal, sys, threading
from polar_env.gym import lifeline
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
lifeline.GRACE = 0.3
lifeline.follow()
try:
    print("ready", flush=True)  # the starter may be shot before this has returned
    threading.Event().wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
_STARTER = """
import subprocess, sys, threading
command = ["bash", "-c", '"$@"; true', "bash", sys.executable, "-c", sys.argv[1], *sys.argv[2:]]
subprocess.Popen(command)
threading.Event().wait()
"""


def starter(marker: str, ears: str) -> "subprocess.Popen[str]":
    """A process that starts a server through a shell, as Gym does."""
    return subprocess.Popen([sys.executable, "-c", _STARTER, _SERVER, marker, ears], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ears", ["hears", "deaf"])
def test_a_server_ends_when_its_starter_is_shot(ears: str) -> None:
    marker = f"lifeline-{os.getpid()}-{ears}"
    with starter(marker, ears) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.read() == ("interrupted\n" if ears == "hears" else ""), "read ends when the server has"


def test_the_owner_is_the_nearest_ancestor_that_is_no_shell() -> None:
    ask = "from polar_env.gym import lifeline; print(lifeline.owner())"
    through = ["bash", "-c", '"$@"; true', "bash", "sh", "-c", '"$@"; true', "sh", sys.executable, "-c", ask]
    assert int(subprocess.run(through, capture_output=True, check=True).stdout) == os.getpid()


def test_a_server_whose_owner_is_gone_already_ends_at_once() -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    code = f"from polar_env.gym import lifeline; lifeline.GRACE = 0; lifeline.follow({dead.pid}).join()"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=30)
    assert ended.returncode in (-signal.SIGINT, -signal.SIGKILL)
    assert lifeline.GRACE > 0


_SHOT = """
import os, sys
from pathlib import Path
from polar_env.sandbox import janitor
closed, kept, child = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
janitor.remove_later(closed)
janitor.remove_later(kept)
janitor.removed(kept)
janitor.kill_later(child)
os.kill(os.getpid(), 9)
"""


def test_what_a_shot_process_leaves_is_removed(tmp_path: Path) -> None:
    closed, kept = tmp_path / "closed", tmp_path / "kept"
    (closed / "inside").mkdir(parents=True)
    (closed / "link").symlink_to(kept)
    (closed / "inside").chmod(0)
    kept.mkdir()
    (kept / "file").touch()
    with subprocess.Popen(["sleep", "7015.25"]) as child:
        subprocess.run([sys.executable, "-c", _SHOT, str(closed), str(kept), str(child.pid)], check=False)
        assert child.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while closed.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not closed.exists()
    assert (kept / "file").exists()


def test_a_process_number_that_was_given_again_is_not_killed(tmp_path: Path) -> None:
    """The list holds when a process began; the number alone would end a stranger."""
    with subprocess.Popen(["sleep", "7016.25"]) as other:
        script = f"+pid:{other.pid} 1\n"
        subprocess.run(["bash", "-c", janitor._SCRIPT], input=script, text=True, check=True, timeout=20)
        assert other.poll() is None
        other.kill()


_STARTING = """
import os, subprocess, sys
from polar_env.sandbox import janitor

def start(seconds):
    return subprocess.Popen(["sleep", seconds], stdin=reader, start_new_session=True).pid

reader, writer = os.pipe()
with janitor.starting(reader):
    print(start("7017.25"), flush=True)
    if sys.argv[1] == "started":
        raise SystemExit
    os.kill(os.getpid(), 9)
"""


def test_a_process_whose_start_was_cut_by_a_shot_is_ended_and_a_started_one_is_its_starters_own() -> None:
    """What a shot leaves half started is nobody's child, and knows nothing yet of the pipe's end."""
    shot = subprocess.run([sys.executable, "-c", _STARTING, "shot"], capture_output=True, check=False, timeout=20)
    assert shot.returncode == -signal.SIGKILL
    assert int(shot.stdout) > 0, "and the run ended: that waits for the last holder of its output"
    with subprocess.Popen([sys.executable, "-c", _STARTING, "started"], stdout=subprocess.PIPE) as done:
        assert done.stdout is not None
        pid = int(done.stdout.readline())
        done.wait(20)
        assert psutil.Process(pid).status() == psutil.STATUS_SLEEPING
        os.kill(pid, signal.SIGKILL)


def test_an_item_is_one_line() -> None:
    with pytest.raises(ValueError, match="line"):
        janitor.remove_later(Path("a\nb"))
