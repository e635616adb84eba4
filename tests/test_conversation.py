"""What calls were asked: kept once, whole again when read, and never in the way of what trains."""

import asyncio
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finished_helpers import LOOKED, TASK, TOOLS, finish, of_session, record, request, two_turns
from polar_env.conversation import Conversation, Writer, decode
from polar_env.errors import CaptureError
from polar_env.frames import MAGIC, PREFIX, PREFIX_SIZE, Damage, Frame, FrameKind, encode_frame, frames
from polar_env.messages import ChatMessage
from polar_env.segment_log import FILE_NAME, read
from polar_env.types import HoleKind, ModelRequest
from trajectory_helpers import call, fields_of, long_session

Encoded = list[tuple[dict[str, Any], bytes]]


def said(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def stored(*requests: ModelRequest) -> Encoded:
    writer = Writer()
    return [writer.encode(f"call-{number}", entry) for number, entry in enumerate(requests)]


def new_in(entry: tuple[dict[str, Any], bytes]) -> dict[str, Any]:
    return json.loads(zlib.decompress(entry[1]))


# --- deltas -----------------------------------------------------------------------------------------------------


def test_a_history_that_grows_is_stored_once() -> None:
    first, second = stored(request(TASK), request((*TASK, *LOOKED)))
    assert (first[0]["base"], first[0]["shared"]) == (None, 0)
    assert (second[0]["base"], second[0]["shared"]) == ("call-0", 2)
    assert new_in(second) == {"messages": list(LOOKED)}


def test_a_side_call_in_between_does_not_break_the_thread() -> None:
    *_, third = stored(request(TASK), request([said("title?")]), request((*TASK, said("go on"))))
    assert (third[0]["base"], third[0]["shared"]) == ("call-0", 2)


def test_the_same_request_again_stores_nothing() -> None:
    _, again = stored(request(TASK), request(TASK))
    assert (again[0]["shared"], new_in(again)) == (2, {"messages": []})


def test_tools_are_stored_where_they_change() -> None:
    other = ({"name": "edit", "parameters": {}},)
    entries = stored(request(TASK), request(TASK, other), request(TASK), request(TASK, ()))
    assert [entry[0]["tools"] for entry in entries] == ["call-0", "call-1", "call-0", "call-3"]
    assert [found.tools for found in decode(entries).values()] == [TOOLS, other, TOOLS, ()]


def test_edited_history_shares_only_what_came_before_the_edit() -> None:
    _, edited = stored(request([said("a"), said("b"), said("c")]), request([said("a"), said("B"), said("c")]))
    assert edited[0]["shared"] == 1


words = st.lists(st.sampled_from(["a", "b", "\ud800", "ä", "x" * 50]), max_size=6)


@given(st.lists(st.tuples(words, st.booleans()), max_size=8))
def test_any_requests_come_back_as_they_were(talks: list[tuple[list[str], bool]]) -> None:
    requests = [request([said(word) for word in texts], TOOLS if tools else ()) for texts, tools in talks]
    assert decode(stored(*requests)) == {
        f"call-{number}": Conversation(entry.messages, entry.tools) for number, entry in enumerate(requests)
    }


def test_a_request_whose_base_was_lost_is_left_out_with_all_that_need_it() -> None:
    entries = stored(
        request(TASK), request([said("other")], ()), request((*TASK, *LOOKED)), request([*TASK, *LOOKED, said("x")])
    )
    assert set(decode(entries[1:])) == {"call-1"}


# --- in the log -------------------------------------------------------------------------------------------------


def test_the_log_gives_back_what_each_call_was_asked(tmp_path: Path) -> None:
    finished = finish(tmp_path)
    found = read(finished.log).conversations()
    assert found["parser.0-0001"] == Conversation((*TASK, *LOOKED), TOOLS)
    assert found["parser.0-0003"] == Conversation(({"role": "user", "content": "title?"},), ())
    assert len(found) == 4


def test_without_messages_the_log_holds_the_same_calls_and_no_word_of_them(tmp_path: Path) -> None:
    asked, bare = finish(tmp_path / "asked"), finish(tmp_path / "bare", messages=False)
    assert read(bare.log).conversations() == {}
    assert [fields_of(r) for r in read(bare.log).ledger.records] == [
        fields_of(r) for r in read(asked.log).ledger.records
    ]
    assert bare.row == asked.row


async def test_a_log_cut_anywhere_gives_messages_of_recorded_calls_only(tmp_path: Path) -> None:
    await record(tmp_path, two_turns())
    path = tmp_path / "parser.0" / FILE_NAME
    whole, counts = path.read_bytes(), set[int]()
    full = read(path.parent).conversations()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        log = read(path.parent)
        assert log.sealed is False
        assert log.ledger.complete
        found = log.conversations()
        assert found == {name: full[name] for name in found}
        assert set(found) <= {entry.call_id for entry in log.ledger.records}
        counts.add(len(found))
    assert counts == {0, 1, 2, 3, 4}


async def test_a_corrupt_request_is_a_hole_and_takes_no_call_along(tmp_path: Path) -> None:
    await record(tmp_path, two_turns())
    path = tmp_path / "parser.0" / FILE_NAME
    data = bytearray(path.read_bytes())
    at = next(start for start, kind in starts(bytes(data)) if kind is FrameKind.MESSAGES)
    data[at + PREFIX_SIZE + 2] ^= 1
    path.write_bytes(data)
    log = read(path.parent)
    assert [hole.kind for hole in log.ledger.holes] == [HoleKind.LOST_RECORD]
    assert len(log.ledger.records) == 4
    assert set(log.conversations()) == {"parser.0-0003"}, "the others' tools were in the lost one"


def starts(data: bytes) -> list[tuple[int, FrameKind]]:
    found, at = [], 0
    while at < len(data):
        found.append((at, FrameKind(data[at + 4])))
        header, body = (int.from_bytes(data[at + n : at + n + 4], "little") for n in (5, 9))
        at += PREFIX_SIZE + header + body
    return found


def test_messages_that_are_none_are_named_as_such(tmp_path: Path) -> None:
    data = encode_frame(FrameKind.MESSAGES, {"call_id": "c"}, b"not zlib")
    (tmp_path / FILE_NAME).write_bytes(data)
    with pytest.raises(CaptureError, match="reading the messages"):
        read(tmp_path).conversations()


async def test_a_long_session_s_messages_cost_less_than_they_say(tmp_path: Path) -> None:
    """Ids and log-probs keep their bar (test_segment_log); messages are counted on their own."""
    history: list[ChatMessage] = [{"role": "system", "content": "You fix bugs."}]
    calls = []
    for entry in long_session(40, 12_000):
        history.append({"role": "user", "content": f"tool result {entry.index}: " + "text of a file " * 20})
        calls.append((of_session("long", entry), request(history)))
        history.append({"role": "assistant", "content": entry.turn.text})
    await record(tmp_path / "with", calls)
    await record(tmp_path / "without", calls, messages=False)
    sizes = [(tmp_path / side / "long" / FILE_NAME).stat().st_size for side in ("with", "without")]
    spoken = len(json.dumps(history))
    assert 0 < sizes[0] - sizes[1] < 0.8 * spoken
    assert read(tmp_path / "with" / "long").conversations()["long-0039"].messages == tuple(history[:-1])


def endless() -> Any:
    """Lists in lists, more than can be written."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize("content", [b"bytes", endless()], ids=["bytes", "endless"])
def test_a_request_that_is_no_json_loses_its_messages_not_its_call(tmp_path: Path, content: Any) -> None:
    odd: list[Any] = [{"role": "user", "content": content}]
    calls = [
        (of_session("s", call(0, [1], [2])), request(odd)),
        (of_session("s", call(1, [1, 2, 3], [4])), request(TASK)),
    ]
    asyncio.run(record(tmp_path, calls))
    log = read(tmp_path / "s")
    assert (len(log.ledger.records), log.ledger.complete) == (2, True)
    assert set(log.conversations()) == {"s-0001"}


# --- frames -----------------------------------------------------------------------------------------------------


def raw(kind: int, header: bytes) -> bytes:
    """A frame whose checksums are right, whatever it holds."""
    prefix = PREFIX.pack(MAGIC, kind, len(header), 0, zlib.crc32(b"", zlib.crc32(header)))
    return prefix + struct.pack("<I", zlib.crc32(prefix)) + header


@pytest.mark.parametrize("broken", [raw(1, b"neither JSON nor zlib"), raw(1, b"{nor this"), raw(99, b"{}")])
def test_a_frame_written_wrongly_is_as_lost_as_a_damaged_one(broken: bytes) -> None:
    good = encode_frame(FrameKind.SEAL, {"records": 0})
    found = [frame.kind if isinstance(frame, Frame) else frame for frame in frames(good + broken + good)]
    assert found == [FrameKind.SEAL, Damage.CORRUPT, FrameKind.SEAL]


def test_a_call_without_a_request_is_a_call(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path, [(of_session("s", call(0, [1], [2])), None)]))
    log = read(tmp_path / "s")
    assert (len(log.ledger.records), log.sealed, log.conversations()) == (1, True, {})
