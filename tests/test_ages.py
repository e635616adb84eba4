"""How old weights are: by the number at the end of their names, else by the order in which the names came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.engine.ages import Versions, behind
from polar_env.gym.contract import MAX_METRIC


def declared(*names: str) -> Versions:
    versions = Versions()
    for name in names:
        versions.declare(name)
    return versions


def test_names_that_end_in_a_number_are_counted_by_it_however_many_were_declared():
    """A trainer that skips names, or that we missed, has updated all the same."""
    versions = declared("step-3", "step-8")
    assert [versions.age(f"step-{number}") for number in (8, 7, 3, 1)] == [0, 1, 5, 7]
    assert declared("7", "9").age("7") == 2


def test_opaque_names_are_counted_by_their_order_of_appearance():
    versions = declared("blue", "green", "red")
    assert [versions.age(name) for name in ("blue", "green", "red")] == [2, 1, 0]


def test_numbers_behind_different_names_say_nothing_about_each_other():
    versions = declared("warmup-90", "main-1", "main-2")
    assert versions.age("warmup-90") == 2
    assert versions.age("main-1") == 1


def test_what_was_there_before_the_first_name_is_older_than_all_that_were_declared():
    assert declared().age("qwen@server") == declared().age("") == 0
    assert declared("step-1").age("qwen@server") == 1
    assert declared("step-1", "step-2").age("") == 2


def test_a_trainer_that_goes_back_to_a_checkpoint_makes_its_name_the_newest():
    versions = declared("step-4", "step-5", "step-6", "step-7", "step-5")
    assert versions.age("step-5") == 0
    assert versions.age("step-4") == 1
    assert versions.age("step-7") == 1, "of a future that did not happen: counted by appearance"
    assert declared("blue", "green", "red", "green").age("blue") == 3, "three updates since, two names"


def test_a_name_said_twice_is_no_update():
    versions = Versions()
    assert [versions.declare(name) for name in ("a", "a", "b", "b", "a")] == [True, False, True, False, True]


def test_a_call_that_went_on_over_an_update_is_as_old_as_it_began():
    versions = declared("step-1", "step-2", "step-3")
    assert versions.age("step-1+step-3") == 2
    assert versions.newest("step-1+step-3") == "step-3"


def test_replicas_that_change_one_after_the_other_are_one_update():
    """Only the first appearance counts: a slow replica that answers with the old name is no step back."""
    versions = Versions()
    assert [versions.told(name) for name in ("aa", "bb", "aa", "aa+bb", "cc")] == [True, True, False, False, True]
    assert [versions.age(name) for name in ("aa", "bb", "cc")] == [2, 1, 0]


def test_names_the_engine_tells_are_an_order_of_their_own():
    versions = declared("step-1", "step-2")
    versions.told("aa")
    assert (versions.age("aa"), versions.age("step-1")) == (0, 1)
    versions.told("bb")
    assert (versions.age("aa"), versions.newest("aa")) == (1, "bb")


def test_a_name_that_both_know_is_as_old_as_the_one_that_knows_more():
    versions = declared("step-1")
    for name in ("step-1", "step-2", "step-3"):
        versions.told(name)
    assert versions.age("step-1") == 2


@pytest.mark.parametrize(
    ("old", "new", "updates"),
    [("step-8", "step-12", 4), ("12", "8", -4), ("a", "b", 0), ("a1", "b2", 0), ("v1.9", "v1.10", 1), ("", "1", 0)],
)
def test_only_names_counted_alike_are_subtracted(old: str, new: str, updates: int):
    assert behind(old, new) == updates


@given(st.lists(st.text("abc019-", min_size=1, max_size=4), max_size=12))
def test_no_weights_are_younger_than_the_newest(names: list[str]):
    versions = declared(*names)
    assert all(versions.age(name) >= (0 if name == names[-1] else 1) for name in names)


@given(st.lists(st.integers(0, 10**6), min_size=1, unique=True).map(sorted))
def test_counted_names_age_by_what_was_counted(numbers: list[int]):
    versions = declared(*(f"step-{number}" for number in numbers))
    assert [versions.age(f"step-{number}") for number in numbers] == [numbers[-1] - number for number in numbers]


@given(st.lists(st.integers(0, 10**24), min_size=1, max_size=5))
def test_an_age_is_a_number_that_a_row_can_hold(numbers: list[int]):
    """A name may end in a hash or a time: the row of its rollout must not be lost for that."""
    versions = declared(*(f"ckpt-{number}" for number in numbers))
    assert all(versions.age(f"ckpt-{number}") <= MAX_METRIC for number in numbers)
