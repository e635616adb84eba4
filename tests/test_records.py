"""Records whose ids are held once while a session lives, and are whole when somebody reads them."""

import pickle
import tracemalloc

import pytest
from hypothesis import given

from polar_env.records import RecordStore
from polar_env.types import CallRecord, SealedLedger
from trajectory_helpers import call, call_trees, fields_of, ids, long_session


def store_of(*records: CallRecord) -> RecordStore:
    store = RecordStore()
    for record in records:
        store.add(record)
    return store


@given(call_trees())
def test_any_session_comes_back_bit_for_bit_and_in_order(sealed: SealedLedger) -> None:
    found = store_of(*sealed.records).records()
    expected = sorted(sealed.records, key=lambda record: record.index)
    assert [fields_of(record) for record in found] == [fields_of(record) for record in expected]


def test_a_live_session_costs_its_unique_ids_not_its_prompts() -> None:
    records = long_session(60, 30_000)
    repeated = sum(4 * len(record.prompt_ids) for record in records)
    tracemalloc.start()
    try:
        store = store_of(*records)
        live = tracemalloc.get_traced_memory()[0]
        found = store.records()
        assert len(found) == 60
        counted = tracemalloc.get_traced_memory()[0]
        assert found[-1].prompt_ids == records[-1].prompt_ids
        read = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert live < 4 * 30_000 + 60 * 2500
    assert counted < live + 10_000
    assert read > repeated


def test_records_are_made_once() -> None:
    found = store_of(call(0, [1], [2])).records()
    assert found[0] is found[-1] is next(iter(found))
    assert found[:1] == (found[0],)


def test_records_are_equal_to_any_sequence_of_the_same() -> None:
    found, records = store_of(call(0, [1], [2])).records(), [call(0, [1], [2])]
    assert (found == records, found == tuple(records), found == records * 2, found == "other") == (True, True, 0, 0)
    assert store_of().records() == ()


def test_records_travel_to_another_process() -> None:
    records = [call(0, [1], [2]), call(1, [1, 2, 3], [4])]
    assert pickle.loads(pickle.dumps(store_of(*records).records())) == tuple(records)


def test_the_ids_of_a_call_are_those_it_was_sampled_with() -> None:
    store = store_of(call(0, [1, 2], [3], call_id="a"), call(1, [1, 9], [4, 5], call_id="b"))
    assert (store.ids("a"), store.ids("b")) == (ids(1, 2, 3), ids(1, 9, 4, 5))
    with pytest.raises(KeyError, match="c"):
        store.ids("c")


def test_a_dropped_record_is_gone_and_those_that_share_its_ids_are_whole() -> None:
    store = store_of(call(0, [1, 2], [3], call_id="a"), call(1, [1, 2, 3, 4], [5], call_id="b"))
    store.drop("a")
    assert ("a" in store, "b" in store, len(store)) == (False, True, 1)
    assert store.records()[0].prompt_ids == ids(1, 2, 3, 4)
    with pytest.raises(KeyError):
        store.ids("a")
