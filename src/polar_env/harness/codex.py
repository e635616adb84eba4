"""Codex CLI (OpenAI Responses): launch profile, model catalog, request marks and event stream.

Codex looks its model up in a catalog and takes tools, window and base prompt from the entry. We give it a copy of the
plain-tools entry of its own catalog under our model's name; the copy is made from the installed CLI and never shipped.
Its prompt names the day and the time zone; ``volatile`` says where, and the engine is shown one of each. (Codex could
be told to leave that block out, but then it does not say where it works either.) It has no turn limit of its own: the
proxy counts.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig, child_environment
from polar_env.errors import HarnessError, boundary
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import OPT, install_npm, once, run
from polar_env.harness.quiet import without
from polar_env.harness.reading import STEADY_DATE, died, failure, items, json_lines, mapping, string, tail, timeout
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "0.169.0"
CODEX_HOME = f"{HOME}/.codex"
"""Not below /tmp: Codex refuses to put its helper programs there and loses apply_patch."""
KEY_VARIABLE = "POLAR_API_KEY"

CHATTER = ('^{"type":"item[.][a-z]*","item":{"id":"[^"]*","type":"command_execution"',)
"""A command's output, up to a mebibyte of it each."""

SUB_AGENT_KINDS: Mapping[str, CallKind] = {"compact": CallKind.COMPACTION, "memory_consolidation": CallKind.SIDE}
"""Values of ``x-openai-subagent`` that do not mean a worker of the task."""


class Codex:
    """Codex CLI at the version ``config.version`` (default: the pinned one)."""

    name = "codex"
    wire = WireApi.RESPONSES
    volatile = (
        ("user", r"\A(<environment_context>[\s\S]*?<current_date>)[^<]*", rf"\g<1>{STEADY_DATE}"),
        ("user", r"\A(<environment_context>[\s\S]*?<timezone>)[^<]*", r"\1Etc/UTC"),
    )

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args
        self._entry: dict[str, Any] | None = None

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """A native binary of about 400 MB; needs no Node to run. Reads the CLI's own model catalog once."""
        label, package = f"{self.name}-{self._version}", f"@openai/codex@{self._version}"
        root = await install_npm(store, label, package, "codex", ("@openai/codex-linux-*/vendor/*/bin/codex",))
        catalog = await once(store, f"{label}-catalog", lambda partial: _write_catalog(root, partial))
        with boundary(HarnessError, f"reading the model catalog {catalog}"):
            text = await asyncio.to_thread((catalog / "models.json").read_text, encoding="utf-8")
            self._entry = plain_entry(mapping(json.loads(text)))
        return (Mount(root, f"{OPT}/{self.name}"),)

    def launch(self, job: Job) -> Launch:
        """Raises HarnessError before ``install``: the catalog entry comes from the installed CLI."""
        if self._entry is None:
            raise HarnessError("codex: call install() before launch(), the model catalog comes from the installed CLI")
        argv = (
            *(f"{OPT}/{self.name}/bin/codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox"),
            *("--skip-git-repo-check", "-C", job.workdir, *self._extra, "-"),
        )
        files = {
            f"{CODEX_HOME}/config.toml": _config(job).encode(),
            f"{CODEX_HOME}/models.json": json.dumps({"models": [_for_job(self._entry, job)]}).encode(),
        }
        env = {"HOME": HOME, "CODEX_HOME": CODEX_HOME, KEY_VARIABLE: job.key}
        return Launch(argv=without(CHATTER, argv), env=env, files=files, stdin=job.instruction.encode())

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """By the headers Codex puts on every request (design: harnesses §10)."""
        worker = headers.get("x-openai-subagent", "")
        thread = headers.get("thread-id", "") if worker or "x-codex-parent-thread-id" in headers else ""
        if _request_kind(headers) == "compaction":
            return CallKind.COMPACTION, thread
        if body.get("generate") is False:
            return CallKind.SIDE, thread
        if thread or worker:
            return SUB_AGENT_KINDS.get(worker, CallKind.SUB_AGENT), thread
        return CallKind.AGENT, ""

    def read(self, exit: HarnessExit) -> Report:
        """``turn.completed`` or ``turn.failed``, whichever came last; ``error`` events before a retry are passing."""
        ending, error, said = "", "", ""
        for event in json_lines(exit.stdout):
            kind, item = string(event.get("type")), mapping(event.get("item"))
            if kind == "item.completed" and item.get("type") == "agent_message":
                said = string(item.get("text"))
            elif kind in ("turn.completed", "turn.failed"):
                ending = kind
            error = string(mapping(event.get("error")).get("message")) or _message(kind, event) or error
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        if ending == "turn.completed":
            return Report(Outcome.COMPLETED, "", said)
        detail = tail(error) or died(self.name, exit)
        return Report(failure(detail), detail, said)


