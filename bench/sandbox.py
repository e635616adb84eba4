"""Start, a command and teardown of a sandbox: bubblewrap, Docker and Podman in one run.

usage: python bench/sandbox.py [--count 20] [--parallel 32] [--only bubblewrap,docker,podman]

Milliseconds of wall clock, p50 and p99 of ``--count`` sandboxes one after another, then of ``--parallel`` at once, and
what each costs against bubblewrap. Docker and Podman run an image made of this machine's tools, prepared once for all;
bubblewrap shows a directory copy-on-write and prepares nothing. bubblewrap and Docker are measured through the handle
that rollouts use (whose start of a container runs one command in it), Podman, which Gym has no provider for, by its
command line. Docker and Podman need root; where they are not installed, Debian's packages are unpacked below the user's
cache. What cannot be had is left out and said so.
"""

import argparse
import asyncio
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polar_env.config import SandboxConfig
from polar_env.sandbox import Box, Overlay
from polar_env.sandbox.sandbox import open_sandbox

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from docker_helpers import IMAGE, NoDockerError, docker_engine, import_image, programs, root_of_tools

PHASES = ("start", "exec", "teardown")


@dataclass
class Times:
    """Seconds by phase."""

    start: list[float] = field(default_factory=list[float])
    exec: list[float] = field(default_factory=list[float])
    teardown: list[float] = field(default_factory=list[float])


def quantile(values: list[float], share: float) -> float:
    """In ms; the nearest rank."""
    return 1e3 * sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


async def handled(box: Box, config: SandboxConfig, times: Times) -> None:
    """One sandbox of a Gym provider, through the handle that rollouts use."""
    before = time.perf_counter()
    async with open_sandbox(box, config) as sandbox:
        ready = time.perf_counter()
        assert (await sandbox.exec(["true"], timeout=60)).code == 0
        done = time.perf_counter()
    times.start.append(ready - before)
    times.exec.append(done - ready)
    times.teardown.append(time.perf_counter() - done)


async def command(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, words = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{argv[0]} {argv[-1]}: {words.decode(errors='replace')[-300:]}")


async def podman(base: list[str], times: Times) -> None:
    """One Podman container by its command line: no Gym provider knows Podman."""
    name = f"polar-bench-{os.getpid()}-{len(times.start)}-{time.monotonic_ns()}"
    marks = [time.perf_counter()]
    await command(*base, "run", "-d", "--network=none", "--name", name, IMAGE, "sleep", "1000")
    marks.append(time.perf_counter())
    await command(*base, "exec", name, "true")
    marks.append(time.perf_counter())
    await command(*base, "rm", "-f", "-t", "0", name)
    marks.append(time.perf_counter())
    for phase, begun, ended in zip(PHASES, marks, marks[1:], strict=False):
        getattr(times, phase).append(ended - begun)


@contextmanager
def bubblewrap_ready() -> Generator[Callable[[Times], object]]:
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as folder:
        (Path(folder) / "file").write_text("x")
        box = Box(workdir="/testbed", overlays=(Overlay(Path(folder), "/testbed"),))
        yield lambda times: handled(box, SandboxConfig(), times)


@contextmanager
def docker_ready() -> Generator[Callable[[Times], object]]:
    with docker_engine() as client, variables(client):
        prepared("docker", lambda: import_image(client))
        yield lambda times: handled(Box(workdir="/tmp", image=IMAGE), SandboxConfig(provider="docker"), times)


@contextmanager
def podman_ready() -> Generator[Callable[[Times], object]]:
    """Own storage; no raised limits and no systemd, which containers may not have either."""
    found = programs(("conmon", "runc", "podman"), ("podman", "conmon", "runc"))
    with tempfile.TemporaryDirectory(prefix="polar-podman-", ignore_cleanup_errors=True) as name, variables(found):
        folder = Path(name)
        (folder / "conf").write_text(
            '[containers]\ndefault_ulimits=["nofile=20000:20000","nproc=4096:4096"]\n'
            f'[engine]\ncgroup_manager="cgroupfs"\nevents_logger="file"\nconmon_path=["{shutil.which("conmon")}"]\n'
        )
        (folder / "policy").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        runc = shutil.which("runc") or "runc"
        base = ["podman", f"--root={folder}/root", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp"]
        base += ["--runtime", runc]
        root = root_of_tools(folder / "tools")
        tar = folder / "image.tar"
        subprocess.run(["tar", "-C", os.fspath(root), "-cf", os.fspath(tar), "."], check=True)
        words = [*base, "import", "--signature-policy", os.fspath(folder / "policy"), os.fspath(tar), IMAGE]
        with variables({"CONTAINERS_CONF": str(folder / "conf")}):
            try:
                prepared("podman", lambda: imported(words))
                yield lambda times: podman(base, times)
            finally:
                subprocess.run([*base, "rm", "-af"], check=False, capture_output=True)
                subprocess.run(["umount", "-R", f"{folder}/root/overlay"], check=False, capture_output=True)


@contextmanager
def variables(ours: Mapping[str, str]) -> Generator[None]:
    """In the environment of this process and what it starts, for the block: what one engine needs misleads others."""
    before = {name: os.environ.get(name) for name in ours}
    os.environ |= ours
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def imported(words: list[str]) -> None:
    done = subprocess.run(words, check=False, capture_output=True)
    if done.returncode:
        raise NoDockerError(f"podman import: {done.stderr.decode(errors='replace').strip()[-300:]}")


def prepared(name: str, prepare: Callable[[], object]) -> None:
    """An image is prepared once and shared by all rollouts: what that takes."""
    begun = time.perf_counter()
    prepare()
    print(f"{name:<12} image prepared once: {time.perf_counter() - begun:.2f} s")


async def measure(one: Callable[[Times], object], count: int, parallel: int) -> tuple[Times, Times, float]:
    alone, together = Times(), Times()
    for _ in range(count):
        await one(alone)  # type: ignore[misc]
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(parallel):
            group.create_task(one(together))  # type: ignore[arg-type]
    return alone, together, time.perf_counter() - begun


READY: dict[str, Callable[[], AbstractContextManager[Callable[[Times], object]]]] = {
    "bubblewrap": bubblewrap_ready,
    "docker": docker_ready,
    "podman": podman_ready,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--only", default=",".join(READY))
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ms")
    first: dict[str, float] = {}
    for name in options.only.split(","):
        try:
            with READY[name]() as one:
                alone, together, wall = asyncio.run(measure(one, options.count, options.parallel))
        except NoDockerError as error:
            print(f"{name:<12} left out: {error}")
            continue
        for label, times in ((f"{options.count} one by one", alone), (f"{options.parallel} at once", together)):
            cells: list[str] = []
            for phase in PHASES:
                half, most = (quantile(getattr(times, phase), share) for share in (0.5, 0.99))
                ratio = half / first.setdefault(f"{label} {phase}", half)
                cells.append(f"{phase} p50 {half:7.1f} p99 {most:7.1f} ({ratio:.1f}x)")
            print(f"{name:<12} {label:<14} {'   '.join(cells)}")
        print(f"{name:<12} {options.parallel} at once took {wall:.2f} s")


if __name__ == "__main__":
    main()
