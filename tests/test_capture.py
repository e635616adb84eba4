"""The capture contract, and a ledger that takes each call once and nothing after it was sealed."""

import asyncio
import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.capture import Ledger, SegmentLog, judge, rebuild
from polar_env.errors import CaptureError
from polar_env.types import CallRecord, EngineReply, Hole, HoleKind, SealedLedger, StopReason, Usage
from trajectory_helpers import SESSION, call, fields_of, ids, probs, reply, same_ledger


def kinds(generation: EngineReply) -> list[HoleKind]:
    return [hole.kind for hole in judge("call-0", generation)]


# --- the contract -----------------------------------------------------------------------------------------------


def test_a_faithful_generation_has_no_hole() -> None:
    assert judge("call-0", reply()) == ()


def test_an_empty_generation_is_faithful() -> None:
    assert judge("call-0", reply(sampled=())) == ()


@pytest.mark.parametrize(
    ("broken", "kind", "says"),
    [
        (reply(prompt=(), usage=Usage(3, 2)), HoleKind.MISSING_IDS, "no prompt ids"),
        (reply(sampled=(), usage=Usage(3, 2)), HoleKind.MISSING_IDS, "no sampled ids for 2 tokens"),
        (reply(sampled=(4, -1)), HoleKind.MISSING_IDS, "negative sampled id"),
        (reply(log_probs=probs(1)), HoleKind.LENGTH_MISMATCH, "2 sampled ids, 1 log-probs"),
        (reply(usage=Usage(3, 5)), HoleKind.LENGTH_MISMATCH, "usage says 5"),
        (reply(usage=Usage(9, 2)), HoleKind.LENGTH_MISMATCH, "3 prompt ids, usage says 9"),
        (reply(log_probs=array("f", [-0.1, math.nan])), HoleKind.BAD_LOG_PROB, "nan at token 1"),
        (reply(log_probs=array("f", [-math.inf, -1])), HoleKind.BAD_LOG_PROB, "-inf at token 0"),
        (reply(log_probs=array("f", [-0.1, 0.25])), HoleKind.BAD_LOG_PROB, "0.25 at token 1"),
        (reply(log_probs=array("f", [-9999.0, -0.1])), HoleKind.BAD_LOG_PROB, "-9999.0 at token 0"),
        (reply(choices=2), HoleKind.MANY_CHOICES, "2 choices"),
        (reply(finish="content_filter"), HoleKind.UNKNOWN_FINISH, "content_filter"),
        (reply(finish="length"), HoleKind.UNKNOWN_FINISH, "told as stop"),
        (reply(policy_version=""), HoleKind.NO_POLICY_VERSION, "which policy"),
    ],
)
def test_each_breach_is_one_typed_hole_that_names_the_call(broken: EngineReply, kind: HoleKind, says: str) -> None:
    (hole,) = judge("call-9", broken)
    assert (hole.kind, hole.call_id) == (kind, "call-9")
    assert says in hole.detail


def test_float_noise_above_zero_is_tolerated() -> None:
    assert kinds(reply(log_probs=array("f", [2e-7, 0.0]))) == []
    assert kinds(reply(log_probs=array("f", [2e-6, 0.0]))) == [HoleKind.BAD_LOG_PROB]


def test_a_reply_cut_at_its_length_is_told_as_such() -> None:
    assert kinds(reply(finish="length", stop=StopReason.LENGTH)) == []


def test_every_breach_is_reported_not_only_the_first() -> None:
    broken = reply(log_probs=probs(5), choices=3, policy_version="")
    assert kinds(broken) == [HoleKind.LENGTH_MISMATCH, HoleKind.MANY_CHOICES, HoleKind.NO_POLICY_VERSION]


# --- the ledger -------------------------------------------------------------------------------------------------


async def sealed(*records: CallRecord) -> SealedLedger:
    ledger = Ledger(SESSION)
    for record in records:
        await ledger.append(record)
    return ledger.seal()


@given(st.permutations(range(6)))
def test_the_order_in_which_calls_are_appended_does_not_matter(order: list[int]) -> None:
    records = [call(i, range(3 * i + 1), [7]) for i in range(6)]
    ledger = asyncio.run(sealed(*(records[i] for i in order)))
    assert [record.index for record in ledger.records] == list(range(6))


async def test_marks_and_holes_reach_the_sealed_ledger() -> None:
    bad = Hole(HoleKind.BAD_LOG_PROB, "call-1", "nan")
    lost = Hole(HoleKind.LOST_RECORD, None, "engine died")
    ledger = Ledger(SESSION)
    await ledger.append(call(1, [1, 2], [3], holes=(bad,)))
    await ledger.append(call(0, [1], [2]))
    ledger.mark_delivered("call-0")
    ledger.mark_superseded("call-0")
    ledger.mark_incomplete(lost)
    result = ledger.seal()
    assert (result.delivered, result.superseded) == ({"call-0"}, {"call-0"})
    assert result.holes == (lost, bad)
    assert not result.complete


