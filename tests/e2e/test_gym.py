"""The released NeMo Gym on polar, out of tree, as its manual says: validate, start, evaluate from another terminal."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from polar_env.gym import ROOT, contract, launch
from rollout_helpers import STORE, adopting, below_us, settled

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(580)]

BIN = Path(sys.executable).parent
CONFIG = "resources_servers/polar/configs/polar.yaml"
EXAMPLE = "resources_servers/polar/data/example.jsonl"
POLAR = "polar_resources_server.resources_servers.polar.polar"

TRIES = 3
"""Ray gives its own parts 15 s to come up, fixed: a machine that is busy for a moment misses that."""


class Servers:
    """`gym env start` in the background; its output is read, and shown when something fails."""

    def __init__(self, command: Sequence[str], env: dict[str, str], cwd: Path) -> None:
        self.output: list[str] = []
        self.ready, self._told = False, threading.Event()
        self.process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if "All 3 / 3 servers ready" in line:
                self.ready = True
                self._told.set()
        self._told.set()

    def wait_ready(self, seconds: float) -> bool:
        """True when all servers are up; False when the command ended, or took longer."""
        self._told.wait(seconds)
        return self.ready

    def stop(self) -> int:
        """As a terminal that is closed, or a job that is cancelled, does."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(10)
            assert self.process.stdout is not None
            self.process.stdout.close()

    def text(self) -> str:
        return "".join(self.output[-60:])


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path: Ray and multiprocessing make sockets below the temporary directory."""
    folder = Path(tempfile.mkdtemp(prefix="pe2e-", dir="/tmp"))
    (folder / "tmp").mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def env(scratch: Path) -> dict[str, str]:
    """A user's shell: our bin first, and the root that `polar gym-root` prints."""
    command = [BIN / "polar", "gym-root", "--venvs", scratch / "venvs"]
    root = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "NEMO_GYM_EXTRA_ROOTS": root,
        "RAY_AUTH_MODE": "disabled",
        "TMPDIR": str(scratch / "tmp"),
    }


def gym(env: dict[str, str], cwd: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [BIN / "gym", *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@contextlib.contextmanager
def started(env: dict[str, str], scratch: Path, *overrides: str) -> Iterator[tuple[Servers, int]]:
    """All servers up, and the head's port. Started again when Ray did not come up."""
    for left in reversed(range(TRIES)):
        head = launch.free_port()
        places = (
            "++skip_venv_if_present=true",
            f"++uv_venv_dir={scratch / 'venvs'}",
            f"++head_server.port={head}",
            "++port_range_low=5000",
            "++port_range_high=5999",
        )
        command = [str(BIN / "gym"), "env", "start", "--config", CONFIG, *places, *overrides]
        servers = Servers(command, env, scratch)
        try:
            if servers.wait_ready(150) or not left:
                assert servers.ready, servers.text()
                yield servers, head
                return
        finally:
            servers.stop()


def test_gym_finds_our_config_out_of_tree_and_calls_it_valid(env: dict[str, str], scratch: Path):
    assert "Config is valid" in gym(env, scratch, "env", "validate", "--config", CONFIG)


def test_rollouts_through_gym_are_graded_rows_and_nothing_outlives_it(env: dict[str, str], scratch: Path):
    shipped = sorted(ROOT.rglob("*"))
    out = scratch / "out" / "rollouts.jsonl"
    polar = (
        f"++{POLAR}.engine.kind=scripted",
        f"++{POLAR}.engine.scripts=[fix,give_up,loop]",
        f"++{POLAR}.harness.name=claude_code",
        f"++{POLAR}.store.cache={STORE}",
        f"++{POLAR}.store.sessions={scratch / 'sessions'}",
    )
    with adopting():
        with started(env, scratch, *polar) as (servers, head):
            asked = ("--agent", "polar_agent", "--input", EXAMPLE, "--output", str(out), "--limit", "1")
            gym(env, scratch, "eval", "run", "--no-serve", *asked, "--num-repeats", "2", f"++head_server.port={head}")
            rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
            stop_in_the_middle_of_a_rollout(servers, head, rows[0])
        assert settled(spared="ray::") == []  # Ray's own agents may need a minute to notice that it ended
    assert [contract.violations(row) for row in rows] == [[], []]
    assert {row["_ng_rollout_index"]: row["reward"] for row in rows} == {0: 1.0, 1: 0.0}
    assert contract.group_disagreements(rows) == []
    assert [row["polar"]["outcome"] for row in rows] == ["completed", "completed"]
    assert {row["polar"]["session_id"] for row in rows} < {path.name for path in (scratch / "sessions").iterdir()}
    assert [path.name for path in (scratch / "tmp").iterdir() if path.name.startswith("polar")] == []
    assert sorted(ROOT.rglob("*")) == shipped  # the servers run in this folder and leave it as it was


def stop_in_the_middle_of_a_rollout(servers: Servers, head: int, like: dict[str, Any]) -> None:
    """Post a rollout whose policy never stops, and end Gym once its harness runs in its sandbox."""
    with urllib.request.urlopen(f"http://127.0.0.1:{head}/server_instances") as answer:
        urls = {server["name"]: server["url"] for server in json.load(answer)}
    row = {key: like[key] for key in ("responses_create_params", "_ng_task_index")} | {
        "task_id": like["polar"]["task_id"],
        "data": "embedded",
        "_ng_rollout_index": 2,
    }
    poster = subprocess.Popen(
        [sys.executable, "-c", POST, urls["polar_agent"], json.dumps(row)], stderr=subprocess.DEVNULL
    )
    try:
        with waiting(60) as until:
            until(lambda: any("bwrap" in command for command in below_us().values()))
        assert servers.process.poll() is None
        servers.process.send_signal(signal.SIGTERM)
        servers.process.wait(60)
    finally:
        poster.kill()
        poster.wait()


POST = """
import sys, urllib.request
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/run", sys.argv[2].encode(), headers)).read()
"""


@contextlib.contextmanager
def waiting(seconds: float) -> Iterator[Any]:
    """Look again and again: the kernel tells only a parent of a process's start."""
    tick, over = threading.Event(), threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.start()

    def until(holds: Any) -> None:
        while not holds():
            assert not over.is_set(), f"not within {seconds:g} s"
            tick.wait(0.1)

    try:
        yield until
    finally:
        timer.cancel()
