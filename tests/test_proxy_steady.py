"""First prompts of a group are one prompt: what names the day, the machine or the request does not reach the engine."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_helpers import build
from polar_env.capture import Ledger
from polar_env.messages import ChatMessage
from polar_env.proxy import DIALECTS
from polar_env.proxy.steady import Steady, restored
from polar_env.segment_log import SegmentLog, read
from polar_env.types import ModelRequest, WireApi
from proxy_helpers import PlayedEngine, open_session, stage

RULES = (("system", r"day \d+", "day 0"), ("user", r"\A(<env>.*?host=)\w+", r"\1box"))


def request(*messages: ChatMessage) -> ModelRequest:
    return ModelRequest(WireApi.CHAT, "any", messages)


def shown(*messages: ChatMessage, rules: Any = RULES) -> list[Any]:
    return [message.get("content") for message in Steady(rules)(request(*messages)).messages]


def test_system_text_is_changed_wherever_it_stands_and_in_either_form() -> None:
    parts = [{"type": "text", "text": "day 3"}, {"type": "image_url", "image_url": {"url": "day 4"}}]
    assert shown(
        {"role": "system", "content": "it is day 1"},
        {"role": "user", "content": "hello on day 2"},
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": "day 5"},
        {"role": "system", "content": "now it is day 6"},
    ) == [
        "it is day 0",
        "hello on day 2",
        [{"type": "text", "text": "day 0"}, parts[1]],
        "day 5",
        "now it is day 0",
    ]


def test_of_the_users_words_only_the_opening_ones_are_the_harnesss() -> None:
    env = "<env> host=node17 </env>"
    assert shown(
        {"role": "user", "content": env},
        {"role": "user", "content": f"my log says {env}"},
        {"role": "assistant", "content": env},
        {"role": "tool", "tool_call_id": "c1", "content": env},
        {"role": "user", "content": env},
    ) == ["<env> host=box </env>", f"my log says {env}", env, env, env]


def test_a_message_without_content_stays_without() -> None:
    message: ChatMessage = {"role": "system", "content": None}
    assert Steady(RULES)(request(message, {"role": "user"})).messages == (message, {"role": "user"})


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text("day 12<env>host=x", max_size=30)),
        max_size=6,
    )
)
def test_nothing_but_system_and_opening_user_text_ever_changes(said: list[tuple[str, str]]) -> None:
    asked = request(*({"role": role, "content": text} for role, text in said))
    got = Steady(RULES)(asked)
    assert replace(got, messages=(), replaced=()) == replace(asked, messages=())
    first = next((at for at, (role, _) in enumerate(said) if role in ("assistant", "tool")), len(said))
    for at, (before, after) in enumerate(zip(asked.messages, got.messages, strict=True)):
        if before["role"] not in ("system", "user") or (before["role"] == "user" and at > first):
            assert before == after
    assert Steady(RULES)(got).messages == got.messages, "once is enough"
    assert tuple(restored(got.messages, got.replaced)) == asked.messages


@given(st.integers(0, 4), st.integers(0, 4))
def test_what_was_shown_stays_so_when_the_conversation_goes_on(before: int, more: int) -> None:
    turn: list[ChatMessage] = [{"role": "assistant", "content": "day 7"}, {"role": "user", "content": "<env> host=a"}]
    head: list[ChatMessage] = [{"role": "system", "content": "day 8"}, {"role": "user", "content": "<env> host=b"}]
    earlier = Steady(RULES)(request(*head, *turn * before)).messages
    later = Steady(RULES)(request(*head, *turn * (before + more))).messages
    assert later[: len(earlier)] == earlier, "the next prompt starts with the last one"


OVERLAPPING = (("system", "ab", "xxx"), ("system", "x", ""), ("system", "c+", "x"), ("user", "b", "ba"))


@given(st.lists(st.tuples(st.sampled_from(["system", "user"]), st.lists(st.text("abcx", max_size=9))), max_size=4))
def test_what_the_harness_wrote_comes_back_from_what_was_shown(said: list[tuple[str, list[str]]]) -> None:
    """Whatever the rules do to each other's work, in strings and in parts."""
    image = {"type": "image_url", "image_url": {"url": "abc"}}
    contents: list[Any] = [
        texts[0] if len(texts) == 1 else [*({"type": "text", "text": text} for text in texts), image]
        for _, texts in said
    ]
    asked = request(*({"role": role, "content": each} for (role, _), each in zip(said, contents, strict=True)))
    got = Steady(OVERLAPPING)(asked)
    assert tuple(restored(got.messages, got.replaced)) == asked.messages
    assert all(change.original != change.shown for change in got.replaced)


