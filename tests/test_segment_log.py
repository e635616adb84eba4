"""The session log: bit-identical after a kill at any point, small, and honest about what it lost."""

import asyncio
import math
import signal
import subprocess
import sys
from array import array
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_env.capture import Ledger, SegmentLog, rebuild
from polar_env.errors import CaptureError
from polar_env.frames import PREFIX_SIZE, FrameKind, encode_frame
from polar_env.segment_log import FILE_NAME
from polar_env.types import CallRecord, Hole, HoleKind, SealedLedger, StopReason, ToolCall
from trajectory_helpers import SESSION, call, call_trees, fields_of, ids, ledger, long_session, same_ledger

NAN_HOLE = Hole(HoleKind.BAD_LOG_PROB, "call-2", "nan")


def talk() -> list[CallRecord]:
    """A small session with all a record can hold: a branch, tool calls, odd text, a hole with a NaN."""
    tool = ToolCall("toolu_1", "bash", '{"command": "ls\\n"}')
    return [
        call(0, [1, 2], [3, 4], text="", tools=(tool,), stop=StopReason.TOOL_CALLS, reasoning="héé \ud800 \n"),
        call(1, [1, 2, 3, 4, 9], [5]),
        call(2, [1, 2, 3, 4, 8, 8], [6, 7], holes=(NAN_HOLE,), log_probs=array("f", [math.nan, -1, -2])),
        call(3, [70, 71], []),
        call(4, [1, 2, 3, 4, 9, 5, 10], [11], thread="sub"),
    ]


async def record(directory: Path, records: list[CallRecord], seal: bool = True) -> SealedLedger:
    async with SegmentLog(directory) as log:
        session = Ledger(SESSION, log)
        for entry in records:
            await session.append(entry)
            session.mark_delivered(entry.call_id)
        session.mark_superseded("call-1")
        session.mark_incomplete(Hole(HoleKind.LOST_RECORD, None, "an aborted stream"))
        return session.seal() if seal else ledger(*records)


@cache
def small_log() -> bytes:
    with TemporaryDirectory() as directory:
        asyncio.run(record(Path(directory), talk()))
        return (Path(directory) / FILE_NAME).read_bytes()


def read(data: bytes) -> SealedLedger:
    with TemporaryDirectory() as directory:
        (Path(directory) / FILE_NAME).write_bytes(data)
        return rebuild(Path(directory))


def frame_starts(data: bytes) -> list[int]:
    starts, at = [], 0
    while at < len(data):
        starts.append(at)
        header = int.from_bytes(data[at + 5 : at + 9], "little")
        at += PREFIX_SIZE + header + int.from_bytes(data[at + 9 : at + 13], "little")
    return starts


async def test_what_was_appended_comes_back_bit_for_bit(tmp_path: Path) -> None:
    sealed = await record(tmp_path, talk())
    assert same_ledger(rebuild(tmp_path), sealed)
    assert sealed.holes == (Hole(HoleKind.LOST_RECORD, None, "an aborted stream"), NAN_HOLE)


async def test_calls_that_arrive_out_of_order_come_back_in_order(tmp_path: Path) -> None:
    sealed = await record(tmp_path, talk()[::-1])
    assert same_ledger(rebuild(tmp_path), sealed)
    assert [entry.index for entry in sealed.records] == [0, 1, 2, 3, 4]


async def test_appends_that_wait_together_share_an_fsync_and_all_return(tmp_path: Path) -> None:
    async with SegmentLog(tmp_path) as log:
        session = Ledger(SESSION, log)
        async with asyncio.TaskGroup() as group:
            for entry in long_session(60, 6000):
                group.create_task(session.append(entry))
        sealed = session.seal()
    assert len(sealed.records) == 60
    assert same_ledger(rebuild(tmp_path), sealed)


async def test_an_append_has_reached_the_file_when_it_returns(tmp_path: Path) -> None:
    async with SegmentLog(tmp_path) as log:
        session = Ledger(SESSION, log)
        for count, entry in enumerate(talk(), start=1):
            await session.append(entry)
            assert len(rebuild(tmp_path).records) == count


def test_a_log_cut_at_any_byte_gives_the_calls_before_the_cut_and_no_hole() -> None:
    data, records = small_log(), [fields_of(entry) for entry in talk()]
    last = frame_starts(data)[-2]  # the logged hole; what comes after is the seal
    counts = set[int]()
    for cut in range(last + 1):
        found = read(data[:cut])
        assert [fields_of(entry) for entry in found.records] == records[: len(found.records)]
        assert {hole.kind for hole in found.holes} <= {HoleKind.BAD_LOG_PROB}
        counts.add(len(found.records))
    assert counts == {0, 1, 2, 3, 4, 5}


