"""The cases a design of this kind is judged by, each from the harness's request to the row that is trained on.

A client speaks the real Chat API to a real proxy; engines are the scripted one (real tokenizer and template) and the
vLLM engine on a server that speaks vLLM's wire. Every test ends at the judged row, and ``cases_helpers`` holds the log
on disk and ``polar verify`` against it. Rules: capture_and_trajectories §1-5.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cases_helpers import Case, bash, case, results, scripted, user
from engine_helpers import Answer, Step, VllmServer
from polar_env.config import EngineConfig
from polar_env.engine.fence import Pause
from polar_env.engine.scripts import Turn
from polar_env.engine.vllm import VllmEngine
from polar_env.types import HoleKind, Outcome, StopReason
from proxy_helpers import PlayedEngine, bit, say

SPLICE = pytest.mark.parametrize("splice", ["off", "on"])
EXTENDS = {"off": "exact", "on": "spliced"}
"""What a faithful history is called: rendered whole, or sent as ids."""


# --- a retry with identical prompt ------------------------------------------------------------------------------


@SPLICE
async def test_a_retry_with_identical_prompt_after_a_full_reply_trains_the_answer_the_harness_kept(
    tmp_path: Path, splice: str
):
    """Claude Code, Qwen and Gemini sample again when they cannot use an answer. The paper's own code drops the rest of
    the session here."""
    engine = scripted(bash("ls", "First."), bash("ls -a", "Second."), "Done.", splice=splice)
    async with case(tmp_path, engine) as it:
        thrown_away = await it.ask([user("Look.")])
        kept = await it.say(user("Look."))
        assert (thrown_away["content"], kept["content"]) == ("First.", "Second.")
        await it.say(*results(kept, "a.py"))
        ended = await it.end()
    assert ended.left_out == {0: "superseded"}
    assert ended.chains == [("agent", [(1, True), (2, True)])]
    assert ended.trained == ended.tokens(1, 2)
    assert ended.joins == ["new", "new", EXTENDS[splice]], "to be asked again is no edit of the history"
    assert ended.records[0].prompt_ids == ended.records[1].prompt_ids
    assert (ended.row["mask_sample"], ended.row["delivered_fraction"], ended.row["starts_with_task"]) == (False, 1, 1)


@SPLICE
async def test_a_retry_with_identical_prompt_and_an_identical_answer_trains_it_once(tmp_path: Path, splice: str):
    """At temperature 0 both answers are the same tokens: which one the harness went on from cannot be seen, and the
    tokens are right for either."""
    engine = scripted(bash("ls"), bash("ls"), "Done.", splice=splice)
    async with case(tmp_path, engine) as it:
        await it.ask([user("Look.")])
        said = await it.say(user("Look."))
        await it.say(*results(said, "a.py"))
        ended = await it.end()
    assert ended.records[0].sampled_ids == ended.records[1].sampled_ids
    assert ended.chains == [("agent", [(1, True), (2, True)])]
    assert ended.trained == ended.tokens(1, 2)
    assert ended.row["trainable_tokens"] == sum(len(sampled) for _, sampled in ended.tokens(1, 2))


@SPLICE
async def test_a_retry_with_identical_prompt_after_a_lost_reply_is_given_that_reply_and_trains_it_once(
    tmp_path: Path, splice: str
):
    engine = scripted(bash("ls", "Only once. " * 40), "Done.", splice=splice)
    async with case(tmp_path, engine) as it:
        await it.leave([user("Look.")], engine)
        engine.gate.set()
        said = await it.say(user("Look."))
        await it.say(*results(said, "a.py"))
        ended = await it.end()
    assert ended.chains == [("agent", [(0, True), (1, True)])]
    assert ended.trained == ended.tokens(0, 1)
    assert (ended.left_out, ended.row["mask_sample"], ended.joins[1]) == ({}, False, EXTENDS[splice])


async def test_a_retry_with_identical_prompt_while_the_first_is_sampled_waits_for_it(tmp_path: Path):
    engine = scripted("Only once.")
    async with case(tmp_path, engine) as it:
        engine.gate.clear()
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(it.ask([user("Look.")])) for _ in range(2)]
            await engine.begun.wait()
            async with asyncio.timeout(20):
                while not it.session.usage.joined:  # noqa: ASYNC110 - a session tells nobody of a request that waits
                    await asyncio.sleep(0.001)
            engine.gate.set()
        assert {task.result()["content"] for task in both} == {"Only once."}
        ended = await it.end()
    assert ended.trained == ended.tokens(0)
    assert len(ended.records) == 1


async def test_a_reply_that_never_arrived_and_was_not_asked_for_again_does_not_train(tmp_path: Path):
    engine = scripted("Lost. " * 60, "Kept.")
    async with case(tmp_path, engine) as it:
        await it.leave([user("Look.")], engine)
        engine.gate.set()
        await it.say(user("Something else."))
        ended = await it.end()
    assert ended.left_out == {0: "undelivered"}
    assert ended.trained == ended.tokens(1)


# --- a sub-agent seeded with the parent's history ---------------------------------------------------------------


@SPLICE
async def test_a_sub_agent_seeded_with_the_parent_s_history_trains_its_own_tokens_and_has_the_parent_s_as_context(
    tmp_path: Path, splice: str
):
    engine = scripted(bash("ls", "I look."), "The sub-agent's finding.", "Done.", splice=splice)
    async with case(tmp_path, engine) as it:
        said = await it.say(user("Look."))
        seeded = [*it.history, *results(said, "a.py"), user("Sub-agent: what is in a.py?")]
        await it.ask(seeded, thread="sub")
        await it.say(*results(said, "a.py"))
        ended = await it.end()
    assert ended.chains == [
        ("agent", [(0, True), (2, True)]),
        ("sub_agent", [(0, False), (1, True)]),
    ]
    sub = ended.trajectory.chains[1]
    assert (sub.thread, sub.branched_from) == ("sub", ended.records[0].call_id)
    assert ended.trained == ended.tokens(0, 2)
    assert ended.joins == ["new", EXTENDS[splice], EXTENDS[splice]]
    every = sum(len(record.sampled_ids) for record in ended.records)
    assert ended.trajectory.sampled_tokens == every
    chains = ended.row["trajectories"]
    assert sum(sum(chain["loss_mask"]) for chain in chains) == every
    assert sum(chain["weight"] for chain in chains) == pytest.approx(1.0)
    assert ended.row["delivered_fraction"] < 1.0, "NeMo-RL takes one chain"


@SPLICE
async def test_a_sub_agent_s_own_turns_stay_one_chain_while_the_parent_goes_on(tmp_path: Path, splice: str):
    engine = scripted(bash("ls"), bash("cat a.py"), bash("cat b.py"), "Found.", "Done.", splice=splice)
    async with case(tmp_path, engine) as it:
        said = await it.say(user("Look."))
        told = [*it.history, *results(said, "a.py b.py"), user("Sub-agent: read both.")]
        first = await it.ask(told, thread="sub")
        main = await it.say(*results(said, "a.py b.py"))
        await it.ask([*told, first, *results(first, "1")], thread="sub")
        await it.say(*results(main, "2"))
        ended = await it.end()
    assert ended.chains == [
        ("agent", [(0, True), (2, True), (4, True)]),
        ("sub_agent", [(0, False), (1, True), (3, True)]),
    ]
    assert ended.trained == ended.tokens(0, 2, 4)


# --- no-think glue ----------------------------------------------------------------------------------------------


async def glued(folder: Path, splice: str) -> Any:
    """Three turns of a model served without thoughts: its template opens a turn with an empty thought, and shows none
    in a turn of the history."""
    engine = scripted(bash("ls", "I look."), bash("cat a.py"), "Done.", splice=splice, thinking=False, folder=folder)
    async with case(folder, engine) as it:
        said = await it.say(user("Look."))
        said = await it.say(*results(said, "a.py"))
        await it.say(*results(said, "x = 1"))
        return await it.end()


async def test_no_think_glue_without_splicing_is_told_as_drift_and_every_token_trains_where_it_was_sampled(
    tmp_path: Path,
):
    ended = await glued(tmp_path, "off")
    assert ended.joins == ["new", "retokenised", "retokenised"]
    assert ended.chains == [("agent", [(0, True)]), ("agent", [(1, True)]), ("agent", [(2, True)])]
    assert ended.trained == ended.tokens(0), "the chain that starts with the task's prompt"
    assert (ended.row["starts_with_task"], ended.row["mask_sample"]) == (1, False)
    assert 0 < ended.row["delivered_fraction"] < 1
    assert ended.row["joins_retokenised"] == 2


async def test_no_think_glue_with_splicing_is_one_chain_that_holds_the_glue_as_it_was_sampled_behind(tmp_path: Path):
    ended = await glued(tmp_path, "on")
    assert ended.joins == ["new", "spliced", "spliced"]
    assert ended.chains == [("agent", [(0, True), (1, True), (2, True)])]
    assert ended.trained == ended.tokens(0, 1, 2)
    assert ended.row["delivered_fraction"] == 1
    for before, after in zip(ended.records, ended.records[1:], strict=False):
        seen = before.prompt_ids + before.sampled_ids
        assert after.prompt_ids[: len(seen)] == seen


# --- thoughts the template drops (the same drift, with thinking on) ------------------------------------------------


@SPLICE
async def test_thoughts_that_the_template_drops_after_a_new_question_are_drift_only_without_splicing(
    tmp_path: Path, splice: str
):
    engine = scripted(Turn("One.", reasoning="Hm."), Turn("Two.", reasoning="Ah."), splice=splice)
    async with case(tmp_path, engine) as it:
        await it.say(user("First?"))
        await it.say(user("Second?"))
        ended = await it.end()
    if splice == "on":
        assert (ended.joins, ended.trained) == (["new", "spliced"], ended.tokens(0, 1))
    else:
        assert (ended.joins, ended.trained) == (["new", "retokenised"], ended.tokens(0))
    assert ended.row["mask_sample"] is False


# --- all turns ending on length ---------------------------------------------------------------------------------


@SPLICE
async def test_all_turns_ending_on_length_train_what_was_sampled_and_nothing_was_called_complete(
    tmp_path: Path, splice: str
):
    cut = [Turn(f"Part {n} of a long", stop=StopReason.LENGTH) for n in range(3)]
    async with case(tmp_path, scripted(*cut, splice=splice)) as it:
        for number in range(3):
            status, answer = await it.post([*it.history, user(f"Go on {number}.")])
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
            it.history += [user(f"Go on {number}."), answer["choices"][0]["message"]]
        ended = await it.end()
    assert [record.turn.stop for record in ended.records] == [StopReason.LENGTH] * 3
    assert ended.joins == ["new", EXTENDS[splice], EXTENDS[splice]]
    assert ended.trained == ended.tokens(0, 1, 2)
    assert {item["status"] for item in ended.row["response"]["output"]} == {"incomplete"}
    assert (ended.result.outcome, ended.row["mask_sample"]) == (Outcome.COMPLETED, False)
    end = ended.records[1].prompt_ids[len(ended.tokens(0)[0][0]) + len(ended.tokens(0)[0][1])]
    assert all(end not in record.sampled_ids for record in ended.records), "the end that was put there does not train"


async def test_all_turns_cut_at_the_session_s_cap_are_the_same(tmp_path: Path):
    """The policy's own cap cuts, not the script."""
    async with case(tmp_path, scripted("one two three four five six seven eight"), max_output_tokens=4) as it:
        await it.say(user("Count."))
        ended = await it.end()
    (record,) = ended.records
    assert (len(record.sampled_ids), record.turn.stop) == (4, StopReason.LENGTH)
    assert ended.trained == ended.tokens(0)