# --- Claude Code's nonce ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ("cc_version=2.1.332.e2f; cc_entrypoint=sdk-cli;", "cc_version=2.1.332; cc_entrypoint=sdk-cli;"),
        ("cc_version=2.1.332.cf6; cc_entrypoint=cli; cch=a11f0;", "cc_version=2.1.332; cc_entrypoint=cli;"),
        ("cc_version=2.1.332.3ad; cc_is_subagent=true;", "cc_version=2.1.332; cc_is_subagent=true;"),
        ("cc_version=2.1.332; cc_entrypoint=cli; cch=00000", "cc_version=2.1.332; cc_entrypoint=cli"),
    ],
)
def test_the_billing_block_says_the_same_in_every_request(sent: str, seen: str) -> None:
    head = "x-anthropic-billing-header: "
    parts = [{"type": "text", "text": head + sent}, {"type": "text", "text": "You are an agent."}]
    steady = Steady()
    (message,) = steady(request({"role": "system", "content": parts})).messages
    assert message.get("content") == [{"type": "text", "text": head + seen}, parts[1]]
    assert sum(steady.changed.values()) >= 1


def test_a_user_who_quotes_the_billing_block_is_quoted() -> None:
    text = "x-anthropic-billing-header: cc_version=2.1.332.e2f; cc_entrypoint=cli;"
    assert shown({"role": "user", "content": text}, {"role": "system", "content": f"see {text}"}, rules=()) == [
        text,
        f"see {text}",
    ]


# --- the presets' own rules: the shapes measured on the pinned versions -------------------------------------------

DAYS = ("2026-11-30", "2027-02-01")
KERNELS = ("Linux 6.18.44-fc-v595", "Linux 5.15.0-1084-aws")


def claude(day: str, kernel: str) -> list[ChatMessage]:
    context = f"# Environment\n - Platform: linux\n - OS Version: {kernel}\n\nToday's date is {day}."
    return [{"role": "user", "content": "fix it"}, {"role": "system", "content": context}]


def claude_bare(day: str, kernel: str) -> list[ChatMessage]:
    return [{"role": "system", "content": f"CWD: /testbed\nDate: {day}"}, {"role": "user", "content": "fix it"}]


def claude_reminded(day: str, kernel: str) -> list[ChatMessage]:
    reminder = f"<system-reminder>\n# currentDate\nToday's date is {day}.\n</system-reminder>"
    machine = f"<system-reminder>\n# Environment\n - OS Version: {kernel}\n</system-reminder>"
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in (machine, reminder, "fix it")]}]


def codex(day: str, kernel: str) -> list[ChatMessage]:
    zone = "Etc/UTC" if day == DAYS[0] else "America/New_York"
    context = f"<environment_context>\n  <cwd>/testbed</cwd>\n  <current_date>{day}</current_date>\n"
    context += f"  <timezone>{zone}</timezone>\n</environment_context>"
    return [{"role": "user", "content": context}, {"role": "user", "content": "fix it"}]


def mini(day: str, kernel: str) -> list[ChatMessage]:
    system = f"<system_information>\n{kernel} #1 SMP {day} x86_64\n</system_information>"
    return [{"role": "user", "content": f"Please solve this issue: fix it\n\n{system}\n"}]


WORDS = dict(zip(DAYS, ("Monday, November 30, 2026", "Monday, February 1, 2027"), strict=True))


def qwen(day: str, kernel: str) -> list[ChatMessage]:
    lines = f"<system-reminder>\nWe set up the context.\nToday's date is {WORDS[day]}.\n</system-reminder>\n"
    lines += f"<system-reminder>\nThe current date is: {WORDS[day]}. Note: it counts.\n</system-reminder>\nfix it"
    return [{"role": "user", "content": lines}]


def gemini(day: str, kernel: str) -> list[ChatMessage]:
    context = f"<session_context>\nHello.\nToday's date is {WORDS[day]} (formatted so).\n</session_context>"
    return [{"role": "user", "content": context}, {"role": "user", "content": "fix it"}]


