"""Whole rollouts on engines other than vLLM: a model behind a chat API, and one that takes no request."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engine_helpers import CACHE, VllmServer
from finished_helpers import write_rows
from polar_env.config import child_environment
from polar_env.engine import tokenizer
from polar_env.export import ExportError, Job
from polar_env.export.write import export
from polar_env.types import Outcome
from polar_env.verify import violations
from rollout_helpers import delivered, roll, roll_unchecked, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

POLAR = "import sys; from polar_env.cli import main; sys.exit(main())"


@contextlib.asynccontextmanager
async def teacher(folder: Path) -> AsyncGenerator[dict[str, str], None]:
    """A chat API in a process of its own: our proxy before a script that knows the fix. Its address and key."""
    words = await asyncio.to_thread(tokenizer.fetch, CACHE)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", POLAR, "proxy", "--engine", "scripted", "--session", "teacher"),
        *("engine.scripts=[teacher_helpers:solve]", f"engine.tokenizer={words}", f"store.sessions={folder}"),
        env=child_environment("HOME") | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        told = (await process.stdout.readline()).decode().split()
        yield dict(part.split("=", 1) for part in told)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_real_cli_on_a_chat_api_is_graded_and_becomes_a_conversation_to_imitate(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    async with teacher(tmp_path / "teacher") as api:
        engine = {"kind": "text", "base_urls": [api["base_url"]], "api_key": api["key"]}
        config = await settings(sessions, engine=engine, harness={"name": "claude_code", "command": []})
        result = await roll(config)
    assert (result.outcome, result.decision.reward, result.decision.masked) == (Outcome.COMPLETED, 1.0, False)
    assert result.ledger.complete
    row = json.loads(json.dumps(delivered(result)))
    assert (row["reward"], row["mask_sample"], row["text_only"], row["trainable_tokens"]) == (1.0, True, 1.0, 0.0)
    assert violations(row, sessions) == []
    rows = write_rows(tmp_path / "rollouts.jsonl", [row])
    assert export("sft", rows, tmp_path / "sft.jsonl", Job(sessions=sessions)) == 1
    line = json.loads((tmp_path / "sft.jsonl").read_text())
    said = [message for message in line["messages"] if message["role"] == "assistant"]
    assert len(said) == row["num_model_calls"] == len(result.trajectory.chains[0].turns)
    assert any(call["function"]["name"] == "Bash" for message in said for call in message.get("tool_calls", ()))
    with pytest.raises(ExportError, match="no token ids"):
        export("trl", rows, tmp_path / "trl.jsonl", Job(sessions=sessions))


async def test_a_harness_whose_requests_the_engine_refuses_is_masked_and_says_why(tmp_path: Path) -> None:
    async with VllmServer(fault="bad_request").run() as server:
        engine = {"kind": "vllm", "base_urls": [server.url], "model": server.model}
        result = await roll_unchecked(await settings(tmp_path, engine=engine))
    assert result.outcome is Outcome.REQUEST_REFUSED
    assert result.detail == "the engine answered 400: tools: bad schema"
    row = delivered(result)
    assert (row["mask_sample"], row["reward"]) == (True, 0.0)
    assert row["failure_kind"] == "polar_env:request_refused"
    assert result.verdict is None, "there is nothing of the policy's to grade"


class Picky(VllmServer):
    """It takes a task, and refuses every request that shows a tool's result."""

    def _refusal(self, body: dict[str, Any]) -> web.Response | None:
        shown = any(message["role"] == "tool" for message in body["messages"])
        return web.json_response({"error": {"message": "no results, please"}}, status=400) if shown else None


async def test_a_refusal_after_a_turn_is_the_agents_own_end_graded_and_told(tmp_path: Path) -> None:
    async with Picky(window=4096).run() as server:
        engine = {"kind": "vllm", "base_urls": [server.url], "model": server.model}
        result = await roll_unchecked(await settings(tmp_path, engine=engine))
    assert result.outcome is Outcome.AGENT_ERROR
    assert result.detail.endswith("requests refused: 1, first: the engine answered 400: no results, please")
    assert result.verdict is not None
    row = delivered(result)
    assert (row["mask_sample"], row["reward"], row["num_model_calls"]) == (False, 0.0, 1.0)
    assert row["trainable_tokens"] > 0
