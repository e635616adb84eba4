"""Claude Code (Anthropic Messages): launch profile, request marks and event stream.

The profile is quiet (no lookups of foreign hosts) and small (four tools, no skills, settings or MCP servers of the
machine). Its prompt still names the day and the kernel release; ``volatile`` says where, and the engine is shown one
day and no release. What it sends for N turns is N requests.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import OPT, install_npm
from polar_env.harness.reading import (
    STEADY_DATE,
    died,
    failure,
    last_result,
    last_text,
    string,
    tail,
    timeout,
)
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "2.1.332"
SESSION_ID = "00000000-0000-4000-8000-000000000001"
"""The same in every rollout: paths derived from it reach the prompt after a compaction."""
COMPACTION_MARK = "CRITICAL: Respond with TEXT ONLY"
"""First words of the text block that asks for a summary; such a request still carries every tool."""

QUIET: Mapping[str, str] = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    # A system block whose suffix changes after a compaction.
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    # cache_control marks wander and flip content between text and list.
    "DISABLE_PROMPT_CACHING": "1",
    # It offers a directory of notes for later sessions; a rollout has none.
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    # Whether the policy thinks is its chat template's affair.
    "MAX_THINKING_TOKENS": "0",
    # Without it the CLI refuses to skip permissions as root.
    "IS_SANDBOX": "1",
    # Milliseconds: the rollout's own deadline decides, not the client's.
    "API_TIMEOUT_MS": "3600000",
}


class ClaudeCode:
    """Claude Code at the version ``config.version`` (default: the pinned one)."""

    name = "claude_code"
    wire = WireApi.ANTHROPIC
    enforces_turns = True
    volatile = (
        ("system", r"(?m)^(Today's date is (?:now )?|Date: )\d{4}-\d{2}-\d{2}", rf"\g<1>{STEADY_DATE}"),
        ("system", r"(?m)^( ?- OS Version: \S+) .*$", r"\1"),
        # Model names it knows get their context as reminders at the head of a user message.
        ("user", r"\A(<system-reminder>[\s\S]*?Today's date is )\d{4}-\d{2}-\d{2}", rf"\g<1>{STEADY_DATE}"),
        ("user", r"\A(<system-reminder>[\s\S]*?\n ?- OS Version: \S+) [^\n]*", r"\1"),
    )

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """A native binary of about 400 MB; needs no Node to run."""
        label, package = f"{self.name}-{self._version}", f"@anthropic-ai/claude-code@{self._version}"
        binary = ("@anthropic-ai/claude-code-linux-*/claude", "@anthropic-ai/claude-code/cli.js")
        return (Mount(await install_npm(store, label, package, "claude", binary), f"{OPT}/{self.name}"),)

    def launch(self, job: Job) -> Launch:
        argv = (
            *(f"{OPT}/{self.name}/bin/claude", "-p", "--model", job.model, "--dangerously-skip-permissions"),
            *("--output-format", "stream-json", "--verbose", "--max-turns", str(job.max_turns)),
            *("--tools", "Bash,Edit,Read,Write", "--disable-slash-commands", "--setting-sources", ""),
            *("--strict-mcp-config", "--no-session-persistence", "--session-id", SESSION_ID),
        )
        env = {
            **QUIET,
            "HOME": HOME,
            "ANTHROPIC_BASE_URL": job.base_url,
            "ANTHROPIC_API_KEY": job.key,
            # An unknown model is taken to have a million tokens: it would never compact in time.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(job.context_window),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(job.max_output_tokens),
        }
        return Launch(argv=(*argv, *self._extra), env=env, stdin=job.instruction.encode())

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """A sub-agent names itself in a header; a compaction is told by its last text block (design: harnesses §10)."""
        thread = headers.get("x-claude-code-agent-id", "")
        if last_text(body).startswith(COMPACTION_MARK):
            return CallKind.COMPACTION, thread
        return (CallKind.SUB_AGENT, thread) if thread else (CallKind.AGENT, "")

    def read(self, exit: HarnessExit) -> Report:
        """The last ``result`` event decides: ``subtype`` alone says success for an API error."""
        result, said = last_result(exit.stdout)
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        if not result:
            return Report(Outcome.AGENT_ERROR, died(self.name, exit), said)
        return _report(result, said)


def _report(result: Mapping[str, Any], said: str) -> Report:
    subtype, reason = string(result.get("subtype")), string(result.get("terminal_reason"))
    text = string(result.get("result"))
    if subtype == "error_max_turns" or reason == "max_turns":
        return Report(Outcome.TURN_LIMIT, f"max turns after {result.get('num_turns')}", said)
    if result.get("is_error") or subtype != "success":
        detail = " ".join(word for word in (reason or subtype or "a result that names no reason", tail(text)) if word)
        return Report(failure(detail), detail, said)
    return Report(Outcome.COMPLETED, "", text or said)
