"""The real CLIs, unmodified: installed from the registry, run in a sandbox without network, on the proxy and the
scripted engine. Claude Code is in the default set; the others are marked slow (mini-swe-agent alone installs 700 MB).
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from cli_scripts_helpers import ANSWER
from harness_helpers import BROKEN, FIXED, INSTRUCTION, STORE, Run, build, drive, proxy_with, repository
from polar_env.engine import tokenizer
from polar_env.harness import Harness
from polar_env.proxy.server import ProxyServer
from polar_env.types import CallKind, Outcome, WireApi

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CLIS = (
    pytest.param("claude_code"),
    pytest.param("codex", marks=pytest.mark.slow),
    pytest.param("pi", marks=pytest.mark.slow),
    pytest.param("qwen_code", marks=pytest.mark.slow),
    pytest.param("opencode", marks=pytest.mark.slow),
    pytest.param("gemini_cli", marks=pytest.mark.slow),
    pytest.param("mini_swe_agent", marks=pytest.mark.slow),
    pytest.param("openhands", marks=pytest.mark.slow),
)
WIRES = {
    "claude_code": WireApi.ANTHROPIC,
    "codex": WireApi.RESPONSES,
    "pi": WireApi.CHAT,
    "qwen_code": WireApi.CHAT,
    "opencode": WireApi.CHAT,
    "gemini_cli": WireApi.GEMINI,
    "mini_swe_agent": WireApi.CHAT,
    "openhands": WireApi.CHAT,
    "aider": WireApi.CHAT,
}


@pytest.fixture
async def proxy() -> AsyncGenerator[ProxyServer]:
    async with proxy_with(max_calls=12) as server:
        yield server


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return repository(tmp_path / "repo")


@pytest.fixture(params=CLIS)
def harness(request: pytest.FixtureRequest) -> Harness:
    return build(request.param)


def assert_clean_capture(run: Run, harness: Harness) -> None:
    assert run.ledger.complete
    assert run.ledger.superseded == frozenset()
    assert run.ledger.delivered == {record.call_id for record in run.ledger.records}
    assert {(record.kind, record.thread, record.wire) for record in run.ledger.records} == {
        (CallKind.AGENT, "", WIRES[harness.name])
    }


async def test_two_rollouts_solve_the_task_by_two_ways_from_one_first_prompt(
    harness: Harness, repo: Path, proxy: ProxyServer
):
    """``fix`` uses the shell tool (4 calls: look, change, check, say); ``edit_tool`` the CLI's own editing tool."""
    by_shell = await drive(harness, repo, proxy, "fix")
    by_editing = await drive(harness, repo, proxy, "edit_tool")
    for run in (by_shell, by_editing):
        assert run.report.outcome is Outcome.COMPLETED, run.report
        assert run.file == FIXED
        assert_clean_capture(run, harness)
    assert len(by_shell.ledger.records) == 4
    assert by_shell.report.final_text == "The problem is fixed; the change is in the working tree."
    assert by_shell.first_prompt == by_editing.first_prompt
    assert (repo / "hello.py").read_text(encoding="utf-8") == BROKEN


WINDOWS = {"qwen_code": 56000}
"""Qwen Code begins with 14,000 tokens and keeps 23,000 free: less would leave it no room to work between two."""


@pytest.mark.parametrize("name", CLIS[:5])
async def test_a_full_context_is_compacted_and_the_call_that_does_it_is_recognised(name: str, repo: Path):
    """The CLIs are told a smaller window than the engine has; mini-swe-agent never compacts."""
    async with proxy_with(max_calls=8) as proxy:
        run = await drive(build(name), repo, proxy, "harness_helpers:noisy", context_window=WINDOWS.get(name, 40000))
    records = run.ledger.records
    compactions = {record.index for record in records if record.kind is CallKind.COMPACTION}
    agent = [record for record in records if record.kind is CallKind.AGENT]
    shrinks = {
        later.index - 1
        for earlier, later in itertools.pairwise(agent)
        if len(later.prompt_ids) < len(earlier.prompt_ids)
    }
    assert compactions >= shrinks != set(), [(record.kind, len(record.prompt_ids)) for record in records]
    assert not any(index + 1 in compactions for index in compactions), "each is followed by work"
    assert run.ledger.complete


async def test_a_turn_limit_is_told_from_a_completion(repo: Path, proxy: ProxyServer):
    """Claude Code has a limit of its own; it stops after that many calls and says so."""
    harness = build("claude_code", extra_args=("--max-turns", "3"))
    run = await drive(harness, repo, proxy, "loop")
    assert run.report.outcome is Outcome.TURN_LIMIT
    assert len(run.ledger.records) == 3


@pytest.mark.slow
async def test_mini_swe_agent_reports_its_step_limit_which_its_exit_code_hides(repo: Path, proxy: ProxyServer):
    run = await drive(build("mini_swe_agent", extra_args=("-c", "agent.step_limit=3")), repo, proxy, "loop")
    assert (run.exit.code, run.report.outcome) == (0, Outcome.TURN_LIMIT)
    assert len(run.ledger.records) == 3


