"""Server-sent events: what the standard says, and that no chunking of the bytes can be told from another."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialect_helpers import chunked, texts, values
from polar_env.proxy.sse import Event, Parser, encode, encode_text

LINES = st.sampled_from(
    [b"data: a", b"data:b", b"data:  c ", b"data", b"event: x", b"event:", b"id: 7", b"id: \0", b": ping", b"retry: 10",
     b"", b"", b"data: \xe2\x98\x83", b"data: \xff", b"nonsense", b"data: x:y", b"\xef\xbb\xbfdata: bom"]
)  # fmt: skip
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r", b"\r\n"])), max_size=20).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


def parse(*chunks: bytes) -> list[Event]:
    parser = Parser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@given(STREAMS, st.lists(st.integers(0, 400), max_size=10))
def test_any_chunking_gives_the_same_events(stream: bytes, cuts: list[int]):
    assert parse(*chunked(stream, cuts)) == parse(stream)


@given(STREAMS)
def test_one_byte_at_a_time_gives_the_same_events(stream: bytes):
    assert parse(*(stream[at : at + 1] for at in range(len(stream)))) == parse(stream)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_noise_never_raises_and_chunks_alike(noise: bytes, cuts: list[int]):
    assert parse(*chunked(noise, cuts)) == parse(noise)


@given(values, st.sampled_from(["", "message_start"]))
def test_an_encoded_event_comes_back(value: Any, name: str):
    (event,) = parse(encode(value, name))
    assert event.json() == value
    assert event.event == (name or "message")


@given(texts)
def test_encoded_text_comes_back_with_line_ends_as_newlines(text: str):
    (event,) = parse(encode_text(text))
    assert event.data == text.replace("\r\n", "\n").replace("\r", "\n")


@given(st.lists(values, max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_events_come_back_in_order(sent: list[Any], cuts: list[int]):
    wire = b"".join(encode(value) for value in sent)
    assert [event.json() for event in parse(*chunked(wire, cuts))] == sent


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_every_line_ending_of_the_standard_ends_a_line(end: bytes):
    assert parse(end.join([b"event: a", b"data: 1", b"data: 2", b"", b""])) == [Event("1\n2", "a")]


def test_a_carriage_return_dispatches_without_waiting_for_what_follows():
    parser = Parser()
    assert parser.feed(b"data: 1\r\r") == [Event("1")]
    assert parser.feed(b"\ndata: 2\n\n") == [Event("2")]


def test_an_empty_chunk_between_cr_and_lf_changes_nothing():
    assert parse(b"data: 1\r", b"", b"\n\r\n") == [Event("1")]


def test_the_byte_order_mark_is_skipped_only_at_the_very_start():
    assert parse(b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n") == [Event("1")]


def test_only_one_space_after_the_colon_is_taken_off():
    assert parse(b"data:  two\ndata:none\n\n") == [Event(" two\nnone")]


def test_comments_and_unknown_fields_say_nothing():
    assert parse(b": ping\n\nretry: 5\n\nfoo: bar\ndata: x\n\n") == [Event("x")]


def test_an_event_without_data_is_none_and_its_name_does_not_leak():
    assert parse(b"event: gone\n\ndata: x\n\n") == [Event("x", "message")]


def test_the_last_id_stays_until_another_comes():
    assert [event.id for event in parse(b"id: 1\ndata: a\n\ndata: b\n\nid: 2\ndata: c\n\n")] == ["1", "1", "2"]


def test_an_event_cut_by_the_end_of_the_stream_is_none():
    assert parse(b"data: whole\n\ndata: cut\n") == [Event("whole")]


def test_bytes_that_are_not_utf8_are_replaced():
    assert parse(b"data: \xff\n\n") == [Event("\ufffd")]


def test_a_done_marker_is_not_json():
    (event,) = parse(encode_text("[DONE]"))
    assert event.data == "[DONE]"
    with pytest.raises(ValueError, match="Expecting value"):
        event.json()


def test_encoded_json_is_one_ascii_line_whatever_it_holds():
    wire = encode({"text": "\u2028\x85\r\n☃\ud800"}, "e")
    assert wire.isascii()
    assert wire.count(b"\n") == 3
    assert json.loads(wire.split(b"data: ")[1]) == {"text": "\u2028\x85\r\n☃\ud800"}


def test_a_large_event_in_small_chunks_is_read_in_linear_time():
    wire = encode("x" * 2_000_000)
    parser = Parser()
    read = [event for start in range(0, len(wire), 64) for event in parser.feed(wire[start : start + 64])]
    assert len(read[0].json()) == 2_000_000
