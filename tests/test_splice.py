"""Splicing: the ids that exist stay as they are, and what follows is what the template says of what is new."""

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import BASH, CACHE, PATIENT, ask, play, user
from polar_env.config import EngineConfig
from polar_env.engine import Session, tokenizer
from polar_env.engine.scripted import ScriptedEngine, history
from polar_env.engine.scripts import Scene, Turn
from polar_env.engine.splice import Splicer, Unspliceable, prove
from polar_env.engine.tokenizer import Tokenizer
from polar_env.errors import EngineError
from polar_env.messages import ChatMessage
from polar_env.types import Continuation, EngineReply, ModelRequest
from template_helpers import own_template, rendering, template, words_of, write

END = "<|im_end|>"


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    return tokenizer.load(tokenizer.fetch(CACHE))


@pytest.fixture
async def splicer(words: Tokenizer) -> Splicer:
    return await prove(rendering(words))


def said(text: str, *calls: tuple[str, str], reasoning: str = "") -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ]
    return message | {"reasoning_content": reasoning} if reasoning else message


def result(at: int, text: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": f"c{at}", "content": text}


def carrying(ids: "array[int]", *messages: ChatMessage, known: int = 2, cut: bool = False) -> ModelRequest:
    """A request whose first ``known`` messages are in ``ids``."""
    return replace(ask(*messages), continues=Continuation("earlier", ids, known, cut))


# --- the proof, on templates as they were published -------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5",
        "qwen3",
        "qwen3_instruct_2507",
        "qwen3_5_think",
        "qwen3_5_nothink",
        "qwen3_6",
        "qwen3_8",
        "nemotron_3_nano",
        "lfm2_v2",
    ],
)
async def test_the_templates_of_these_models_can_be_spliced(name: str) -> None:
    words = words_of(template(name))
    found = await prove(rendering(words))
    assert words.decode([found.end]) == END


@pytest.mark.parametrize(
    ("name", "end", "why"),
    [
        ("gemma3", "<end_of_turn>", "a tool call, then its result: .* roles must alternate"),
        ("llama3_1", "<|eot_id|>", "a tool call, then its result: the template does not show the assistant's text"),
        ("gptoss", "<|end|>", "a tool call, then its result: what is new is rendered otherwise"),
        (
            "deepseekv3",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
            "a tool call, then its result: rendering the chat template",
        ),
        ("glm4moe", "", "a text turn, then the user: what is new is rendered otherwise"),  # no token ends a turn
        ("cohere2", "<|END_OF_TURN_TOKEN|>", "a text turn, then the user: what is new is rendered otherwise"),
    ],
)
async def test_the_templates_of_these_models_are_refused_with_the_reason(name: str, end: str, why: str) -> None:
    """Their end token is written as Qwen3's, so that one token ends a turn here as it does there."""
    text = template(name)
    assert end in text
    with pytest.raises(Unspliceable, match=why):
        await prove(rendering(words_of(text.replace(end, END) if end else text)))


async def test_the_pinned_tokenizer_s_own_template_can_be_spliced(splicer: Splicer, words: Tokenizer) -> None:
    assert splicer.end == words.encode(END)[0]


# --- the proof, on templates made to break it -------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


async def refused(text: str) -> str:
    with pytest.raises(Unspliceable) as caught:
        await prove(rendering(words_of(text)))
    return str(caught.value)


async def test_a_plain_template_can_be_spliced() -> None:
    await prove(rendering(words_of(PLAIN)))


async def test_thoughts_opened_in_the_generation_prompt_and_dropped_from_history_can_be_spliced() -> None:
    thinking = PLAIN.replace("assistant\n", "assistant\n<think>\n")
    await prove(rendering(words_of(thinking)))


