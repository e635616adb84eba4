"""Which earlier call a request carries on: conversations as harnesses send them back, in their own spelling."""

import json
import tracemalloc
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import BASH, CACHE, PATIENT, ask, user
from polar_env.continuation import History
from polar_env.engine import tokenizer
from polar_env.engine.splice import Splicer, prove
from polar_env.messages import ChatMessage, ToolSpec
from polar_env.proxy.steady import Steady
from polar_env.types import AssistantTurn, StopReason, ToolCall, Usage
from template_helpers import rendering

TASK: tuple[ChatMessage, ...] = ({"role": "system", "content": "You fix bugs."}, user("Fix it."))
READ: ToolSpec = {"name": "read", "parameters": {"type": "object"}}
LS = ToolCall("call_1", "bash", '{"command": "ls", "timeout": 5}')
CAT = ToolCall("call_2", "bash", '{"command": "cat a"}')


def turn(text: str = "", *calls: ToolCall, reasoning: str = "", stop: StopReason = StopReason.STOP) -> AssistantTurn:
    return AssistantTurn(text, calls, stop, Usage(1, 1), reasoning)


def echo(said: AssistantTurn, **changes: Any) -> ChatMessage:
    """The turn as a faithful harness sends it back, but for ``changes``; None leaves a key out."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.tool_calls
    ]
    fields = {"content": said.text, "reasoning_content": said.reasoning or None, "tool_calls": calls or None}
    kept = {key: value for key, value in {**fields, **changes}.items() if value is not None}
    return {"role": "assistant", **kept}


def result(call: ToolCall, text: str = "ok") -> ChatMessage:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


class Talk:
    """A session's history, filled call by call."""

    def __init__(self) -> None:
        self.history = History()
        self.calls = 0

    def sampled(self, said: AssistantTurn, *messages: ChatMessage, name: str = "", **fields: Any) -> str:
        """A call that was given ``messages`` and committed; its name."""
        name = name or f"call {self.calls}"
        self.history.add(self.history.place(ask(*messages, **fields)), name, self.calls, said)
        self.calls += 1
        return name

    def carries_on(self, *messages: ChatMessage, **fields: Any) -> str | None:
        return self.history.place(ask(*messages, **fields)).call_id


@pytest.fixture
def talk() -> Talk:
    return Talk()


# --- what is the same conversation ------------------------------------------------------------------------------


def test_the_first_request_carries_on_nothing(talk: Talk) -> None:
    assert talk.carries_on(*TASK) is None


def test_a_result_behind_the_echoed_turn_carries_it_on(talk: Talk) -> None:
    said = turn("I look.", LS)
    first = talk.sampled(said, *TASK)
    request = ask(*TASK, echo(said), result(LS))
    place = talk.history.place(request)
    assert (place.call_id, place.messages, place.cut) == (first, 3, False)
    carried = place.carried(request, {first: array("i", [1, 2])}.__getitem__).continues
    assert carried is not None
    assert (carried.call_id, carried.ids, carried.messages) == (first, array("i", [1, 2]), 3)


def test_a_request_that_carries_on_nothing_is_left_as_it_is(talk: Talk) -> None:
    request = ask(*TASK)
    assert talk.history.place(request).carried(request, {}.__getitem__) is request


def test_each_call_is_carried_on_in_turn(talk: Talk) -> None:
    messages, before = TASK, None
    for step in range(4):
        call = ToolCall(f"c{step}", "bash", "{}")
        assert talk.carries_on(*messages) == before
        before = talk.sampled(turn("", call), *messages)
        messages = (*messages, echo(turn("", call)), result(call))


def test_a_user_message_behind_a_text_turn_carries_it_on(talk: Talk) -> None:
    first = talk.sampled(turn("Done."), *TASK)
    assert talk.carries_on(*TASK, echo(turn("Done.")), user("And b?")) == first


def test_nothing_behind_the_turn_is_no_continuation(talk: Talk) -> None:
    talk.sampled(turn("Done."), *TASK)
    assert talk.carries_on(*TASK, echo(turn("Done."))) is None


def test_a_turn_cut_at_its_length_says_so(talk: Talk) -> None:
    cut = turn("I was ab", stop=StopReason.LENGTH)
    talk.sampled(cut, *TASK)
    assert talk.history.place(ask(*TASK, echo(cut), user("go on"))).cut


