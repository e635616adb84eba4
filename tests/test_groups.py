"""Which rollouts belong together, which ones an order means, and when the last of a group have had their time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.config import StragglersConfig
from polar_env.errors import BadRequest, GroupTimeout, Straggler
from polar_env.gym.groups import Place, Stragglers, chosen, place_of
from polar_env.types import INFRASTRUCTURE, Outcome

HERE = Place("task", "codex", "7", "0")


def answered(seconds: float, outcome: Outcome = Outcome.COMPLETED, held: float = 0.0) -> dict[str, Any]:
    return {"seconds_agent": seconds, "seconds_held": held, "polar": {"outcome": outcome.value}}


def group(size: int, **config: Any) -> Stragglers:
    """A group of which ``size`` rows were posted, keys ``0`` and up; nobody is told anything before one finished."""
    settings: dict[str, Any] = {"after_fraction": 0.75, "patience": 2.0, "min_seconds": 1.0} | config
    stragglers = Stragglers(StragglersConfig(**settings))
    assert [stragglers.began(str(at), HERE) for at in range(size)] == [None] * size
    return stragglers


# --- when -------------------------------------------------------------------------------------------------------


def test_the_rest_of_a_group_gets_a_multiple_of_what_its_siblings_took_once_most_have_finished():
    it = group(4)
    assert it.ended("0", HERE, answered(10.0)) is None
    assert it.ended("1", HERE, answered(20.0)) is None
    rest = it.ended("2", HERE, answered(60.0))
    assert rest is not None
    assert (rest.keys, rest.seconds) == (frozenset({"3"}), 40.0)
    assert str(rest.error) == (
        "3 of its group of 4 had finished, in 20.0 s (median), and the rest was given 40.0 s (stragglers)"
    )


def test_siblings_that_were_quick_leave_the_rest_the_minimum():
    it = group(2, after_fraction=0.5, min_seconds=30.0)
    rest = it.ended("0", HERE, answered(1.0))
    assert rest is not None
    assert rest.seconds == 30.0


def test_time_at_the_fence_is_nobody_s_and_not_in_the_median():
    it = group(2, after_fraction=0.5)
    rest = it.ended("0", HERE, answered(100.0, held=90.0))
    assert rest is not None
    assert rest.seconds == 20.0


@pytest.mark.parametrize(("then", "error"), [("mask", Straggler), ("grade", GroupTimeout)])
def test_what_ends_them_is_the_user_s_choice(then: str, error: type[Straggler]):
    rest = group(2, after_fraction=0.5, then=then).ended("0", HERE, answered(5.0))
    assert rest is not None
    assert type(rest.error) is error
    assert (error.outcome in INFRASTRUCTURE) == (then == "mask")


def test_it_is_off_unless_it_is_asked_for():
    it = group(4, after_fraction=None)
    assert [it.ended(str(at), HERE, answered(1.0)) for at in range(4)] == [None] * 4


def test_a_group_of_known_size_waits_for_rows_that_are_still_to_be_posted():
    """A collector that posts a few rows at a time: most of those seen is not most of the group."""
    it = group(4, group_size=8)
    assert [it.ended(str(at), HERE, answered(1.0)) for at in range(3)] == [None] * 3
    for at in range(4, 8):
        assert it.began(str(at), HERE) is None
    assert [it.ended(str(at), HERE, answered(1.0)) for at in (3, 4)] == [None] * 2
    rest = it.ended("5", HERE, answered(1.0))
    assert rest is not None
    assert rest.keys == {"6", "7"}


def test_a_row_posted_when_most_have_finished_is_told_as_it_begins():
    it = group(3, after_fraction=0.5, group_size=4)
    it.ended("0", HERE, answered(3.0))
    it.ended("1", HERE, answered(3.0))
    late = it.began("3", HERE)
    assert late is not None
    assert late.keys == {"3"}


@pytest.mark.parametrize(
    "outcome", [Outcome.SANDBOX_ERROR, Outcome.CANCELLED, Outcome.STRAGGLER, Outcome.GROUP_TIMEOUT]
)
def test_rollouts_that_somebody_else_ended_do_not_say_how_long_the_task_takes(outcome: Outcome):
    """An engine that died under fifteen of sixteen must not hurry the last."""
    it = group(4)
    assert [it.ended(str(at), HERE, answered(0.1, outcome)) for at in range(3)] == [None] * 3


def test_rows_that_were_given_up_are_finished_but_say_nothing_of_time():
    it = group(4)
    assert it.ended("0", HERE, answered(8.0)) is None
    assert it.ended("1", HERE, {}) is None
    rest = it.ended("2", HERE, {})
    assert rest is not None
    assert rest.seconds == 16.0


def test_a_row_posted_again_while_its_first_rollout_is_torn_down_is_being_played():
    """Its connection was lost for longer than the grace: the first is given up, and ends when the second has begun."""
    it = group(4)
    assert it.ended("1", HERE, answered(10.0)) is None
    assert it.began("0", HERE) is None
    assert it.ended("0", HERE, {}) is None
    assert it.ended("2", HERE, answered(10.0)) is None, "two of four"
    rest = it.ended("3", HERE, answered(10.0))
    assert rest is not None
    assert rest.keys == {"0"}


def test_groups_do_not_hurry_each_other():
    it = group(2, after_fraction=0.5)
    for place in (Place("task", "codex", "8", "0"), Place("task", "pi", "7", "0"), Place("other", "codex", "7", "0")):
        assert it.began("x", place) is None
        assert it.began("y", place) is None
    rest = it.ended("0", HERE, answered(1.0))
    assert rest is not None
    assert rest.keys == {"1"}


def test_a_group_that_came_to_its_end_is_forgotten_and_the_next_epoch_begins_anew():
    it = group(2, after_fraction=0.5)
    it.ended("0", HERE, answered(1.0))
    assert it.ended("1", HERE, answered(1.0)) is None
    assert it.began("0", HERE) is None
    assert it.began("1", HERE) is None
    assert it.ended("unknown", Place("never", "seen", "", ""), answered(1.0)) is None


@given(st.data())
def test_only_rows_under_way_are_ever_told(data: st.DataObject):
    """Whatever comes in whatever order: what is told is being played, and the share has been reached."""
    it = Stragglers(StragglersConfig(after_fraction=0.5, group_size=data.draw(st.sampled_from([None, 4]))))
    playing: set[str] = set()
    finished: set[str] = set()
    for key in data.draw(st.lists(st.sampled_from("abcdef"), max_size=30)):
        if key in playing:
            playing.discard(key)
            finished.add(key)
            rest = it.ended(key, HERE, data.draw(st.sampled_from([answered(3.0), {}])))
        else:
            playing.add(key)
            finished.discard(key)
            rest = it.began(key, HERE)
        if not playing:
            finished.clear()
        if rest is not None:
            assert rest.keys <= playing
            assert len(finished) >= 0.5 * min(4, len(playing | finished))


# --- which ------------------------------------------------------------------------------------------------------


def test_a_group_is_what_the_trainer_says_it_is():
    gym = {"_ng_task_index": 3, "_ng_rollout_index": 2}
    nemo_rl = {"_ng_task_index": 3, "_rowidx": 19}
    assert place_of(gym, "t", "pi") == Place("t", "pi", "3", "2")
    assert place_of(nemo_rl, "t", "pi") == Place("t", "pi", "3", "19")
    assert place_of({"_rowidx": 0}, "t", "pi") == Place("t", "pi", "", "0")
    assert place_of({}, "t", "pi") == Place("t", "pi", "", "")


@pytest.mark.parametrize(
    ("fields", "hit"),
    [
        ({"task": "task"}, True),
        ({"group": "7"}, True),
        ({"group": 7}, True),
        ({"session": "s-1"}, True),
        ({"task": "task", "group": "7", "session": "s-1"}, True),
        ({"keys": ["k"]}, True),
        ({"task": "tas"}, False),
        ({"group": "70"}, False),
        ({"session": ""} | {"group": "8"}, False),
        ({"task": "task", "group": "8"}, False),
        ({"keys": []}, False),
        ({"keys": ["k"], "group": "8"}, False),
    ],
)
def test_an_order_means_rollouts_to_which_all_it_says_applies(fields: dict[str, Any], hit: bool):
    assert chosen(fields).has("k", HERE, "s-1") is hit


@pytest.mark.parametrize(
    "fields", [{}, {"task": ""}, {"group": None}, {"task": ["a"]}, {"keys": "k"}, {"sessions": "s"}]
)
def test_an_order_that_names_nothing_means_nothing(fields: dict[str, Any]):
    """A typing error must not end every rollout of the server."""
    with pytest.raises(BadRequest, match="say which rollouts"):
        chosen(fields)