async def test_no_think_glue_in_the_generation_prompt_can_be_spliced() -> None:
    await prove(rendering(words_of(PLAIN.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"))))


async def test_a_template_that_numbers_its_messages_is_refused() -> None:
    numbered = PLAIN.replace("{{ m.role }}\n", "{{ m.role }} {{ loop.index }}\n")
    assert "a text turn, then the user: what is new is rendered otherwise" in await refused(numbered)


async def test_a_template_that_counts_down_to_the_end_is_not_refused() -> None:
    """What depends on the distance to the end is the same behind any conversation."""
    await prove(rendering(words_of(PLAIN.replace("{{ m.role }}\n", "{{ m.role }} {{ loop.revindex }}\n"))))


async def test_a_template_that_tells_of_the_last_message_in_front_is_refused() -> None:
    forward = "<|im_start|>system\n{{ messages[-1].content }}<|im_end|>\n" + PLAIN
    assert "not all behind the turn's end" in await refused(forward)


async def test_a_template_that_names_tools_behind_the_last_message_is_refused() -> None:
    late = PLAIN.replace("<|im_start|>assistant\n", "{{ tools | tojson if tools }}<|im_start|>assistant\n")
    assert "rendered otherwise" in await refused(late)


async def test_a_template_that_hides_what_the_assistant_said_is_refused() -> None:
    hidden = PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}")
    assert "does not show the assistant's text" in await refused(hidden)


async def test_a_template_that_shows_either_calls_or_text_is_refused() -> None:
    either = PLAIN.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    assert "a tool call, then its result: the template does not show" in await refused(either)


async def test_a_template_that_renders_nothing_at_all_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="never"):
        await prove(rendering(words_of("{{ raise_exception('never') }}")))


# --- one prompt -------------------------------------------------------------------------------------------------


async def test_the_prompt_begins_with_the_very_ids_and_goes_on_with_what_is_new(
    splicer: Splicer, words: Tokenizer
) -> None:
    """The ids spell `<tool_call>` as a model may: not as the tokenizer would."""
    odd = words.encode(f"<|im_start|>user\nhi{END}\n<|im_start|>assistant\n") + array("i", [27, 14172, 13429, 397])
    ids = odd + words.encode("x" + END)
    prompt = await splicer.prompt(carrying(ids, user("hi"), said("hm", ("bash", "{}")), result(0, "a.py")))
    assert prompt[: len(ids)] == ids
    tail = "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert words.decode(prompt[len(ids) :]) == tail


async def test_a_cut_turn_is_ended_by_the_template_s_token_which_was_not_sampled(
    splicer: Splicer, words: Tokenizer
) -> None:
    ids = words.encode("<|im_start|>assistant\nI was ab")
    prompt = await splicer.prompt(carrying(ids, user("hi"), said("I was ab"), user("go on"), cut=True))
    assert words.decode(prompt[len(ids) :]) == f"{END}\n<|im_start|>user\ngo on{END}\n<|im_start|>assistant\n"


async def test_a_turn_cut_right_behind_its_end_is_not_ended_twice(splicer: Splicer, words: Tokenizer) -> None:
    ids = words.encode("<|im_start|>assistant\nDone." + END)
    prompt = await splicer.prompt(carrying(ids, user("hi"), said("Done."), user("go on"), cut=True))
    assert words.decode(prompt[len(ids) :]).startswith("\n<|im_start|>user")


async def refusal_of(splicer: Splicer, request: ModelRequest) -> str:
    with pytest.raises(Unspliceable) as caught:
        await splicer.prompt(request)
    return str(caught.value)


async def test_a_turn_that_another_token_ended_is_refused(splicer: Splicer, words: Tokenizer) -> None:
    ids = words.encode("Done.<|endoftext|>")
    told = await refusal_of(splicer, carrying(ids, user("hi"), said("Done."), user("go on")))
    assert f"ended with id {ids[-1]}, the template ends one with {splicer.end}" in told


async def test_a_request_that_carries_on_nothing_is_refused(splicer: Splicer) -> None:
    assert "carries on no earlier call" in await refusal_of(splicer, ask())


async def test_a_request_that_adds_nothing_is_refused(splicer: Splicer) -> None:
    assert "nothing new" in await refusal_of(splicer, carrying(array("i", [1]), user("hi"), said("Done.")))


@pytest.mark.parametrize("at", [0, 2])
async def test_a_conversation_with_an_image_is_refused(splicer: Splicer, at: int) -> None:
    messages = [user("hi"), said("Done."), user("go on")]
    messages[at] = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    assert "image" in await refusal_of(splicer, carrying(array("i", [1]), *messages))


async def test_a_stand_in_that_cannot_be_rendered_is_a_call_that_cannot_be_spliced(splicer: Splicer) -> None:
    async def down(messages, tools):
        raise EngineError("the server is restarting")

    request = carrying(array("i", [splicer.end]), user("hi"), said("Done."), user("go on"))
    assert "the server is restarting" in await refusal_of(replace(splicer, render=down), request)


@pytest.mark.parametrize("written", ["Zqvx", f"Zqvx{END}\n", f"a{END}\n<|im_start|>assistant\nZqvx", "kwyj"])
async def test_new_words_that_look_like_the_stand_in_change_nothing(
    splicer: Splicer, words: Tokenizer, written: str
) -> None:
    ids = words.encode("…" + END)
    request = carrying(ids, user(written), said(written, ("bash", "{}")), result(0, written))
    prompt = await splicer.prompt(request)
    tail = f"\n<|im_start|>user\n<tool_response>\n{written}\n</tool_response>{END}\n<|im_start|>assistant\n"
    assert prompt == ids + words.encode(tail)


async def test_arguments_that_hold_the_end_token_do_not_move_the_cut(splicer: Splicer, words: Tokenizer) -> None:
    ids = words.encode("…" + END)
    call = ("bash", '{"command": "echo <|im_end|> Zqvx <|im_end|>"}')
    prompt = await splicer.prompt(carrying(ids, user("hi"), said("", call), result(0, "ok")))
    assert words.decode(prompt[len(ids) :]).startswith("\n<|im_start|>user\n<tool_response>\nok")


# --- the scripted engine ----------------------------------------------------------------------------------------


def engine(words: str = "on", **config: object) -> ScriptedEngine:
    fields = {"kind": "scripted", "tokenizer": tokenizer.fetch(CACHE), "splice": words, **config}
    return ScriptedEngine(EngineConfig.model_validate(fields))


def thinks(scene: Scene) -> Turn:
    """A thought and a command in every turn."""
    return Turn("", (scene.shell("ls"),), f"Step {scene.step}.")


async def reply_of(engine: ScriptedEngine, request: ModelRequest) -> EngineReply:
    _, reply = await play(engine, request, Session("s", script="test_splice:thinks"))
    return reply


async def second_turn(engine: ScriptedEngine, *new: ChatMessage) -> tuple[EngineReply, EngineReply]:
    """A turn with a thought, and the one behind ``new``; the harness drops the thought."""
    first = await reply_of(engine, ask())
    echoed = list(history(first.turn, ("a.py",)))
    echoed[0].pop("reasoning_content", None)
    messages = (*ask().messages, *echoed, *new)
    carried = Continuation("first", first.prompt_ids + first.sampled_ids, len(ask().messages) + 1)
    return first, await reply_of(engine, replace(ask(*messages), continues=carried))


async def test_the_scripted_engine_keeps_a_thought_that_the_harness_dropped() -> None:
    first, second = await second_turn(engine())
    seen = first.prompt_ids + first.sampled_ids
    assert second.spliced
    assert second.prompt_ids[: len(seen)] == seen


async def test_switched_off_it_renders_what_the_harness_sent() -> None:
    off = engine("off")
    first, second = await second_turn(off)
    seen = first.prompt_ids + first.sampled_ids
    assert not second.spliced
    assert second.prompt_ids[: len(seen)] != seen
    assert off.unspliced == {"engine.splice is off": 1}


async def test_a_call_that_cannot_be_spliced_is_rendered_whole_and_counted() -> None:
    on = engine("auto")
    picture: ChatMessage = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    _, second = await second_turn(on, picture)
    assert not second.spliced
    assert on.unspliced == {"the conversation shows an image": 1}


async def test_its_check_says_whether_prompts_are_spliced() -> None:
    assert "prompts are spliced (template proved)" in (await engine("auto").check()).notes
    assert "no splicing: engine.splice is off" in (await engine("off").check()).notes


async def test_a_template_that_cannot_be_spliced_is_refused_only_where_splicing_is_demanded(tmp_path: Path) -> None:
    """Qwen3's template, but results say which message they are."""
    plain = "'\\n<tool_response>\\n'"
    assert plain in own_template()
    folder = write(own_template().replace(plain, "'\\n<tool_response ' ~ loop.index ~ '>\\n'"), tmp_path)
    with pytest.raises(EngineError, match=r"cannot be spliced: a tool call.*; set engine\.splice to auto or off"):
        await engine("on", tokenizer=folder).check()
    auto = engine("auto", tokenizer=folder)
    assert any(note.startswith("no splicing: a tool call, then its result") for note in (await auto.check()).notes)
    _, second = await second_turn(auto)
    assert not second.spliced


# --- any conversation -------------------------------------------------------------------------------------------

TEXT = st.sampled_from(["", "I look.", "héllo\n\n  ", "<tool_call>", "Zqvx", "a<|im_end|>b", "</think>", "\n"])
CALLS = st.lists(st.tuples(st.just("bash"), st.sampled_from(["{}", '{"command":  "ls"}', '{"a": "<|im_end|>"}'])))


@PATIENT
@given(TEXT, CALLS, TEXT, st.lists(TEXT, max_size=2), st.booleans())
async def test_the_tail_is_that_of_the_whole_rendering(
    text: str, calls: list[tuple[str, str]], thought: str, users: list[str], tools: bool
) -> None:
    """The suffix property, on conversations the proof did not think of."""
    words = tokenizer.load(tokenizer.fetch(CACHE))
    splicer = await prove(rendering(words)) if not _PROVED else _PROVED[0]
    _PROVED[:] = [splicer]
    turn = said(text, *calls, reasoning=thought)
    new = [result(at, text) for at in range(len(calls))] + [user(each) for each in users or ["x"]]
    whole = words.render([user("task"), turn, *new], [BASH] if tools else [])
    tail = array("i", [splicer.end]) + await splicer.tail(turn, new, tools=tools)
    assert whole[-len(tail) :] == tail


_PROVED: list[Splicer] = []
