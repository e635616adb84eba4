"""The NeMo-RL engine on the HTTP app of a NeMo-RL worker, run from its own source on a real vLLM of this CPU.

Needs a git directory of NVIDIA-NeMo/RL (7ea279ab was used) in POLAR_NEMO_RL_GIT: nothing of NeMo-RL is kept here. It is
also what holds ``nemo_rl_helpers.Worker``, which the quick tests run on, to the truth.
"""

import asyncio
import contextlib
import re
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from e2e.vllm_helpers import VLLM, VllmProcess, _end, _environment, _free_port, _until_ready, tiny_model
from engine_helpers import ask, play, user
from nemo_rl_helpers import Worker, join, words
from polar_env.capture import judge
from polar_env.config import EngineConfig, environment
from polar_env.engine.nemo_rl import NemoRlEngine
from polar_env.engine.replicas import ServerFailed
from polar_env.errors import EngineError, EngineOverflow, EngineRefused
from polar_env.types import Continuation, Sampling, StopReason

GIT = environment("POLAR_NEMO_RL_GIT")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not GIT, reason="POLAR_NEMO_RL_GIT names no git directory of NVIDIA-NeMo/RL"),
    pytest.mark.skipif(not (VLLM / "vllm").exists(), reason="no .venv-vllm: run `make test-vllm`"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nemo_rl")


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncGenerator[VllmProcess, None]:
    model = await tiny_model(folder, 0, "agent")
    port, log = _free_port(), folder / "worker.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(VLLM / "python", Path(__file__).with_name("nemo_rl_worker.py"), GIT, model, str(port)),
            env=_environment(folder) | {"PATH": environment("PATH")},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = VllmProcess(f"http://127.0.0.1:{port}/v1", model, log, process.pid)
        await _until_ready(server, process)
        yield server
    finally:
        await asyncio.shield(_end(process))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(folder: Path) -> AsyncGenerator[VllmProcess, None]:
    if url := environment("POLAR_NEMO_RL_URL"):  # one that runs already
        yield VllmProcess(url, folder, folder, 0)
        return
    async with started(folder) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(worker: VllmProcess) -> AsyncGenerator[NemoRlEngine, None]:
    made = NemoRlEngine(EngineConfig(kind="nemo_rl", base_urls=(worker.url,), policy_version="step-1"))
    yield made
    await made.aclose()


TRAIN = Sampling(1.0, 1.0, None, 48)
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "a.py"}


async def test_check_proves_ids_log_probs_and_splice(engine: NemoRlEngine) -> None:
    facts = await engine.check()
    assert (facts.max_model_len, facts.policy_version, facts.real_tensors) == (4096, "step-1", True)
    assert facts.notes[0] == "a continued prompt begins with the exact ids (splice)"


async def test_ten_turns_are_one_sequence_that_no_rendering_gives(engine: NemoRlEngine) -> None:
    """The model writes calls as no template does, so what was sampled is never what would be rendered."""
    request, sequence, drifted = ask(), array("i"), 0
    for turn in range(10):
        _, reply = await play(engine, request, sampling=TRAIN)
        assert judge("c", reply) == ()
        assert reply.prompt_ids[: len(sequence)] == sequence
        assert reply.spliced is (turn > 0)
        if turn:
            drifted += rendered(request)[: len(sequence)] != sequence
            assert reply.prompt_ids == expected(request, sequence)
        sequence = reply.prompt_ids + reply.sampled_ids
        request = carried_on(request, reply)
    assert drifted == 9


def rendered(request: Any) -> Any:
    return words().render(request.messages, request.tools)


def carried_on(request: Any, reply: Any) -> Any:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.turn.tool_calls
    ]
    said = {"role": "assistant", "content": reply.turn.text, **({"tool_calls": calls} if calls else {})}
    new = [{**RESULT, "tool_call_id": call["id"]} for call in calls] or [user("Go on.")]
    ids, cut = reply.prompt_ids + reply.sampled_ids, reply.turn.stop is StopReason.LENGTH
    carried = Continuation("c", ids, len(request.messages) + 1, cut=cut)
    return ask(*request.messages, said, *new, continues=carried)


