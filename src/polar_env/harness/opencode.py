"""opencode (OpenAI Chat): launch profile, request marks and event stream.

Its system prompt holds the day; the engine is shown one (``volatile``). What it sends for N turns is N requests. It has
no turn limit of its own that ends it: the proxy counts. Its stream has no final event, and it exits 1 after an error it
has recovered from.

It searches with ripgrep and would fetch one from a foreign host at the first search; we bring it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import OPT, install_npm
from polar_env.harness.quiet import without
from polar_env.harness.reading import died, failure, json_lines, kind_by_system, mapping, string, tail, timeout
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "1.18.33"
RIPGREP = "1.18.0"
"""Version of the npm package @vscode/ripgrep: ripgrep 15.0."""
RIPGREP_HOME = f"{HOME}/.cache/opencode/bin"
"""Where opencode looks for ripgrep when there is none in PATH, which is the task's and not ours."""

CONFIG_HOME = f"{HOME}/.config/opencode"
_LOCK = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
"""It would install this package beside its configuration, for plugins, and we have none. A lock file that names it
keeps it from asking the package registry (measured, 1.18.33: no flag does)."""

_START = f'mkdir -p "{RIPGREP_HOME}" && ln -sf "{OPT}/ripgrep/bin/rg" "{RIPGREP_HOME}/rg" && exec "$@"'

CHATTER = ('^{"type":"tool_use"', '^{"type":"reasoning"')
"""Every call with its whole output, and thoughts."""

ENDINGS = ("stop", "length", "content-filter")
"""Reasons of a last step that ended the run rather than asked for a tool."""


class Opencode:
    """opencode at the version ``config.version`` (default: the pinned one)."""

    name = "opencode"
    wire = WireApi.CHAT
    volatile = (("system", r"(?m)^( *Today's date: )\w{3} \w{3} \d{2} \d{4}$", r"\g<1>Thu Jan 01 2026"),)

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """A native binary of 180 MB, in two builds (we take the one for any x64 machine); needs no Node to run."""
        label, package = f"{self.name}-{self._version}", f"opencode-ai@{self._version}"
        binary = ("opencode-linux-*-baseline/bin/opencode", "opencode-linux-*/bin/opencode")
        root = await install_npm(store, label, package, "opencode", binary)
        ripgrep = f"@vscode/ripgrep@{RIPGREP}"
        search = await install_npm(store, f"ripgrep-{RIPGREP}", ripgrep, "rg", ("@vscode/ripgrep-linux-*/bin/rg",))
        return (Mount(root, f"{OPT}/{self.name}"), Mount(search, f"{OPT}/ripgrep"))

    def launch(self, job: Job) -> Launch:
        argv = (
            *("/bin/sh", "-c", _START, "opencode", f"{OPT}/{self.name}/bin/opencode", "run", "--format", "json"),
            # With a title of ours the model is not asked for one.
            *("--model", f"polar/{job.model}", "--title", "task", *self._extra),
        )
        env = {
            "HOME": HOME,
            "OPENCODE_CONFIG_CONTENT": json.dumps(_config(job)),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }
        # An instruction in the argv would reach the model with quotes around it (design: harnesses §7).
        files = {
            f"{CONFIG_HOME}/package-lock.json": json.dumps(_LOCK).encode(),
            f"{CONFIG_HOME}/node_modules/.installed": b"",
        }
        return Launch(argv=without(CHATTER, argv), env=env, files=files, stdin=job.instruction.encode())

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """A sub-agent names its parent's session; the rest is told by the system prompt (design: harnesses §10)."""
        thread = headers.get("x-session-id", "") if "x-parent-session-id" in headers else ""
        kind = CallKind.AGENT if body.get("tools") else kind_by_system(body)
        return (CallKind.SUB_AGENT if thread and kind is CallKind.AGENT else kind), thread

    def read(self, exit: HarnessExit) -> Report:
        """Its last step or its last error, whichever came last; a step that was begun and not finished is neither."""
        ending, error, said = "", "", ""
        for event in json_lines(exit.stdout):
            kind, part = string(event.get("type")), mapping(event.get("part"))
            if kind == "text" and not part.get("synthetic"):
                said = string(part.get("text")) or said
            elif kind in ("step_finish", "step_start"):
                ending, error = string(part.get("reason")), ""
            elif kind == "error":
                ending, error = "", _words(mapping(event.get("error")))
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        if ending in ENDINGS and exit.code in (0, 1):
            return Report(Outcome.COMPLETED, "", said)
        detail = error or died(self.name, exit)
        return Report(failure(detail), detail, said)


def _words(error: Mapping[str, Any]) -> str:
    message = tail(string(mapping(error.get("data")).get("message")))
    return ": ".join(word for word in (string(error.get("name")), message) if word)


def _config(job: Job) -> dict[str, Any]:
    model = {
        "name": job.model,
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": job.context_window, "output": job.max_output_tokens},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "polar",
        # No timeout: the rollout's own deadline decides, not the client's.
        "options": {"baseURL": f"{job.base_url}/v1", "apiKey": job.key, "timeout": False},
        "models": {job.model: model},
    }
    return {
        # Web and skills are of no use in a sandbox without network or skills.
        "permission": {"*": "allow", "webfetch": "deny", "websearch": "deny", "skill": "deny"},
        "share": "disabled",
        "autoupdate": False,
        # A second git repository of every state of the tree, for undo.
        "snapshot": False,
        # What they find on the machine would rewrite edited files and add to tool results.
        "lsp": False,
        "formatter": False,
        "small_model": f"polar/{job.model}",
        "provider": {"polar": provider},
    }
