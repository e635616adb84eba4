"""A row as JSON: the same object whatever its shape, written and recognised without holding up the process."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_env.config import TrajectoryConfig
from polar_env.gym.contract import violations
from polar_env.gym.rows import compact, plain, row
from polar_env.gym.wire import LARGE, encode, is_row
from polar_env.types import SealedLedger
from trajectory_helpers import call_trees, ledger, long_session, rollout

PARAMS = {"input": [{"role": "user", "content": "fix it"}]}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"))
    | st.lists(st.integers(0, 3)).map(lambda numbers: array("i", numbers))
    | st.lists(st.floats(-9, 0, width=32)).map(lambda numbers: array("f", numbers)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["reward", "response", "trajectories", 'odd "key"', "é"]), values))
def test_any_object_is_written_as_it_is(value: dict[str, Any]) -> None:
    assert json.loads(encode(value)) == plain(value)


@settings(max_examples=40, deadline=None)
@given(call_trees())
def test_a_row_on_the_wire_is_the_row(sealed: SealedLedger) -> None:
    made = compact(rollout(sealed), PARAMS, model="m", max_tokens=None)
    assert plain(made) == row(rollout(sealed), PARAMS, model="m", max_tokens=None)
    assert json.loads(encode(made)) == json.loads(json.dumps(plain(made)))
    assert violations(made) == violations(plain(made)) == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6))
def test_arrays_that_repeat_one_another_are_each_written_whole(arrays: list[list[int]]) -> None:
    assert json.loads(encode({"response": [array("i", numbers) for numbers in arrays]})) == {"response": arrays}
    items = [{"ids": array("i", numbers)} for numbers in arrays]
    assert json.loads(encode({"response": items})) == {"response": [{"ids": numbers} for numbers in arrays]}


def test_what_is_small_comes_first() -> None:
    written = encode({"response": {"output": []}, "trajectories": [], "reward": 1.0, "mask_sample": False})
    assert list(json.loads(written)) == ["reward", "mask_sample", "response", "trajectories"]


def test_a_field_whose_name_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="str"):
        encode({"polar": {1: "one"}})


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize(
    ("lacks", "expected"), [(None, True), ("reward", False), ("mask_sample", False), ("response", False)]
)
def test_a_row_is_told_from_an_error_however_large(size: int, lacks: str | None, expected: bool) -> None:
    answer = {"reward": 1.0, "mask_sample": False, "response": {"output": []}, "detail": "x" * size}
    assert is_row(encode({key: value for key, value in answer.items() if key != lacks})) is expected


@pytest.mark.parametrize("size", [10, LARGE])
def test_half_a_row_and_a_page_of_text_are_no_rows(size: int) -> None:
    written = encode({"reward": 1.0, "mask_sample": False, "response": {"output": []}, "detail": "x" * size})
    assert not is_row(written[: len(written) // 2])
    assert not is_row(written[1:])
    assert not is_row(b"[" + written + b"]")


def test_a_row_holds_no_number_twice() -> None:
    """The prompts of a long session would be millions of Python objects: their arrays are handed on as they are."""
    result = rollout(ledger(*long_session(20, 8000)), trajectory=TrajectoryConfig())
    made = compact(result, PARAMS, model="m", max_tokens=None)
    assert result.trajectory.main is not None
    turns = result.trajectory.main.turns
    carrying = [item for item in made["response"]["output"] if "prompt_token_ids" in item]
    assert all(item["prompt_token_ids"] is turn.prompt_ids for item, turn in zip(carrying, turns, strict=True))