@pytest.mark.slow
async def test_aider_writes_whole_files_out_of_one_answer_and_nothing_of_its_own(repo: Path, proxy: ProxyServer):
    """It offers no tools, so the usual scripts cannot play it."""
    harness = build("aider")
    first, second = [await drive(harness, repo, proxy, "harness_helpers:whole_file") for _ in range(2)]
    assert (first.report.outcome, first.file) == (Outcome.COMPLETED, FIXED), first.report
    assert first.report.final_text.startswith("The greeting is spelt right now.")
    assert len(first.ledger.records) == 1
    assert_clean_capture(first, harness)
    assert first.first_prompt == second.first_prompt


@pytest.mark.slow
async def test_aider_stops_after_its_reflections_and_that_is_a_turn_limit(repo: Path, proxy: ProxyServer):
    harness = build("aider", extra_args=("--edit-format", "diff"))
    run = await drive(harness, repo, proxy, "harness_helpers:edits_nothing_there")
    assert (run.report.outcome, run.file) == (Outcome.TURN_LIMIT, BROKEN), run.report
    assert len(run.ledger.records) == 4
    assert_clean_capture(run, harness)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openhands", "aider", "gemini_cli"])
async def test_a_full_context_of_a_harness_that_never_compacts_is_an_overflow(name: str, repo: Path):
    async with proxy_with(max_calls=30) as proxy:
        run = await drive(build(name), repo, proxy, "loop", instruction="Read hello.py. " + "very long " * 40_000)
    assert run.report.outcome is Outcome.CONTEXT_OVERFLOW, run.report
    assert run.ledger.records == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openhands", "qwen_code", "gemini_cli"])
async def test_a_turn_limit_of_the_job_is_kept_and_told(name: str, repo: Path, proxy: ProxyServer):
    run = await drive(build(name), repo, proxy, "loop", max_turns=3)
    assert run.report.outcome is Outcome.TURN_LIMIT, run.report
    assert len(run.ledger.records) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen_code", "opencode", "gemini_cli"])
async def test_a_refused_call_at_the_session_s_limit_ends_the_cli_at_once(name: str, repo: Path):
    """opencode has no turn limit of its own."""
    async with proxy_with(max_calls=3) as proxy:
        run = await drive(build(name), repo, proxy, "loop")
    assert run.report.outcome is Outcome.AGENT_ERROR, run.report
    assert "this session has used its 3 model calls" in run.report.detail
    assert len(run.ledger.records) == 3
    assert run.ledger.complete


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen_code", "opencode", "gemini_cli"])
async def test_the_calls_of_a_sub_agent_are_told_from_the_agent_s(name: str, repo: Path, proxy: ProxyServer):
    run = await drive(build(name), repo, proxy, "cli_scripts_helpers:delegates")
    assert run.report.outcome is Outcome.COMPLETED, run.report
    kinds = [record.kind for record in run.ledger.records]
    assert kinds.count(CallKind.SUB_AGENT) == 2
    assert (kinds[0], kinds[-1]) == (CallKind.AGENT, CallKind.AGENT)
    assert set(kinds) == {CallKind.AGENT, CallKind.SUB_AGENT}
    assert ANSWER in await asyncio.to_thread(_text, run, -1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen_code", "opencode", "gemini_cli"])
async def test_the_search_tools_work_without_a_network(name: str, repo: Path, proxy: ProxyServer):
    """opencode would fetch its ripgrep from the network; Qwen Code's own is packed unable to run."""
    run = await drive(build(name), repo, proxy, "cli_scripts_helpers:searches")
    before, after = [await asyncio.to_thread(_text, run, at) for at in (0, 1)]
    results = after.removeprefix(before)
    assert 'return "helo "' in results, results
    assert results.count("/testbed/hello.py") >= (2 if name == "opencode" else 1), results
    assert len(run.ledger.records) == 2


async def test_a_cli_that_hangs_is_an_agent_timeout(repo: Path, proxy: ProxyServer):
    run = await drive(build("shell", command=("sh", "-c", "sleep 60")), repo, proxy, "fix", seconds=1.0)
    assert run.report.outcome is Outcome.AGENT_TIMEOUT
    assert run.ledger.complete


@pytest.mark.slow
async def test_the_instruction_reaches_every_model_word_for_word(repo: Path, tmp_path: Path):
    """Codex keeps arguments and text byte for byte; the instruction must not be quoted, cut or expanded on the way."""
    words: list[str] = []
    async with proxy_with(max_calls=12) as proxy:
        for name in WIRES:
            script = "harness_helpers:whole_file" if name == "aider" else "give_up"
            run = await drive(build(name), repo, proxy, script)
            words.append(await asyncio.to_thread(_text, run))
    assert [INSTRUCTION in text for text in words] == [True] * len(WIRES)


def _text(run: Run, at: int = 0) -> str:
    """A prompt, by default the first, as the engine's tokenizer spells it."""
    return tokenizer.load(tokenizer.fetch(STORE)).decode(run.ledger.records[at].prompt_ids)