SAID = turn("I look.", LS, reasoning="Look first.")


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(echo(SAID, reasoning_content=None), id="thoughts left out"),
        pytest.param(echo(SAID, reasoning_content="\nLook first.\n"), id="blanks around thoughts"),
        pytest.param(echo(SAID, content="I look.\n"), id="a blank behind the words"),
        pytest.param(echo(SAID, content=None), id="the words left out beside the calls"),
        pytest.param(echo(SAID, content=[{"type": "text", "text": "I look."}]), id="the words in parts"),
        pytest.param(
            echo(replace(SAID, tool_calls=(ToolCall("call_1", "bash", '{"timeout":5,"command":"ls"}'),))),
            id="arguments in another order",
        ),
        pytest.param(
            echo(replace(SAID, tool_calls=(ToolCall("call_1", "bash", '{"command": "ls", "all": false}'),))),
            id="arguments with a default filled in",
        ),
        pytest.param(
            echo(replace(SAID, tool_calls=(replace(LS, id="call_3_0"),))),
            id="ids of the place, from a wire without ids",
        ),
    ],
)
def test_an_echo_in_another_spelling_is_the_turn(talk: Talk, message: ChatMessage) -> None:
    first = talk.sampled(SAID, *TASK)
    after = result(ToolCall(message["tool_calls"][0]["id"], "", ""))
    assert talk.carries_on(*TASK, message, after) == first
    second = talk.sampled(turn("Done."), *TASK, message, after)
    assert talk.carries_on(*TASK, message, after, echo(turn("Done.")), user("more")) == second


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(echo(SAID, reasoning_content="I know better."), id="other thoughts"),
        pytest.param(echo(SAID, content="I guess."), id="other words"),
        pytest.param(echo(SAID, tool_calls=None), id="the call dropped"),
        pytest.param(echo(replace(SAID, tool_calls=(LS, CAT))), id="a call more"),
        pytest.param(echo(replace(SAID, tool_calls=(replace(CAT, id="other"),))), id="another call"),
        pytest.param(user("I look."), id="not the model's"),
    ],
)
def test_an_edited_echo_is_not_the_turn(talk: Talk, message: ChatMessage) -> None:
    talk.sampled(SAID, *TASK)
    assert talk.carries_on(*TASK, message, user("go on")) is None


def test_thoughts_that_the_model_never_had_are_an_edit(talk: Talk) -> None:
    talk.sampled(turn("Done."), *TASK)
    assert talk.carries_on(*TASK, echo(turn("Done.", reasoning="Hm.")), user("more")) is None


def test_a_harness_that_drops_thoughts_later_is_still_understood(talk: Talk) -> None:
    """Claude Code keeps the thoughts of the last turn and drops those before."""
    second = turn("", CAT, reasoning="Then this.")
    talk.sampled(SAID, *TASK)
    talk.sampled(second, *TASK, echo(SAID), result(LS))
    old = echo(SAID, reasoning_content=None)
    assert talk.carries_on(*TASK, old, result(LS), echo(second), result(CAT)) == "call 1"


def test_results_of_parallel_calls_may_come_in_another_order(talk: Talk) -> None:
    both, then = turn("", LS, CAT), turn("Done.")
    talk.sampled(both, *TASK)
    talk.sampled(then, *TASK, echo(both), result(LS), result(CAT))
    assert talk.carries_on(*TASK, echo(both), result(CAT), result(LS), echo(then), user("more")) == "call 1"


def test_parallel_calls_in_another_order_are_an_edit(talk: Talk) -> None:
    """Templates show results without ids: behind the sampled calls they would be taken for one another's."""
    talk.sampled(turn("", LS, CAT), *TASK)
    assert talk.carries_on(*TASK, echo(turn("", CAT, LS)), result(CAT), result(LS)) is None


def test_a_dropped_parallel_call_is_an_edit(talk: Talk) -> None:
    talk.sampled(turn("", LS, CAT), *TASK)
    assert talk.carries_on(*TASK, echo(turn("", LS)), result(LS)) is None


@pytest.mark.parametrize(
    "opening",
    [
        ({"role": "developer", "content": "You fix bugs."}, TASK[1]),
        (TASK[0], {"role": "user", "content": [{"type": "text", "text": "Fix it."}]}),
    ],
    ids=["developer for system", "parts for text"],
)
def test_an_opening_in_another_shape_is_the_same(talk: Talk, opening: Sequence[ChatMessage]) -> None:
    talk.sampled(SAID, *TASK)
    assert talk.carries_on(*opening, echo(SAID), result(LS)) == "call 0"


