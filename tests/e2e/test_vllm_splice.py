"""Splicing on a real vLLM: real harnesses, real sampling, and a forward pass that judges every log-probability.

The model is the tiny one of tiny_model.py with its ``agent`` habits: it thinks a few words and calls ``bash`` because
its weights make that likely. Nothing forces a token: no grammar, no allowed ids, and the log-probs are the model's own.
Its spelling of a thought and of a call is not the template's, so every turn drifts that is rendered again.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from e2e.tap import tapped
from e2e.vllm_helpers import MODEL, VLLM, served_vllm, session_members
from engine_helpers import CACHE, ask, play, user
from polar_env.capture import judge, rebuild
from polar_env.config import EngineConfig
from polar_env.engine import Session, tokenizer
from polar_env.engine.scripted import history
from polar_env.engine.vllm import VllmEngine
from polar_env.errors import EngineError, EngineOverflow
from polar_env.gym import contract, rows
from polar_env.joins import Join, joins
from polar_env.rollout import open_proxy, rollout
from polar_env.types import (
    INFRASTRUCTURE,
    Chain,
    Continuation,
    EngineReply,
    ModelRequest,
    RolloutResult,
    Sampling,
    StopReason,
)
from rollout_helpers import job, settings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (VLLM / "vllm").exists(), reason="no .venv-vllm: run `make test-vllm`"),
]

WINDOW = 16_384
END = 151_645
TURNS = 6
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=128)
LONG = 8192
"""Tokens of an answer that takes minutes. This model ends its turns soon: a tap keeps the end from it (min_tokens)."""
SAME = 2e-4
"""Largest |delta| in nats between float32 kernels of vLLM and torch over a session's context."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    options = ("--enable-scale-out", "--reasoning-parser", "qwen3")
    folder = tmp_path_factory.mktemp("vllm")
    async with served_vllm(folder, *options, max_model_len=WINDOW, habits=("agent",)) as running:
        yield running
    assert session_members(running.pid) == []


@contextlib.asynccontextmanager
async def proved(*urls: str, **fields):
    """An engine that must splice, and has proved that it can."""
    engine = VllmEngine(EngineConfig(base_urls=urls, splice="on", **fields))
    try:
        await engine.check()
        yield engine
    finally:
        await engine.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(server):
    """Proved once: the proof is 80 requests."""
    async with proved(server.url) as made:
        yield made


def carrying_on(request: ModelRequest, reply: EngineReply) -> ModelRequest:
    told = (*history(reply.turn, ("a.py",) * len(reply.turn.tool_calls)), user("And now?"))
    ids = reply.prompt_ids + reply.sampled_ids
    carried = Continuation("c", ids, len(request.messages) + 1, cut=reply.turn.stop is StopReason.LENGTH)
    return replace(request, messages=(*request.messages, *told), continues=carried)


# --- sessions of real harnesses ---------------------------------------------------------------------------------


def sequences(chains: tuple[Chain, ...]) -> list[tuple[list[int], list[int], list[float]]]:
    """(ids, where those that train are, their recorded log-probs) of each chain."""
    found = []
    for chain in chains:
        last, trained = chain.turns[-1], [turn for turn in chain.turns if turn.trained]
        at = [len(turn.prompt_ids) + i for turn in trained for i in range(len(turn.sampled_ids))]
        recorded = [value for turn in trained for value in turn.log_probs]
        found.append(((last.prompt_ids + last.sampled_ids).tolist(), at, recorded))
    return found


def stitched(result: RolloutResult) -> tuple[list[int], list[int], list[float]]:
    """What nobody should train: the calls' sampled ids one behind the other, as if they were one conversation, with
    what was new in each prompt (all behind its last turn's end) in between."""
    ids, at, recorded = [], [], []
    for record in result.ledger.records:
        prompt = record.prompt_ids.tolist()
        ends = [i for i, token in enumerate(prompt) if token == END]
        ids += prompt[ends[-2] + 1 :] if ids else prompt
        at += range(len(ids), len(ids) + len(record.sampled_ids))
        ids += record.sampled_ids
        recorded += record.log_probs
    return ids, at, recorded


