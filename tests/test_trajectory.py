"""From calls to chains: nothing sampled is dropped, nothing trains twice, and each chain is one sequence of ids."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.config import TrajectoryConfig
from polar_env.trajectory import build, trim
from polar_env.types import CallKind, Chain, Hole, HoleKind, SealedLedger, Trajectory
from trajectory_helpers import Conversation, call, call_trees, ids, ledger, long_session

DEFAULT = TrajectoryConfig(delivery="main")


def names(chain: Chain) -> str:
    """``a+ b-``: the calls of a chain, trained or context."""
    return " ".join(f"{turn.call_id}{'+' if turn.trained else '-'}" for turn in chain.turns)


def drawn(trajectory: Trajectory) -> list[str]:
    return [names(chain) for chain in trajectory.chains]


def delivered(trajectory: Trajectory) -> str:
    assert trajectory.main is not None
    return names(trajectory.main)


# --- shapes -----------------------------------------------------------------------------------------------------


def test_a_linear_session_is_one_chain_with_every_call_trained() -> None:
    talk = Conversation()
    for name in "abc":
        talk.turn([1, 2], [3, 4], call_id=name)
    result = build(ledger(*talk.records), DEFAULT)
    assert drawn(result) == ["a+ b+ c+"]
    assert result.delivered == 0
    assert result.sampled_tokens == result.chains[0].trainable_tokens == 6
    assert (result.chains[0].branched_from, dict(result.left_out)) == (None, {})


def test_arrays_are_handed_on_without_a_copy() -> None:
    record = call(0, [1, 2], [3])
    turn = build(ledger(record), DEFAULT).chains[0].turns[0]
    assert turn.prompt_ids is record.prompt_ids
    assert turn.log_probs is record.log_probs


def test_a_branch_keeps_the_shared_calls_as_context_and_trains_them_once() -> None:
    talk = Conversation()
    talk.turn([1], [2], call_id="a")
    fork = talk.history
    talk.turn([3], [4, 4, 4], call_id="b")
    result = build(ledger(*talk.records, call(2, fork + ids(9), [8], call_id="c", thread="x")), DEFAULT)
    assert drawn(result) == ["a+ b+", "a- c+"]
    assert [chain.branched_from for chain in result.chains] == [None, "a"]


def test_parallel_sub_agents_seeded_with_the_history_leave_the_main_chain_whole() -> None:
    main = Conversation()
    main.turn([1], [2], call_id="m0")
    seed = main.history
    helpers = [
        call(i, seed + ids(50 + i), [6] * 9, call_id=f"s{i}", kind=CallKind.SUB_AGENT, thread=f"sub-{i}")
        for i in (1, 2)
    ]
    last = call(3, seed + ids(7), [8], call_id="m1")
    result = build(ledger(*main.records, *helpers, last), DEFAULT)
    assert drawn(result) == ["m0+ m1+", "m0- s1+", "m0- s2+"]
    assert delivered(result) == "m0+ m1+"
    assert [(chain.kind, chain.thread) for chain in result.chains[1:]] == [
        (CallKind.SUB_AGENT, "sub-1"),
        (CallKind.SUB_AGENT, "sub-2"),
    ]


def test_a_compaction_ends_one_chain_and_the_harness_goes_on_in_another() -> None:
    talk = Conversation()
    talk.turn([1], [2], call_id="a")
    talk.turn([3], [4], call_id="summary", kind=CallKind.COMPACTION)
    after = call(2, [1, 77, 78], [5], call_id="b")
    result = build(ledger(*talk.records, after), DEFAULT)
    assert drawn(result) == ["a+ summary+", "b+"]
    assert delivered(result) == "b+"
    assert result.sampled_tokens == 3


def test_a_prompt_that_rewrites_one_token_is_a_new_chain() -> None:
    first = call(0, [1, 2, 3], [4], call_id="a")
    result = build(ledger(first, call(1, [1, 9, 3, 4, 5], [6], call_id="b")), DEFAULT)
    assert drawn(result) == ["a+", "b+"]


def test_a_call_cut_at_its_length_and_continued_without_a_new_token_starts_anew() -> None:
    first = call(0, [1, 2], [3, 4], call_id="a")
    result = build(ledger(first, call(1, [1, 2, 3, 4], [5], call_id="b")), DEFAULT)
    assert drawn(result) == ["a+", "b+"]


def test_identical_prompts_sampled_twice_are_siblings() -> None:
    talk = Conversation()
    talk.turn([1], [2], call_id="a")
    prompt = talk.history + ids(3)
    again = [call(1, prompt, [4, 4], call_id="b"), call(2, prompt, [5], call_id="c")]
    result = build(ledger(*talk.records, *again), DEFAULT)
    assert drawn(result) == ["a+ c+", "a- b+"]
    assert delivered(result) == "a+ c+"


# --- what does not train ----------------------------------------------------------------------------------------


def test_an_empty_generation_does_not_break_the_chain() -> None:
    prompt = ids(1, 2, 3, 4)
    records = (
        call(0, [1], [2], call_id="a"),
        call(1, prompt, [], call_id="empty"),
        call(2, prompt, [5], call_id="b"),
        call(3, prompt + ids(5, 6), [7], call_id="c"),
    )
    result = build(ledger(*records), DEFAULT)
    assert drawn(result) == ["a+ b+ c+"]
    assert dict(result.left_out) == {"empty": "empty generation"}


def test_each_call_that_is_left_out_says_why() -> None:
    bad = Hole(HoleKind.BAD_LOG_PROB, "holed", "nan")
    records = (
        call(0, [1], [2], call_id="lost"),
        call(1, [1], [3], call_id="resampled"),
        call(2, [1], [4], call_id="holed", holes=(bad,)),
        call(3, [8], [5], call_id="title", kind=CallKind.SIDE),
        call(4, [1], [6], call_id="named"),
        call(5, [1], [7], call_id="good"),
    )
    hole = Hole(HoleKind.LOST_RECORD, "named", "torn")
    sealed = ledger(*records, undelivered=["lost"], superseded=["resampled"], holes=(hole,))
    result = build(sealed, DEFAULT)
    assert dict(result.left_out) == {
        "lost": "undelivered",
        "resampled": "superseded",
        "holed": "hole",
        "named": "hole",
        "title": "kind: side",
    }
    assert drawn(result) == ["good+"]
    assert result.sampled_tokens == 1


@pytest.mark.parametrize("fate", ["undelivered", "superseded"])
def test_a_call_the_harness_does_not_have_is_nobodys_parent(fate: str) -> None:
    records = (call(0, [1], [2], call_id="a"), call(1, [1, 2, 3], [4], call_id="b"))
    sealed = ledger(*records, **{fate: ["a"]})
    assert drawn(build(sealed, DEFAULT)) == ["b+"]


def test_kinds_that_are_not_trained_are_a_matter_of_config() -> None:
    records = (call(0, [1], [2], call_id="a"), call(1, [9], [3], call_id="s", kind=CallKind.SUB_AGENT))
    only = build(ledger(*records), TrajectoryConfig(trained_kinds=(CallKind.SUB_AGENT,)))
    assert drawn(only) == ["s+"]
    assert delivered(only) == "s+"
    assert dict(only.left_out) == {"a": "kind: agent"}


def test_a_session_that_sampled_nothing_delivers_nothing() -> None:
    result = build(ledger(), DEFAULT)
    assert (result.chains, result.delivered, result.main, result.sampled_tokens) == ((), None, None, 0)


# --- delivery ---------------------------------------------------------------------------------------------------


def two_chains() -> SealedLedger:
    """A chain of 9 sampled tokens, then the one the harness finished on, of 1."""
    return ledger(call(0, [1], [2] * 9, call_id="long"), call(1, [5], [6], call_id="last"))


def test_main_is_the_chain_the_harness_finished_on() -> None:
    assert delivered(build(two_chains(), DEFAULT)) == "last+"


def compacted(then: int = 20) -> SealedLedger:
    """The task's prompt worked on for two calls, a compaction, and ``then`` tokens in the context it left."""
    talk = Conversation()
    talk.turn([1, 2], [3], call_id="first")
    talk.turn([4], [5, 5], call_id="second")
    summary = call(2, [9, 1], [9], call_id="summary", kind=CallKind.COMPACTION)
    return ledger(*talk.records, summary, call(3, [7, 9], [8] * then, call_id="after"))


