"""What the dialects share: the order in which a turn is written, and the small conversions around it."""

from typing import Any

import pytest
from hypothesis import given

from dialect_helpers import TOOLS, USAGE, any_deltas, fragments, split_turns, texts, turns
from polar_env.proxy import render
from polar_env.proxy.render import Kind, TurnWriter
from polar_env.types import AssistantTurn, Delta, StopReason, ToolCall


class Plain(TurnWriter):
    """A wire a test can read: ``<text Hello>``, with calls as ``<call a:bash {}>`` and ``.`` for the end."""

    def open_block(self, kind: Kind) -> bytes:
        name = f"{self.calls[-1].id}:{self.calls[-1].name}" if kind == "call" else ""
        return f"<{kind} {name}|".encode()

    def block_text(self, kind: Kind, text: str) -> bytes:
        return text.encode()

    def close_block(self, kind: Kind, text: str) -> bytes:
        return b">"

    def end(self, turn: AssistantTurn) -> bytes:
        return b"."

    def streams_call(self, name: str) -> bool:
        return name != "whole"


def text(words: str) -> Delta:
    return Delta("text", words)


def thought(words: str) -> Delta:
    return Delta("reasoning", words)


def opens(call_id: str, name: str = "bash", index: int = 0) -> Delta:
    return Delta("tool_open", index=index, id=call_id, name=name)


def args(words: str, index: int = 0) -> Delta:
    return Delta("tool_args", words, index=index)


def turn(words: str = "", *calls: ToolCall, reasoning: str = "") -> AssistantTurn:
    return AssistantTurn(words, calls, StopReason.STOP, USAGE, reasoning)


def call(call_id: str, arguments: str = "{}", name: str = "bash") -> ToolCall:
    return ToolCall(call_id, name, arguments)


def written(final: AssistantTurn, *deltas: Delta) -> list[str]:
    """[what streamed, what may leave before the commit, what is held back]."""
    writer = Plain()
    streamed = b"".join(map(writer.delta, deltas))
    return [part.decode() for part in (streamed, *writer.finish(final))]


def test_a_burst_is_reasoning_text_and_calls_in_order():
    final = turn("Look.", call("a"), call("b"), reasoning="hm")
    assert written(final) == ["", "<reasoning |hm><text |Look.", "><call a:bash|{}><call b:bash|{}>."]


def test_an_empty_turn_is_only_its_end():
    assert written(turn()) == ["", "", "."]


def test_text_streams_and_finish_adds_what_is_missing():
    assert written(turn("Hello there"), text("Hel"), text(""), text("lo")) == ["<text |Hello", " there", ">."]


def test_reasoning_closes_when_text_begins_and_may_begin_again():
    streamed, _, _ = written(turn("ac", reasoning="bd"), text("a"), thought("b"), text("c"), thought("d"))
    assert streamed == "<text |a><reasoning |b><text |c><reasoning |d"


def test_the_first_call_streams_and_closes_only_with_the_held_end():
    final = turn("x", call("a", '{"k": 1}'))
    assert written(final, text("x"), opens("a"), args('{"k"')) == ["<text |x><call a:bash|" + '{"k"', "", ": 1}>."]


def test_whatever_follows_the_first_call_waits_for_the_end():
    final = turn("xy", call("a"), call("b", "[]"), reasoning="r")
    streamed, before, held = written(
        final, text("x"), opens("a"), args("{"), opens("b", index=1), args("[", 1), text("y"), thought("r"), args("}")
    )
    assert streamed == "<text |x><call a:bash|{}"
    assert before == ""
    assert held == "><reasoning |r><text |y><call b:bash|[]>."


def test_a_call_that_must_be_whole_waits_and_so_does_all_after_it():
    final = turn("x", call("a", "{}", "whole"), call("b"))
    assert written(final, text("x"), opens("a", "whole"), args("{}"), opens("b", index=1), args("{}", 1)) == [
        "<text |x",
        "",
        "><call a:whole|{}><call b:bash|{}>.",
    ]


def test_arguments_of_a_call_that_never_opened_are_not_written_twice():
    assert written(turn("", call("a")), args("{}")) == ["", "", "<call a:bash|{}>."]


