"""The conformance table: what each real CLI is put through, and what has to come of it.

``kinds`` is a pattern over the recorded calls in order: A agent, S sub-agent, C compaction, s side. Every token that
was sampled is in a chain or left out for a reason named here, and no name is looked up, in every cell. There is one
chain where a CLI only appends to its history; the others are explained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polar_env.types import Outcome

CLIS = ("claude_code", "codex", "pi", "qwen_code", "opencode", "gemini_cli", "mini_swe_agent", "openhands", "aider")

LOOKUPS = {"opencode": r"registry\..+"}
"""Names a CLI asks for that nothing switches off: opencode looks for updates of plugins (design: harnesses §1)."""


@dataclass(frozen=True)
class Expected:
    """What a run leaves behind. ``failed``: generations that broke; ``left_out``: why calls do not train."""

    kinds: str
    outcome: Outcome = Outcome.COMPLETED
    chains: int = 1
    failed: int = 0
    left_out: tuple[str, ...] = ()
    fixed: bool = False


@dataclass(frozen=True)
class Case:
    """``but``: per CLI what differs, or the reason why there is no such cell; ``result``: words the model saw last."""

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


NO_TOOLS = "it offers no tools"
NEVER = "it never compacts"
FIX = Expected("A{4}", fixed=True)
ONCE = replace(FIX, failed=1)
TWO = Expected("AA")
RESUMED = Expected("A{4}", chains=2, failed=1)
"""Qwen Code asks to go on after the words that had come, and then joins both to one answer in its history. The script
counts answers, and so misses its fix."""
OVERFLOWN = Expected("A{3}", Outcome.CONTEXT_OVERFLOW, failed=1)

CASES: dict[str, Case] = {
    "edit": Case(
        "edit_tool",
        FIX,
        {
            # Its Edit gets a key more (replace_all) in the history than was sampled.
            "claude_code": replace(FIX, chains=2),
            "codex": replace(FIX, kinds="A{3}"),
            "aider": replace(FIX, kinds="A"),
        },
        scripts={"aider": "harness_helpers:whole_file"},
    ),
    "parallel": Case("conformance.scripts:parallel", TWO, {"aider": NO_TOOLS}, result=("first", "second")),
    "odd_arguments": Case(
        "conformance.scripts:odd_arguments",
        # The chat template spells the arguments its own way, so what follows is a chain of its own.
        replace(TWO, chains=2),
        {"aider": NO_TOOLS},
        result=("héllo/☃".encode().hex(),),
        same_arguments=True,
    ),
    "blank_text": Case(
        "conformance.scripts:blank_text",
        TWO,
        # The block is not in the history any more.
        {**dict.fromkeys(("claude_code", "pi", "openhands"), replace(TWO, chains=2)), "aider": NO_TOOLS},
        result=("first",),
    ),
    "reasoning": Case(
        "think",
        FIX,
        # It sends no reasoning back for a model it does not know (design: harnesses §12).
        {"openhands": replace(FIX, chains=4), "aider": NO_TOOLS},
    ),
    "sub_agent": Case(
        "cli_scripts_helpers:delegates",
        Expected("AS{2}A", chains=2),
        {
            # They go on while the sub-agent works.
            **dict.fromkeys(("claude_code", "codex", "qwen_code"), Expected("A(ASS|SAS|SSA)A", chains=2)),
            "pi": "it has no sub-agents",
            "mini_swe_agent": "it has no sub-agents",
            "openhands": "sub-agents are off in the preset",
            "aider": NO_TOOLS,
        },
        # The presets offer none.
        extra={
            "claude_code": ("--tools", "Bash,Edit,Read,Write,Agent"),
            "codex": ("-c", "agents.enabled=true"),
        },
        scripts={"codex": "conformance.scripts:spawns"},
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
    "busy_429": Case("fix", ONCE, {"aider": NO_TOOLS}, {1: "busy"}),
    "broken_500": Case("fix", ONCE, {"aider": NO_TOOLS}, {1: "broken"}),
    "reset": Case("fix", ONCE, {"qwen_code": RESUMED, "aider": NO_TOOLS}, {1: "reset"}),
    # The engine's; the proxy itself writes no broken event (property tests of sse).
    "malformed": Case("fix", ONCE, {"qwen_code": RESUMED, "aider": NO_TOOLS}, {1: "malformed"}),
    "overflow": Case(
        "conformance.scripts:looks",
        Expected("A{3}CA", chains=3, failed=1),
        {
            "codex": OVERFLOWN,  # a refused request never compacts it; its own count does
            "qwen_code": Expected("A{3}CCA", chains=3, failed=1),
            "gemini_cli": OVERFLOWN,
            "mini_swe_agent": OVERFLOWN,
            "openhands": OVERFLOWN,
            "aider": NO_TOOLS,
        },
        {3: "overflow"},
        # They think there is room yet. Pi does not compact less than 20,000 tokens.
        job={"context_window": 131072},
    ),
    "silence_40s": Case("fix", FIX, {"aider": NO_TOOLS}, {1: "silent"}),
    "length_stop": Case(
        "fix",
        Expected("A{5}", fixed=True),
        {
            # These take a cut answer for the end of the run, and so do not get to the fix.
            "codex": Expected("A", Outcome.AGENT_ERROR),
            **dict.fromkeys(("pi", "qwen_code", "opencode", "gemini_cli", "openhands"), Expected("A")),
            # The cut answer is not in the history any more; it is told that it was one.
            "mini_swe_agent": Expected("A{5}", chains=2, fixed=True),
            "aider": NO_TOOLS,
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