def test_by_default_a_compacted_rollout_delivers_the_chain_its_siblings_share_the_prompt_of() -> None:
    assert delivered(build(compacted(), TrajectoryConfig())) == "first+ second+"
    assert delivered(build(compacted(), TrajectoryConfig(delivery="main"))) == "after+"


def test_by_default_the_chain_the_harness_finished_on_when_it_starts_with_the_task_s_prompt() -> None:
    talk = Conversation()
    talk.turn([1, 2], [3], call_id="a")
    side = call(1, talk.history + ids(6), [6] * 30, call_id="heavy", kind=CallKind.SUB_AGENT, thread="x")
    sealed = ledger(*talk.records, side, call(2, talk.history + ids(4), [5], call_id="end"))
    assert delivered(build(sealed, TrajectoryConfig())) == "a+ end+"


def test_by_default_the_heaviest_branch_that_starts_with_the_task_s_prompt() -> None:
    talk = Conversation()
    talk.turn([1, 2], [3], call_id="a")
    branches = [call(i, talk.history + ids(i), [5] * i, call_id=f"b{i}") for i in (1, 2)]
    sealed = ledger(*talk.records, *branches, call(3, [7, 9], [8], call_id="after"))
    assert delivered(build(sealed, TrajectoryConfig())) == "a+ b2+"


def test_main_is_not_moved_by_what_came_after_on_another_thread() -> None:
    late = call(2, [7], [8] * 20, call_id="sub", kind=CallKind.SUB_AGENT, thread="x")
    sealed = ledger(*two_chains().records, late)
    assert delivered(build(sealed, DEFAULT)) == "last+"