# --- what an engine may fail to tell ----------------------------------------------------------------------------

PROMPT = (151644, 872, 198, 151645)


def words(*ids: int, log_prob: float | None = -0.5, text: str = "ok") -> tuple[Step, ...]:
    return tuple(Step((token,), (log_prob,), {"content": text} if n == 0 else {}) for n, token in enumerate(ids))


def says(*ids: int, prompt: tuple[int, ...] = PROMPT, log_prob: float | None = -0.5, **fields: Any) -> Answer:
    return Answer(words(*ids, log_prob=log_prob), prompt_ids=prompt, **{"finish": "stop", **fields})


@asynccontextmanager
async def on_vllm(folder: Path, stream: bool = True) -> AsyncGenerator[tuple[VllmServer, Case]]:
    async with VllmServer().run() as server:
        engine = VllmEngine(EngineConfig(base_urls=(server.url,), model="tiny", stream=stream, splice="off"))
        try:
            async with case(folder, engine) as it:
                yield server, it
        finally:
            await engine.aclose()


async def three_calls(server: VllmServer, it: Case, middle: Answer) -> Any:
    """A good call, ``middle``, and a good call whose prompt extends the first."""
    server.answer = says(40, 41)
    await it.say(user("one"))
    server.answer = middle
    said = await it.say(user("two"))
    assert said["content"] == "ok", "capture never breaks the call"
    server.answer = says(60, prompt=(*PROMPT, 40, 41, 50, 51))
    await it.say(user("three"))
    return await it.end()