async def forward(model_dir, rows_of: list[tuple[list[int], list[int], list[float]]]) -> list[float]:
    """|recomputed - recorded| of every trained token, each sequence in a pass of its own (forward.py)."""
    asked = [{"ids": ids, "at": at} for ids, at, _ in rows_of]
    script = Path(__file__).with_name("forward.py")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(VLLM / "python", script, model_dir, stdin=pipe, stdout=pipe)
    told, _ = await process.communicate(json.dumps(asked).encode())
    found = json.loads(told)
    pairs = [zip(values, recorded, strict=True) for values, (_, _, recorded) in zip(found, rows_of, strict=True)]
    return [abs(a - b) for a, b in itertools.chain.from_iterable(pairs)]


async def session(server, folder, harness: str, splice: str) -> tuple[RolloutResult, list, int]:
    """A rollout of TURNS calls; what the engine sent, read off the wire; how many prompts were ids."""
    async with tapped(server.url) as tap:
        config = await settings(
            folder,
            engine={"kind": "vllm", "base_urls": [tap.url], "splice": splice, "tokenizer": None},
            harness={"name": harness, "command": ()},
            proxy={"max_calls": TURNS, "max_output_tokens": 128},
            budget={"agent": 240.0},
        )
        async with open_proxy(config) as proxy:
            tap.replies.clear()  # the engine's self-test went through the tap as well
            result = await asyncio.wait_for(rollout(job(config), proxy, config), 400)
        return result, tap.generations(), tap.given_ids


def spread(deltas: list[float]) -> str:
    return f"mean |delta| {sum(deltas) / len(deltas):.2e}, max {max(deltas):.2e}"


def told(result: RolloutResult, harness: str, splice: str, deltas: list[float]) -> str:
    chains = result.trajectory.chains
    share = result.trajectory.main.trainable_tokens / result.trajectory.sampled_tokens
    kinds = ", ".join(f"{count} {join}" for join, count in joins(result.ledger).items() if count)
    return (
        f"\n{harness} splice={splice}: {len(result.ledger.records)} calls, {len(chains)} chains, {kinds}; "
        f"{result.trajectory.sampled_tokens} tokens sampled, {share:.0%} in the delivered row; "
        f"log-probs recomputed: {spread(deltas)}"
    )


@pytest.mark.parametrize("splice", ["on", "off"])
@pytest.mark.parametrize("harness", ["mini_swe_agent", "pi"])
async def test_six_turns_of_a_real_harness(server, tmp_path, capsys, harness: str, splice: str):
    """Recorded is what the engine sent; a forward pass over what is delivered agrees; spliced, it is one row."""
    result, sent, given_ids = await session(server, tmp_path, harness, splice)
    records, trajectory = result.ledger.records, result.trajectory
    assert result.outcome not in INFRASTRUCTURE, result.detail
    assert result.ledger.holes == ()
    assert len(records) == TURNS
    assert all(record.turn.tool_calls and record.turn.reasoning for record in records)
    assert [(record.prompt_ids, record.sampled_ids, record.log_probs) for record in records] == sent
    assert rebuild(tmp_path / result.ledger.session_id) == result.ledger
    calls = [call.id for record in records for call in record.turn.tool_calls]
    assert len(set(calls)) == len(calls)

    deltas = await forward(server.model_dir, sequences(trajectory.chains))
    as_one = await forward(server.model_dir, [stitched(result)])
    with capsys.disabled():
        sys.stdout.write(f"{told(result, harness, splice, deltas)}; as one sequence: {spread(as_one)}\n")
    assert len(deltas) == trajectory.sampled_tokens == sum(len(record.sampled_ids) for record in records)
    assert max(deltas) < SAME
    assert contract.violations(rows.row(result, {"input": "x"}, model=MODEL, max_tokens=None)) == []

    assert [record.spliced for record in records] == [False] + [splice == "on"] * (TURNS - 1)
    assert given_ids == (TURNS - 1 if splice == "on" else 0)
    counted = {join: count for join, count in joins(result.ledger).items() if count}
    if splice == "on":
        assert counted == {Join.NEW: 1, Join.SPLICED: TURNS - 1}
        assert len(trajectory.chains) == 1
        assert max(as_one) < SAME
        assert trajectory.main.trainable_tokens == trajectory.sampled_tokens
    else:  # the same session, its turns spelled anew: each call a chain of its own
        assert counted == {Join.NEW: 1, Join.RETOKENISED: TURNS - 1}
        assert len(trajectory.chains) == TURNS
        assert max(as_one) > 10 * SAME  # the tokens are right, and the context is one they were never sampled in
        assert all(record.continues for record in records[1:])


