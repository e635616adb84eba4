"""Small real parts for the tests of the tasks room: rows, wheels, sdists, git mirrors, and the official report."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polar_env.config import SandboxConfig
from polar_env.sandbox import Box, ExecResult, Overlay
from polar_env.sandbox.sandbox import open_sandbox
from polar_env.tasks import ENV_PREFIX, WORKDIR, Prepared

BASE = "a" * 40

REPO = Path(__file__).resolve().parents[1]


def spent() -> float:
    """Seconds of processor this process and its ended children have used: the same however busy the machine is."""
    return sum(os.times()[:4])


def good_row(**changes: Any) -> dict[str, Any]:
    """A complete v5 row; ``changes`` replace fields, and a field set to ``...`` is left out."""
    row = {
        "instance_id": "acme__gadget-1",
        "repo": "acme/gadget",
        "version": "1.0",
        "base_commit": BASE,
        "patch": "",
        "test_patch": "",
        "problem_statement": "It is broken.",
        "eval_script": "#!/bin/bash\n",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "image": "acme/gadget:latest",
        "FAIL_TO_PASS": '["t.py::test_a"]',
        "PASS_TO_PASS": "[]",
    } | changes
    return {key: value for key, value in row.items() if value is not ...}


def write_jsonl(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def use_registry(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Make ``folder`` the only place pip takes packages from."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in (("CONFIG_FILE", os.devnull), ("NO_INDEX", "1"), ("FIND_LINKS", str(folder))):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def make_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel that installs one module called ``name``."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def make_sdist(
    folder: Path, files: Mapping[str, str], *, name: str = "gadget", evil: str = "", link: str = ""
) -> dict[str, Any]:
    """An sdist and the source mapping that names it. ``evil`` adds a member of that name, a symlink if ``link``."""
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for member, text in files.items():
            info = tarfile.TarInfo(f"{name}-1.0/{member}")
            info.size, info.mode = len(text.encode()), 0o755 if text.startswith("#!") else 0o644
            tar.addfile(info, io.BytesIO(text.encode()))
        if evil:
            info = tarfile.TarInfo(evil)
            info.type, info.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.REGTYPE, "")
            tar.addfile(info)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"kind": "sdist", "name": name, "tag": "1.0", "file": path.name, "sha256": sha256}


def make_mirror(path: Path) -> tuple[str, str]:
    """A git repository whose second commit holds the fix; returns (base commit, commit with the fix)."""
    path.mkdir()
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    env |= {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=path, env=env, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q", "-b", "main")
    commits = list[str]()
    for text in ("answer = 41\n", "answer = 42  # the fix\n"):
        (path / "gadget.py").write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", text)
        commits.append(git("rev-parse", "HEAD"))
    return commits[0], commits[1]


def swebench_data() -> str:
    """The folder of official rows, or a skip with the reason."""
    folder = os.environ.get("POLAR_SWEBENCH_DATA") or str(REPO.parent / "shared" / "data" / "swebench")
    if not Path(folder).is_dir():
        pytest.skip("no SWE-bench rows: set POLAR_SWEBENCH_DATA to a folder with the official parquet files")
    return folder


async def evaluate(prepared: Prepared, patch: str) -> ExecResult:
    """Run the task's eval script on ``patch`` in a fresh sandbox without network; stdout is the log."""
    assert prepared.repo is not None
    assert prepared.env is not None
    overlays = (Overlay(prepared.repo, WORKDIR), Overlay(prepared.env, ENV_PREFIX))
    box = Box(WORKDIR, overlays=overlays, read_only=prepared.mounts, env=prepared.env_vars)
    script = str(prepared.task.row["eval_script"])
    for old, new in prepared.eval_rewrites:
        script = script.replace(old, new)
    async with open_sandbox(box, SandboxConfig()) as sandbox:
        if patch:
            applied = await sandbox.exec(("git", "apply", "-"), stdin=patch.encode(), timeout=30.0)
            assert applied.code == 0, applied.stderr
        await sandbox.write("/tmp/eval.sh", script.encode())
        return await sandbox.exec(("bash", "-c", "exec bash /tmp/eval.sh 2>&1"), timeout=300.0)


_REPORT = """
import json, sys
from swebench.harness.grading import get_eval_report
from swebench.harness.utils import make_test_spec
row, patch, log = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3]
prediction = {"instance_id": row["instance_id"], "model_patch": patch, "model_name_or_path": "test"}
print(json.dumps(get_eval_report(make_test_spec(row), prediction, log, True)[row["instance_id"]]))
"""


def official_report(prepared: Prepared, patch: str, log: bytes, scratch: Path) -> dict[str, Any]:
    """What the official swebench package says of a log (in a child: the package is heavy to import)."""
    (scratch / "row.json").write_text(json.dumps(dict(prepared.task.row)))
    (scratch / "log.txt").write_bytes(log)
    argv = [sys.executable, "-c", _REPORT, str(scratch / "row.json"), patch, str(scratch / "log.txt")]
    return json.loads(subprocess.run(argv, check=True, capture_output=True, timeout=100).stdout)


def passed(report: Mapping[str, Any], field: str) -> tuple[int, int]:
    """(passed, total) of a list of test ids in an official report."""
    counts = report["tests_status"][field]
    return len(counts["success"]), len(counts["success"]) + len(counts["failure"])