def test_tools_may_come_in_another_order(talk: Talk) -> None:
    talk.sampled(SAID, *TASK, tools=(BASH, READ))
    assert talk.carries_on(*TASK, echo(SAID), result(LS), tools=(READ, BASH)) == "call 0"


# --- what is not ------------------------------------------------------------------------------------------------


def test_other_tools_are_another_conversation(talk: Talk) -> None:
    talk.sampled(SAID, *TASK)
    assert talk.carries_on(*TASK, echo(SAID), result(LS), tools=(BASH, READ)) is None


@pytest.mark.parametrize("at", range(4))
def test_an_earlier_message_edited_is_another_conversation(talk: Talk, at: int) -> None:
    then = turn("Done.")
    messages: list[ChatMessage] = [*TASK, echo(SAID), result(LS)]
    talk.sampled(SAID, *TASK)
    talk.sampled(then, *messages)
    messages[at] = {**messages[at], "content": "something else"}
    assert talk.carries_on(*messages, echo(then), user("more")) is None


def test_an_earlier_message_left_out_is_another_conversation(talk: Talk) -> None:
    then = turn("Done.")
    talk.sampled(SAID, *TASK)
    talk.sampled(then, *TASK, echo(SAID), result(LS), user("hurry"))
    assert talk.carries_on(*TASK, echo(SAID), result(LS), echo(then), user("more")) is None


def test_a_summary_in_place_of_the_history_is_another_conversation(talk: Talk) -> None:
    talk.sampled(SAID, *TASK)
    assert talk.carries_on(TASK[0], user("You looked and found a.py."), user("go on")) is None


def test_a_turn_that_nobody_sampled_ends_what_can_be_carried_on(talk: Talk) -> None:
    """Qwen Code joins a broken answer and the next to one."""
    talk.sampled(SAID, *TASK)
    made_up = echo(turn("I look. And then"))
    assert talk.carries_on(*TASK, echo(SAID), result(LS), made_up, user("go on")) is None


def test_what_follows_a_made_up_turn_can_be_carried_on_again(talk: Talk) -> None:
    opening = (*TASK, echo(turn("Made up.")), user("go on"))
    talk.sampled(turn("Done."), *opening)
    assert talk.carries_on(*opening, echo(turn("Done.")), user("more")) == "call 0"


# --- several calls of the same words ----------------------------------------------------------------------------


def test_of_two_retries_the_one_that_is_echoed_is_carried_on(talk: Talk) -> None:
    for name, call in (("first", LS), ("second", replace(LS, id="call_9"))):
        talk.sampled(turn("I look.", call), *TASK, name=name)
    assert talk.carries_on(*TASK, echo(turn("I look.", LS)), result(LS)) == "first"
    again = replace(LS, id="call_9")
    assert talk.carries_on(*TASK, echo(turn("I look.", again)), result(again)) == "second"


def test_of_two_equal_turns_the_latest_is_carried_on(talk: Talk) -> None:
    talk.sampled(turn("Done."), *TASK)
    talk.sampled(turn("Done."), *TASK)
    assert talk.carries_on(*TASK, echo(turn("Done.")), user("more")) == "call 1"


def test_the_latest_is_told_by_arrival_and_not_by_who_was_done_first(talk: Talk) -> None:
    place = talk.history.place(ask(*TASK))
    talk.history.add(place, "late", 1, turn("Done."))
    talk.history.add(place, "early", 0, turn("Done."))
    assert talk.carries_on(*TASK, echo(turn("Done.")), user("more")) == "late"


def test_of_equal_words_those_with_the_echoed_thoughts_are_carried_on(talk: Talk) -> None:
    talk.sampled(turn("Done.", reasoning="This."), *TASK)
    talk.sampled(turn("Done.", reasoning="That."), *TASK)
    assert talk.carries_on(*TASK, echo(turn("Done.", reasoning="This.")), user("more")) == "call 0"
    assert talk.carries_on(*TASK, echo(turn("Done.")), user("more")) == "call 1"


def test_of_equal_words_those_of_its_own_thread_are_carried_on(talk: Talk) -> None:
    """Two sub-agents were told the same, thought differently, and their harness keeps no thoughts."""
    for at, thread in enumerate(("one", "two")):
        said = turn("Done.", reasoning=f"I am {thread}.")
        talk.history.add(talk.history.place(ask(*TASK), thread), thread, at, said, thread)
    request = ask(*TASK, echo(turn("Done.")), user("more"))
    assert [talk.history.place(request, thread).call_id for thread in ("one", "two", "three")] == ["one", "two", "two"]


