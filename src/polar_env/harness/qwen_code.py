"""Qwen Code (OpenAI Chat): launch profile, request marks and event stream.

Its first message holds the day, twice, and a tree of the working directory; the engine is shown one day (``volatile``).
What it sends for N turns is N requests; an empty answer it asks for again up to four times, over half a minute, and one
with arguments that are not JSON once, with the same request. It keeps 23,000 tokens of the window free and begins with
a prompt of 14,000: in a window of 40,000 it has no room.

Its own sub-agents run beside the main line and report when they are done. They are named by what they were told.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig
from polar_env.errors import HarnessError, boundary
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import NODE, OPT, install_npm, node_mount
from polar_env.harness.quiet import without
from polar_env.harness.reading import (
    STEADY_DAY,
    died,
    failure,
    kind_by_system,
    last_result,
    last_text,
    mapping,
    string,
    timeout,
    told,
)
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "0.24.4"
SETTINGS_FILE = f"{HOME}/.qwen/settings.json"
SESSION_ID = "00000000-0000-4000-8000-000000000001"
"""The same in every rollout: paths derived from it may reach the prompt."""
TURN_LIMIT_CODE = 53
"""It ends with this exit code and no final event (design: harnesses §6)."""
COMPACTION_MARK = "You are the component that summarizes a conversation"
"""Its summary is asked for twice: at first as a message behind the whole history, with the agent's own system prompt
and tools; with a system prompt of its own when that brought none (measured, 0.24.4)."""
API_ERROR = "[API Error"
"""It shows a failed call as if the model had said it."""
CHATTER = ('^{"type":"user"',)
"""Tool results, whole."""


class QwenCode:
    """Qwen Code at the version ``config.version`` (default: the pinned one)."""

    name = "qwen_code"
    wire = WireApi.CHAT
    enforces_turns = True
    volatile = (
        ("user", r"\A(<system-reminder>[\s\S]*?\nToday's date is )[^\n]*?\d{4}(?=\.)", rf"\g<1>{STEADY_DAY}"),
        ("user", r"\A(<system-reminder>[\s\S]*?\nThe current date is: )[^\n]*?\d{4}(?=\.)", rf"\g<1>{STEADY_DAY}"),
    )

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """JavaScript, about 160 MB; brings Node with it into the sandbox."""
        label, package = f"{self.name}-{self._version}", f"@qwen-code/qwen-code@{self._version}"
        root = await install_npm(store, label, package, "qwen", ("@qwen-code/qwen-code/cli-entry.js",))
        await asyncio.to_thread(_make_runnable, root)
        return (Mount(root, f"{OPT}/{self.name}"), await node_mount())

    def launch(self, job: Job) -> Launch:
        argv = (
            *(NODE, f"{OPT}/{self.name}/bin/qwen", "--auth-type", "openai", "--model", job.model, "--yolo"),
            *("--output-format", "stream-json", "--max-session-turns", str(job.max_turns)),
            *("--chat-recording", "false", "--session-id", SESSION_ID),
        )
        env = {
            "HOME": HOME,
            "OPENAI_BASE_URL": f"{job.base_url}/v1",
            "OPENAI_API_KEY": job.key,
            "QWEN_USAGE_STATISTICS_ENABLED": "false",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_DISABLE_AUTO_TITLE": "1",
        }
        files = {SETTINGS_FILE: json.dumps(_settings(job)).encode()}
        argv = without(CHATTER, (*argv, *self._extra))
        return Launch(argv=argv, env=env, files=files, stdin=job.instruction.encode())

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """By the first words of the system prompt or the last message: Qwen Code names no session or thread."""
        kind = kind_by_system(body)
        thread = told(body) if kind is CallKind.SUB_AGENT else ""
        return (CallKind.COMPACTION if last_text(body).startswith(COMPACTION_MARK) else kind), thread

    def read(self, exit: HarnessExit) -> Report:
        """The last ``result`` event decides; at the turn limit there is none, only an exit code."""
        result, said = last_result(exit.stdout, unsaid=API_ERROR)
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        if exit.code == TURN_LIMIT_CODE and not result:
            return Report(Outcome.TURN_LIMIT, "max session turns", said)
        if result.get("subtype") == "success" and not result.get("is_error"):
            return Report(Outcome.COMPLETED, "", string(result.get("result")) or said)
        detail = _error(result) or died(self.name, exit)
        return Report(failure(detail), detail, said)


def _error(result: Mapping[str, Any]) -> str:
    return string(mapping(result.get("error")).get("message")) or string(result.get("subtype"))


def _make_runnable(root: Path) -> None:
    """Its own ripgrep comes without the right to be run; without it the grep tool is another one."""
    with boundary(HarnessError, "making Qwen Code's ripgrep executable"):
        for program in root.glob("node_modules/@qwen-code/qwen-code/vendor/ripgrep/*-linux/rg"):
            program.chmod(0o755)


def _settings(job: Job) -> dict[str, Any]:
    generation = {
        "contextWindowSize": job.context_window,
        "samplingParams": {"max_tokens": job.max_output_tokens},
        # Milliseconds: the rollout's own deadline decides, not the client's.
        "timeout": 3600000,
        "streamIdleTimeoutMs": 3600000,
    }
    return {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        # Agents of its own that write notes when the run is over, with a shell.
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        # It would rewrite old tool results, and a prompt would no longer continue the one before it.
        "context": {
            "clearContextOnIdle": {"toolResultsThresholdMinutes": -1, "toolResultsTotalCharsThreshold": -1},
        },
        "model": {"generationConfig": generation},
        # What is of no use in a sandbox without network or user, or would outlive the task.
        "skills": {"disabledLevels": ["project", "user", "extension", "bundled"]},
        "tools": {"exclude": ["web_fetch", "skill"]},
        "experimental": {"cron": False, "artifact": False},
    }
