"""Finished rollouts -> rows NeMo-RL takes: whatever happened, a valid row that trains only on what was sampled."""

import base64
import itertools
import json
import math
from array import array
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nemo_gym.failure_kinds import validate_failure_kind
from nemo_gym.openai_utils import NeMoGymResponse

from polar_env.config import TrajectoryConfig
from polar_env.gym.contract import ContractError, group_disagreements, trainable_items, violations
from polar_env.gym.rows import FAILURE_KINDS, row
from polar_env.types import (
    CallKind,
    CallRecord,
    Hole,
    HoleKind,
    Outcome,
    RewardDecision,
    RolloutResult,
    SealedLedger,
    StopReason,
    ToolCall,
)
from polar_env.verdict import VerdictStatus
from trajectory_helpers import Conversation, call, call_trees, ids, ledger, rollout

PARAMS = {"input": [{"role": "user", "content": "fix it"}], "temperature": 1.0}
BASH = ToolCall("toolu_1", "bash", '{"command": "ls"}')


def session() -> SealedLedger:
    """Look, edit, say so: three calls of 2 sampled tokens each, 12 tokens in all."""
    talk = Conversation()
    talk.turn(
        [1, 2], [3, 4], call_id="look", text="", tools=(BASH,), reasoning="let me look", stop=StopReason.TOOL_CALLS
    )
    talk.turn([5, 6], [7, 8], call_id="edit", text="Editing.", tools=(BASH, replace(BASH, id="toolu_2")))
    talk.turn([9, 10], [11, 12], call_id="done", text="Done.")
    return ledger(*talk.records)


def made(result: RolloutResult, max_tokens: int | None = None, **options: Any) -> dict[str, Any]:
    return row(result, PARAMS, model="policy", max_tokens=max_tokens, **options)


def said(record: CallRecord, **options: Any) -> list[dict[str, Any]]:
    """The output items of one call."""
    return made(rollout(ledger(record)), **options)["response"]["output"]


def sampled(made_row: dict[str, Any]) -> list[int]:
    return [token for item in trainable_items(made_row) for token in item["generation_token_ids"]]


# --- a rollout that trains --------------------------------------------------------------------------------------


def test_a_solved_rollout_is_one_row_of_all_its_sampled_tokens() -> None:
    made_row = made(rollout(session()))
    assert violations(made_row) == []
    assert (made_row["reward"], made_row["mask_sample"], made_row["failure_kind"]) == (1.0, False, None)
    assert made_row["responses_create_params"] == PARAMS
    assert [item["prompt_token_ids"] for item in trainable_items(made_row)] == [
        [1, 2],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]
    assert sampled(made_row) == [3, 4, 7, 8, 11, 12]


def test_the_tensors_sit_on_the_last_item_of_each_call() -> None:
    items = made(rollout(session()))["response"]["output"]
    shape = [(item["type"], "generation_token_ids" in item) for item in items]
    assert shape == [
        ("reasoning", False),
        ("function_call", True),
        ("message", False),
        ("function_call", False),
        ("function_call", True),
        ("message", True),
    ]


def test_log_probs_are_the_recorded_ones() -> None:
    sealed = session()
    items = trainable_items(made(rollout(sealed)))
    assert [array("f", item["generation_log_probs"]) for item in items] == [r.log_probs for r in sealed.records]


def test_the_response_is_one_gym_accepts_and_keeps() -> None:
    response = made(rollout(session()))["response"]
    kept = NeMoGymResponse.model_validate(response).model_dump()
    fields = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    for before, after in zip(response["output"], kept["output"], strict=True):
        assert {key: after.get(key) for key in fields} == {key: before.get(key) for key in fields}


def test_tools_of_the_dataset_row_are_echoed_in_a_response_gym_accepts() -> None:
    tool = {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}
    params = PARAMS | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    response = row(rollout(session()), params, model="policy", max_tokens=None)["response"]
    assert NeMoGymResponse.model_validate(response).tool_choice == "required"
    assert (response["tools"], response["parallel_tool_calls"]) == ([tool], False)