def masked(ended: Any, kind: HoleKind) -> str:
    """A session with a hole in its second call: nothing of it trains, and it says why."""
    assert [(hole.kind, hole.call_id) for hole in ended.ledger.holes] == [(kind, ended.records[1].call_id)]
    assert ended.result.outcome is Outcome.CAPTURE_INCOMPLETE
    assert (ended.row["mask_sample"], ended.row["reward"], ended.row["trainable_tokens"]) == (True, 0.0, 0.0)
    assert ended.row["failure_kind"] == "polar_env:capture_incomplete"
    assert ended.row["num_holes"] == 1
    assert ended.left_out == {1: "hole"}
    assert len(ended.trained) == 1, "the placeholder of a masked row"
    assert [sum(chain["loss_mask"]) for chain in ended.row["trajectories"]] == [0] * len(ended.chains)
    assert ended.chains[0] == ("agent", [(0, True), (2, True)]), "what was captured is told, and masked in the row"
    return ended.row["failure_reason"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_missing_ids_are_a_hole_that_masks_the_rollout_and_never_breaks_the_call(tmp_path: Path, stream: bool):
    async with on_vllm(tmp_path, stream) as (server, it):
        ended = await three_calls(server, it, says(70, 71, with_ids=False))
    reason = ended.row["failure_reason"]
    kinds = {hole.kind for hole in ended.ledger.holes}
    assert HoleKind.MISSING_IDS in kinds
    assert {hole.call_id for hole in ended.ledger.holes} == {ended.records[1].call_id}
    assert (ended.result.outcome, ended.row["mask_sample"]) == (Outcome.CAPTURE_INCOMPLETE, True)
    assert (ended.row["trainable_tokens"], ended.left_out) == (0.0, {1: "hole"})
    assert "missing_ids" in reason


@pytest.mark.parametrize("value", [-9999.0, None, float("inf"), 0.5], ids=["-9999", "null", "infinite", "above 0"])
async def test_minus_9999_log_probs_are_a_hole_that_masks_the_rollout(tmp_path: Path, value: float | None):
    """vLLM writes -9999.0 where it has none; in a loss it would be a ratio of e^9999."""
    async with on_vllm(tmp_path) as (server, it):
        ended = await three_calls(server, it, says(70, 71, log_prob=value))
    assert "bad_log_prob" in masked(ended, HoleKind.BAD_LOG_PROB)


async def test_n_greater_than_1_is_refused_before_anything_is_sampled_and_the_session_goes_on(tmp_path: Path):
    async with on_vllm(tmp_path) as (server, it):
        server.answer = says(40, 41)
        status, told = await it.post([user("one")], n=2)
        assert (status, "n" in told["error"]["message"]) == (400, True)
        assert server.requests == []
        await it.say(user("one"), n=1)
        ended = await it.end()
    assert ended.trained == [(list(PROMPT), [40, 41])]
    assert it.session.usage.rejected == {400: 1}
    assert ended.row["mask_sample"] is False


async def test_n_greater_than_1_that_the_engine_gave_unasked_is_a_hole_that_masks_the_rollout(tmp_path: Path):
    async with on_vllm(tmp_path) as (server, it):
        ended = await three_calls(server, it, says(70, 71, choices=2))
    assert "many_choices" in masked(ended, HoleKind.MANY_CHOICES)


# --- abort ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_abort_by_the_engine_is_no_answer_and_the_retry_is_sampled_anew(tmp_path: Path, stream: bool):
    async with on_vllm(tmp_path, stream) as (server, it):
        server.answer = says(70, 71, finish="abort")
        status, told = await it.post([user("one")])
        assert (status, told["error"]["message"]) == (503, "the model engine failed; try again")
        server.answer = says(40, 41)
        await it.say(user("one"))
        ended = await it.end()
    assert [record.index for record in ended.records] == [1]
    assert ended.trained == [(list(PROMPT), [40, 41])]
    assert (ended.result.outcome, ended.row["mask_sample"], ended.ledger.holes) == (Outcome.COMPLETED, False, ())


async def test_abort_of_a_stream_under_way_resets_it_so_that_half_an_answer_is_never_taken_for_one(tmp_path: Path):
    shown = asyncio.Event()
    engine = PlayedEngine([bit("half"), shown, say("half", stop=StopReason.ABORT)], [say("whole")])
    async with case(tmp_path, engine) as it:
        async with it.stream([user("one")]) as answer:
            assert b"half" in await answer.content.readuntil(b"half")
            shown.set()
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        assert (await it.say(user("one")))["content"] == "whole"
        ended = await it.end()
    assert [record.index for record in ended.records] == [1]
    assert [bytes(sampled) for _, sampled in ended.trained] == [b"whole"]
    assert ended.row["mask_sample"] is False


async def test_abort_because_the_harness_left_ends_the_generation_and_leaves_no_record(tmp_path: Path):
    async with on_vllm(tmp_path) as (server, it):
        server.fault = "hang"
        it.session._config = it.session._config.model_copy(update={"retry_grace": 0.05})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(it.post([user("one")]), 0.5)
        await asyncio.wait_for(server.aborted.wait(), 10)
        server.fault, server.answer = "", says(40, 41)
        await it.say(user("two"))
        ended = await it.end()
    assert ended.trained == [(list(PROMPT), [40, 41])]
    assert it.session.usage.aborted == 1
    assert ended.row["mask_sample"] is False


async def test_abort_at_the_end_of_the_session_leaves_what_was_captured(tmp_path: Path):
    async with on_vllm(tmp_path) as (server, it):
        server.answer = says(40, 41)
        await it.say(user("one"))
        server.fault = "hang"
        server.started.clear()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(it.post([user("two")]))
            await asyncio.wait_for(server.started.wait(), 10)
            ended = await it.end()
        assert asking.result()[0] == 410
        await asyncio.wait_for(server.aborted.wait(), 10)
    assert ended.trained == [(list(PROMPT), [40, 41])]
    assert (ended.result.outcome, ended.row["mask_sample"]) == (Outcome.COMPLETED, False)


async def test_abort_for_new_weights_is_sampled_again_and_the_row_has_the_new_version(tmp_path: Path):
    async with on_vllm(tmp_path) as (server, it):
        server.fault = "hang"
        it.proxy.fence.declare("step-1")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(it.say(user("one")))
            await asyncio.wait_for(server.started.wait(), 10)
            await it.proxy.fence.pause(Pause.ABORT)
            await asyncio.wait_for(server.aborted.wait(), 10)
            server.fault, server.answer = "", says(40, 41)
            it.proxy.fence.resume("step-2")
        assert asking.result()["content"] == "ok"
        ended = await it.end()
    assert ended.trained == [(list(PROMPT), [40, 41])]
    assert [record.policy_version for record in ended.records] == ["step-2"]
    assert ended.row["polar"]["policy_version_first"] == "step-2"
