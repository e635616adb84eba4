"""Harbor task folders of the tests' own, and agents that are one shell script."""

from collections.abc import Mapping
from pathlib import Path

from polar_env.config import SandboxConfig
from polar_env.engine.scripts import Scene, Turn
from polar_env.grade import grading
from polar_env.grade import patch as patches
from polar_env.grade.trial import box_of
from polar_env.sandbox.sandbox import open_sandbox
from polar_env.tasks import Prepared, rows
from polar_env.tasks.prepare import prepare
from polar_env.verdict import Verdict

EXAMPLES = Path(__file__).parent.parent / "examples" / "harbor"

LOCAL = '[metadata.polar]\npolar_source = { kind = "local" }\n[environment]\nworkdir = "/app"\n'
"""A task.toml for this machine's own tools."""

ANSWERED = "#!/bin/bash\nif ./answer > /tmp/said && grep -qx 42 /tmp/said; then reward=1; else reward=0; fi\n"
ANSWERED += "echo $reward > /logs/verifier/reward.txt\n"
"""A verifier that runs a program of the agent's."""
ANSWER = "printf '#!/bin/bash\\necho 42\\n' > answer; chmod +x answer"


def folder(place: Path, toml: str = LOCAL, **files: str) -> Path:
    """A task folder; ``files`` are named with ``__`` for ``/`` and ``_sh`` for ``.sh``; an empty one is left out."""
    every: Mapping[str, str] = {
        "instruction_md": "Do it.\n",
        "tests__test_sh": ANSWERED,
        "solution__solve_sh": f"#!/bin/bash\n{ANSWER}\n",
        **files,
    }
    for name, text in {"task.toml": toml, **every}.items():
        path = place / name.replace("__", "/").replace("_sh", ".sh").replace("_md", ".md")
        if text or name == "task.toml":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    return place


async def prepared(place: Path, store: Path, config: SandboxConfig | None = None, **row: str) -> Prepared:
    """The folder's task, ready to run; ``row`` holds what a dataset row says of it."""
    task = rows.task_of({**rows.load(str(place))[0].row, **row})
    return await prepare(task, store, sandbox=config or SandboxConfig())


async def graded(
    ready: Prepared,
    script: str,
    config: SandboxConfig | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109 - a budget
) -> Verdict:
    """What an agent earns that runs ``script`` in the task's sandbox and is killed."""
    config = config or SandboxConfig()
    async with open_sandbox(box_of(ready, config), config) as left:
        baseline = await patches.snapshot(left, ready.workdir) if ready.by_snapshot else None
        await left.exec(["bash", "-c", script], timeout=60)
        await left.kill()
        patch = b"" if ready.repo is None and baseline is None else await patches.extract(left, ready, baseline)
        return await grading.grade(ready, patch, left, sandbox=config, timeout=timeout)


# --- scripts of the scripted engine -------------------------------------------------------------------------------


def solves(scene: Scene) -> Turn:
    return _runs(scene, (EXAMPLES / "word-count" / "solution" / "solve.sh").read_text())


def idles(scene: Scene) -> Turn:
    return _runs(scene, "ls -la")


def plants(scene: Scene) -> Turn:
    """The reward and the verifier, and a process that goes on writing them."""
    write = "echo 1 > /logs/verifier/reward.txt; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
    again = f'(setsid sh -c "while sleep 0.1; do {write}; done" >/dev/null 2>&1 &)'
    return _runs(scene, f"mkdir -p /logs/verifier /tests; {again}; {write}")


def tunes(scene: Scene) -> Turn:
    """A result that is not in the work tree."""
    return _runs(scene, "mkdir -p /etc/app && echo level=3 > /etc/app/conf")


def shadows(scene: Scene) -> Turn:
    """A bash of the agent's own, found before the image's, that corrects the reward."""
    lines = (
        "#!/usr/bin/bash",
        '/usr/bin/bash "$@"',
        "code=$?",
        "[ ! -d /logs/verifier ] || echo 1 > /logs/verifier/reward.json",
        "exit $code",
    )
    words = " ".join(f"'{line}'" for line in lines)
    place = "/usr/local/bin/bash"
    return _runs(scene, f"mkdir -p /usr/local/bin; printf '%s\\n' {words} > {place}; chmod +x {place}")


def breaks(scene: Scene) -> Turn:
    """No shell is left, so that nothing of ours could run there."""
    return _runs(scene, "rm -f /usr/bin/bash /usr/bin/sh")


def _runs(scene: Scene, command: str) -> Turn:
    """One command, then the end."""
    return scene.finish("Done.") if scene.step else Turn("", (scene.shell(command),))
