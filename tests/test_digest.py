"""The digest chain: the same for the same tokens, another after any change."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.config import TrajectoryConfig
from polar_env.digest import Digest, digest
from polar_env.trajectory import build
from polar_env.types import ChainTurn, SealedLedger
from trajectory_helpers import call_trees, ids, probs

Turns = Sequence[ChainTurn]


def turn(call_id: str, prompt: "array[int]", sampled: "array[int]", trained: bool = True) -> ChainTurn:
    return ChainTurn(call_id, prompt, sampled, probs(len(sampled)), trained)


def talk() -> list[ChainTurn]:
    """Three calls, each prompt the whole history and one or two tokens more."""
    return [
        turn("a", ids(1, 2), ids(3)),
        turn("b", ids(1, 2, 3, 4), ids(5, 6)),
        turn("c", ids(1, 2, 3, 4, 5, 6, 7, 8), ids(9)),
    ]


def test_the_chain_is_what_it_has_always_been() -> None:
    """Rows are kept for years: a change of this value is a new format, and needs a new seed."""
    made = digest("s", talk())
    assert made == Digest("c5414fff1f96a16d3416beb4c2d8e44bc26bda8ee7e372b44de54ebbbcedb3ca", 6, ("a", "b", "c"))


def test_nothing_delivered_is_the_seed_of_its_session() -> None:
    assert digest("s", []).links == 0
    assert digest("s", []) == digest("s", [turn("a", ids(1), ids(2), trained=False)])
    assert digest("s", []).sha256 != digest("t", []).sha256


def test_what_another_chain_trains_is_in_the_prompt_that_follows_it() -> None:
    context, own = turn("a", ids(1), ids(2), trained=False), turn("b", ids(1, 2, 3), ids(4))
    assert digest("s", [context, own]) == digest("s", [own])
    assert digest("s", [context, own]).links == 2


def test_a_change_of_what_trains_shows() -> None:
    first, second, third = talk()
    whole = digest("s", talk())
    assert digest("s", [first, replace(second, trained=False), third]) != whole
    assert digest("s", [first, second]) != whole
    assert digest("s", [second, first, third]) != whole


def test_tokens_cannot_move_from_one_segment_to_the_next() -> None:
    left, right = turn("a", ids(1, 2), ids(3, 4)), turn("a", ids(1, 2, 3), ids(4))
    assert digest("s", [left]).sha256 != digest("s", [replace(right, log_probs=left.log_probs)]).sha256


def test_the_repeated_part_of_a_prompt_cannot_change_unseen() -> None:
    first, second, third = talk()
    for at in range(4):
        prompt = second.prompt_ids[:]
        prompt[at] += 100
        assert digest("s", [first, replace(second, prompt_ids=prompt), third]).sha256 != digest("s", talk()).sha256


def test_any_session_id_and_call_id_can_be_hashed() -> None:
    assert digest("\ud800", [turn("\udfff", ids(1), ids(2))]).links == 2


def changed(turns: list[ChainTurn], choice: st.DataObject) -> list[ChainTurn]:
    """One number of one trained turn, by the least it can change."""
    at = choice.draw(st.sampled_from([n for n, entry in enumerate(turns) if entry.trained]))
    field = choice.draw(st.sampled_from(["prompt_ids", "sampled_ids", "log_probs"]))
    values = getattr(turns[at], field)[:]
    where = choice.draw(st.integers(0, len(values) - 1))
    if field == "log_probs":
        values[where] = float(np.nextafter(np.float32(values[where]), np.float32(-np.inf)))
    else:
        values[where] ^= choice.draw(st.sampled_from([1, 2, 1 << 20]))
    return [replace(entry, **{field: values}) if n == at else entry for n, entry in enumerate(turns)]


@given(call_trees(), st.data())
def test_one_changed_number_anywhere_is_another_chain(sealed: SealedLedger, choice: st.DataObject) -> None:
    main = build(sealed, TrajectoryConfig()).main
    if main is None or not main.trainable_tokens:
        return
    turns = list(main.turns)
    assert digest("s", turns) == digest("s", list(main.turns))
    assert digest("s", changed(turns, choice)).sha256 != digest("s", turns).sha256


@pytest.mark.parametrize("field", ["call_id", "session"])
def test_whose_tokens_they_are_is_part_of_it(field: str) -> None:
    first, *rest = talk()
    other = digest("t", talk()) if field == "session" else digest("s", [replace(first, call_id="x"), *rest])
    assert other.sha256 != digest("s", talk()).sha256
