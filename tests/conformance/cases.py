"""The conformance table: what each real CLI is put through, and what has to come of it.

``kinds`` is a pattern over the recorded calls in order: A agent, S sub-agent, C compaction, s side. Every token that
was sampled is in a chain or left out for a reason named here, and nobody but the model is asked for, in every cell.
Prompts are spliced, so there is one chain where a CLI only appends to its history, in whatever spelling; the others are
explained.
"""

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polar_env.harness import Launch
from polar_env.types import Outcome

CLIS = ("claude_code", "codex", "pi", "qwen_code", "opencode", "gemini_cli", "mini_swe_agent", "openhands", "aider")


@dataclass(frozen=True)
class Expected:
    """What a run leaves behind. ``failed``: generations that broke; ``left_out``: why calls do not train; ``threads``:
    sub-agents."""

    kinds: str
    outcome: Outcome = Outcome.COMPLETED
    chains: int = 1
    failed: int = 0
    left_out: tuple[str, ...] = ()
    fixed: bool = False
    threads: int = 0


@dataclass(frozen=True)
class Case:
    """``but``: per CLI what differs, or the reason why there is no such cell; ``result``: words the model saw last.

    ``files``: name -> bytes, put beside hello.py; ``tweaks``: what a preset cannot be told by its arguments; ``late``:
    faults per CLI that come at another generation.
    """

    script: str
    expected: Expected
    but: Mapping[str, Expected | str] = field(default_factory=dict[str, Expected | str])
    faults: Mapping[int, str] = field(default_factory=dict[int, str])
    result: tuple[str, ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict[str, Any])
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    scripts: Mapping[str, str] = field(default_factory=dict[str, str])
    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    same_arguments: bool = False
    """The call's arguments come back with the meaning they were sampled with."""
    picture: bool = False
    """The model is shown a picture."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    tweaks: Mapping[str, Callable[[Launch], Launch]] = field(default_factory=dict[str, Callable[[Launch], Launch]])
    late: Mapping[str, Mapping[int, str]] = field(default_factory=dict[str, Mapping[int, str]])
    alone: bool = True
    """False where a run does nothing but wait: all CLIs may do so at once."""


NO_TOOLS = "it offers the model no tools"
NEVER = "it never compacts"
NO_SUB_AGENTS = "it has no sub-agents"
BLIND = "it takes a model it does not know to be blind, and says in words that there was a picture"
NO_FLAG = "its preset takes no servers of tools"
FIX = Expected("A{4}", fixed=True)
ONCE = replace(FIX, failed=1)
TWO = Expected("AA")
SPOKE_ONCE = {"aider": "harness_helpers:whole_file"}
AIDER = {"aider": Expected("A", fixed=True)}
AIDER_AGAIN = {"aider": Expected("A", fixed=True, failed=1)}
RESUMED = Expected("A{4}", chains=2, failed=1)
"""Qwen Code asks to go on after the words that had come, and then joins both to one answer in its history. The script
counts answers, and so misses its fix."""
OVERFLOWN = Expected("A{3}", Outcome.CONTEXT_OVERFLOW, failed=1)
BESIDE = Expected("A(ASS|SAS|SSA)A", chains=2, threads=1)
"""They go on while the sub-agent works."""
TWINS = Expected("A[AS]{4,6}A", chains=3, threads=2)
DELEGATING = {"claude_code": ("--tools", "Bash,Edit,Read,Write,Agent"), "codex": ("-c", "agents.enabled=true")}
"""The presets offer no sub-agents."""


def _png() -> bytes:
    """Eight by eight red dots."""
    parts = {b"IHDR": struct.pack(">2I5B", 8, 8, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(8 * (b"\0" + 8 * b"\xff\0\0"))}
    chunks = [struct.pack(">I", len(data)) + name + data for name, data in {**parts, b"IEND": b""}.items()]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk + struct.pack(">I", zlib.crc32(chunk[4:])) for chunk in chunks)


def _steps(launch: Launch) -> Launch:
    """opencode tells the model after two steps that it has to stop, as if the model had said so itself."""
    config = json.loads(launch.env["OPENCODE_CONFIG_CONTENT"])
    config["agent"] = {"build": {"steps": 3}}
    return replace(launch, env={**launch.env, "OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _toy(command: str = "python3", script: str = "/testbed/toy_mcp.py") -> dict[str, Any]:
    return {"mcpServers": {"toy": {"command": command, "args": [script]}}}


def _in_settings(name: str) -> Callable[[Launch], Launch]:
    """A server of tools in the settings file ``name``."""

    def tweak(launch: Launch) -> Launch:
        path = next(path for path in launch.files if path.endswith(name))
        settings = {**json.loads(launch.files[path]), **_toy()}
        return replace(launch, files={**launch.files, path: json.dumps(settings).encode()})

    return tweak


def _opencode_toy(launch: Launch) -> Launch:
    config = json.loads(launch.env["OPENCODE_CONFIG_CONTENT"])
    config["mcp"] = {"toy": {"type": "local", "command": ["python3", "/testbed/toy_mcp.py"], "enabled": True}}
    return replace(launch, env={**launch.env, "OPENCODE_CONFIG_CONTENT": json.dumps(config)})


CASES: dict[str, Case] = {
    "edit": Case(
        "edit_tool",
        FIX,
        {
            # Its patch tool is a freeform one.
            "codex": replace(FIX, kinds="A{3}"),
            **AIDER,
        },
        scripts=SPOKE_ONCE,
    ),
    "parallel": Case("conformance.scripts:parallel", TWO, {"aider": NO_TOOLS}, result=("first", "second")),
    "odd_arguments": Case(
        "conformance.scripts:odd_arguments",
        TWO,
        {"aider": NO_TOOLS},
        result=("héllo/☃".encode().hex(),),
        same_arguments=True,
    ),
    "blank_text": Case(
        "conformance.scripts:blank_text",
        TWO,
        {"aider": NO_TOOLS},
        result=("first",),
    ),
    "tool_error": Case("conformance.scripts:fails", TWO, {"aider": NO_TOOLS}, result=("broken",)),
    "picture": Case(
        "conformance.scripts:looks_at_a_picture",
        TWO,
        {
            **dict.fromkeys(("pi", "qwen_code", "opencode", "openhands"), BLIND),
            "mini_swe_agent": "its one tool is a shell",
            "aider": NO_TOOLS,
        },
        picture=True,
        files={"dot.png": _png()},
    ),
    "mcp_tool": Case(
        "conformance.scripts:shouts",
        TWO,
        {
            # It is asked for the tool first.
            "qwen_code": Expected("A{3}"),
            "pi": "it knows no MCP",
            "mini_swe_agent": "its one tool is a shell",
            "openhands": NO_FLAG,
            "aider": NO_TOOLS,
        },
        result=("FIRST",),
        files={"toy_mcp.py": Path(__file__).with_name("toy_mcp.py").read_bytes()},
        extra={
            "claude_code": ("--mcp-config", json.dumps(_toy())),
            "codex": ("-c", 'mcp_servers.toy.command="python3"', "-c", 'mcp_servers.toy.args=["/testbed/toy_mcp.py"]'),
        },
        tweaks={
            "qwen_code": _in_settings(".qwen/settings.json"),
            "gemini_cli": _in_settings(".gemini/settings.json"),
            "opencode": _opencode_toy,
        },
    ),
    "assistant_last": Case(
        "conformance.scripts:walks",
        Expected("A{3}"),
        {cli: "its conversations end in the user's words or in a result" for cli in CLIS if cli != "opencode"},
        tweaks={"opencode": _steps},
    ),
    "reasoning": Case(
        "think",
        FIX,
        {"aider": NO_TOOLS},
    ),
    "sub_agent": Case(
        "cli_scripts_helpers:delegates",
        Expected("AS{2}A", chains=2, threads=1),
        {
            **dict.fromkeys(("claude_code", "codex", "qwen_code"), BESIDE),
            **dict.fromkeys(("pi", "mini_swe_agent"), NO_SUB_AGENTS),
            "openhands": "sub-agents are off in the preset",
            "aider": NO_TOOLS,
        },
        extra=DELEGATING,
        # Its tools for that are in a namespace.
        scripts={"codex": "conformance.scripts:spawns"},
    ),
    "twins": Case(
        "conformance.scripts:delegates_twice",
        TWINS,
        {
            **dict.fromkeys(("pi", "mini_swe_agent"), NO_SUB_AGENTS),
            "openhands": "sub-agents are off in the preset",
            "aider": NO_TOOLS,
        },
        extra=DELEGATING,
        scripts={"codex": "conformance.scripts:spawns_twice"},
    ),
    "compaction": Case(
        "conformance.scripts:fills",
        Expected("A+CA", chains=3),
        {
            # It asks again when the first summary is not in the form it wants.
            "qwen_code": Expected("A+CCA", chains=3),
            **dict.fromkeys(("gemini_cli", "mini_swe_agent", "openhands", "aider"), NEVER),
        },
        job={"context_window": 40000},
        jobs={"qwen_code": {"context_window": 56000}},
    ),
    "busy_429": Case("fix", ONCE, AIDER_AGAIN, {1: "busy"}, scripts=SPOKE_ONCE, late={"aider": {0: "busy"}}),
    "broken_500": Case("fix", ONCE, AIDER_AGAIN, {1: "broken"}, scripts=SPOKE_ONCE, late={"aider": {0: "broken"}}),
    "reset": Case(
        "fix",
        ONCE,
        {"qwen_code": RESUMED, **AIDER_AGAIN},
        {1: "reset"},
        scripts=SPOKE_ONCE,
        late={"aider": {0: "reset"}},
    ),
    # The engine's; the proxy itself writes no broken event (property tests of sse).
    "malformed": Case(
        "fix",
        ONCE,
        {"qwen_code": RESUMED, **AIDER_AGAIN},
        {1: "malformed"},
        scripts=SPOKE_ONCE,
        late={"aider": {0: "malformed"}},
    ),
    "overflow": Case(
        "conformance.scripts:looks",
        Expected("A{3}CA", chains=3, failed=1),
        {
            "codex": OVERFLOWN,  # a refused request never compacts it; its own count does
            "qwen_code": Expected("A{3}CCA", chains=3, failed=1),
            "gemini_cli": OVERFLOWN,
            "mini_swe_agent": OVERFLOWN,
            "openhands": OVERFLOWN,
            "aider": "a call that failed is all there was of its run",
        },
        {3: "overflow"},
        # They think there is room yet. Pi does not compact less than 20,000 tokens.
        job={"context_window": 131072},
    ),
    "silence_40s": Case(
        "fix", FIX, AIDER, {1: "silent"}, scripts=SPOKE_ONCE, late={"aider": {0: "silent"}}, alone=False
    ),
    "length_stop": Case(
        "fix",
        Expected("A{5}", fixed=True),
        {
            # These take a cut answer for the end of the run, and so do not get to the fix.
            "codex": Expected("A", Outcome.AGENT_ERROR),
            **dict.fromkeys(("pi", "qwen_code", "opencode", "gemini_cli", "openhands", "aider"), Expected("A")),
            # The cut answer is not in the history any more; it is told that it was one.
            "mini_swe_agent": Expected("A{5}", chains=2, fixed=True),
        },
        {0: "cut"},
    ),
}

CI = {("claude_code", "edit"), ("claude_code", "parallel"), ("claude_code", "reset")}
"""Cells of the default test set; the others are slow."""


def expected(cli: str, case: str) -> Expected | str:
    """What has to come of a cell, or why there is none."""
    found = CASES[case]
    return found.but.get(cli, found.expected)
