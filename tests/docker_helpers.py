"""A Docker engine of the tests' own in a temporary directory, and an image made of this machine's tools."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_TOOLS = """bash sh cat chmod cp cut dd echo env false grep head hostname id kill ln ls mkdir mkfifo printf pwd readlink
rm setsid sleep sort stat tail touch tr true wc yes"""
TOOLS = tuple(_TOOLS.split())
IMAGE = "polar-tools:1"


def missing() -> str:
    """Why no Docker engine can be started here; empty when one can."""
    if os.geteuid() != 0:
        return "a Docker engine of our own needs root"
    absent = [name for name in ("dockerd", "containerd", "runc", "docker") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (apt-get install docker.io)" if absent else ""


def root_of_tools(folder: Path) -> Path:
    """A root directory with TOOLS and the libraries they load: about 12 MB, no download."""
    places = [found for name in TOOLS if (found := shutil.which(name, path="/usr/bin:/bin"))]
    listed = subprocess.run(["ldd", *places], capture_output=True, text=True, check=False).stdout
    libraries = {
        word for line in listed.splitlines() for word in line.split() if word.startswith("/") and ":" not in word
    }
    for path in (*places, *sorted(libraries)):
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
def docker_engine() -> Generator[str]:
    """A running engine; gives its DOCKER_HOST. RuntimeError with its log if it does not start."""
    with tempfile.TemporaryDirectory(prefix="polar-docker-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        host = f"unix://{folder}/sock"
        command = ["dockerd", f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid",
                   "-H", host, "--bridge=none", "--iptables=false", "--ip6tables=false"]  # fmt: skip
        with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as engine:
            try:
                _ready(host, engine, folder / "log")
                yield host
            finally:
                engine.terminate()
                engine.wait(30)
                for left in reversed([line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]):
                    if left.startswith(f"{folder}/"):
                        subprocess.run(["umount", left], check=False)


def _ready(host: str, engine: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 30
    while subprocess.run(["docker", "-H", host, "version"], capture_output=True, check=False).returncode:
        if engine.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"dockerd did not start: {log.read_text(errors='replace')[-1500:]}")
        time.sleep(0.1)


def import_image(host: str, image: str = IMAGE) -> None:
    """Make ``image`` of TOOLS in the engine at ``host``."""
    with tempfile.TemporaryDirectory(prefix="polar-root-") as name, suppress(BrokenPipeError):
        root = root_of_tools(Path(name))
        with subprocess.Popen(["tar", "-C", os.fspath(root), "-c", "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(
                ["docker", "-H", host, "import", "-", image], stdin=tar.stdout, check=True, capture_output=True
            )
