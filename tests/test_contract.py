"""NeMo-RL's rules: a good row has no violation, and each way to break one is found and named by its number."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from polar_env.gym.contract import ContractError, check, first_prompt_digest, group_disagreements, violations

Row = dict[str, Any]
Change = Callable[[Row], object]


def item(prompt: list[int], sampled: list[int], text: str = "ok") -> Row:
    return {
        "type": "message",
        "content": [{"type": "output_text", "text": text}],
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
    }


def good() -> Row:
    """Two trained calls around a call whose tokens are left out."""
    aside = {"type": "message", "content": [{"type": "output_text", "text": "untrained"}]}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "fix it"}]},
        "response": {"output": [item([1, 2], [3, 4]), aside, item([1, 2, 3, 4, 5], [6])]},
        "reward": 1.0,
        "mask_sample": False,
        "instance_config": {"mask_sample": False},
        "num_model_calls": 2.0,
    }


def output(row: Row) -> list[Any]:
    return row["response"]["output"]


def retoken(row: Row, prompt: list[Any]) -> None:
    """The same first prompt in both calls."""
    output(row)[0]["prompt_token_ids"] = prompt
    output(row)[2]["prompt_token_ids"] = [*prompt, 3, 4, 5]


def only_thought(row: Row, text: str) -> None:
    """The first call was nothing but this thought, which therefore carries its tokens."""
    del output(row)[0]["content"]
    output(row)[0].update(type="reasoning", summary=[{"type": "summary_text", "text": text}])


def test_a_good_row_is_accepted() -> None:
    assert violations(good(), max_tokens=6) == []
    check(good())


@pytest.mark.parametrize("reward", [0, 0.25, 0.50390625, 1.0])
def test_a_reward_between_the_ends_is_accepted_when_it_is_exact(reward: float) -> None:
    assert violations(good() | {"reward": reward, "reward_components": {}}) == []


BREAKS: list[tuple[str, Change]] = [
    ("rule 1: not a JSON object in UTF-8", lambda row: row.update(polar={"detail": "\ud800"})),
    ("rule 1: not a JSON object in UTF-8", lambda row: row.update(polar={"x": math.nan})),
    ("rule 1: not a JSON object in UTF-8", lambda row: row.update(polar={"patch": b"bytes"})),
    ("rule 2: response.output must be a list", lambda row: row.pop("response")),
    ("rule 2: response.output must be a list", lambda row: row.update(response={"output": "text"})),
    ("rule 2: response.output must be a list", lambda row: output(row).append("text")),
    ("rule 2: responses_create_params.input", lambda row: row["responses_create_params"].pop("input")),
    (
        "rule 2: reward must be in [0, 1] and a multiple of 1/256, not nan",
        lambda row: row.update(reward=math.nan),
    ),
    ("rule 2: reward must be in [0, 1] and a multiple of 1/256, not 0.3", lambda row: row.update(reward=0.3)),
    ("rule 2: reward must be in [0, 1] and a multiple of 1/256, not 2.0", lambda row: row.update(reward=2.0)),
    (
        "rule 2: reward must be in [0, 1] and a multiple of 1/256, not True",
        lambda row: row.update(reward=True),
    ),
    ("rule 2: reward must be in [0, 1] and a multiple of 1/256, not None", lambda row: row.pop("reward")),
    ("rule 3: output[2] needs all of", lambda row: output(row)[2].pop("prompt_token_ids")),
    ("rule 3: output[1] needs all of", lambda row: output(row)[1].update(generation_token_ids=[])),
    ("rule 3: output[2] has 1 sampled ids and 2", lambda row: output(row)[2]["generation_log_probs"].append(-1.0)),
    ("rule 3: output[0] has a log-prob", lambda row: output(row)[0].update(generation_log_probs=[-1.0, math.nan])),
    ("rule 3: output[0] has a log-prob", lambda row: output(row)[0].update(generation_log_probs=[-1.0, 0.5])),
    ("rule 3: trainable item 0 has a negative", lambda row: output(row)[0].update(prompt_token_ids=[-1, 2])),
    ("rule 3: trainable item 1 has a negative", lambda row: output(row)[2].update(generation_token_ids=[-6])),
    ("rule 2: reward_components must add up", lambda row: row.update(reward_components={"tests": 0.25})),
    ("rule 2: reward_components must add up", lambda row: row.update(reward_components={"tests": None})),
    ("rule 2: reward_components must add up", lambda row: row.update(reward_components=[1.0])),
    ("rule 3: trainable item 0 has a token id that is a float", lambda row: retoken(row, [1.0, 2])),
    ("rule 3: trainable item 0 has a token id that is a bool", lambda row: retoken(row, [True, 2])),
    ("rule 3: trainable item 0 has a token id that is a str", lambda row: retoken(row, ["a", "b"])),
    ("rule 3: trainable item 0 has a token id above int32", lambda row: retoken(row, [2**31, 2])),
    ("rule 3: output[0] needs all of", lambda row: output(row)[0].update(prompt_token_ids="ab")),
    ("rule 3: output[0] has a log-prob", lambda row: output(row)[0].update(generation_log_probs=["a", "b"])),
    ("rule 4: trainable item 1 does not continue", lambda row: output(row)[2].update(prompt_token_ids=[1, 2, 3, 9, 5])),
    ("rule 4: trainable item 1 does not continue", lambda row: output(row)[2].update(prompt_token_ids=[1, 2])),
    ("rule 5: no trainable item", lambda row: row.update(response={"output": []})),
    ("rule 6: trainable item 1 adds no prompt", lambda row: output(row)[2].update(prompt_token_ids=[1, 2, 3, 4])),
    ("rule 7: mask_sample is True at top level and False", lambda row: row.update(mask_sample=True)),
    ("rule 7: mask_sample is False at top level and None", lambda row: row.pop("instance_config")),
    ("rule 7: mask_sample is None", lambda row: row.pop("mask_sample")),
    ("rule 9: seconds is inf", lambda row: row.update(seconds=math.inf)),
    ("rule 9: nanoseconds is an integer", lambda row: row.update(nanoseconds=1_700_000_000_000_000_000)),
    ("rule 9: count is an integer", lambda row: row.update(count=10**400)),
    ("rule 10: 6 tokens, the policy takes 5", lambda row: None),
    ("rule 11: <think> in the text of output[1]", lambda row: output(row)[1]["content"][0].update(text="a <think>")),
    ("rule 11: </think>", lambda row: output(row)[0]["content"][0].update(text="hm</think> ok")),
    ("rule 11: <tool_call>", lambda row: output(row)[0]["content"][0].update(text="<tool_call>{")),
    ("rule 11: <function_call>", lambda row: output(row)[0]["content"][0].update(text="<function_call>{")),
    ("rule 11: <think>", lambda row: output(row)[0]["content"].insert(0, {"type": "refusal", "text": "<think>"})),
    ("rule 11: <tool_call> in the text of output[0]", lambda row: only_thought(row, "<tool_call>{")),
    ("rule 11: <think> in the text of output[0]", lambda row: only_thought(row, "<think>a<think>b")),
]


@pytest.mark.parametrize(("told", "change"), BREAKS, ids=[f"{i}-{told[:26]}" for i, (told, _) in enumerate(BREAKS)])
def test_each_broken_rule_is_named(told: str, change: Change) -> None:
    row = good()
    change(row)
    limit = 5 if told.startswith("rule 10") else None
    assert any(found.startswith(told) for found in violations(row, limit)), violations(row, limit)
    with pytest.raises(ContractError, match=r"^rule"):
        check(row, limit)


def test_where_a_row_stops_being_one_sequence_is_told() -> None:
    row = good()
    output(row)[2]["prompt_token_ids"] = [1, 2, 3, 9, 5]
    (found,) = violations(row)
    assert found == "rule 4: trainable item 1 does not continue the row: token 3 of 4 differs"


def test_reasoning_items_may_hold_what_a_message_may_not() -> None:
    row = good()
    output(row).insert(0, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "<think>"}]})
    assert violations(row) == []


def test_one_tag_in_the_thought_that_carries_the_tokens_is_no_leak() -> None:
    row = good()
    only_thought(row, "<think>never closed")
    assert violations(row) == []


def test_reward_components_that_add_up_are_accepted() -> None:
    assert violations(good() | {"reward_components": {"tests": 0.75, "style": 0.25}}) == []


@pytest.mark.parametrize("content", [None, "text", [{"type": "output_text", "text": None}], ["text"]])
def test_content_without_text_is_no_leak(content: Any) -> None:
    row = good()
    output(row)[1]["content"] = content
    assert violations(row) == []


def test_token_fields_that_are_null_are_absent() -> None:
    row = good()
    output(row)[1].update(prompt_token_ids=None, generation_token_ids=None, generation_log_probs=None)
    assert violations(row) == []


# --- groups -----------------------------------------------------------------------------------------------------


def rollout(prompt: list[int], masked: bool = False) -> Row:
    row = copy.deepcopy(good())
    row["response"]["output"] = [item(prompt, [3])]
    row.update(mask_sample=masked, instance_config={"mask_sample": masked})
    return row


def test_the_digest_is_that_of_the_first_prompt_alone() -> None:
    assert first_prompt_digest(rollout([1, 2])) == first_prompt_digest(good())
    assert first_prompt_digest(rollout([1, 2])) != first_prompt_digest(rollout([2, 1]))
    assert len(first_prompt_digest(good())) == 64
    assert first_prompt_digest({"response": {"output": []}}) == ""


def test_siblings_that_agree_form_one_group() -> None:
    assert group_disagreements([rollout([1, 2, 3])] * 4) == []


def test_a_sibling_with_another_first_prompt_is_named_with_the_token() -> None:
    (found,) = group_disagreements([rollout([1, 2, 3]), rollout([1, 9, 3]), rollout([1, 2, 3])])
    assert found.startswith("rule 8: row 1 ")
    assert "row 0's at token 1;" in found


def test_a_longer_prompt_differs_where_the_shorter_one_ends() -> None:
    (found,) = group_disagreements([rollout([1, 2]), rollout([1, 2]), rollout([1, 2, 3])])
    assert "at token 2;" in found


def test_a_masked_placeholder_has_a_prompt_of_its_own_on_purpose() -> None:
    assert group_disagreements([rollout([1, 2, 3]), rollout([1], masked=True), rollout([1, 2, 3])]) == []