def test_metrics_say_what_was_delivered() -> None:
    aside = call(9, [50], [51, 52], call_id="sub", kind=CallKind.SUB_AGENT, thread="x")
    made_row = made(rollout(ledger(*session().records, aside, call(10, [60], [61], kind=CallKind.SIDE))))
    expected = {
        "num_model_calls": 5,
        "num_chains": 2,
        "num_left_out": 1,
        "num_holes": 0,
        "sampled_tokens": 8,
        "trainable_tokens": 6,
        "delivered_fraction": 0.75,
        "total_tokens": 12,
        "starts_with_task": 1,
        "truncated": 0,
        "resolved": 1,
        "patch_bytes": 19,
        "harness_exit_code": 0,
        "agent_timed_out": 0,
        "seconds_agent": 12.5,
        "seconds_queue": 0,
    }
    assert {key: made_row[key] for key in expected} == expected


def test_polar_tells_people_what_happened() -> None:
    polar = made(rollout(session()))["polar"]
    assert (polar["task_id"], polar["harness"], polar["outcome"]) == ("demo__parser-1", "claude_code", "completed")
    assert polar["verdict"] == {
        "status": "resolved",
        "fail_to_pass": (1, 1),
        "pass_to_pass": (3, 4),
        "detail": "2 tests",
        "seconds": 1.5,
        "flags": (),
        "official": False,
    }


def test_the_patch_comes_along_byte_for_byte_to_be_graded_again() -> None:
    polar = made(replace(rollout(session()), patch=b"\xff\x00diff"))["polar"]
    assert base64.b64decode(polar["patch"]) == b"\xff\x00diff"
    assert polar["complete"] is True


def test_a_row_says_how_it_was_built_by_which_policy_and_what_it_hashes_to() -> None:
    sealed = session()
    later = replace(sealed.records[2], policy_version="step-8")
    made_row = made(rollout(replace(sealed, records=(*sealed.records[:2], later))), 100)
    polar, (chain,) = made_row["polar"], made_row["trajectories"]
    assert polar["trajectory"] == {
        "delivery": "task",
        "trained_kinds": ["agent", "sub_agent", "compaction"],
        "seed": 0,
        "max_tokens": 100,
    }
    assert polar["policy_versions"] == chain["policy_versions"] == ["step-7", "step-8"]
    assert chain["call_versions"] == ["step-7", "step-7", "step-8"]
    assert (polar["digest"]["links"], polar["digest"]["calls"]) == (6, ("look", "edit", "done"))


def versions_of(row: dict[str, Any]) -> tuple[str, str, float, float]:
    """First and last version that sampled what the row trains, how many there were, and in how many calls two."""
    polar, counts = row["polar"], (row["num_policy_versions"], row["num_calls_across_versions"])
    return polar["policy_version_first"], polar["policy_version_last"], *counts


def test_a_row_spans_the_versions_that_sampled_what_it_trains_and_no_others() -> None:
    sealed = session()
    dated = [replace(r, policy_version=v) for r, v in zip(sealed.records, ("s1+s2", "s2", "s3"), strict=True)]
    over = replace(sealed, records=tuple(dated))
    assert versions_of(made(rollout(over))) == ("s1", "s3", 3.0, 1.0)
    assert versions_of(made(rollout(over), 8)) == ("s1", "s2", 2.0, 1.0), "the cut call does not train"
    assert versions_of(made(rollout(replace(over, delivered=frozenset({"done"}))))) == ("s3", "s3", 1.0, 0.0)
    assert versions_of(made(rollout(over, Outcome.ENGINE_ERROR))) == ("", "", 0.0, 0.0)


AGES = {"s1": 2, "s2": 1, "s3": 0}


def ages_of(result: RolloutResult, max_tokens: int | None = None) -> tuple[float, float, float]:
    row = made(replace(result, ages=AGES), max_tokens)
    return row["policy_age"], row["policy_age_mean"], row["policy_stale"]


