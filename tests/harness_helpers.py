"""Harnesses for tests: built from the table, run in a real sandbox against the real proxy and the scripted engine."""

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from polar_env.capture import Ledger
from polar_env.config import EngineConfig, HarnessConfig, ProxyConfig, SandboxConfig, environment
from polar_env.engine import Session as EngineSession
from polar_env.engine import scripts, tokenizer
from polar_env.engine.scripted import ScriptedEngine
from polar_env.harness import HARNESSES, HOME, MODEL_PORT, Harness, Job, Report
from polar_env.proxy.server import ProxyServer
from polar_env.sandbox import Box, Overlay
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.types import HarnessExit, SealedLedger

STORE = Path(environment("POLAR_CACHE", "~/.cache/polar_env")).expanduser()
"""Shared with all rollouts of this machine: a CLI is installed once, not once per test run."""

INSTRUCTION = (
    "The greeting in hello.py is wrong:\n\n    it says \"helo\" & not 'hello' {{é}} ${HOME}\n\n-- please fix it."
)
"""Quotes, braces, dollars and a leading dash: what argv, templates and YAML trip over."""

GOLD = """\
diff --git a/hello.py b/hello.py
--- a/hello.py
+++ b/hello.py
@@ -1,2 +1,2 @@
 def greet(name):
-    return "helo " + name
+    return "hello " + name
"""

BROKEN = 'def greet(name):\n    return "helo " + name\n'
FIXED = BROKEN.replace("helo", "hello")


def build(name: str, **config: Any) -> Harness:
    """The harness ``name`` of the table."""
    return resolve_name(HARNESSES[name])(HarnessConfig(name=name, **config))


def a_job(**changes: Any) -> Job:
    facts: dict[str, Any] = {
        "instruction": INSTRUCTION,
        "model": "Qwen/Qwen3-8B",
        "base_url": f"http://127.0.0.1:{MODEL_PORT}",
        "key": "the-key",
        "workdir": "/testbed",
        "context_window": 65536,
        "max_output_tokens": 4096,
        "max_turns": 20,
    }
    return Job(**{**facts, **changes})


def ended(stdout: str = "", stderr: str = "", code: int | None = 0, *, timed_out: bool = False) -> HarnessExit:
    return HarnessExit(code, stdout, stderr, timed_out, seconds=12.0)


def repository(at: Path) -> Path:
    """A git repository with one wrong greeting, the same commit every time."""
    at.mkdir()
    (at / "hello.py").write_text(BROKEN, encoding="utf-8")
    who = {f"GIT_{role}_{part}": value for role in ("AUTHOR", "COMMITTER") for part, value in _WHO.items()}
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "A greeting"]):
        env = {"PATH": environment("PATH"), "HOME": str(at.parent), **who}
        subprocess.run(["git", *command], cwd=at, env=env, check=True)
    return at


_WHO = {"NAME": "a", "EMAIL": "a@example.org", "DATE": "2020-01-01T00:00:00Z"}


@dataclass(frozen=True)
class Run:
    """What is left of a harness run."""

    report: Report
    exit: HarnessExit
    ledger: SealedLedger
    file: str
    """hello.py afterwards."""

    @property
    def first_prompt(self) -> str:
        """Digest of the first call's prompt ids."""
        return hashlib.sha256(self.ledger.records[0].prompt_ids.tobytes()).hexdigest()


def noisy(scene: scripts.Scene) -> scripts.Turn:
    """A script that fills the context: long tool results, for ever."""
    return scripts.Turn("Once more.", (scene.shell(f"seq {scene.step} 4000"),))


def whole_file(scene: scripts.Scene) -> scripts.Turn:
    """Aider's way to edit: the answer names the file and gives all of it in a fence."""
    return scripts.Turn(f"The greeting is spelt right now.\n\nhello.py\n```\n{FIXED}```\n")


def edits_nothing_there(scene: scripts.Scene) -> scripts.Turn:
    """An edit (``--edit-format diff``) of words the file does not have: Aider says so and asks again."""
    lines = ("hello.py", "```python", "<<<<<<< SEARCH", "nowhere()", "=======", "here()", ">>>>>>> REPLACE", "```")
    return scripts.Turn("\n".join(lines))


for _script in (whole_file, edits_nothing_there):
    vars(_script)["without_tools"] = True


@asynccontextmanager
async def proxy_with(**config: Any) -> AsyncGenerator[ProxyServer]:
    """The real proxy on the scripted engine with its real tokenizer."""
    words = await asyncio.to_thread(tokenizer.fetch, STORE)
    engine = ScriptedEngine(EngineConfig(kind="scripted", tokenizer=words, max_model_len=65536))
    async with ProxyServer(engine, ProxyConfig(**config)) as proxy:
        yield proxy


async def drive(
    harness: Harness,
    repo: Path,
    proxy: ProxyServer,
    script: str,
    *,
    seconds: float = 100.0,
    beside: Callable[[Sandbox], AbstractAsyncContextManager[Any]] = nullcontext,
    **changes: Any,
) -> Run:
    """One run of the harness on ``repo`` in a sandbox of its own, with no network but the proxy's listener.

    ``changes`` go into the job (``a_job``); ``beside`` is open for as long as the sandbox is.
    """
    mounts = await harness.install(STORE)
    box = Box(
        workdir="/testbed",
        overlays=(Overlay(repo, "/testbed"),),
        read_only=tuple((mount.source, mount.target) for mount in mounts),
        env={"HOME": HOME, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
    )
    session = proxy.open(
        session_id=f"{harness.name}-{script}",
        ledger=Ledger(f"{harness.name}-{script}"),
        engine_session=EngineSession("s", harness=harness.name, script=script, gold_patch=GOLD),
        classify=harness.classify,
    )
    async with (
        open_sandbox(box, SandboxConfig()) as sandbox,
        proxy.listen(sandbox.listener(MODEL_PORT)),
        beside(sandbox),
    ):
        exit = await _run(harness, sandbox, a_job(key=session.key, **changes), seconds)
        ledger = await session.close()
        file = (await sandbox.read("/testbed/hello.py")).decode()
    return Run(harness.read(exit), exit, ledger, file)


async def _run(harness: Harness, sandbox: Sandbox, job: Job, seconds: float) -> HarnessExit:
    launch = harness.launch(job)
    for path, data in launch.files.items():
        await sandbox.write(path, data)
    result = await sandbox.exec(launch.argv, env=launch.env, stdin=launch.stdin, timeout=seconds)
    out, err = (stream.decode("utf-8", "replace") for stream in (result.stdout, result.stderr))
    return HarnessExit(result.code, out, err, result.timed_out, result.seconds)
