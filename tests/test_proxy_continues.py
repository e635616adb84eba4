"""A session tells its engine which call a request carries on, with its ledger's ids, and records what came of it."""

from array import array
from dataclasses import replace

import pytest

from engine_helpers import CACHE, user
from polar_env.capture import Ledger, SegmentLog, rebuild
from polar_env.config import EngineConfig, TrajectoryConfig
from polar_env.engine import tokenizer
from polar_env.engine.scripted import ScriptedEngine, history
from polar_env.engine.scripts import Scene, Turn
from polar_env.joins import Join, joins
from polar_env.messages import ChatMessage
from polar_env.trajectory import build
from polar_env.types import Continuation, SealedLedger, StopReason
from proxy_helpers import PlayedEngine, say
from session_helpers import opened, turn

TASK = user("Fix it.")


def echo(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}


def carried(engine: PlayedEngine) -> list[tuple[str, int] | None]:
    """(call, messages) that each request was said to carry on."""
    told = (request.continues for request in engine.requests)
    return [None if each is None else (each.call_id, each.messages) for each in told]


# --- what the engine is told ------------------------------------------------------------------------------------


async def test_a_request_brings_the_ids_of_the_call_it_carries_on() -> None:
    engine = PlayedEngine([say("Done.")])
    async with opened(engine) as session:
        await turn(session, TASK)
        await turn(session, TASK, echo("Done."), user("more"))
    first = array("i", range(1, 8)) + array("i", list(b"Done."))
    assert [request.continues for request in engine.requests] == [None, Continuation("s-0000", first, 2)]


async def test_a_call_that_was_cut_says_so() -> None:
    engine = PlayedEngine([say("I was ab", stop=StopReason.LENGTH)])
    async with opened(engine) as session:
        await turn(session, TASK)
        await turn(session, TASK, echo("I was ab"), user("go on"))
    assert engine.requests[1].continues is not None
    assert engine.requests[1].continues.cut


async def test_a_reply_that_never_arrived_can_be_carried_on_only_by_one_who_has_it() -> None:
    engine = PlayedEngine([say("one")], [say("two")])
    async with opened(engine) as session:
        await turn(session, TASK, deliver=False)
        await turn(session, TASK, user("again"))
        await turn(session, TASK, user("again"), echo("two"), user("more"))
    assert carried(engine) == [None, None, ("s-0001", 3)]


async def test_a_call_that_was_not_recorded_cannot_be_carried_on(tmp_path) -> None:
    engine = PlayedEngine([say("Done.")])
    async with SegmentLog(tmp_path / "log") as log:
        ledger = Ledger("s", log)
        async with opened(engine, ledger) as session:
            ledger.seal()  # what comes after is refused by the ledger
            await turn(session, TASK)
            await turn(session, TASK, echo("Done."), user("more"))
    assert carried(engine) == [None, None]


async def test_a_call_with_a_hole_cannot_be_carried_on() -> None:
    engine = PlayedEngine([replace(say("Done."), log_probs=array("f"))])
    async with opened(engine) as session:
        await turn(session, TASK)
        await turn(session, TASK, echo("Done."), user("more"))
    assert carried(engine) == [None, None]


async def test_of_two_samples_of_one_request_the_echoed_one_is_carried_on() -> None:
    engine = PlayedEngine([say("one")], [say("two")])
    async with opened(engine) as session:
        await turn(session, TASK)
        await turn(session, TASK)
        await turn(session, TASK, echo("one"), user("more"))
        await turn(session, TASK, echo("two"), user("more"))
    assert carried(engine) == [None, None, ("s-0000", 2), ("s-0001", 2)]


async def test_a_sub_agent_seeded_with_its_parent_s_history_carries_it_on() -> None:
    engine = PlayedEngine([say("one")])
    async with opened(engine) as session:
        await turn(session, TASK)
        await turn(session, TASK, echo("one"), user("you are a fork"), thread="child")
    assert carried(engine) == [None, ("s-0000", 2)]


async def test_steady_prompts_carry_on_over_midnight() -> None:
    engine = PlayedEngine([say("one")])
    rule = ("system", r"Today is \d+\.", "Today is 1.")
    days: list[ChatMessage] = [{"role": "system", "content": f"Today is {day}."} for day in (8, 9)]
    async with opened(engine, volatile=[rule]) as session:
        await turn(session, days[0], TASK)
        await turn(session, days[1], TASK, echo("one"), user("more"))
    assert carried(engine) == [None, ("s-0000", 3)]


async def test_two_sessions_know_nothing_of_each_other() -> None:
    engine = PlayedEngine([say("Done.")])
    async with opened(engine) as first, opened(engine) as second:
        await turn(first, TASK)
        await turn(second, TASK, echo("Done."), user("more"))
    assert carried(engine) == [None, None]


# --- what is recorded, on the scripted engine and its real template ---------------------------------------------


def thinks(scene: Scene) -> Turn:
    """A thought and a command, three times; then the end."""
    if scene.step >= 3:
        return Turn("Done.", reasoning="That was all.")
    return Turn("", (scene.shell(f"echo {scene.step}"),), f"Step {scene.step}.")


async def forgetful(splice: str, ledger: Ledger | None = None) -> SealedLedger:
    """Four turns of a harness that sends no thoughts back, then a user's word and a fifth."""
    config = {"kind": "scripted", "tokenizer": tokenizer.fetch(CACHE), "splice": splice}
    engine = ScriptedEngine(EngineConfig.model_validate(config))
    async with opened(engine, ledger, script="test_proxy_continues:thinks") as session:
        messages: tuple[ChatMessage, ...] = (TASK,)
        for _ in range(4):
            said = replace(await turn(session, *messages), reasoning="")
            messages = (*messages, *history(said, ("ok",)))
        await turn(session, *messages, user("And b?"))
        return await session.close()


@pytest.mark.parametrize(("splice", "join", "chains"), [("on", Join.SPLICED, 1), ("off", Join.RETOKENISED, 5)])
async def test_thoughts_a_harness_forgets_stay_in_the_row_only_where_prompts_are_spliced(
    splice: str, join: Join, chains: int
) -> None:
    sealed = await forgetful(splice)
    counts = {name: count for name, count in joins(sealed).items() if count}
    assert counts == {Join.NEW: 1, join: 4}
    assert len(build(sealed, TrajectoryConfig()).chains) == chains
    assert [record.continues for record in sealed.records] == [None, "s-0000", "s-0001", "s-0002", "s-0003"]
    assert [record.spliced for record in sealed.records] == [False] + [splice == "on"] * 4


async def test_every_sampled_token_of_a_spliced_session_is_in_the_delivered_row() -> None:
    trajectory = build(await forgetful("on"), TrajectoryConfig())
    assert trajectory.main is not None
    assert trajectory.main.trainable_tokens == trajectory.sampled_tokens


async def test_what_a_call_carried_on_is_in_the_durable_log(tmp_path) -> None:
    async with SegmentLog(tmp_path / "log") as log:
        sealed = await forgetful("on", Ledger("s", log))
    again = rebuild(tmp_path / "log")
    assert [(r.continues, r.spliced) for r in again.records] == [(r.continues, r.spliced) for r in sealed.records]
    assert joins(again) == joins(sealed)