# --- one call ---------------------------------------------------------------------------------------------------


async def test_the_turn_of_the_ids_is_the_turn_a_chat_would_show(engine):
    """The same six turns with the real parsers: thought, text and calls of both kinds of call."""
    request = ask()
    for turn in range(TURNS):
        _, reply = await play(engine, request, sampling=SAMPLING)
        assert reply.spliced == (turn > 0)
        assert reply.turn.reasoning
        assert json.loads(reply.turn.tool_calls[0].arguments)["command"] in {"ls", "pwd", "date", "df", "id"}
        assert (reply.turn.stop, reply.turn.text.strip()) == (StopReason.TOOL_CALLS, "")
        assert judge("c", reply) == ()
        request = carrying_on(request, reply)


@pytest.mark.parametrize("stream", [True, False])
async def test_greedy_tokens_behind_the_same_ids_are_the_chat_s(server, stream):
    """Ids that the template spells as it spelled them before are the prompt of a chat: the engine is asked the same."""
    greedy = Sampling(temperature=0.0, max_tokens=24)
    first = ask(user("Say it."), tools=())
    request = replace(first, messages=(*first.messages, {"role": "assistant", "content": "It."}, user("Again.")))
    async with proved(server.url, stream=stream) as engine:
        _, whole = await play(engine, request, sampling=greedy)
        end = list(whole.prompt_ids).index(END, list(whole.prompt_ids).index(END) + 1)
        carried = Continuation("c", whole.prompt_ids[: end + 1], messages=2)
        _, behind_ids = await play(engine, replace(request, continues=carried), sampling=greedy)
    assert behind_ids.spliced
    assert behind_ids.prompt_ids == whole.prompt_ids
    assert behind_ids.sampled_ids == whole.sampled_ids
    assert behind_ids.log_probs == pytest.approx(whole.log_probs, abs=SAME)
    assert behind_ids.turn.reasoning == whole.turn.reasoning


async def test_weights_named_by_a_trainer_are_the_version_of_spliced_calls(engine, server):
    async with aiohttp.ClientSession() as trainer:
        _, first = await play(engine, ask(), sampling=SAMPLING)
        url = server.url.removesuffix("/v1") + "/update_weight_version"
        try:
            async with trainer.post(url, json={"new_version": "step-7"}):
                _, second = await play(engine, carrying_on(ask(), first), sampling=SAMPLING)
        finally:
            await (await trainer.post(url, json={"new_version": "default"})).read()
    assert (second.policy_version, second.versioned) == ("step-7", True)


async def test_a_tool_choice_that_needs_a_grammar_is_a_chat_and_counted(engine):
    _, first = await play(engine, ask(), sampling=SAMPLING)
    _, second = await play(engine, replace(carrying_on(ask(), first), tool_choice="none"), sampling=SAMPLING)
    assert not second.spliced
    assert [count for why, count in engine.unspliced.items() if "tool_choice 'none'" in why] == [1]


async def test_a_call_that_may_not_be_parallel_is_held_to_the_grammar_of_its_own_tools(engine):
    """The model's habit is to call ``bash``. The server holds a call that must be alone to the names that are offered,
    as in a chat; only a grammar that came along can make it say another."""
    shell = {**ask().tools[0], "name": "shell"}
    _, first = await play(engine, ask(), sampling=SAMPLING)
    request = replace(carrying_on(ask(), first), tools=(shell,), parallel_tool_calls=False)
    _, second = await play(engine, request, sampling=SAMPLING)
    said = tokenizer.load(tokenizer.fetch(CACHE)).decode(second.sampled_ids)
    assert second.spliced
    assert "shell" in said
    assert "bash" not in said