def test_a_branch_carries_on_where_it_left(talk: Talk) -> None:
    """A sub-agent seeded with its parent's history, or a harness that goes back."""
    talk.sampled(SAID, *TASK)
    talk.sampled(turn("Done."), *TASK, echo(SAID), result(LS))
    assert talk.carries_on(*TASK, echo(SAID), result(LS, "another world")) == "call 0"


def test_what_a_turn_was_given_counts_and_not_its_words_alone(talk: Talk) -> None:
    talk.sampled(turn("Done."), *TASK)
    assert talk.carries_on(TASK[0], user("Fix something else."), echo(turn("Done.")), user("more")) is None


def test_prompts_made_steady_carry_on(talk: Talk) -> None:
    """Day and nonce differ in what the harness sends and not in what the session reads."""
    steady = Steady([("system", r"Today is \d+\.", "Today is 1.")])
    days = [({"role": "system", "content": f"Today is {day}."}, TASK[1]) for day in (8, 9)]
    first = steady(ask(*days[0]))
    talk.history.add(talk.history.place(first), "call 0", 0, SAID)
    assert talk.history.place(steady(ask(*days[1], echo(SAID), result(LS)))).call_id == "call 0"


# --- odd content ------------------------------------------------------------------------------------------------


def test_an_image_counts_and_so_does_its_place(talk: Talk) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:a"}}
    other = {"type": "image_url", "image_url": {"url": "data:b"}}
    words = {"type": "text", "text": "see"}
    shown: ChatMessage = {"role": "user", "content": [words, picture]}
    talk.sampled(SAID, shown)
    assert talk.carries_on(shown, echo(SAID), result(LS)) == "call 0"
    for content in ([words, other], [picture, words], [words]):
        assert talk.carries_on({"role": "user", "content": content}, echo(SAID), result(LS)) is None


@pytest.mark.parametrize("arguments", ["", "{", '{"a": NaN}', "[" * 100_000, '{"a": "\ud800"}'])
def test_arguments_that_are_no_json_join_as_they_are(talk: Talk, arguments: str) -> None:
    said = turn("", ToolCall("x", "bash", arguments))
    talk.sampled(said, *TASK)
    nameless = echo(turn("", ToolCall("place", "bash", arguments)))
    assert talk.carries_on(*TASK, nameless, user("go on")) == "call 0"


def test_half_characters_are_words_like_others(talk: Talk) -> None:
    said = turn("\ud83d")
    talk.sampled(said, user("\udc00"))
    assert talk.carries_on(user("\udc00"), echo(said), user("more")) == "call 0"


def test_a_live_session_stays_small() -> None:
    """100 turns of 4 KB, which is what is hashed with each: digests are kept and no text."""
    talk, messages = Talk(), list[ChatMessage](TASK)
    said = [turn("I look.", ToolCall(f"c{step}", "bash", json.dumps({"command": "x" * 1000}))) for step in range(100)]
    tracemalloc.start()
    try:
        for each in said:
            talk.sampled(each, *messages)
            messages += [echo(each), result(each.tool_calls[0], "y" * 3000)]
        messages.clear()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 150_000


# --- any session ------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["", "I look.", "  \n", "héllo\n\nx", "<tool_call>\n{", "a<|im_end|>b", "<think>hm"])
THOUGHTS = st.sampled_from(["", "", "Look first.", "\nWhy\n"])
ARGUMENTS = st.sampled_from(["{}", '{"command":  "ls"}', '{"b": 1.0e5, "a": "\\u00e9/"}', "{", '{"x": "<|im_end|>"}'])


def spelled(said: AssistantTurn) -> str:
    """How the model wrote the turn: thoughts, words and calls, with its own spelling of JSON, and its end."""
    thought = f"<think>\n{said.reasoning}\n</think>\n\n" if said.reasoning else ""
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in said.tool_calls
    )
    return thought + said.text + calls + ("" if said.stop is StopReason.LENGTH else "<|im_end|>")


