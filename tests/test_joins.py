"""How a call's prompt joins the call it carries on: by ids, whatever the engine said."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from polar_env.joins import Join, classify, joins
from polar_env.types import CallKind, CallRecord, SealedLedger
from trajectory_helpers import Conversation, call, call_trees, ids, ledger


def carrying(record: CallRecord, earlier: str, *, spliced: bool = False) -> CallRecord:
    return replace(record, continues=earlier, spliced=spliced)


def first() -> CallRecord:
    return call(0, [1, 2], [3, 4], call_id="first")


def join_of(record: CallRecord, *before: CallRecord) -> Join:
    return classify(ledger(*before, record))[record.call_id]


def test_a_prompt_rendered_to_the_sampled_ids_is_exact() -> None:
    assert join_of(carrying(call(1, [1, 2, 3, 4, 5], [6]), "first"), first()) is Join.EXACT


def test_a_prompt_sent_as_the_sampled_ids_is_spliced() -> None:
    assert join_of(carrying(call(1, [1, 2, 3, 4, 5], [6]), "first", spliced=True), first()) is Join.SPLICED


def test_the_same_messages_with_other_ids_are_retokenised() -> None:
    assert join_of(carrying(call(1, [1, 2, 9, 5], [6]), "first"), first()) is Join.RETOKENISED


def test_an_engine_that_says_it_spliced_and_did_not_is_found_out() -> None:
    assert join_of(carrying(call(1, [1, 2, 9, 5], [6]), "first", spliced=True), first()) is Join.RETOKENISED


def test_a_prompt_that_adds_nothing_does_not_extend() -> None:
    assert join_of(carrying(call(1, [1, 2, 3, 4], [6]), "first"), first()) is Join.RETOKENISED


def test_dropped_thoughts_are_retokenised_although_an_older_call_is_extended() -> None:
    second = carrying(call(1, [1, 2, 3, 4, 5], [6, 7], call_id="second"), "first")
    third = carrying(call(2, [1, 2, 3, 4, 5, 7, 8], [9]), "second")
    assert join_of(third, first(), second) is Join.RETOKENISED


def test_an_edited_history_is_rewritten() -> None:
    assert join_of(call(1, [7, 7], [8]), first()) is Join.REWRITTEN


def test_the_agent_after_a_compaction_is_rewritten_and_the_summary_is_new() -> None:
    summary = call(1, [5, 6], [7], call_id="summary", kind=CallKind.COMPACTION)
    after = call(2, [7, 8], [9], call_id="after")
    assert classify(ledger(first(), summary, after)) == {
        "first": Join.NEW,
        "summary": Join.NEW,
        "after": Join.REWRITTEN,
    }


def test_a_summary_asked_for_behind_the_whole_history_carries_it_on() -> None:
    summary = carrying(call(1, [1, 2, 3, 4, 5], [7], kind=CallKind.COMPACTION), "first", spliced=True)
    assert join_of(summary, first()) is Join.SPLICED


def test_the_first_call_of_a_sub_agent_is_new_and_an_edit_of_its_own_is_not() -> None:
    child = call(1, [5, 5], [6], call_id="child", kind=CallKind.SUB_AGENT, thread="t")
    edited = call(2, [8, 8], [6], call_id="edited", kind=CallKind.SUB_AGENT, thread="t")
    assert classify(ledger(first(), child, edited)) == {
        "first": Join.NEW,
        "child": Join.NEW,
        "edited": Join.REWRITTEN,
    }


def test_side_calls_are_new_and_begin_no_thread() -> None:
    title = call(0, [9], [9], call_id="title", kind=CallKind.SIDE)
    again = call(1, [8], [9], call_id="again", kind=CallKind.SIDE)
    agent = call(2, [1], [2], call_id="agent")
    assert set(classify(ledger(title, again, agent)).values()) == {Join.NEW}


def test_calls_that_were_not_delivered_are_not_counted_and_can_be_carried_on() -> None:
    after = carrying(call(1, [1, 2, 3, 4, 5], [6], call_id="after"), "first")
    assert classify(ledger(first(), after, undelivered=["first"])) == {"after": Join.EXACT}


def test_records_that_name_no_call_are_judged_by_their_ids() -> None:
    talk = Conversation()
    for name in "abc":
        talk.turn([1, 2], [3, 4], call_id=name)
    lost = call(4, talk.history + ids(1), [1], call_id="lost")
    sealed = ledger(*talk.records, call(3, [9], [9]), lost, undelivered=["lost"])
    assert {join: count for join, count in joins(sealed).items() if count} == {
        Join.EXACT: 2,
        Join.NEW: 1,
        Join.REWRITTEN: 1,
    }


@given(call_trees(), st.randoms())
def test_every_delivered_call_has_one_class_in_whatever_order_it_is_told(sealed: SealedLedger, draw: object) -> None:
    records = list(sealed.records)
    draw.shuffle(records)
    shuffled = replace(sealed, records=tuple(records))
    assert classify(shuffled) == classify(sealed)
    assert classify(sealed).keys() == sealed.delivered
    assert sum(joins(sealed).values()) == len(sealed.delivered)
