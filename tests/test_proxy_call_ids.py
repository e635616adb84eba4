"""Engines that give one id to several calls: the harness gets each id once, the engine sees its own."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import user
from polar_env.capture import Ledger, SegmentLog
from polar_env.continuation import History
from polar_env.messages import ChatMessage
from polar_env.proxy.call_ids import CallIds
from polar_env.proxy.render import in_call_order, turn_message
from polar_env.segment_log import read
from polar_env.types import AssistantTurn, CallKind, Delta, EngineReply, ModelRequest, StopReason, ToolCall, WireApi
from proxy_helpers import PlayedEngine, open_session, say, stage
from session_helpers import opened, turn

TASK = user("Fix it.")


def act(*calls: tuple[str, str]) -> EngineReply:
    """A reply that makes these (id, command) calls."""
    made = tuple(ToolCall(name, "bash", f'{{"command": "{command}"}}') for name, command in calls)
    reply = say(" ".join(command for _, command in calls))
    return replace(reply, turn=replace(reply.turn, text="", tool_calls=made, stop=StopReason.TOOL_CALLS))


def ids(said: AssistantTurn) -> list[str]:
    return [call.id for call in said.tool_calls]


def results(said: AssistantTurn) -> list[ChatMessage]:
    """What a faithful harness adds to its history after a turn."""
    seen = [ChatMessage(role="tool", tool_call_id=call.id, content=f"ran {call.arguments}") for call in said.tool_calls]
    return [turn_message(said), *seen]


def shown(request: ModelRequest) -> list[str]:
    """Every id of a request as the engine sees it, in order."""
    made = [[call["id"] for call in message.get("tool_calls", [])] for message in request.messages]
    answered = [[message["tool_call_id"]] if "tool_call_id" in message else [] for message in request.messages]
    return [name for pair in zip(made, answered, strict=True) for names in pair for name in names]


# --- a conversation -----------------------------------------------------------------------------------------------


async def test_an_engine_that_counts_from_nought_in_every_turn_is_shown_its_own_ids_again() -> None:
    engine = PlayedEngine(*([act(("call_0", command))] for command in ("ls", "cat a", "make")))
    async with opened(engine) as session:
        talk, given = [TASK], list[str]()
        for _ in range(3):
            said = await turn(session, *talk)
            given += ids(said)
            talk += results(said)
        await turn(session, *talk)
    assert given == ["call_0", "call_0-2", "call_0-3"]
    assert shown(engine.requests[-1]) == ["call_0"] * 6
    assert [request.continues and request.continues.call_id for request in engine.requests] == [
        None,
        *("s-0000", "s-0001", "s-0002"),
    ]


async def test_of_two_answers_with_one_id_the_one_the_harness_kept_is_carried_on() -> None:
    """It threw the first away and asked again; then it shows the first all the same. With the second's tokens before
    it, its result would be that of another command."""
    engine = PlayedEngine([act(("call_0", "ls"))], [act(("call_0", "rm -r ."))])
    async with opened(engine) as session:
        first = await turn(session, TASK)
        second = await turn(session, TASK)
        await turn(session, TASK, *results(first))
        await turn(session, TASK, *results(second))
    told = [request.continues.call_id for request in engine.requests[2:] if request.continues]
    assert told == ["s-0000", "s-0001"]


async def test_parallel_calls_with_one_id_are_told_apart_and_their_results_kept_in_order() -> None:
    engine = PlayedEngine([act(("x", "one"), ("y", "two"), ("x", "three"))])
    async with opened(engine) as session:
        said = await turn(session, TASK)
        message, *seen = results(said)
        assert in_call_order([message, *reversed(seen)]) == [message, *seen]
        await turn(session, TASK, message, *seen)
    assert ids(said) == ["x", "y", "x-2"]
    assert shown(engine.requests[1]) == ["x", "y", "x", "x", "y", "x"]


async def test_ids_of_another_session_are_free() -> None:
    engine = PlayedEngine(otherwise=[act(("call_0", "ls"))])
    async with opened(engine) as first, opened(engine) as second:
        assert ids(await turn(first, TASK)) == ids(await turn(second, TASK)) == ["call_0"]


async def test_twins_that_make_the_same_call_under_the_same_id_each_go_on_as_themselves() -> None:
    """Sub-agents are told by the ids of their calls (``proxy.threads``)."""
    engine = PlayedEngine(*([act(("functions.bash:0", "ls"))] for _ in range(2)), otherwise=[say("done")])

    def classify(headers: Any, body: Any) -> tuple[CallKind, str]:
        return CallKind.SUB_AGENT, "told"

    async with stage(engine) as s:
        session = open_session(s.proxy, "twins", Ledger("twins"), classify=classify)
        first = session.call(ModelRequest(WireApi.CHAT, "any", (TASK,)), {}, {"messages": [TASK]}, b"1")
        with first.reading():
            second = session.call(ModelRequest(WireApi.CHAT, "any", (TASK,)), {}, {"messages": [TASK]}, b"2")
            with second.reading():
                turns = [await attempt.answer() for attempt in (first, second)]
        for said in turns:
            talk = (TASK, *results(said))
            attempt = session.call(ModelRequest(WireApi.CHAT, "any", talk), {}, {"messages": [*talk]}, b"3")
            with attempt.reading():
                await attempt.answer()
        sealed = await session.close()
    assert [record.thread for record in sealed.records] == ["told", "told#2", "told", "told#2"]
    assert [record.continues for record in sealed.records][2:] == ["twins-0000", "twins-0001"]


async def test_a_streamed_call_keeps_the_id_its_stream_began_with() -> None:
    stream = [Delta("tool_open", index=0, id="call_0", name="bash"), act(("call_0", "ls"))]
    engine = PlayedEngine([act(("call_0", "pwd"))], stream)
    async with opened(engine) as session:
        await turn(session, TASK)
        request = ModelRequest(WireApi.CHAT, "any", (user("next"),), stream=True)
        attempt = session.call(request, {}, {"messages": ["next"]}, b"next")
        with attempt.reading():
            seen = attempt.deltas
            said = await attempt.answer()
    assert [delta.id for delta in seen] == ids(said) == ["call_0-2"]


async def test_the_log_holds_what_the_model_wrote_and_was_shown(tmp_path: Path) -> None:
    """Kimi's template writes ids into the text. Fine-tuned on ids of ours, it would learn to write them."""
    engine = PlayedEngine(*([act(("functions.bash:0", command))] for command in ("ls", "make")), [say("done")])
    async with SegmentLog(tmp_path / "s") as log, opened(engine, Ledger("s", log)) as session:
        talk = [TASK]
        for _ in range(2):
            talk += results(await turn(session, *talk))
        await turn(session, *talk)
    kept = read(tmp_path / "s")
    assert [ids(record.turn) for record in kept.ledger.records] == [["functions.bash:0"], ["functions.bash:0"], []]
    asked = kept.conversations()["s-0002"]
    assert list(asked.messages) == list(engine.requests[-1].messages)
    assert shown(engine.requests[-1]) == ["functions.bash:0"] * 4


