"""The text engine: words from an API that gives no ids, and what becomes of them everywhere ids would be."""

import asyncio
import contextlib
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engine_helpers import BASH, Answer, Step, ask, event, play, user
from polar_env.capture import Ledger, SegmentLog, judge, rebuild
from polar_env.config import EngineConfig, PolarConfig, RewardConfig, TrajectoryConfig
from polar_env.engine import Session
from polar_env.engine.text import TextEngine
from polar_env.errors import EngineBusy, EngineError, EngineOverflow, EngineRefused
from polar_env.export import ExportError, Job
from polar_env.export.write import export
from polar_env.gym import contract, rows
from polar_env.proxy import DIALECTS
from polar_env.reward import decide
from polar_env.standalone import describe
from polar_env.trajectory import NO_IDS, build
from polar_env.types import Delta, HoleKind, Outcome, RolloutResult, Sampling, StopReason, Usage
from polar_env.verdict import Verdict, VerdictStatus
from polar_env.verify import violations
from proxy_helpers import stage
from served_helpers import always, serving

KNOWN = {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "temperature"}
KNOWN |= {"top_p", "max_tokens"}
"""Fields a strict chat API takes; anything else it answers with a 400, as OpenAI's does."""


class Api:
    """A strict chat API: no ids, no log-probs. Its answers are vLLM's without what an API does not give."""

    def __init__(self, *answers: Answer, takes: frozenset[str] = frozenset(KNOWN)) -> None:
        self.answers = list(answers) or [Answer(with_ids=False)]
        self.takes = takes
        self.requests: list[dict[str, Any]] = []
        self.started, self.aborted = asyncio.Event(), asyncio.Event()
        self.hang = False

    @contextlib.asynccontextmanager
    async def run(self, **settings: Any):
        async with serving({"POST /v1/chat/completions": self._chat, "GET /v1/models": self._models}) as url:
            engine = TextEngine(EngineConfig(kind="text", base_urls=(url,), **settings))
            try:
                yield engine
            finally:
                await engine.aclose()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "strong-1", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        for unknown in body.keys() - self.takes:
            hint = ". Use 'max_completion_tokens' instead." if unknown == "max_tokens" else ""
            return web.json_response({"error": {"message": f"Unsupported parameter: '{unknown}'{hint}"}}, status=400)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not body["stream"]:
            return web.json_response(without_logprobs(answer.whole()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in answer.chunks()[: 3 if self.hang else None]:
            await response.write(event(without_logprobs(chunk)))
        if self.hang:
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.set()
        await response.write(b"data: [DONE]\n\n")
        return response


def without_logprobs(chunk: dict[str, Any]) -> dict[str, Any]:
    bare = [{name: value for name, value in choice.items() if name != "logprobs"} for choice in chunk["choices"]]
    return {**chunk, "choices": bare, "system_fingerprint": "fp_44"}


def words(text: str) -> Answer:
    return Answer((Step((1, 2), (None, None), {"content": text}),), with_ids=False, finish="stop")


# --- a good answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_words_and_no_tensor(stream):
    api = Api()
    async with api.run(stream=stream) as engine:
        deltas, reply = await play(engine, ask(), sampling=Sampling(0.7, 0.9, None, 99))
    assert (reply.ids, reply.versioned) == (False, False)
    assert (reply.prompt_ids, reply.sampled_ids, reply.log_probs) == (array("i"), array("i"), array("f"))
    assert reply.turn.text == "I will look."
    assert [(call.name, call.arguments) for call in reply.turn.tool_calls] == [("bash", '{"command": "ls"}')]
    assert (reply.turn.stop, reply.turn.usage) == (StopReason.TOOL_CALLS, Usage(4, 9))
    assert reply.policy_version == "strong-1@fp_44"
    assert "".join(delta.text for delta in deltas if delta.kind == "text") == "I will look."
    assert judge("c", reply) == (), "what an API cannot give is no hole"


async def test_nothing_is_sent_that_a_strict_api_would_refuse():
    api = Api()
    async with api.run() as engine:
        await play(engine, ask(user("Hi"), tools=()), sampling=Sampling(1.0, 1.0, None, 9))
    assert api.requests[0].keys() <= KNOWN
    assert (api.requests[0]["model"], api.requests[0]["max_tokens"]) == ("strong-1", 9)


async def test_an_api_that_wants_the_other_name_of_the_cap_gets_it_from_then_on():
    api = Api(takes=frozenset(KNOWN - {"max_tokens"} | {"max_completion_tokens"}))
    async with api.run() as engine:
        for _ in range(2):
            await play(engine, ask(), sampling=Sampling(max_tokens=9))
    caps = [{name for name in body if name.startswith("max_")} for body in api.requests]
    assert caps == [{"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]
    assert api.requests[-1]["max_completion_tokens"] == 9


async def test_thoughts_go_back_under_the_name_such_apis_have_for_them():
    said = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    api = Api(words("y"))
    async with api.run() as engine:
        await play(engine, ask(user("Hi"), said, user("Go on.")))
    assert api.requests[0]["messages"][1] == said


async def test_the_configured_version_is_the_replys_unless_a_trainer_declares_one():
    async with Api().run(policy_version="teacher-3") as engine:
        _, reply = await play(engine, ask())
    assert (reply.policy_version, reply.versioned) == ("teacher-3", False)


async def test_count_tokens_is_an_estimate_that_grows_with_the_request():
    async with Api().run() as engine:
        short, long = await engine.count_tokens(ask()), await engine.count_tokens(ask(user("word " * 400)))
    assert 400 < long - short < 600


@pytest.mark.parametrize(
    ("given", "asked"),
    [("", "/v1/chat/completions"), ("/v1/", "/v1/chat/completions"), ("/api/paas/v4", "/api/paas/v4/chat/completions")],
)
async def test_an_address_keeps_the_path_it_has(given, asked):
    async with serving({f"POST {asked}": always(200, Answer(with_ids=False).whole())}) as url:
        engine = TextEngine(EngineConfig(kind="text", base_urls=(url + given,), model="m", stream=False))
        _, reply = await play(engine, ask())
        await engine.aclose()
    assert reply.turn.text == "I will look."


# --- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "messages[1].image_url is only supported by certain models", EngineRefused),
        (400, "This model's maximum context length is 8192 tokens.", EngineOverflow),
        (400, "prompt is too long: 205011 tokens > 200000 maximum", EngineOverflow),
        (400, "Your input exceeds the context window of this model.", EngineOverflow),
        (429, "Rate limit reached", EngineBusy),
        (529, "Overloaded", EngineBusy),
        (401, "Incorrect API key provided", EngineError),
        (402, "Insufficient balance", EngineError),
        (500, "Internal error", EngineError),
    ],
)
async def test_an_apis_refusal_is_the_typed_error_of_its_meaning(status, message, kind):
    routes = {"POST /v1/chat/completions": always(status, {"error": {"message": message}})}
    async with serving(routes) as url:
        engine = TextEngine(EngineConfig(kind="text", base_urls=(url,), model="m"))
        with pytest.raises(EngineError, match=message.split()[-1][:5]) as caught:
            await play(engine, ask(), sampling=Sampling(max_tokens=9))
        await engine.aclose()
    assert type(caught.value) is kind or (kind is EngineError and not isinstance(caught.value, EngineRefused))


async def test_an_answer_that_breaks_off_is_an_engine_error():
    api = Api(Answer(with_ids=False, finish=""))
    async with api.run() as engine:
        with pytest.raises(EngineError, match="without a finish reason"):
            await play(engine, ask())


async def test_closing_the_generation_closes_the_request():
    api = Api()
    api.hang = True
    async with api.run() as engine:
        parts = engine.generate(ask(), Sampling(), Session("s"))
        assert await anext(parts) == Delta("text", "I will")
        await api.started.wait()
        await parts.aclose()
        await asyncio.wait_for(api.aborted.wait(), 5)


async def test_a_filtered_answer_is_a_hole_like_any_ending_nobody_knows():
    async with Api(Answer(with_ids=False, finish="content_filter")).run() as engine:
        _, reply = await play(engine, ask())
    assert {hole.kind for hole in judge("c", reply)} == {HoleKind.UNKNOWN_FINISH}


async def test_check_says_plainly_what_is_not_there():
    async with Api(words("Hello")).run(max_model_len=4096) as engine:
        facts = await engine.check()
    assert (facts.model, facts.max_model_len, facts.ids, facts.real_tensors) == ("strong-1", 4096, False, False)
    assert "no token ids" in facts.notes[0]


@pytest.mark.parametrize(
    ("routes", "told"),
    [
        ({"POST /v1/chat/completions": always(400, {"error": {"message": "no"}})}, "refused a plain question"),
        ({"POST /v1/chat/completions": always(200, words("").whole())}, "answered with no words"),
        ({}, r"404.*check engine\.model and engine\.base_urls"),
    ],
)
async def test_check_refuses_what_is_no_chat_api(routes, told):
    async with serving(routes) as url:
        engine = TextEngine(EngineConfig(kind="text", base_urls=(url,), model="m", stream=False))
        with pytest.raises(EngineError, match=told):
            await engine.check()
        await engine.aclose()


def test_an_engine_without_an_address_is_refused_at_once():
    with pytest.raises(EngineError, match="base_urls is empty"):
        TextEngine(EngineConfig(kind="text"))


# --- through the proxy: what is captured, and what becomes of it ------------------------------------------------


@contextlib.asynccontextmanager
async def captured(folder: Path, *answers: Answer):
    """A session of the real proxy on a text engine, with a durable log."""
    async with (
        Api(*answers).run() as engine,
        SegmentLog(folder / "s") as log,
        stage(engine, dialects=DIALECTS, log=log) as s,
    ):
        yield s


async def said(s, *messages: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "m", "messages": list(messages), "tools": [{"type": "function", "function": BASH}]}
    async with s.http.post(s.url("/v1/chat/completions"), json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]["message"]


async def conversation(folder: Path) -> Ledger:
    """Two turns that carry on one another, sealed."""
    async with captured(folder, Answer(with_ids=False), words("Done.")) as s:
        task = user("Fix the bug.")
        first = await said(s, task)
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "a.py"}
        await said(s, task, first, result)
        return await s.session.close()


def finished(ledger: Any, **more: Any) -> RolloutResult:
    """That session, resolved by the grader."""
    verdict = Verdict(VerdictStatus.RESOLVED, (1, 1), (1, 1))
    outcome = more.get("outcome", Outcome.COMPLETED)
    return RolloutResult(
        task_id="t",
        harness="h",
        outcome=outcome,
        detail="",
        verdict=verdict,
        decision=decide(outcome, verdict, ledger.complete, RewardConfig()),
        trajectory=build(ledger, TrajectoryConfig()),
        ledger=ledger,
        patch=b"diff",
        exit=None,
    )


def row_of(ledger: Any, **more: Any) -> dict[str, Any]:
    """Its row, as it is read back."""
    return json.loads(json.dumps(rows.row(finished(ledger, **more), {"input": "x"}, model="m", max_tokens=4096)))


async def test_a_session_of_words_is_complete_and_can_be_rebuilt(tmp_path):
    ledger = await conversation(tmp_path)
    assert ledger.complete
    assert [record.ids for record in ledger.records] == [False, False]
    assert rebuild(tmp_path / "s") == ledger


async def test_calls_are_joined_by_what_was_said_and_none_of_them_trains(tmp_path):
    trajectory = build(await conversation(tmp_path), TrajectoryConfig())
    assert [len(chain.turns) for chain in trajectory.chains] == [2]
    assert (trajectory.delivered, trajectory.sampled_tokens) == (0, 0)
    assert not any(turn.trained for chain in trajectory.chains for turn in chain.turns)
    assert set(trajectory.left_out.values()) == {NO_IDS}
    assert len(trajectory.left_out) == 2


@pytest.mark.parametrize("delivery", ["main", "longest", "sample"])
async def test_every_way_to_deliver_gives_the_conversation_it_finished_on(tmp_path, delivery):
    trajectory = build(await conversation(tmp_path), TrajectoryConfig(delivery=delivery))
    assert trajectory.main is not None
    assert [turn.call_id for turn in trajectory.main.turns] == ["s-0000", "s-0001"]


async def test_a_conversation_begun_anew_is_a_chain_of_its_own(tmp_path):
    async with captured(tmp_path, words("One."), words("Two.")) as s:
        await said(s, user("Fix the bug."))
        await said(s, user("A summary of the above."))
        ledger = await s.session.close()
    assert [len(chain.turns) for chain in build(ledger, TrajectoryConfig()).chains] == [1, 1]


async def test_the_row_is_masked_with_its_reason_and_keeps_its_reward(tmp_path):
    row = row_of(await conversation(tmp_path))
    assert contract.violations(row) == []
    assert (row["mask_sample"], row["reward"], row["resolved"], row["text_only"]) == (True, 1.0, 1.0, 1.0)
    assert row["failure_kind"] == "polar_env:text_only"
    assert "export it as sft or neutral" in row["polar"]["masked_reason"]
    assert row["trainable_tokens"] == 0
    spoken = [item for item in row["response"]["output"] if item["type"] in ("message", "function_call")]
    assert [item.get("name") or item["content"][0]["text"] for item in spoken] == ["I will look.", "bash", "Done.", ""]
    assert violations(row, tmp_path) == []


async def test_an_infrastructure_failure_stays_one(tmp_path):
    row = row_of(await conversation(tmp_path), outcome=Outcome.SANDBOX_ERROR)
    assert (row["failure_kind"], row["reward"], row["mask_sample"]) == ("polar_env:sandbox_error", 0.0, True)


def written(row: Mapping[str, Any], folder: Path) -> Path:
    source = folder / "rollouts.jsonl"
    source.write_text(json.dumps(row) + "\n")
    return source


def exported(name: str, row: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    out = folder / f"{name}.jsonl"
    export(name, written(row, folder), out, Job(sessions=folder))
    return [json.loads(line) for line in out.read_text().splitlines()]


async def test_sft_carries_the_conversation(tmp_path):
    (line,) = exported("sft", row_of(await conversation(tmp_path)), tmp_path)
    assert [message["role"] for message in line["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert line["messages"][1]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert line["messages"][-1] == {"role": "assistant", "content": "Done."}
    assert line["tools"][0]["function"]["name"] == "bash"


async def test_sft_leaves_out_what_the_grader_did_not_accept(tmp_path):
    row = row_of(await conversation(tmp_path))
    assert exported("sft", {**row, "reward": 0.0}, tmp_path) == []


async def test_neutral_carries_the_answers_and_no_weight(tmp_path):
    (line,) = exported("neutral", row_of(await conversation(tmp_path)), tmp_path)
    assert (line["token_ids"], line["loss_mask"], line["log_probs"], line["weight"]) == ([], [], [], 0.0)
    assert (line["masked"], line["reward"], line["delivered"]) == (True, 1.0, True)
    first, last = map(json.loads, line["answers"])
    assert (first["content"], first["tool_calls"][0]["function"]["name"]) == ("I will look.", "bash")
    assert last == {"role": "assistant", "content": "Done."}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
async def test_neutral_columns_carry_them_too(tmp_path, suffix):
    row = row_of(await conversation(tmp_path))
    assert export("neutral", written(row, tmp_path), tmp_path / f"out{suffix}", Job()) == 1


@pytest.mark.parametrize("name", ["nemo_rl", "trl", "verl", "slime"])
async def test_formats_of_token_ids_refuse_it_and_say_what_to_export(tmp_path, name):
    row = row_of(await conversation(tmp_path))
    with pytest.raises(ExportError, match=r"has no token ids \(engine\.kind=text\): export it as sft or neutral"):
        exported(name, row, tmp_path)


async def test_the_table_of_a_session_says_why_nothing_trains(tmp_path):
    await conversation(tmp_path)
    told, _ = describe(tmp_path / "s", PolarConfig())
    assert told.count(f"no: {NO_IDS}") == 2