def test_a_row_tells_how_old_the_oldest_and_the_mean_of_its_tokens_are() -> None:
    sealed = session()
    dated = [replace(r, policy_version=v) for r, v in zip(sealed.records, ("s1+s2", "s2", "s3"), strict=True)]
    over = replace(sealed, records=tuple(dated))
    assert ages_of(rollout(over)) == (2.0, 1.0, 0.0)
    assert ages_of(rollout(over), 8) == (2.0, 1.5, 0.0), "the cut call does not train"
    assert ages_of(rollout(replace(over, delivered=frozenset({"done"})))) == (0.0, 0.0, 0.0)
    assert ages_of(rollout(session())) == (0.0, 0.0, 0.0), "weights nobody named have no age"


def test_a_row_that_is_too_old_says_by_how_much_also_where_that_is_only_reported() -> None:
    sealed = session()
    old = replace(sealed, records=tuple(replace(r, policy_version="s1") for r in sealed.records))
    reported = replace(rollout(old), stale="s1 is 2 updates behind s3")
    assert ages_of(reported) == (2.0, 2.0, 1.0)
    assert made(reported)["mask_sample"] is False
    masked = replace(rollout(old, Outcome.STALE_POLICY, None, detail="too old"), stale="too old")
    assert ages_of(masked) == (2.0, 2.0, 1.0)
    row = made(masked)
    assert (row["mask_sample"], row["failure_kind"], row["ended_early"]) == (True, "polar_env:stale_policy", 1.0)


def test_the_digest_covers_what_the_row_delivers_and_nothing_of_a_masked_one() -> None:
    whole, cut = made(rollout(session())), made(rollout(session()), 8)
    masked = made(rollout(session(), Outcome.ENGINE_ERROR))
    assert [r["polar"]["digest"]["links"] for r in (whole, cut, masked)] == [6, 4, 0]
    assert len({r["polar"]["digest"]["sha256"] for r in (whole, cut, masked)}) == 3


# --- what the model said ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "thought", "message"),
    [
        ("<think>why</think>because", "why", "because"),
        ("one <think>a</think>two", "a", "one two"),
        ("the template opened it</think>answer", "the template opened it", "answer"),
        ("I will call <tool_call>{bad json", "<tool_call>{bad json", "I will call "),
        ("<think>never closed", "<think>never closed", None),
        ("<thi<think>x</think>nk>y", "x\n<think>y", None),
    ],
)
def test_markup_a_parser_left_behind_is_reasoning_not_text(text: str, thought: str, message: str | None) -> None:
    items = said(call(0, [1], [2], text=text))
    thoughts = [item["summary"][0]["text"] for item in items if item["type"] == "reasoning"]
    messages = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    assert "\n".join(thoughts) == thought
    assert messages == ([] if message is None else [message])
    assert "generation_token_ids" in items[-1]


def test_a_call_that_said_nothing_still_has_an_item_for_its_tokens() -> None:
    (item,) = said(call(0, [1], [2], text=""))
    assert (item["content"][0]["text"], item["generation_token_ids"]) == ("", [2])


@pytest.mark.parametrize("field", ["text", "reasoning"])
@pytest.mark.parametrize("thought", ["<tool_call>{bad json", "<think>a <think>b"])
def test_a_thought_nemo_rl_would_punish_does_not_carry_the_tokens(field: str, thought: str) -> None:
    reasoning, message = said(call(0, [1], [2], **{"text": "", field: thought}))
    assert (reasoning["summary"][0]["text"], "generation_token_ids" in reasoning) == (thought, False)
    assert (message["content"][0]["text"], message["generation_token_ids"]) == ("", [2])


def test_seconds_are_rounded_so_that_two_never_differ_by_a_few_bits() -> None:
    close = [made(replace(rollout(session()), seconds={"agent": value})) for value in (12.5, 12.5 + 2e-15)]
    assert [made_row["seconds_agent"] for made_row in close] == [12.5, 12.5]


