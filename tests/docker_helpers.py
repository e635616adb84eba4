"""A Docker engine of the tests' own in a temporary directory, and an image made of this machine's tools.

The engine is the machine's, or Debian's packages unpacked below the user's cache: nothing is installed, no bridge and
no firewall rule is made, and when it ends no process, mount, namespace or control group of it is left.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

from debian_helpers import NoPackagesError, libraries, unpacked
from polar_env.config import environment

_TOOLS = """bash sh awk cat chmod cp cut dd echo env false find grep head hostname id kill ln ls mkdir mkfifo mktemp mv
printf pwd readlink rm rmdir sed seq setsid sleep sort stat tail tar touch tr true wc yes"""
TOOLS = tuple(_TOOLS.split())
IMAGE = "polar-tools:1"
PROGRAMS = ("dockerd", "containerd", "runc", "docker", "docker-init")
PACKAGES = ("docker.io", "containerd", "runc", "tini")
"""What holds them in Debian and Ubuntu; where the client is a package of its own, it is ``docker-cli``."""
STARTED = 30.0
"""Seconds until the engine answers; one is usual."""
_BESIDE = (Path("/run/docker"), Path("/run/containerd"))
"""What an engine makes outside of the folders it is given."""
_OWN_MOUNTS = ("unshare", "--mount", "--propagation=private")
"""What an engine mounts is seen by it alone and goes with it: other tests count this machine's mounts meanwhile."""
_CACHE = "POLAR_CACHE"
_PYTHON, _LIBRARY = "/usr/bin/python3", "import sysconfig; print(sysconfig.get_path('stdlib'))"


class NoDockerError(Exception):
    """Why no engine can be started here."""


def programs(names: Sequence[str] = PROGRAMS, packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Variables (PATH, LD_LIBRARY_PATH) under which the programs are found. Raises NoDockerError with the reason."""
    if os.geteuid() != 0:
        raise NoDockerError("an engine of our own needs root")
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if all(shutil.which(name, path=path) for name in names):
        return {"PATH": path}
    place = Path(environment(_CACHE, "~/.cache/polar_env")).expanduser() / f"debian-{packages[0]}"
    try:
        root = unpacked(place, packages, f"usr/bin/{names[-1]}", ("docker-cli",))
    except NoPackagesError as error:
        absent = [name for name in names if shutil.which(name, path=path) is None]
        raise NoDockerError(f"not installed: {', '.join(absent)}; {error}") from None
    ours = ":".join(map(str, (root / "usr/bin", root / "usr/sbin")))
    found = {"PATH": f"{ours}:{path}", "LD_LIBRARY_PATH": ":".join(map(str, libraries(root)))}
    if absent := [name for name in names if shutil.which(name, path=found["PATH"]) is None]:
        raise NoDockerError(f"the packages {', '.join(packages)} hold no {', '.join(absent)}")
    return found


def root_of_tools(folder: Path, extra: Sequence[str] = ()) -> Path:
    """A root directory with TOOLS and the libraries they load: about 12 MB, no download."""
    wanted = (*TOOLS, *extra)
    places = [found for name in wanted if (found := shutil.which(name, path="/usr/bin:/bin:/usr/sbin"))]
    listed = subprocess.run(["ldd", *places], capture_output=True, text=True, check=False).stdout
    needed = {word for line in listed.splitlines() for word in line.split() if word.startswith("/") and ":" not in word}
    for path in (*places, *sorted(needed)):
        target = folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target, follow_symlinks=True)
    for name in ("tmp", "proc", "dev", "sys", "etc", "root"):
        (folder / name).mkdir(exist_ok=True)
    if not (folder / "bin").exists():
        (folder / "bin").symlink_to("usr/bin")
    (folder / "tmp").chmod(0o1777)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    return folder


@contextmanager
def docker_engine() -> Generator[Mapping[str, str]]:
    """A running engine; gives the variables a client needs (PATH, DOCKER_HOST). Raises NoDockerError with the end of
    its log when it does not start here."""
    found = programs()
    made = [place for place in _BESIDE if not place.exists()]
    with tempfile.TemporaryDirectory(prefix="polar-docker-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        client = {"PATH": found["PATH"], "DOCKER_HOST": f"unix://{folder}/sock", "DOCKER_CONFIG": f"{folder}/client"}
        with (folder / "log").open("wb") as log, _groups_of_our_own(folder.name) as parent:
            command = [*_OWN_MOUNTS, "dockerd", f"--data-root={folder}/data", f"--exec-root={folder}/exec",
                       f"--pidfile={folder}/pid", "-H", client["DOCKER_HOST"], "--bridge=none", "--iptables=false",
                       "--ip6tables=false", f"--cgroup-parent={parent}", "--shutdown-timeout=1"]  # fmt: skip
            env = {**os.environ, **found, "TMPDIR": name}
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env) as engine:
                try:
                    _ready(client, engine, folder / "log")
                    yield client
                finally:
                    _end(client, engine)
                    for place in made:
                        shutil.rmtree(place, ignore_errors=True)


def docker(client: Mapping[str, str], *words: str, stdin: IO[bytes] | None = None) -> "CompletedProcess[bytes]":
    """One command of the client, to its end."""
    env = {**os.environ, **client}
    return subprocess.run(["docker", *words], env=env, stdin=stdin, capture_output=True, timeout=60, check=False)


def _ready(client: Mapping[str, str], engine: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + STARTED
    while docker(client, "version").returncode:
        if engine.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").splitlines()
            raise NoDockerError(f"dockerd does not start here: {' | '.join(lines[-2:])[-600:]}")
        time.sleep(0.1)


def _end(client: Mapping[str, str], engine: "subprocess.Popen[bytes]") -> None:
    """Containers first, then the engine, whose own containerd it ends."""
    if engine.poll() is None and (left := docker(client, "ps", "-aq").stdout.split()):
        docker(client, "rm", "-f", *(name.decode() for name in left))
    engine.terminate()
    try:
        engine.wait(30)
    except subprocess.TimeoutExpired:
        engine.kill()


@contextmanager
def _groups_of_our_own(name: str) -> Generator[str]:
    """A name for the engine's control groups; whatever is left of them is removed, in every hierarchy."""
    try:
        yield f"/{name}"
    finally:
        for top in Path("/sys/fs/cgroup").glob(f"**/{name}") if Path("/sys/fs/cgroup").is_dir() else ():
            for group in sorted((path for path in (top, *top.rglob("*")) if path.is_dir()), reverse=True):
                with suppress(OSError):
                    group.rmdir()


def import_image(client: Mapping[str, str], image: str = IMAGE, *, python: bool = False) -> None:
    """Make ``image`` of TOOLS in the engine; with ``python`` also of this system's own, without what was installed."""
    with tempfile.TemporaryDirectory(prefix="polar-root-") as name:
        root = root_of_tools(Path(name), ("python3",) if python else ())
        if python:
            asked = subprocess.run([_PYTHON, "-c", _LIBRARY], capture_output=True, text=True, check=True)
            library = Path(asked.stdout.strip())
            skipped = shutil.ignore_patterns("__pycache__", "*-packages", "test", "idlelib", "ensurepip", "config-*")
            shutil.copytree(library, root / library.relative_to("/"), ignore=skipped, symlinks=True)
        with subprocess.Popen(["tar", "-C", os.fspath(root), "-c", "."], stdout=subprocess.PIPE) as tar:
            docker(client, "import", "-", image, stdin=tar.stdout).check_returncode()