# --- the window -------------------------------------------------------------------------------------------------


async def behind(engine: VllmEngine, left: int) -> ModelRequest:
    """A call whose spliced prompt leaves ``left`` tokens of the window."""
    _, first = await play(engine, ask(), sampling=SAMPLING)
    request = carrying_on(ask(), first)
    _, second = await play(engine, request, sampling=replace(SAMPLING, max_tokens=1))
    missing = WINDOW - left - len(second.prompt_ids)
    ids = request.continues.ids[:1] * missing + request.continues.ids
    return replace(request, continues=replace(request.continues, ids=ids))


@pytest.mark.parametrize("left", [0, -1, -500])
async def test_a_spliced_prompt_over_the_window_is_an_overflow(engine, left):
    with pytest.raises(EngineOverflow, match=f"maximum context length is {WINDOW}"):
        await play(engine, await behind(engine, left), sampling=SAMPLING)


async def test_a_cap_beyond_the_window_ends_where_the_window_does(engine):
    _, reply = await play(engine, await behind(engine, 5), sampling=replace(SAMPLING, max_tokens=4096))
    assert (len(reply.prompt_ids), len(reply.sampled_ids), reply.turn.stop) == (WINDOW - 5, 5, StopReason.LENGTH)
    assert judge("c", reply) == ()


# --- replicas, cancellation, death ------------------------------------------------------------------------------


async def test_a_session_s_calls_go_through_one_door_and_another_session_s_through_another(server):
    """Two replicas are two doors to the one server that this machine can hold."""
    async with tapped(server.url) as one, tapped(server.url) as other, proved(one.url, other.url) as engine:
        for name in map(str, range(8)):
            one.replies.clear()
            other.replies.clear()
            request = ask()
            for _ in range(3):
                _, reply = await play(engine, request, Session(name), SAMPLING)
                request = carrying_on(request, reply)
            used = [tap for tap in (one, other) if tap.replies]
            assert [(len(tap.replies), tap.given_ids) for tap in used] == [(3, 2)]


async def running(server) -> float:
    """Requests the engine works on, by its own metrics."""
    url = server.url.removesuffix("/v1") + "/metrics"
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        lines = (await response.text()).splitlines()
    states = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(states))


async def until(server, busy: bool) -> None:
    """The engine has no event for this but its metrics; 30 s is far less than LONG takes."""
    for _ in range(300):
        if (await running(server) > 0) == busy:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the engine is {'idle' if busy else 'busy'}")


@contextlib.asynccontextmanager
async def endless(server):
    """A spliced call that goes on for minutes."""
    async with tapped(server.url) as tap, proved(tap.url) as engine:
        _, first = await play(engine, ask(), sampling=SAMPLING)
        tap.sampling["min_tokens"] = LONG
        yield play(engine, carrying_on(ask(), first), sampling=replace(SAMPLING, max_tokens=LONG))


async def test_a_cancelled_call_ends_the_generation_in_the_engine(engine, server):
    async with endless(server) as call, asyncio.TaskGroup() as group:
        task = group.create_task(call)
        await until(server, busy=True)
        task.cancel()
    await until(server, busy=False)
    _, after = await play(engine, ask(), sampling=SAMPLING)
    assert judge("c", after) == ()


async def failure(call) -> EngineError:
    with pytest.raises(EngineError) as failed:
        await call
    return failed.value


async def test_a_server_killed_under_a_session_is_an_engine_error(engine, server):
    """Last in this file, as it ends the server: a generation under way is lost, and the session's next call as well."""
    _, first = await play(engine, ask(), sampling=SAMPLING)
    async with endless(server) as call, asyncio.TaskGroup() as group:
        lost = group.create_task(failure(call))
        await until(server, busy=True)
        for pid in session_members(server.pid):
            os.kill(pid, signal.SIGKILL)
    assert type(lost.result()) is EngineError
    with pytest.raises(EngineError, match="no engine can be reached"):
        await play(engine, carrying_on(ask(), first), sampling=SAMPLING)
