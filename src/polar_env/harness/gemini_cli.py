"""Gemini CLI (Google generateContent): launch profile, request marks and event stream.

Its first message holds the day and a tree of the working directory; the engine is shown one day (``volatile``).
What it sends for N turns is N requests; an empty answer it asks for again, three times, with a note. It takes a model
it does not know to have a million tokens and compacts only between prompts of a user, of which a rollout has one: a
full context ends it, with the outcome context_overflow.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import NODE, OPT, install_npm, node_mount
from polar_env.harness.quiet import without
from polar_env.harness.reading import (
    STEADY_DAY,
    died,
    failure,
    items,
    json_lines,
    kind_by_system,
    mapping,
    string,
    tail,
    timeout,
    told,
)
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "0.61.0"
SETTINGS_FILE = f"{HOME}/.gemini/settings.json"
SESSION_ID = "00000000-0000-4000-8000-000000000001"
"""The same in every rollout: paths derived from it may reach the prompt."""
SUB_AGENT_TOOL = "complete_task"
"""The tool by which a sub-agent hands in its result; the main agent has none (design: harnesses §8)."""
CHATTER = ('^{"type":"tool_result"',)
"""Tool results, whole."""


class GeminiCli:
    """Gemini CLI at the version ``config.version`` (default: the pinned one)."""

    name = "gemini_cli"
    wire = WireApi.GEMINI
    enforces_turns = True
    volatile = (
        ("user", r"\A(<session_context>[\s\S]*?\nToday's date is )[^\n]*?(?= \(formatted)", rf"\g<1>{STEADY_DAY}"),
    )

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """JavaScript, about 100 MB; brings Node with it into the sandbox."""
        label, package = f"{self.name}-{self._version}", f"@google/gemini-cli@{self._version}"
        root = await install_npm(store, label, package, "gemini", ("@google/gemini-cli/bundle/gemini.js",))
        return (Mount(root, f"{OPT}/{self.name}"), await node_mount())

    def launch(self, job: Job) -> Launch:
        argv = (
            # Without --model a call to a model of its own choice comes first, to choose one.
            *(NODE, f"{OPT}/{self.name}/bin/gemini", "--yolo", "--skip-trust", "--model", job.model),
            *("--output-format", "stream-json", "--session-id", SESSION_ID, *self._extra),
        )
        env = {
            "HOME": HOME,
            "GOOGLE_GEMINI_BASE_URL": job.base_url,
            "GEMINI_API_KEY": job.key,
            # It would start itself a second time, with a heap of half the machine.
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }
        files = {SETTINGS_FILE: json.dumps(_settings(job)).encode()}
        return Launch(argv=without(CHATTER, argv), env=env, files=files, stdin=job.instruction.encode())

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """By the first words of the system prompt and by the tools: it names no session or thread.

        A sub-agent is named by what it was told.
        """
        declared = [tool for group in items(body.get("tools")) for tool in _functions(mapping(group))]
        if SUB_AGENT_TOOL in declared:
            return CallKind.SUB_AGENT, told(body)
        return (CallKind.AGENT if declared else kind_by_system(body)), ""

    def read(self, exit: HarnessExit) -> Report:
        """The last ``result`` event decides, and where it gives no reason the last ``error`` event (exit code 0 then).

        Text comes in pieces, one message until the next tool call.
        """
        result: dict[str, Any] = {}
        said, closed, trouble = "", True, ""
        for event in json_lines(exit.stdout):
            kind = event.get("type")
            if kind == "message" and event.get("role") == "assistant":
                said = string(event.get("content")) if closed else said + string(event.get("content"))
                closed = False
            elif kind == "result":
                result = event
            elif kind == "error":
                trouble = string(event.get("message")) or trouble
            closed = closed or kind == "tool_use"
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        return _report(result, said, trouble) or Report(Outcome.AGENT_ERROR, died(self.name, exit), said)


def _report(result: Mapping[str, Any], said: str, trouble: str) -> Report | None:
    if result.get("status") == "success":
        return Report(Outcome.COMPLETED, "", said)
    error = mapping(result.get("error"))
    kind, message = string(error.get("type")), tail(string(error.get("message")) or trouble)
    if not result or not (kind or message):
        return None
    if kind == "FatalTurnLimitedError":
        return Report(Outcome.TURN_LIMIT, message or kind, said)
    detail = message or kind
    return Report(failure(detail), detail, said)


def _functions(group: Mapping[str, Any]) -> list[str]:
    return [string(mapping(function).get("name")) for function in items(group.get("functionDeclarations"))]


def _settings(job: Job) -> dict[str, Any]:
    return {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {
            "enableAutoUpdate": False,
            "enableAutoUpdateNotification": False,
            # Planning ends when a user approves.
            "plan": {"enabled": False},
        },
        "model": {
            "maxSessionTurns": job.max_turns,
            # After 30 turns it would ask the model, again and again, whether it is going round in circles.
            "disableLoopDetection": True,
        },
        # Of no use in a sandbox without network or skills; both web tools would ask the model. Ripgrep is used where
        # the machine has one, with other results than its own search.
        "tools": {"exclude": ["google_web_search", "web_fetch", "activate_skill"], "useRipgrep": False},
        "skills": {"enabled": False},
    }