def test_a_call_cut_at_its_length_is_incomplete() -> None:
    (item,) = said(call(0, [1], [2], stop=StopReason.LENGTH))
    assert item["status"] == "incomplete"


def test_lone_surrogates_do_not_reach_gyms_encoder() -> None:
    tool = ToolCall("t\ud800", "bash", '"\udfff"')
    made_row = made(rollout(ledger(call(0, [1], [2], text="a\ud83d\ude00b\ud800", tools=(tool,))), detail="\ud800"))
    orjson.dumps(made_row)
    assert made_row["response"]["output"][0]["content"][0]["text"] == "a\U0001f600b\ufffd"


# --- chains -----------------------------------------------------------------------------------------------------


def forked() -> SealedLedger:
    """A trunk, a side branch of one call, and the main line."""
    talk = Conversation()
    talk.turn([1], [2], call_id="trunk")
    branch = call(1, talk.history + ids(9), [8, 8], call_id="branch", kind=CallKind.SUB_AGENT, thread="x")
    main = call(2, talk.history + ids(3), [4], call_id="main")
    return ledger(*talk.records, branch, main)


def test_all_chains_are_in_trajectories_and_count_as_one_rollout() -> None:
    main, branch = made(rollout(forked()))["trajectories"]
    assert (main["delivered"], branch["delivered"]) == (True, False)
    assert (main["weight"], branch["weight"]) == (0.5, 0.5)
    assert (branch["call_ids"], branch["branched_from"], branch["kind"]) == (["trunk", "branch"], "trunk", "sub_agent")
    assert main["token_ids"] == [1, 2, 3, 4]
    assert main["loss_mask"] == [0, 1, 0, 1]
    assert branch["token_ids"] == [1, 2, 9, 8, 8]
    assert branch["loss_mask"] == [0, 0, 0, 1, 1]


def test_log_probs_stand_beside_the_tokens_they_belong_to() -> None:
    sealed = session()
    (chain,) = made(rollout(sealed))["trajectories"]
    spans = [chain["log_probs"][i : i + 2] for i in (2, 6, 10)]
    assert [array("f", span) for span in spans] == [record.log_probs for record in sealed.records]
    assert [at for at, value in enumerate(chain["log_probs"]) if value] == [2, 3, 6, 7, 10, 11]


def test_context_calls_of_a_delivered_branch_carry_no_ids() -> None:
    sealed = forked()
    result = rollout(sealed)
    on_branch = replace(result, trajectory=replace(result.trajectory, delivered=1))
    made_row = made(on_branch)
    assert violations(made_row) == []
    (only,) = trainable_items(made_row)
    assert (only["prompt_token_ids"], only["generation_token_ids"]) == ([1, 2, 9], [8, 8])


def test_trajectories_can_be_left_out_but_not_their_key() -> None:
    assert made(rollout(forked()), include_trajectories=False)["trajectories"] == []


def test_a_row_that_does_not_start_with_the_tasks_prompt_says_so() -> None:
    compacted = call(3, [1, 77], [5], call_id="after")
    sealed = ledger(*session().records, compacted)
    made_row = made(rollout(sealed, trajectory=TrajectoryConfig(delivery="main")))
    assert sampled(made_row) == [5]
    assert made_row["starts_with_task"] == 0.0
    assert len(group_disagreements([made(rollout(session())), made(rollout(session())), made_row])) == 1
    by_default = made(rollout(sealed))
    assert by_default["starts_with_task"] == 1.0
    assert group_disagreements([made(rollout(session())), by_default]) == []


# --- trimming ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "tokens"), [(12, 6), (11, 4), (8, 4), (7, 2), (4, 2)])
def test_a_row_is_cut_after_a_whole_call_and_says_so(limit: int, tokens: int) -> None:
    made_row = made(rollout(session()), limit)
    assert violations(made_row, limit) == []
    assert len(sampled(made_row)) == tokens == made_row["trainable_tokens"]
    assert made_row["truncated"] == (limit < 12)
    assert made_row["mask_sample"] is False