@settings(deadline=None)
@given(st.data())
def test_a_changed_byte_never_changes_a_call_in_silence(choice: st.DataObject) -> None:
    data = bytearray(small_log())
    at = choice.draw(st.integers(0, len(data) - 1))
    data[at] ^= choice.draw(st.integers(1, 255))
    found = read(bytes(data))
    good = {entry.call_id: fields_of(entry) for entry in talk()}
    assert all(fields_of(entry) == good[entry.call_id] for entry in found.records)
    assert any(hole.kind is HoleKind.LOST_RECORD and "corrupt" in hole.detail for hole in found.holes)


def test_a_corrupt_call_takes_along_those_that_needed_its_ids() -> None:
    data = bytearray(small_log())
    first_call = frame_starts(bytes(data))[1]
    data[first_call + PREFIX_SIZE + 3] ^= 1
    found = read(bytes(data))
    assert [entry.call_id for entry in found.records] == ["call-3"]
    assert {hole.call_id for hole in found.holes if "begins with" in hole.detail} == {"call-1", "call-2", "call-4"}


def test_a_call_cut_out_whole_is_missed_by_the_seal() -> None:
    frames = [
        encode_frame(FrameKind.OPEN, {"session_id": SESSION}),
        encode_frame(FrameKind.SEAL, {"records": 2}),
    ]
    found = read(b"".join(frames))
    assert [(hole.kind, hole.detail) for hole in found.holes] == [
        (HoleKind.LOST_RECORD, "the session was sealed with 2 calls, the log holds 0")
    ]


async def test_a_log_without_a_seal_gives_what_is_there(tmp_path: Path) -> None:
    await record(tmp_path, talk(), seal=False)
    found = rebuild(tmp_path)
    assert len(found.records) == 5
    assert found.delivered == {f"call-{i}" for i in range(5)}


@pytest.mark.parametrize("after", [0, 1, 7, 23])
def test_a_killed_writer_loses_nothing_it_had_promised(tmp_path: Path, after: int) -> None:
    script = Path(__file__).with_name("capture_writer.py")
    command = [sys.executable, str(script), str(tmp_path / "session"), "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        promised = [writer.stdout.readline().strip() for _ in range(after)]
        writer.send_signal(signal.SIGKILL)
        promised += [line.strip() for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    if not (tmp_path / "session" / FILE_NAME).exists():
        assert not promised
        return
    found, truth = rebuild(tmp_path / "session"), long_session(400, 60 * 400)
    assert found.complete
    assert len(promised) <= len(found.records)
    assert [fields_of(entry) for entry in found.records] == [fields_of(entry) for entry in truth[: len(found.records)]]


async def test_a_long_session_is_stored_in_at_most_a_fifth_more_than_its_unique_tensors(tmp_path: Path) -> None:
    records = long_session()
    sealed = await record(tmp_path, records)
    unique = 4 * (len(records[-1].prompt_ids) + sum(len(entry.log_probs) for entry in records))
    assert (tmp_path / FILE_NAME).stat().st_size <= 1.2 * unique
    assert same_ledger(rebuild(tmp_path), sealed)


async def test_histories_that_part_in_the_middle_are_stored_once_up_to_there(tmp_path: Path) -> None:
    """A harness that rewrites the end of its history (thinking stripped, a result cut) repeats all that is before."""
    records = [call(i, [*range(5000), 70_000 + i], range(9)) for i in range(20)]
    sealed = await record(tmp_path, records)
    assert (tmp_path / FILE_NAME).stat().st_size < 4 * 5000 + 20 * 700
    assert same_ledger(rebuild(tmp_path), sealed)


@settings(deadline=None, max_examples=30)
@given(call_trees())
def test_any_session_comes_back_as_it_was_sealed(found: SealedLedger) -> None:
    with TemporaryDirectory() as directory:
        sealed = asyncio.run(record(Path(directory), list(found.records)))
        assert same_ledger(rebuild(Path(directory)), sealed)


async def test_a_directory_holds_one_session(tmp_path: Path) -> None:
    await record(tmp_path, talk())
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(CaptureError, match="needs its own directory"):
        await SegmentLog(tmp_path).__aenter__()
    assert (tmp_path / FILE_NAME).read_bytes() == before


async def test_a_log_used_outside_its_lifetime_says_so(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path)
    with pytest.raises(CaptureError, match="async with"):
        Ledger(SESSION, log)
    async with log:
        session = Ledger(SESSION, log)
    with pytest.raises(CaptureError, match="not open"):
        await session.append(call(0, ids(1), ids(2)))
    session.mark_incomplete(Hole(HoleKind.LOST_RECORD, None, "after the log"))
    assert rebuild(tmp_path).holes == ()


async def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CaptureError, match=r"store\.sessions"):
        await SegmentLog(tmp_path / "file" / "session").__aenter__()
    with pytest.raises(CaptureError, match="reading the session log"):
        rebuild(tmp_path / "nothing")
