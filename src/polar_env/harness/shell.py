"""Any other CLI: the argv of ``harness.command``, pointed at the proxy by the variables the field's tools read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig
from polar_env.errors import ConfigError
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.reading import kind_by_system, tail, timeout
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

INSTRUCTION_FILE = f"{HOME}/.polar/instruction.md"


class Shell:
    """Runs ``config.command`` followed by ``config.extra_args``; ``{instruction_file}`` in either is replaced.

    The command finds the model in POLAR_BASE_URL (no version), POLAR_API_KEY and POLAR_MODEL, and in the variables of
    the OpenAI and Anthropic clients. It must already be in the sandbox (a mount of the task, or its image).
    """

    name = "shell"
    wire = WireApi.CHAT

    def __init__(self, config: HarnessConfig) -> None:
        """Raises ConfigError when there is no command."""
        if not config.command:
            raise ConfigError("harness 'shell' needs harness.command, e.g. [sh, -c, 'my-agent < {instruction_file}']")
        self._argv = (*config.command, *config.extra_args)

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """Nothing to install."""
        return ()

    def launch(self, job: Job) -> Launch:
        return Launch(
            argv=tuple(part.replace("{instruction_file}", INSTRUCTION_FILE) for part in self._argv),
            env={
                "HOME": HOME,
                "POLAR_BASE_URL": job.base_url,
                "POLAR_API_KEY": job.key,
                "POLAR_MODEL": job.model,
                "OPENAI_BASE_URL": f"{job.base_url}/v1",
                "OPENAI_API_KEY": job.key,
                "ANTHROPIC_BASE_URL": job.base_url,
                "ANTHROPIC_API_KEY": job.key,
            },
            files={INSTRUCTION_FILE: job.instruction.encode()},
        )

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """By the marks of the harnesses we know; opencode names the parent session of a sub-agent in a header."""
        if "x-parent-session-id" in headers:
            return CallKind.SUB_AGENT, headers.get("x-session-id", "")
        return kind_by_system(body), ""

    def read(self, exit: HarnessExit) -> Report:
        """The exit code is all there is."""
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), tail(exit.stdout))
        if exit.code != 0:
            words = tail(exit.stderr) or tail(exit.stdout) or "no output"
            return Report(Outcome.AGENT_ERROR, f"exit code {exit.code}; last words: {words}", tail(exit.stdout))
        return Report(Outcome.COMPLETED, "", tail(exit.stdout))
