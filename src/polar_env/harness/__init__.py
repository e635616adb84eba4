"""The harness room: real, unmodified agent CLIs as values. One file per harness; ``HARNESSES`` is the table.

A preset says how to install a pinned version, how to launch it at our proxy, and how to read what it did (exit codes
lie: Pi exits 0 on every failure).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

HARNESSES: dict[str, str] = {
    "claude_code": "polar_env.harness.claude_code:ClaudeCode",
    "codex": "polar_env.harness.codex:Codex",
    "pi": "polar_env.harness.pi:Pi",
    "qwen_code": "polar_env.harness.qwen_code:QwenCode",
    "opencode": "polar_env.harness.opencode:Opencode",
    "gemini_cli": "polar_env.harness.gemini_cli:GeminiCli",
    "mini_swe_agent": "polar_env.harness.mini_swe_agent:MiniSweAgent",
    "openhands": "polar_env.harness.openhands:OpenHands",
    "aider": "polar_env.harness.aider:Aider",
    "shell": "polar_env.harness.shell:Shell",
}
"""Harness name (config ``harness.name``) -> dotted path of a class built as ``cls(config: HarnessConfig)``."""

HOME = "/home/agent"
"""HOME inside every sandbox: fixed, because a path that differs between the rollouts of one task splits its group."""

MODEL_PORT = 8080
"""Port of the model listener inside the sandbox's own network namespace."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a preset needs to launch: everything per-rollout except the key is the same for a whole group."""

    instruction: str
    model: str
    base_url: str
    """``http://127.0.0.1:8080``: no trailing slash, no API version, no secret."""
    key: str
    """The session's model key. Goes into a header or environment variable, never into a prompt."""
    workdir: str
    context_window: int
    max_output_tokens: int
    max_turns: int


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory shown read-only inside the sandbox (the installed CLI)."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to run in the sandbox, and the files it needs beforehand (absolute sandbox path -> bytes)."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    stdin: bytes | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What the harness says of itself, read from its event stream, not from its exit code."""

    outcome: Outcome
    detail: str = ""
    final_text: str = ""


class Harness(Protocol):
    """A preset. Two attributes more are read where a preset has them:

    - ``enforces_turns = True``: the CLI is told ``max_turns`` and keeps to it; for the others the proxy counts.
    - ``volatile``: ``(role, pattern, shown)`` for each part of its first prompt that names the day or the machine; see
      ``proxy.steady``.
    """

    name: str
    wire: WireApi

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """Install the pinned version under ``store`` once (atomic, safe between processes), from the registry.

        Raises HarnessError that says what failed and what to do.
        """
        ...

    def launch(self, job: Job) -> Launch: ...

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """(kind, thread) of a model call; ``headers`` are lower-case. The main thread is ``""``."""
        ...

    def read(self, exit: HarnessExit) -> Report: ...