def test_main_is_not_moved_by_a_compaction_nobody_went_on_from() -> None:
    late = call(2, [7], [8] * 20, call_id="summary", kind=CallKind.COMPACTION)
    assert delivered(build(ledger(*two_chains().records, late), DEFAULT)) == "last+"


def test_main_goes_on_into_the_heaviest_of_what_was_sampled_on_its_last_call() -> None:
    talk = Conversation()
    talk.turn([1], [2], call_id="last")
    subs = [
        call(i, talk.history + ids(9, i), [8] * i, call_id=f"s{i}", kind=CallKind.SUB_AGENT, thread=f"x{i}")
        for i in (1, 2, 3)
    ]
    result = build(ledger(*talk.records, *subs), DEFAULT)
    assert delivered(result) == "last+ s3+"
    assert drawn(result) == ["last+ s3+", "last- s1+", "last- s2+"]


def test_main_is_the_last_call_that_was_delivered() -> None:
    sealed = replace(two_chains(), delivered=frozenset({"long"}))
    assert delivered(build(sealed, DEFAULT)) == "long+"


def test_longest_is_the_chain_with_most_trainable_tokens_and_owns_what_it_shares() -> None:
    talk = Conversation()
    talk.turn([1], [2], call_id="a")
    fork = talk.history
    talk.turn([3], [4] * 9, call_id="b", thread="x", kind=CallKind.SUB_AGENT)
    sealed = ledger(*talk.records, call(2, fork + ids(9), [8], call_id="c"))
    assert delivered(build(sealed, DEFAULT)) == "a+ c+"
    assert delivered(build(sealed, TrajectoryConfig(delivery="longest"))) == "a+ b+"


def test_sample_draws_in_proportion_to_trainable_tokens_and_is_repeatable() -> None:
    def draw(session: str, seed: int = 0) -> str:
        sealed = replace(two_chains(), session_id=session)
        return delivered(build(sealed, TrajectoryConfig(delivery="sample", seed=seed)))

    counts = Counter(draw(f"session-{i}") for i in range(400))
    assert 330 <= counts["long+"] <= 385  # 360 expected; three standard deviations are 18
    assert [draw("s") for _ in range(3)] == [draw("s")] * 3
    assert len({draw("s", seed) for seed in range(60)}) == 2


def test_a_chain_is_trimmed_after_a_whole_call() -> None:
    talk = Conversation()
    for name in "abc":
        talk.turn([1, 2], [3, 4], call_id=name)
    chain = build(ledger(*talk.records), DEFAULT).chains[0]
    assert [(names(trim(chain, limit)[0]), trim(chain, limit)[1]) for limit in (12, 11, 8, 7, 3)] == [
        ("a+ b+ c+", False),
        ("a+ b+", True),
        ("a+ b+", True),
        ("a+", True),
        ("", True),
    ]


# --- any session ------------------------------------------------------------------------------------------------


@given(call_trees(), st.sampled_from(["task", "main", "longest", "sample"]))
def test_every_sampled_token_of_a_call_that_trains_trains_exactly_once(sealed: SealedLedger, delivery: str) -> None:
    result = build(sealed, TrajectoryConfig.model_validate({"delivery": delivery}))
    good = {
        record.call_id: len(record.sampled_ids)
        for record in sealed.records
        if record.call_id in sealed.delivered
        and record.call_id not in sealed.superseded
        and record.kind is not CallKind.SIDE
    }
    trained = Counter(turn.call_id for chain in result.chains for turn in chain.turns if turn.trained)
    assert set(trained) == {name for name, length in good.items() if length}
    assert set(trained.values()) <= {1}
    assert result.sampled_tokens == sum(good.values())
    assert result.sampled_tokens == sum(chain.trainable_tokens for chain in result.chains)


@given(call_trees())
def test_every_chain_is_one_growing_sequence_of_what_the_engine_saw(sealed: SealedLedger) -> None:
    records = {record.call_id: record for record in sealed.records}
    for chain in build(sealed, DEFAULT).chains:
        seen = ids()
        for turn in chain.turns:
            record = records[turn.call_id]
            assert (turn.prompt_ids, turn.sampled_ids) == (record.prompt_ids, record.sampled_ids)
            assert turn.prompt_ids[: len(seen)] == seen
            assert len(turn.prompt_ids) > len(seen)
            seen = turn.prompt_ids + turn.sampled_ids
        flags = [turn.trained for turn in chain.turns]
        assert flags == sorted(flags)
        assert flags[-1]
        assert chain.branched_from == next((t.call_id for t in reversed(chain.turns) if not t.trained), None)


@given(call_trees(), st.randoms())
def test_the_order_of_the_records_does_not_matter(sealed: SealedLedger, random: st.DataObject) -> None:
    shuffled = list(sealed.records)
    random.shuffle(shuffled)
    assert build(replace(sealed, records=tuple(shuffled)), DEFAULT) == build(sealed, DEFAULT)


def test_a_long_session_is_one_chain() -> None:
    records = long_session()
    result = build(ledger(*records), DEFAULT)
    assert [len(chain.turns) for chain in result.chains] == [150]
    assert result.sampled_tokens == sum(len(record.sampled_ids) for record in records)