def follows(said: AssistantTurn, new: Sequence[ChatMessage]) -> str:
    """Qwen3's text of what is new, written from its template's description and not by it."""
    text = "<|im_end|>" if said.stop is StopReason.LENGTH else ""
    text += "\n"
    for at, message in enumerate(new):
        tool = message["role"] == "tool"
        first = tool and (at == 0 or new[at - 1]["role"] != "tool")
        last = tool and (at + 1 == len(new) or new[at + 1]["role"] != "tool")
        content = message["content"]
        if tool:
            text += "<|im_start|>user" if first else ""
            text += f"\n<tool_response>\n{content}\n</tool_response>" + ("<|im_end|>\n" if last else "")
        else:
            text += f"<|im_start|>user\n{content}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


@st.composite
def turns(draw: st.DrawFn, index: int) -> AssistantTurn:
    cut = draw(st.integers(0, 5)) == 0
    count = 0 if cut else draw(st.integers(0, 3))
    calls = tuple(ToolCall(f"call-{index}-{at}", "bash", draw(ARGUMENTS)) for at in range(count))
    stop = StopReason.LENGTH if cut else StopReason.TOOL_CALLS if calls else StopReason.STOP
    return AssistantTurn(draw(WORDS), calls, stop, Usage(1, 1), draw(THOUGHTS))


@st.composite
def echoes(draw: st.DrawFn, said: AssistantTurn) -> ChatMessage:
    """The turn as some harness sends it back."""
    message = echo(said)
    if draw(st.booleans()):
        message.pop("reasoning_content", None)
    if draw(st.booleans()):
        message["content"] = said.text.rstrip()
    if draw(st.booleans()):
        message["content"] = [{"type": "text", "text": said.text}]
    for call in message.get("tool_calls", []):
        with_default = draw(st.booleans())
        try:
            value = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
        call["function"]["arguments"] = json.dumps(value | ({"replace_all": False} if with_default else {}), indent=1)
    return message


PROVED: list[Splicer] = []


async def splicer() -> Splicer:
    if not PROVED:
        PROVED.append(await prove(rendering(tokenizer.load(tokenizer.fetch(CACHE)))))
    return PROVED[0]


@settings(PATIENT, max_examples=25)
@given(st.data())
async def test_every_call_that_carries_one_on_extends_its_very_ids(data: st.DataObject) -> None:
    """Random sessions: thoughts, parallel calls, retries, branches, cut turns, every harness's spelling. A prompt
    starts with the ids of the call it carries on, and its text is what was sampled and then what is new."""
    words, splice, history = tokenizer.load(tokenizer.fetch(CACHE)), await splicer(), History()
    ids, said = dict[str, array[int]](), dict[str, AssistantTurn]()
    states: list[tuple[list[ChatMessage], str | None]] = [([*TASK], None)]
    for index in range(data.draw(st.integers(1, 6))):
        messages, before = data.draw(st.sampled_from(states))
        place = history.place(ask(*messages))
        if before is None:
            assert place.call_id is None
            prompt = words.render(messages, (BASH,))
        else:
            assert place.call_id is not None
            seen = ids[place.call_id]
            meant = said[place.call_id]
            assert (meant.text.strip(), meant.tool_calls) == (said[before].text.strip(), said[before].tool_calls)
            prompt = await splice.prompt(place.carried(ask(*messages), ids.__getitem__))
            assert len(prompt) > len(seen)
            assert prompt[: len(seen)] == seen
            assert words.decode(prompt[len(seen) :]) == follows(meant, messages[place.messages :])
        name = f"call {index}"
        turn = said[name] = data.draw(turns(index))
        ids[name] = prompt + words.encode(spelled(turn))
        history.add(place, name, index, turn)
        new = [result(call, data.draw(WORDS)) for call in turn.tool_calls]
        new += [user(data.draw(WORDS)) for _ in range(data.draw(st.integers(0 if new else 1, 2)))]
        states.append(([*messages, data.draw(echoes(turn)), *new], name))


@PATIENT
@given(st.data())
def test_one_changed_word_before_the_last_turn_carries_nothing_on(data: st.DataObject) -> None:
    talk, messages = Talk(), list[ChatMessage](TASK)
    for index in range(data.draw(st.integers(1, 4))):
        said = data.draw(turns(index))
        talk.sampled(said, *messages)
        messages += [data.draw(echoes(said)), *(result(call) for call in said.tool_calls), user(f"go on {index}")]
    assert talk.carries_on(*messages) == f"call {index}"
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    edits = [at for at, message in enumerate(messages[:last]) if message["role"] != "assistant"]
    at = data.draw(st.sampled_from(edits))
    messages[at] = {**messages[at], "content": f"{messages[at]['content']}!"}
    assert talk.carries_on(*messages) is None
