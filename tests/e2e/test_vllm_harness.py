"""Unmodified harnesses on a real vLLM: what the ledger holds is what the engine sent, token for token.

The model is tiny and random, so nothing gets solved; every token, id and log-probability is a real one all the same.
"""

import asyncio

import pytest
import pytest_asyncio

from e2e.tap import tapped
from e2e.vllm_helpers import VLLM, served_vllm
from polar_env.capture import rebuild
from polar_env.gym import contract, rows
from polar_env.rollout import open_proxy, rollout
from polar_env.types import INFRASTRUCTURE
from rollout_helpers import job, settings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (VLLM / "vllm").exists(), reason="no .venv-vllm: run `make test-vllm`"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    async with served_vllm(tmp_path_factory.mktemp("vllm"), max_model_len=16_384) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("harness", ["pi", "claude_code", "codex", "mini_swe_agent"])
async def test_recorded_ids_and_log_probs_equal_the_engine_s(server, tmp_path, harness: str, stream: bool):
    async with tapped(server.url) as tap:
        config = await settings(
            tmp_path,
            engine={"kind": "vllm", "base_urls": [tap.url], "stream": stream, "tokenizer": None},
            harness={"name": harness, "command": ()},
            proxy={"max_calls": 4, "max_output_tokens": 48},
            budget={"agent": 180.0},
        )
        async with open_proxy(config) as proxy:
            tap.replies.clear()  # the engine's self-test went through the tap as well
            result = await asyncio.wait_for(rollout(job(config), proxy, config), 300)
    assert result.outcome not in INFRASTRUCTURE, result.detail
    assert result.ledger.records
    assert result.ledger.holes == ()
    recorded = [(call.prompt_ids, call.sampled_ids, call.log_probs) for call in result.ledger.records]
    assert recorded == tap.generations()
    assert rebuild(tmp_path / result.ledger.session_id) == result.ledger
    row = rows.row(result, {"input": "x"}, model="tiny", max_tokens=None)
    assert contract.violations(row) == []
    assert row["trainable_tokens"] > 0