class Counting(PlayedEngine):
    """An engine that tells what it was asked to count."""

    async def count_tokens(self, request: ModelRequest) -> int:
        self.requests.append(request)
        return 0


async def test_a_prompt_is_counted_with_the_ids_it_is_sampled_with() -> None:
    engine = Counting(*([act(("call_0", command))] for command in ("ls", "make")))
    async with opened(engine) as session:
        talk = [TASK]
        for _ in range(2):
            talk += results(await turn(session, *talk))
        await session.count_tokens(ModelRequest(WireApi.CHAT, "any", tuple(talk)))
    assert shown(engine.requests[-1]) == ["call_0"] * 4


# --- the ids ------------------------------------------------------------------------------------------------------


NAMES = st.lists(st.lists(st.sampled_from(["call_0", "call_0-2", "call_1", "x"]), max_size=4), max_size=6)


@given(NAMES)
def test_no_id_is_handed_out_twice_and_all_find_their_way_back(turns: list[list[str]]) -> None:
    calls, given, talk = CallIds(), list[str](), list[ChatMessage]()
    for names in turns:
        said = calls.answer().turn(act(*((name, "ls") for name in names)).turn)
        given += ids(said)
        talk += results(said)
    assert len(given) == len(set(given))
    request = ModelRequest(WireApi.CHAT, "any", tuple(talk))
    assert shown(calls.engines(request)) == [name for names in turns for name in (*names, *names)]
    assert shown(request) == [name for names in _by_turn(given, turns) for name in (*names, *names)]


def _by_turn(given: list[str], turns: list[list[str]]) -> list[list[str]]:
    numbers = count()
    return [[given[next(numbers)] for _ in names] for names in turns]


@pytest.mark.parametrize("name", ["", "call_0"])
def test_a_request_nothing_was_renamed_for_is_left_as_it_is(name: str) -> None:
    calls = CallIds()
    said = calls.answer().turn(act((name, "ls")).turn)
    request = ModelRequest(WireApi.CHAT, "any", (TASK, *results(said)))
    assert calls.engines(request) is request


def test_a_history_of_its_own_would_take_the_wrong_one_of_two() -> None:
    """Why ids are made unique before anything else sees them."""
    history, request = History(), ModelRequest(WireApi.CHAT, "any", (TASK,))
    place = history.place(request)
    for index, command in enumerate(("ls", "rm -r .")):
        history.add(place, f"call {index}", index, act(("call_0", command)).turn)
    shows_first = replace(request, messages=(TASK, *results(act(("call_0", "ls")).turn)))
    assert history.place(shows_first).call_id == "call 1"