async def test_a_sealed_ledger_refuses_a_late_call_and_ignores_late_marks() -> None:
    ledger = Ledger(SESSION)
    await ledger.append(call(0, [1], [2]))
    first = ledger.seal()
    ledger.mark_delivered("call-0")
    ledger.mark_superseded("call-0")
    ledger.mark_incomplete(Hole(HoleKind.LOST_RECORD, None, "late"))
    with pytest.raises(CaptureError, match="sealed"):
        await ledger.append(call(1, [1, 2, 3], [4]))
    assert ledger.seal() is first
    assert (len(first.records), first.delivered, first.complete) == (1, frozenset(), True)


@pytest.mark.parametrize("again", [call(0, [1], [2], call_id="other"), call(5, [1], [2], call_id="call-0")])
async def test_a_call_or_an_index_is_committed_once(again: CallRecord) -> None:
    ledger = Ledger(SESSION)
    await ledger.append(call(0, [1], [2]))
    with pytest.raises(CaptureError, match="committed before"):
        await ledger.append(again)
    assert ledger.seal().complete


async def test_a_call_of_another_session_is_refused() -> None:
    with pytest.raises(CaptureError, match="belongs to session other"):
        await Ledger(SESSION).append(call(0, [1], [2], session="other"))


async def test_a_disk_that_takes_nothing_is_an_error_and_a_hole(tmp_path: Path) -> None:
    (tmp_path / "calls.log").symlink_to("/dev/full")
    async with SegmentLog(tmp_path) as log:
        ledger = Ledger(SESSION, log)
        with pytest.raises(CaptureError, match="No space left"):
            await ledger.append(call(0, [1], [2]))
        with pytest.raises(CaptureError, match="no longer recorded"):
            await ledger.append(call(1, [1, 2, 3], [4]))
        result = ledger.seal()
    assert result.records == ()
    assert [(hole.kind, hole.call_id) for hole in result.holes] == [
        (HoleKind.LOST_RECORD, "call-0"),
        (HoleKind.LOST_RECORD, "call-1"),
    ]


async def test_what_cannot_be_synced_is_not_durable(tmp_path: Path) -> None:
    (tmp_path / "calls.log").symlink_to("/dev/null")  # takes every write, and refuses fsync
    async with SegmentLog(tmp_path) as log:
        ledger = Ledger(SESSION, log)
        with pytest.raises(CaptureError, match="Invalid argument"):
            await ledger.append(call(0, [1], [2]))
    assert not ledger.seal().complete


async def test_marks_are_synced_when_the_log_ends(tmp_path: Path) -> None:
    (tmp_path / "calls.log").symlink_to("/dev/null")
    async with SegmentLog(tmp_path) as log:
        Ledger(SESSION, log)  # writes that the session was opened
    assert "Invalid argument" in str(log.failure)


async def test_late_marks_do_not_reach_the_log_either(tmp_path: Path) -> None:
    async with SegmentLog(tmp_path) as log:
        ledger = Ledger(SESSION, log)
        await ledger.append(call(0, [1], [2]))
        first = ledger.seal()
        ledger.mark_delivered("call-0")
        ledger.mark_superseded("call-0")
        ledger.mark_incomplete(Hole(HoleKind.LOST_RECORD, None, "late"))
    assert same_ledger(rebuild(tmp_path), first)


async def test_a_failed_log_is_a_hole_even_when_no_call_waited_for_it(tmp_path: Path) -> None:
    (tmp_path / "calls.log").symlink_to("/dev/full")
    log = SegmentLog(tmp_path)
    async with log:
        ledger = Ledger(SESSION, log)
    result = ledger.seal()
    assert [hole.kind for hole in result.holes] == [HoleKind.LOST_RECORD]


async def test_a_caller_that_goes_away_does_not_undo_its_commit(tmp_path: Path) -> None:
    async with SegmentLog(tmp_path) as log:
        ledger = Ledger(SESSION, log)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await ledger.append(call(0, [1], [2]))
        result = ledger.seal()
    assert [fields_of(record) for record in result.records] == [fields_of(call(0, [1], [2]))]


async def test_the_ids_of_a_committed_call_are_those_it_was_sampled_with() -> None:
    ledger = Ledger(SESSION)
    await ledger.append(call(0, [1, 2], [3], call_id="a"))
    await ledger.append(call(1, [1, 2, 9], [4, 5], call_id="b"))
    assert (ledger.ids("a"), ledger.ids("b")) == (ids(1, 2, 3), ids(1, 2, 9, 4, 5))
    ledger.seal()
    assert ledger.ids("a") == ids(1, 2, 3)
    with pytest.raises(KeyError, match="c"):
        ledger.ids("c")


async def test_a_call_the_log_lost_has_no_ids_to_continue(tmp_path: Path) -> None:
    (tmp_path / "calls.log").symlink_to("/dev/full")
    async with SegmentLog(tmp_path) as log:
        ledger = Ledger(SESSION, log)
        with pytest.raises(CaptureError, match="No space left"):
            await ledger.append(call(0, [1], [2]))
        with pytest.raises(KeyError, match="call-0"):
            ledger.ids("call-0")


def test_arrays_are_kept_as_they_came() -> None:
    values = array("f", [2e-7, -0.5])
    record = asyncio.run(sealed(call(0, [1], [2, 3], log_probs=values))).records[0]
    assert record.log_probs.tobytes() == values.tobytes()
    assert record.sampled_ids == ids(2, 3)