def test_a_rollout_whose_first_call_does_not_fit_is_masked_with_the_reason() -> None:
    made_row = made(rollout(session()), 3)
    assert violations(made_row, 3) == []
    assert (made_row["mask_sample"], made_row["failure_kind"]) == (True, "polar_env:no_trainable_tokens")
    assert "fits" in made_row["failure_reason"]
    assert (made_row["reward"], made_row["truncated"]) == (0.0, 1.0)


# --- masked rows ------------------------------------------------------------------------------------------------


def assert_placeholder(made_row: dict[str, Any]) -> None:
    assert violations(made_row) == []
    assert made_row["mask_sample"] is made_row["instance_config"]["mask_sample"] is True
    assert made_row["reward"] == made_row["trainable_tokens"] == 0.0
    (item,) = trainable_items(made_row)
    assert len(item["prompt_token_ids"]) == len(item["generation_token_ids"]) == 1
    for chain in made_row["trajectories"]:
        assert chain["weight"] == 0.0
        assert not any(chain["loss_mask"])


def test_a_masked_rollout_keeps_its_text_and_its_chains_but_not_one_token_to_train_on() -> None:
    made_row = made(rollout(session(), Outcome.ENGINE_ERROR, detail="vLLM died mid-stream"))
    assert_placeholder(made_row)
    assert (made_row["failure_kind"], made_row["failure_reason"]) == ("polar_env:engine_error", "vLLM died mid-stream")
    assert [item["content"][0]["text"] for item in made_row["response"]["output"] if item["type"] == "message"] == [
        "Editing.",
        "Done.",
        "",
    ]
    assert len(made_row["trajectories"][0]["token_ids"]) == 12


def test_a_masked_sibling_is_not_in_its_groups_baseline() -> None:
    live = made(rollout(session()))
    masked = made(rollout(session(), Outcome.SANDBOX_ERROR))
    assert group_disagreements([live, masked, live]) == []
    assert masked["first_prompt_digest"] != live["first_prompt_digest"]


def test_a_rollout_without_a_call_is_a_valid_masked_row() -> None:
    made_row = made(replace(rollout(ledger(), Outcome.NO_CALLS, None), exit=None))
    assert_placeholder(made_row)
    assert made_row["failure_kind"] == "polar_env:no_calls"
    assert made_row["failure_reason"] == "infrastructure: no_calls"
    assert made_row["harness_exit_code"] == -1.0
    NeMoGymResponse.model_validate(made_row["response"])


def test_an_unfinished_rollout_trains_with_its_failure_named() -> None:
    made_row = made(rollout(session(), Outcome.AGENT_TIMEOUT, VerdictStatus.UNRESOLVED))
    assert (made_row["mask_sample"], made_row["reward"], made_row["failure_kind"]) == (False, 0.0, "agent_timeout")
    assert (made_row["agent_timed_out"], made_row["failure_reason"]) == (1.0, "agent_timeout")
    assert len(sampled(made_row)) == 6


def test_an_incomplete_capture_is_masked_and_lists_its_holes() -> None:
    hole = Hole(HoleKind.LOST_RECORD, None, "disk full")
    made_row = made(rollout(ledger(*session().records, holes=(hole,))))
    assert_placeholder(made_row)
    assert made_row["failure_kind"] == "polar_env:capture_incomplete"
    assert made_row["polar"]["holes"] == ["lost_record: disk full"]
    assert made_row["polar"]["complete"] is False


def test_a_completed_rollout_that_could_not_be_graded_is_the_verifiers_failure() -> None:
    made_row = made(rollout(session(), status=VerdictStatus.ERROR))
    assert_placeholder(made_row)
    assert made_row["failure_kind"] == "verifier_error"