def _message(kind: str, event: Mapping[str, Any]) -> str:
    return string(event.get("message")) if kind == "error" else ""


def _request_kind(headers: Mapping[str, str]) -> str:
    return next(
        (string(found.get("request_kind")) for found in json_lines(headers.get("x-codex-turn-metadata", ""))), ""
    )


# --- model catalog ----------------------------------------------------------------------------------------------


async def _write_catalog(root: Path, partial: Path) -> None:
    """Ask the CLI for its bundled catalog (`codex debug models`), with a home of its own."""
    env = {**child_environment(), "HOME": str(partial), "CODEX_HOME": str(partial)}
    output = await run((str(root / "bin" / "codex"), "debug", "models"), "codex debug models", env, limit=60.0)
    catalog = next((found for found in json_lines(output) if "models" in found), None)
    if catalog is None:
        raise HarnessError(f"`codex debug models` printed no catalog: {tail(output)}")
    plain_entry(catalog)
    await asyncio.to_thread((partial / "models.json").write_text, json.dumps(catalog), encoding="utf-8")


def plain_entry(catalog: Mapping[str, Any]) -> dict[str, Any]:
    """The catalog's entry with ordinary tools: no code mode, no "responses lite" (tools hidden in the input).

    Raises HarnessError when there is none.
    """
    for entry in map(mapping, items(catalog.get("models"))):
        if entry.get("use_responses_lite") is False and not entry.get("tool_mode"):
            return entry
    raise HarnessError("this Codex version has no model entry with plain tools; set harness.version to the pinned one")


def _for_job(entry: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """The entry under our model's name and window, without what only the vendor's service has."""
    plain = dict.fromkeys(("include_skills_usage_instructions", "include_plugin_usage_instructions"), False)
    return {
        **entry,
        **plain,
        "slug": job.model,
        "display_name": job.model,
        "context_window": job.context_window,
        "max_context_window": job.context_window,
        "supports_search_tool": False,
        "include_apps_usage_instructions": False,
        "availability_nux": None,
        "upgrade": None,
        "service_tiers": [],
        "additional_speed_tiers": [],
    }


def _config(job: Job) -> str:
    """config.toml; JSON strings are TOML basic strings."""
    # Room for one answer and for one big tool result: an answer cut by the window is `response.incomplete`, which
    # ends Codex.
    compact_at = max(job.context_window // 2, job.context_window - 2 * job.max_output_tokens)
    return f"""\
model = {json.dumps(job.model)}
model_provider = "polar"
model_catalog_json = "{CODEX_HOME}/models.json"
model_auto_compact_token_limit = {compact_at}
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.polar]
name = "polar"
base_url = {json.dumps(job.base_url + "/v1")}
wire_api = "responses"
env_key = "{KEY_VARIABLE}"
stream_idle_timeout_ms = 3600000

[analytics]
enabled = false

[features]
plugins = false
apps = false
goals = false

[skills]
include_instructions = false

[agents]
enabled = false
"""