# what was streamed stands, and what was not follows


def test_text_that_the_final_turn_contradicts_is_neither_repeated_nor_continued():
    assert written(turn("new and longer"), text("old")) == ["<text |old", "", ">."]
    assert written(turn("Hel"), text("Hello")) == ["<text |Hello", "", ">."]


def test_text_that_turns_out_to_be_a_call_is_followed_by_the_call():
    assert written(turn("", call("a")), text("<tool>")) == ["<text |<tool>", "", "><call a:bash|{}>."]


def test_arguments_that_the_final_turn_contradicts_are_left_as_streamed():
    assert written(turn("", call("a", '{"b": 2}')), opens("a"), args('{"a"')) == ['<call a:bash|{"a"', "", ">."]


def test_a_streamed_call_that_the_final_turn_lacks_stands_beside_its_calls():
    final = turn("", call("z", "[]"))
    assert written(final, opens("a"), args("{}")) == ["<call a:bash|{}", "", "><call z:bash|[]>."]


def test_calls_that_share_an_id_are_all_written():
    final = turn("", call("a", "1"), call("a", "2"))
    assert written(final, opens("a"), args("1")) == ["<call a:bash|1", "", "><call a:bash|2>."]


@given(split_turns())
def test_any_beginning_of_a_turn_gives_the_same_whole(case: tuple[AssistantTurn, list[Delta]]):
    final, deltas = case
    assert "".join(written(final, *deltas)) == "".join(written(final))


@given(turns(), any_deltas())
def test_blocks_never_overlap_whatever_is_streamed(final: AssistantTurn, deltas: list[Delta]):
    class Marks(Plain):
        def block_text(self, kind: Kind, text: str) -> bytes:
            return b"x"

    writer = Marks()
    wire = b"".join(map(writer.delta, deltas)) + b"".join(writer.finish(final))
    depth = 0
    for sign in wire.decode():
        depth += {"<": 1, ">": -1}.get(sign, 0)
        assert depth in (0, 1)
    assert depth == 0
    assert wire.endswith(b".")


def test_the_calls_that_went_out_are_known():
    writer = Plain()
    for delta in fragments(TOOLS):
        writer.delta(delta)
    writer.finish(TOOLS)
    assert [each.id for each in writer.calls] == ["call_a", "call_b"]


# --- conversions ------------------------------------------------------------------------------------------------


@given(texts)
def test_sealed_reasoning_survives_trimming_and_hiding(reasoning: str):
    sealed = render.seal(reasoning)
    assert render.unseal(sealed, reasoning.strip()) == reasoning
    assert render.unseal(sealed, "") == reasoning
    assert render.unseal(sealed, reasoning + "edited") == reasoning + "edited"


def test_reasoning_with_half_a_character_can_be_sealed():
    assert render.unseal(render.seal("\ud83d"), "") == "\ud83d"


def test_a_turn_in_chat_form_has_no_empty_keys():
    assert render.turn_message(turn()) == {"role": "assistant", "content": ""}
    assert render.turn_message(turn("x", call("a"), reasoning="r")) == {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "r",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("[1]", None),
        ('{"a": NaN}', None),
        ('{"a": -Infinity}', None),
        ('{"a": 1e999}', None),
        ('{"a": -1.5e3}', {"a": -1500.0}),
        ('{"a"', None),
        ("", None),
        pytest.param("[" * 100_000, None, id="too deep"),
        pytest.param('{"a": ' * 9_000 + "1" + "}" * 9_000, None, id="too deep to be sent"),
    ],
)
def test_only_a_strict_json_object_is_one(text: str, value: Any):
    assert render.parse_object(text) == value


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("maximum context length is 40 tokens. However, you requested 0 output tokens and your prompt contains at "
         "least 50 input tokens, for a total of at least 51 tokens.", (51, 40)),
        ("The prompt (total length 500) is too long to fit into the model (context length 40).", (500, 40)),
        ("maximum model length of 40", (41, 40)),
        ("the engine is down on port 8000", None),
    ],
)  # fmt: skip
def test_sizes_are_read_out_of_the_engines_words(message: str, sizes: tuple[int, int] | None):
    assert render.context_sizes(message) == sizes
