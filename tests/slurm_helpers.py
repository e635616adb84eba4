"""A Slurm cluster of two nodes on this machine, of Debian's packages: downloaded and unpacked once, not installed.

Its parts check nobody's identity (auth/none), so they are made to listen on loopback alone.
"""

import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import debian_helpers

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
NODES = ("n1", "n2")
STARTED = 15.0
"""Seconds until both nodes are idle; two are usual."""


class NoSlurmError(Exception):
    """Why this machine cannot have a Slurm."""


@dataclass(frozen=True)
class Slurm:
    """Programs of an unpacked Slurm and the configuration of a running one."""

    root: Path
    config: Path

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs to talk to this cluster by ``sbatch`` and ``srun``."""
        return {
            "PATH": f"{self.root / 'usr/bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": ":".join(map(str, _libraries(self.root))),
            "SLURM_CONF": str(self.config),
        }

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands prints."""
        program = str(self.root / "usr/bin" / words[0])
        done = subprocess.run(
            [program, *words[1:]], capture_output=True, text=True, env=self.variables, check=False, timeout=STARTED
        )
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Names of all jobs the cluster was ever given, oldest first."""
        return self.ask("squeue", "--states=all", "--noheader", "--sort=i", "--format=%j").splitlines()


def unpacked(place: Path) -> Path:
    """Debian's packages as a folder, once per machine. Raises NoSlurmError: there is no apt, archive or package."""
    try:
        return debian_helpers.unpacked(place, PACKAGES, "usr/sbin/slurmd-wlm")
    except debian_helpers.NoPackagesError as error:
        raise NoSlurmError(str(error)) from None


def _libraries(root: Path) -> list[Path]:
    return [*debian_helpers.libraries(root), *root.glob("usr/lib/*/slurm-wlm")]


@contextmanager
def running(root: Path, workdir: Path) -> Iterator[Slurm]:
    """slurmctld and a slurmd per node until the end of the block, and nothing of them afterwards, jobs included.

    Raises NoSlurmError: a part of it does not start here.
    """
    slurm = Slurm(root, workdir / "slurm.conf")
    slurm.config.write_text(_configuration(root, workdir))
    before = set(psutil.Process().children(recursive=True))
    with ExitStack() as stack:
        stack.callback(_end, before)
        parts = [_started(stack, slurm, "slurmctld", "-D", "-c")]
        step = str(root / "usr/sbin/slurmstepd-wlm")
        parts += [_started(stack, slurm, "slurmd", "-D", "-d", step, "-N", node) for node in NODES]
        _wait(slurm, parts)
        yield slurm


def _started(stack: ExitStack, slurm: Slurm, name: str, *options: str) -> "subprocess.Popen[bytes]":
    said = stack.enter_context((slurm.config.parent / f"{name}{options[-1]}.said").open("wb"))
    program = [str(slurm.root / f"usr/sbin/{name}-wlm"), *options, "-f", str(slurm.config)]
    process = subprocess.Popen(
        program, env={**os.environ, **slurm.variables}, stdin=subprocess.DEVNULL, stdout=said, stderr=said
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _wait(slurm: Slurm, parts: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Until a first job of all nodes has run: the scheduler begins seconds after the nodes are idle, and ``sbatch
    --wait`` looks again at ever longer intervals."""
    states = ("sinfo", "--noheader", "--format=%T %D")
    _until(slurm, states, f"idle {len(NODES)}", parts)
    slurm.ask("sbatch", f"--nodes={len(NODES)}", "--job-name=first", "--output=/dev/null", "--wrap=srun true")
    _until(slurm, ("squeue", "--states=all", "--noheader", "--format=%T"), "COMPLETED", parts)
    _until(slurm, states, f"idle {len(NODES)}", parts)


def _until(slurm: Slurm, question: Sequence[str], answer: str, parts: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Poll: Slurm tells when it is asked. Raises NoSlurmError."""
    deadline = time.monotonic() + STARTED
    while (said := slurm.ask(*question)) != answer:
        if time.monotonic() > deadline or any(part.poll() is not None for part in parts):
            logs = [line for path in slurm.config.parent.glob("*.said") for line in path.read_text().splitlines()]
            raise NoSlurmError(f"Slurm does not start here ({question[0]}: {said}): {' | '.join(logs[-3:])}")
        time.sleep(0.1)


def _end(before: set[psutil.Process]) -> None:
    """Kill the steps of jobs that still ran; daemons have ended by then. They are below us by ``adopting``."""
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def _configuration(root: Path, workdir: Path) -> str:
    controller, *ports = _ports(1 + len(NODES))
    (plugins,) = root.glob("usr/lib/*/slurm-wlm")
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    for folder in ("state", *NODES):
        (workdir / folder).mkdir()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} State=UNKNOWN"
        for node, port in zip(NODES, ports, strict=True)
    )
    return f"""ClusterName=polar
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
PluginDir={plugins}
StateSaveLocation={workdir}/state
SlurmdSpoolDir={workdir}/%n
SlurmctldPidFile={workdir}/slurmctld.pid
SlurmdPidFile={workdir}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
SwitchType=switch/none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=main Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""


def _ports(count: int) -> list[int]:
    """Loopback ports nobody listens on: Slurm takes numbers only."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]