def opencode(day: str, kernel: str) -> list[ChatMessage]:
    short = {DAYS[0]: "Mon Nov 30 2026", DAYS[1]: "Mon Feb 01 2027"}[day]
    env = f"<env>\n  Platform: linux\n  Today's date: {short}\n</env>"
    return [{"role": "system", "content": env}, {"role": "user", "content": "fix it"}]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("qwen_code", qwen),
        ("gemini_cli", gemini),
        ("opencode", opencode),
        ("claude_code", claude),
        ("claude_code", claude_bare),
        ("claude_code", claude_reminded),
        ("codex", codex),
        ("mini_swe_agent", mini),
    ],
)
def test_two_days_on_two_kernels_make_one_prompt(name: str, prompt: Any) -> None:
    sent = [prompt(day, kernel) for day, kernel in zip(DAYS, KERNELS, strict=True)]
    assert sent[0] != sent[1]
    rules = build(name).volatile
    one, two = (shown(*messages, rules=rules) for messages in sent)
    assert one == two
    assert "fix it" in str(one)
    assert not any(word in str(one) for day in DAYS for word in (day, WORDS[day]))
    assert not any(kernel.split()[1] in str(one) for kernel in KERNELS)


@pytest.mark.parametrize("name", ["claude_code", "codex"])
def test_an_issue_that_quotes_a_date_keeps_it(name: str) -> None:
    issue = "Today's date is 2019-05-05 in my log:\nDate: 2019-05-05\n<current_date>2019-05-05</current_date>"
    assert shown({"role": "user", "content": issue}, rules=build(name).volatile) == [issue]


# --- in the proxy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steady", [True, False])
async def test_the_engine_sees_the_steady_form_unless_it_is_switched_off(steady: bool) -> None:
    engine = PlayedEngine()
    rules = (("user", r"day \d+", "day 0"),)
    async with stage(engine, volatile=rules, steady_prompts=steady) as s:
        assert (await s.ask("it is day 12")).status == 200
        assert engine.requests[0].messages[0].get("content") == ("it is day 0" if steady else "it is day 12")
        digests = [record.body_digest for record in (await s.session.close()).records]
        other = open_session(s.proxy, "tomorrow", Ledger("tomorrow"), volatile=rules)
        await s.ask("it is day 13", key=other.key)
        assert (engine.requests[0].messages == engine.requests[1].messages) is steady
        assert [record.body_digest for record in (await other.close()).records] != digests, "as it was sent"


async def test_a_question_of_another_day_is_another_question() -> None:
    """Retries are told by the body that was sent: what was asked again after midnight is asked anew."""
    engine = PlayedEngine()
    async with stage(engine, volatile=(("user", r"day \d+", "day 0"),)) as s:
        await s.ask("it is day 12")
        await s.ask("it is day 13")
        assert (len(engine.requests), s.session.usage.superseded) == (2, 0)


def billed(nonce: str) -> dict[str, Any]:
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.332.{nonce}; cc_x=y;"}]
    system.append({"type": "text", "text": "You are an agent."})
    return {"model": "m", "max_tokens": 9, "system": system, "messages": [{"role": "user", "content": "hi"}]}


async def test_the_nonce_is_in_the_session_log(tmp_path: Path) -> None:
    async with SegmentLog(tmp_path / "log") as log, stage(PlayedEngine(), dialects=DIALECTS) as s:
        session = open_session(s.proxy, "billed", Ledger("billed", log))
        async with s.http.post(s.url("/v1/messages", key=session.key), json=billed("e2f")) as response:
            assert response.status == 200
        await session.close()
    found = await asyncio.to_thread(read, tmp_path / "log")
    (record,) = found.ledger.records
    shown = found.conversations()[record.call_id].messages
    assert "2.1.332;" in str(shown[0])
    assert [change.original for change in record.replaced] == ["x-anthropic-billing-header: cc_version=2.1.332.e2f"]
    assert restored(shown, record.replaced)[0] == {"role": "system", "content": billed("e2f")["system"]}


async def test_claudes_nonce_is_gone_whatever_the_harness_was_called() -> None:
    engine = PlayedEngine()
    async with stage(engine, dialects=DIALECTS) as s:
        for nonce in ("e2f", "cf6"):
            async with s.http.post(s.url("/v1/messages"), json=billed(nonce)) as response:
                assert response.status == 200
        assert engine.requests[0].messages == engine.requests[1].messages
        assert "2.1.332;" in str(engine.requests[0].messages)
