"""Sub-agents that look the same on the wire, told apart from retries and from each other."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polar_env.capture import Ledger
from polar_env.messages import ChatMessage
from polar_env.proxy.attempts import Attempt
from polar_env.proxy.render import turn_message
from polar_env.proxy.threads import Threads
from polar_env.types import AssistantTurn, CallKind, StopReason, ToolCall, Usage
from proxy_helpers import Arrivals, PlayedEngine, open_session, say, stage

TOLD: tuple[ChatMessage, ...] = ({"role": "user", "content": "look at hello.py"},)


def calls(*ids: str) -> AssistantTurn:
    return AssistantTurn("", tuple(ToolCall(i, "bash", "{}") for i in ids), StopReason.TOOL_CALLS, Usage(1, 1))


def went_on(*ids: str) -> tuple[ChatMessage, ...]:
    """The history of a sub-agent that made these calls, one a turn."""
    results: list[ChatMessage] = []
    for call_id in ids:
        results += [turn_message(calls(call_id)), {"role": "tool", "tool_call_id": call_id, "content": "seen"}]
    return (*TOLD, *results)


class Room:
    """A session's threads and its latest attempts, as the session keeps them."""

    def __init__(self) -> None:
        self.threads = Threads()
        self.latest: dict[str, Attempt] = {}

    def ask(self, messages: tuple[ChatMessage, ...] = TOLD) -> str:
        """The thread of a request, which is then at work."""
        thread = self.threads.place("a", messages, lambda name: f"{name} {messages}", self.latest)
        self.latest.setdefault(f"{thread} {messages}", Attempt("c", 0, 60.0))
        return thread

    def attempt(self, thread: str, messages: tuple[ChatMessage, ...] = TOLD) -> Attempt:
        return self.latest[f"{thread} {messages}"]

    def answer(self, thread: str, *ids: str) -> None:
        """Its first request is answered in full."""
        attempt = self.attempt(thread)
        attempt.reply(calls(*ids))
        attempt.commit(recorded=True)
        attempt.delivered = True
        self.threads.answered(thread, calls(*ids))


async def test_who_asks_while_the_first_still_waits_is_another_sub_agent() -> None:
    room = Room()
    with room_of_waiters(room, 3) as names:
        assert names == ["a", "a#2", "a#3"]


@contextmanager
def room_of_waiters(room: Room, count: int) -> Iterator[list[str]]:
    with ExitStack() as waiting:
        names: list[str] = []
        for _ in range(count):
            names.append(room.ask())
            waiting.enter_context(room.attempt(names[-1]).reading())
        yield names


async def test_who_asks_after_the_first_has_left_asks_again() -> None:
    room = Room()
    with room.attempt(room.ask()).reading():
        pass
    assert room.ask() == "a"


async def test_the_second_of_two_comes_back_to_its_own_request() -> None:
    room = Room()
    with room.attempt(room.ask()).reading():
        with room.attempt(room.ask()).reading():
            pass
        assert room.ask() == "a#2"


async def test_an_answer_that_was_used_is_not_asked_for_again() -> None:
    room = Room()
    room.ask()
    room.answer("a", "one")
    assert room.ask() == "a", "thrown away, as far as anybody can know"
    assert room.ask(went_on("one")) == "a"
    assert room.ask() == "a#2"


async def test_each_goes_on_under_its_own_name() -> None:
    room = Room()
    with room_of_waiters(room, 2):
        pass
    room.answer("a", "one")
    room.answer("a#2", "two")
    assert room.ask(went_on("two")) == "a#2"
    assert room.ask(went_on("one")) == "a"
    room.threads.answered("a#2", calls("three"))
    assert room.ask(went_on("three")) == "a#2", "even if it forgot how it began"
    assert room.ask(went_on("two", "three")) == "a#2"


@given(st.lists(st.integers(0, 4), max_size=20))
def test_names_and_attempts_never_mix(order: list[int]) -> None:
    """Any number of twins, in any order of later requests: each keeps the name it got."""

    async def conversation() -> None:
        room = Room()
        with room_of_waiters(room, 5) as names:
            assert len(set(names)) == 5
        for name in names:
            room.answer(name, f"of {name}")
        assert [room.ask(went_on(f"of {names[who]}")) for who in order] == [names[who] for who in order]

    asyncio.run(conversation())


# --- in the proxy -------------------------------------------------------------------------------------------------


def sub_agents(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
    """A harness that names its sub-agents by nothing but their task."""
    main = body["messages"][0] == "main"
    return (CallKind.AGENT, "") if main else (CallKind.SUB_AGENT, "told")


async def test_two_that_were_told_the_same_are_sampled_twice() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([go, say("one")], [go, say("two")])
    async with stage(engine) as s, asyncio.TaskGroup() as group:
        session = open_session(s.proxy, "twins", Ledger("twins"), classify=sub_agents)
        asks = [group.create_task(s.ask("look", key=session.key)) for _ in range(2)]
        await engine.until(2)
        go.set()
        assert {(await ask).json["text"] for ask in asks} == {"one", "two"}
        sealed = await session.close()
    assert [record.thread for record in sealed.records] == ["told", "told#2"]
    assert (session.usage.joined, sealed.superseded) == (0, frozenset())
    assert len(sealed.delivered) == 2


async def test_one_that_hung_up_and_asks_again_is_joined_to_its_first_request() -> None:
    go = asyncio.Event()
    engine = PlayedEngine([go, say("one")])
    arrivals = Arrivals(sub_agents)
    async with stage(engine) as s, asyncio.TaskGroup() as group:
        session = open_session(s.proxy, "again", Ledger("again"), classify=arrivals.classify)
        first = group.create_task(s.ask("look", key=session.key))
        await engine.until(1)
        first.cancel()
        again = group.create_task(s.ask("look", key=session.key))
        await arrivals.until(2)
        go.set()
        assert (await again).json["text"] == "one"
    assert (len(engine.requests), session.usage.joined) == (1, 1)


async def test_the_agent_itself_is_never_two() -> None:
    """Its main thread has one request at a time: the same one again is a retry, whoever still waits."""
    go = asyncio.Event()
    engine = PlayedEngine([go, say("one")])
    arrivals = Arrivals(sub_agents)
    async with stage(engine) as s, asyncio.TaskGroup() as group:
        session = open_session(s.proxy, "main", Ledger("main"), classify=arrivals.classify)
        asks = [group.create_task(s.ask("main", key=session.key)) for _ in range(2)]
        await arrivals.until(2)
        go.set()
        assert {(await ask).json["text"] for ask in asks} == {"one"}
    assert len(engine.requests) == 1
