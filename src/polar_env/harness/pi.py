"""Pi (OpenAI Chat): launch profile, request marks and event stream.

Pi's prompt is small and constant: it names the working directory, no date and no host. It has no turn limit of its own:
the proxy counts. In JSON mode it exits 0 on every failure.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import NODE, OPT, install_npm, node_mount
from polar_env.harness.quiet import without
from polar_env.harness.reading import died, failure, flat_text, json_lines, kind_by_system, mapping, string, timeout
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "1.6.0"
AGENT_DIR = f"{HOME}/.pi/agent"
CHATTER = ('^{"type":"message_[su]', '^{"type":"tool_execution_', '^{"type":"turn_end"')
"""An event of some 300 bytes for every token, a tool's whole output again and again while it grows, and repetitions."""


class Pi:
    """Pi at the version ``config.version`` (default: the pinned one)."""

    name = "pi"
    wire = WireApi.CHAT

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """JavaScript, about 170 MB; brings Node with it into the sandbox."""
        label, package = f"{self.name}-{self._version}", f"@earendil-works/pi-coding-agent@{self._version}"
        main = ("@earendil-works/pi-coding-agent/dist/bundle/cli.js", "@earendil-works/pi-coding-agent/dist/cli.js")
        root = await install_npm(store, label, package, "pi", main)
        return (Mount(root, f"{OPT}/{self.name}"), await node_mount())

    def launch(self, job: Job) -> Launch:
        # Node is named by path: putting it into PATH would show it to the agent's own commands.
        argv = (
            *(NODE, f"{OPT}/{self.name}/bin/pi", "-p", "--mode", "json", "--provider", "polar", "--model", job.model),
            *("--thinking", "off", "--no-session", "--tools", "bash,edit,read,write"),
            *("--no-approve", "--no-skills", "--no-extensions", "--no-prompt-templates", "--no-mcp"),
        )
        files = {
            f"{AGENT_DIR}/models.json": json.dumps(_models(job)).encode(),
            f"{AGENT_DIR}/settings.json": json.dumps(_settings(job)).encode(),
        }
        env = {"HOME": HOME, "PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_CODING_AGENT_DIR": AGENT_DIR}
        return Launch(
            argv=without(CHATTER, (*argv, *self._extra)), env=env, files=files, stdin=job.instruction.encode()
        )

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """A compaction has its own system prompt and no tools; Pi has no sub-agents."""
        return (CallKind.AGENT if body.get("tools") else kind_by_system(body)), ""

    def read(self, exit: HarnessExit) -> Report:
        """The last assistant message decides, once Pi has said that the agent ended."""
        last: dict[str, Any] = {}
        ended = False
        for event in json_lines(exit.stdout):
            ended = ended or event.get("type") == "agent_end"
            message = mapping(event.get("message")) if event.get("type") == "message_end" else {}
            last = message if message.get("role") == "assistant" else last
        said = flat_text(last.get("content"))
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        if last.get("stopReason") in ("error", "aborted"):
            detail = string(last.get("errorMessage")) or "the model call failed"
            return Report(failure(detail), detail, said)
        if not (ended and last):
            return Report(Outcome.AGENT_ERROR, died(self.name, exit), said)
        return Report(Outcome.COMPLETED, "", said)


def _models(job: Job) -> dict[str, Any]:
    model = {
        "id": job.model,
        "name": job.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": job.context_window,
        "maxTokens": job.max_output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{job.base_url}/v1",
        "api": "openai-completions",
        "apiKey": job.key,
        "models": [model],
    }
    return {"providers": {"polar": provider}}


def _settings(job: Job) -> dict[str, Any]:
    """Compact while an answer and a big tool result still fit."""
    reserve = min(2 * job.max_output_tokens, job.context_window // 2)
    return {
        "compaction": {
            "enabled": True,
            "reserveTokens": reserve,
            "keepRecentTokens": min(20000, job.context_window // 4),
        },
        "retry": {"maxRetries": 3, "baseDelayMs": 2000},
        "httpIdleTimeoutMs": 3600000,
    }
