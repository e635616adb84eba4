"""`polar submit ray` against a real Ray cluster of one node: a rollout is a job, its row the job's output."""

import base64
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from polar_env.gym import contract
from rollout_helpers import AGENT, STORE, adopting, below_us, settled

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not find_spec("aiohttp_cors"), reason="Ray's job server needs ray[default]"),
]

BIN = Path(sys.executable).parent
POLAR = str(BIN / "polar")
TRIES = 3
"""Ray gives its raylet 30 s to come up, fixed (ray/_private/node.py): on a busy machine that is too short at times."""

LATER = "No available agent to submit job, please try again later"
"""What Ray answers when the agent of a node that is up was not up within 10 s, fixed (ray/dashboard/consts.py)."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def reachable(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(the job server's address, what a process needs to be let in): a cluster with a token of its own."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    let_in = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "POLAR_CACHE": str(STORE)}
    let_in["PATH"] = f"{BIN}:{let_in['PATH']}"
    before = below_us()
    with adopting(), ExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="ray", dir="/tmp"))  # its sockets' names must be short
        said = token.parent / "said"
        port = next(filter(None, (started(stack, place, let_in, said) for _ in range(TRIES))), None)
        assert port, said.read_text()
        yield f"http://127.0.0.1:{port}", let_in
    assert settled(known=before) == []


def started(stack: ExitStack, place: str, let_in: Mapping[str, str], said: Path) -> int | None:
    """The job server's port; None when Ray did not come up, and then nothing of it runs. ``stack`` ends it."""
    known, port = set(psutil.Process().children(recursive=True)), free_port()
    words = ["start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1", f"--temp-dir={place}"]
    others = ("ray-client-server-port", "dashboard-agent-listen-port")  # or another Ray may hold them yet
    ports = [f"--dashboard-port={port}", "--port=0", *(f"--{name}={free_port()}" for name in others)]
    with said.open("w") as log:
        command = [str(BIN / "ray"), *words, *ports, "--disable-usage-stats"]
        head = subprocess.Popen(command, env=let_in, stdout=log, stderr=log)
    stack.callback(head.wait)
    stack.callback(end, known)
    deadline = time.monotonic() + 100
    while "Ray runtime started" not in said.read_text():  # poll: it is another program
        if head.poll() is not None or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    else:
        if reachable(port):
            return port
    end(known)
    return None


def end(known: set[psutil.Process]) -> None:
    """Kill what the cluster started: asked to end, it would drain for half a minute."""
    left = [process for process in psutil.Process().children(recursive=True) if process not in known]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def rollout(sessions: Path) -> str:
    """The command of a rollout of the example agent on an embedded task."""
    program = f"import base64; exec(base64.b64decode('{base64.b64encode(AGENT.encode()).decode()}'))"
    words = ["polar", "rollout", "--engine", "scripted", "--harness", "shell", "--task", "polar-env__expiry-2"]
    words += ["--data", "embedded", "engine.scripts=[fix]", f"store.sessions={sessions}"]
    return shlex.join([*words, f'harness.command=[python,-c,"{program}","{{instruction_file}}"]'])


@pytest.fixture(scope="module")
def ended(
    cluster: tuple[str, Mapping[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, tuple[int, str]]:
    """Job -> (exit code of `polar submit ray`, what it printed); all jobs run at once, as each takes Ray a while."""
    address, let_in = cluster
    outsider = {**let_in, "RAY_AUTH_TOKEN": "a guess"}
    jobs = {
        "rollout": (rollout(tmp_path_factory.mktemp("sessions")), let_in),
        "broken": ("echo going wrong; exit 3", let_in),
        "uninvited": ("echo let in", {name: outsider[name] for name in outsider if name != "RAY_AUTH_TOKEN_PATH"}),
    }
    said: dict[str, tuple[int, str]] = {}
    for _ in range(TRIES):
        submitted = {
            name: subprocess.Popen(
                [POLAR, "submit", "ray", "--address", address, "--name", name, "--command", command],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name, (command, env) in jobs.items()
            if name not in said or LATER in said[name][1]
        }
        for name, process in submitted.items():
            text = process.communicate()[0]
            said[name] = process.returncode, text
    return said


def test_a_rollout_runs_as_a_job_and_its_row_is_in_the_log(ended: Mapping[str, tuple[int, str]]):
    code, said = ended["rollout"]
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith('{"')]
    row = json.loads(line)
    assert contract.violations(row) == []
    assert (row["reward"], row["mask_sample"], row["polar"]["task_id"]) == (1.0, False, "polar-env__expiry-2")
    assert row["trainable_tokens"] > 0


def test_a_job_that_fails_is_told_by_the_exit_code_and_its_log(ended: Mapping[str, tuple[int, str]]):
    code, said = ended["broken"]
    assert code == 1
    assert "going wrong\n" in said
    assert "exit code 3" in said


def test_a_cluster_with_a_token_takes_no_job_from_somebody_without_it(ended: Mapping[str, tuple[int, str]]):
    code, said = ended["uninvited"]
    assert code != 0
    assert "AuthenticationError" in said
    assert "\nlet in" not in said