def expected(request: Any, sequence: "array[int]") -> "array[int]":
    """What the worker of the quick tests would have made of it."""
    before = words().encode(words().template(request.messages[: request.continues.messages], request.tools, False))
    return join(sequence, before, rendered(request), words().encode(words().eos)[0])


async def test_sampling_of_no_profile_is_a_bare_500(engine: NemoRlEngine) -> None:
    for sampling in (Sampling(0.7, 1.0), Sampling(1.0, 0.95)):
        with pytest.raises(ServerFailed, match="answered 500: Internal Server Error"):
            await play(engine, ask(), sampling=sampling)
    _, reply = await play(engine, ask(), sampling=Sampling(0.5, 0.9, None, 4))
    assert judge("c", reply) == (), "the validation profile is served"


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


async def test_an_image_for_a_text_model_is_the_requests_fault_and_no_dead_engine(engine: NemoRlEngine) -> None:
    image = user([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}])
    with pytest.raises(EngineRefused, match="fails on this request and on no other"):
        await play(engine, ask(image), sampling=TRAIN)


async def test_a_tool_without_a_name_is_refused_in_the_workers_words(engine: NemoRlEngine) -> None:
    with pytest.raises(EngineRefused, match=r"422: .*Field required"):
        await play(engine, ask(tools=({"parameters": {}},)), sampling=TRAIN)


async def test_a_prompt_that_does_not_fit_is_an_overflow(engine: NemoRlEngine) -> None:
    with pytest.raises(EngineOverflow):
        await play(engine, ask(user("word " * 5000)), sampling=TRAIN)


async def test_a_cap_beyond_the_window_is_clamped(engine: NemoRlEngine) -> None:
    async with asyncio.timeout(300):
        _, reply = await play(engine, ask(user("word " * 3900)), sampling=Sampling(1.0, 1.0, None, 100_000))
    assert len(reply.prompt_ids) + len(reply.sampled_ids) <= 4096


async def test_count_tokens_is_the_length_of_the_prompt(engine: NemoRlEngine) -> None:
    _, reply = await play(engine, ask(), sampling=TRAIN)
    assert await engine.count_tokens(ask()) == len(reply.prompt_ids)


MESSAGES = [{"role": "user", "content": "Hi"}]
PLAIN = {"messages": MESSAGES, "temperature": 1.0, "top_p": 1.0, "logprobs": True, "top_logprobs": 0, "max_tokens": 2}


@pytest.mark.parametrize(
    "body",
    [
        PLAIN,
        PLAIN | {"top_k": 5},
        PLAIN | {"top_p": None},
        PLAIN | {"model": "unheard of"},
        PLAIN | {"top_logprobs": None},
        PLAIN | {"stream": True},
        PLAIN | {"messages": [{"role": "user", "content": "word " * 5000}]},
        PLAIN | {"messages": [*MESSAGES, *MESSAGES], "required_prefix_token_ids": [1, 2, 3]},
    ],
    ids=["plain", "top_k", "no top_p", "model", "no top_logprobs", "stream", "overflow", "no assistant to join behind"],
)
async def test_the_worker_of_the_quick_tests_answers_as_the_real_one(worker: VllmProcess, body: dict[str, Any]) -> None:
    async with Worker().run() as fake, aiohttp.ClientSession() as client:
        found = [await seen(client, url, body) for url in (worker.url, f"{fake.url}/v1")]
    assert found[0] == found[1]


async def seen(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, str, set[str]]:
    """Status, type, and which tensors of ours are in an answer."""
    names = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
    async with client.post(f"{url}/chat/completions", json=body) as response:
        text = await response.text()
        return response.status, response.content_type, {name for name in names if re.search(rf'"{name}": ?\[', text)}


async def test_a_worker_that_is_gone_is_an_engine_error() -> None:
    made = NemoRlEngine(EngineConfig(kind="nemo_rl", base_urls=("http://127.0.0.1:9/v1",), connect_timeout=2.0))
    with pytest.raises(EngineError, match="no engine can be reached"):
        await play(made, ask(), sampling=TRAIN)
    await made.aclose()
