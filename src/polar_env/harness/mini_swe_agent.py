"""mini-swe-agent (OpenAI Chat, not streaming): launch profile and exit status.

It exits 0 on every ending and keeps the reason in its trajectory file, so a small launcher runs it and then prints the
reason as one line. The launcher also finds the packages: the interpreter runs isolated, and no variable that would
reach the agent's own commands (PYTHONPATH, LD_LIBRARY_PATH) is left set. Its prompt names the kernel release, which
the engine is not shown (``volatile``).
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from polar_env.config import HarnessConfig
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import OPT, PYTHON, install_python, python_mount
from polar_env.harness.reading import died, failure, last_event, string, tail, timeout
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "2.4.6"
CONFIG_FILE = f"{HOME}/.config/mini-swe-agent/polar.yaml"
TRAJECTORY_FILE = f"{HOME}/.config/mini-swe-agent/polar.traj.json"
LAUNCHER_FILE = f"{HOME}/.config/mini-swe-agent/polar_launch.py"
EVENT = "polar.mini_swe_agent.exit"

LAUNCHER = f"""\
import json, os, sys
os.environ.pop("LD_LIBRARY_PATH", None)
sys.path.insert(0, "{OPT}/mini_swe_agent/site")
from minisweagent.run.mini import app
try:
    app()
finally:
    try:
        with open("{TRAJECTORY_FILE}", encoding="utf-8") as file:
            trajectory = json.load(file)
    except (OSError, ValueError):
        trajectory = {{}}
    messages = trajectory.get("messages") or [{{}}]
    said = [m.get("content") for m in messages if m.get("role") == "assistant" and m.get("content")]
    extra = messages[-1].get("extra") or {{}}
    print()
    print(json.dumps({{
        "type": "{EVENT}",
        "exit_status": extra.get("exit_status", ""),
        "error": extra.get("exception_str", ""),
        "final_text": said[-1] if said else "",
    }}), flush=True)
"""

LIMITS = ("LimitsExceeded", "TimeExceeded")


class MiniSweAgent:
    """mini-swe-agent at the version ``config.version`` (default: the pinned one)."""

    name = "mini_swe_agent"
    wire = WireApi.CHAT
    enforces_turns = True
    volatile = (("user", r"(<system_information>\n\S+) .* (\S+)(?=\n</system_information>)", r"\1 \2"),)

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """A directory of Python packages (litellm and all) and the interpreter to run them."""
        root = await install_python(store, f"{self.name}-{self._version}", f"mini-swe-agent=={self._version}")
        return (Mount(root, f"{OPT}/{self.name}"), python_mount())

    def launch(self, job: Job) -> Launch:
        # -I: no PYTHON* variable or user directory; -S: none of the base interpreter's own packages.
        argv = (
            *(PYTHON, "-I", "-S", LAUNCHER_FILE, "-y", "--exit-immediately"),
            *("-c", "mini.yaml", "-c", CONFIG_FILE, "-o", TRAJECTORY_FILE),
        )
        env = {
            "HOME": HOME,
            # The interpreter may be linked to a shared libpython whose own search path names the host's directory.
            "LD_LIBRARY_PATH": f"{OPT}/python/lib",
            "OPENAI_API_KEY": job.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        files = {CONFIG_FILE: _config(job), LAUNCHER_FILE: LAUNCHER.encode()}
        return Launch(argv=(*argv, *self._extra), env=env, files=files)

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """Every call is the agent's own."""
        return CallKind.AGENT, ""

    def read(self, exit: HarnessExit) -> Report:
        """By the line of the launcher."""
        ending = last_event(exit.stdout, EVENT)
        said = string(ending.get("final_text"))
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        status = string(ending.get("exit_status"))
        if status == "Submitted":
            return Report(Outcome.COMPLETED, "", said)
        if status in LIMITS:
            return Report(Outcome.TURN_LIMIT, status, said)
        detail = f"{status}: {tail(string(ending.get('error')))}".rstrip(": ") if status else died(self.name, exit)
        return Report(failure(detail), detail, said)


def _config(job: Job) -> bytes:
    """What goes on top of the package's own mini.yaml. The instruction is here: an argv would show and bound it."""
    config = {
        "run": {"task": job.instruction},
        "agent": {"step_limit": job.max_turns, "cost_limit": 0},
        "model": {
            "model_name": f"openai/{job.model}",
            "model_kwargs": {"api_base": f"{job.base_url}/v1", "timeout": 3600},
        },
    }
    return yaml.safe_dump(config, allow_unicode=False, sort_keys=False, width=sys.maxsize).encode()