def test_a_verdict_masked_for_its_flags_is_not_the_verifiers_failure() -> None:
    solved = rollout(session(), status=VerdictStatus.RESOLVED)
    flagged = replace(solved, decision=RewardDecision(0.0, masked=True, reason="flagged: unproven"))
    made_row = made(flagged)
    assert_placeholder(made_row)
    assert (made_row["failure_kind"], made_row["failure_reason"]) == ("polar_env:flagged", "flagged: unproven")


def test_every_ending_has_a_failure_kind_gym_knows(caplog: pytest.LogCaptureFixture) -> None:
    assert set(FAILURE_KINDS) == set(Outcome)
    for kind in (*FAILURE_KINDS.values(), "polar_env:flagged"):
        validate_failure_kind(kind)
    assert caplog.records == []


def test_a_row_the_judge_refuses_becomes_a_placeholder_that_says_what_was_wrong() -> None:
    result = rollout(session())
    chain = result.trajectory.chains[0]
    shifted = replace(chain.turns[1], log_probs=array("f", [-1.0]))
    broken = replace(chain, turns=(chain.turns[0], shifted, chain.turns[2]))
    made_row = made(
        replace(result, trajectory=replace(result.trajectory, chains=(broken,))), include_trajectories=False
    )
    assert_placeholder(made_row)
    assert made_row["failure_kind"] == "polar_env:contract_violation"
    assert "2 sampled ids and 1 log-probs" in made_row["failure_reason"]


def test_parameters_that_are_no_json_are_an_error_not_a_row() -> None:
    with pytest.raises(ContractError, match="rule 1"):
        row(rollout(session()), {"input": [], "top_p": math.nan}, model="policy", max_tokens=None)


# --- any rollout ------------------------------------------------------------------------------------------------


def test_the_keys_are_the_same_for_every_ending() -> None:
    sessions = (session(), ledger())
    statuses = (None, *VerdictStatus)
    rows = [made(rollout(s, o, v)) for s, o, v in itertools.product(sessions, Outcome, statuses)]
    assert len({tuple(made_row) for made_row in rows}) == 1
    numbers = {tuple(k for k, v in made_row.items() if isinstance(v, float | bool)) for made_row in rows}
    assert len(numbers) == 1
    assert all(violations(made_row) == [] for made_row in rows)


rollouts = st.builds(
    lambda sealed, outcome, status, delivery: rollout(
        sealed, outcome, status, trajectory=TrajectoryConfig.model_validate({"delivery": delivery})
    ),
    call_trees(),
    st.sampled_from([*Outcome, *[Outcome.COMPLETED] * 6]),
    st.sampled_from([None, *VerdictStatus, *[VerdictStatus.RESOLVED] * 6]),
    st.sampled_from(["task", "main", "longest", "sample"]),
)


@given(rollouts, st.none() | st.integers(2, 12))
def test_any_session_gives_a_row_nemo_rl_takes(result: RolloutResult, max_tokens: int | None) -> None:
    made_row = made(result, max_tokens)
    assert violations(made_row, max_tokens) == []
    NeMoGymResponse.model_validate(made_row["response"])
    assert violations(orjson.loads(orjson.dumps(made_row)), max_tokens) == []
    assert json.loads(json.dumps(made_row, allow_nan=False))["mask_sample"] is made_row["mask_sample"]


@given(rollouts)
def test_a_row_trains_on_exactly_the_tokens_of_its_chain_and_the_chains_on_every_token_once(
    result: RolloutResult,
) -> None:
    made_row = made(result)
    by_mask = sum(sum(chain["loss_mask"]) for chain in made_row["trajectories"])
    if made_row["mask_sample"]:
        assert_placeholder(made_row)
        return
    trained = [list(t.sampled_ids) for t in result.trajectory.main.turns if t.trained] if result.trajectory.main else []
    assert [item["generation_token_ids"] for item in trainable_items(made_row)] == trained
    assert by_mask == result.trajectory.sampled_tokens
    assert math.isclose(sum(chain["weight"] for chain in made_row["trajectories"]), 1.0)
