"""Which call does a prompt continue: exact prefixes only, the longest one, never an empty step; every id held once."""

import gc
import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from polar_env.prefix import BLOCK, Line, PrefixIndex, as_ids
from trajectory_helpers import ids, long_session

tokens = st.lists(st.integers(0, 2), max_size=6)

Call = tuple[list[int], list[int], str]
"""Prompt, sampled ids and group of a call; its name is its position."""


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    """Any tree of calls: each begins anew, or with a part of an earlier call's ids, or with all of them."""
    made: list[Call] = []
    for _ in range(draw(st.integers(0, 12))):
        base: list[int] = []
        if made and draw(st.booleans()):
            prompt, sampled, _ = draw(st.sampled_from(made))
            base = (prompt + sampled)[: draw(st.none() | st.integers(0, 8))]
        made.append((base + draw(tokens), draw(tokens), draw(st.sampled_from(["", "sub"]))))
    return made


def index_of(*known: Call | tuple[list[int], list[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for number, (prompt, sampled, *group) in enumerate(known):
        index.add(f"{number}", ids(prompt), ids(sampled), *group)
    return index


def name(index: PrefixIndex, *prompt: int, group: str = "") -> str | None:
    entry = index.longest(ids(prompt), group)
    return entry.name if entry else None


def naive(known: list[Call], prompt: list[int], group: str) -> tuple[str, int] | None:
    """Name and length of what ``longest`` must find, by comparing lists."""
    whole = [(prompt + sampled, of, str(number)) for number, (prompt, sampled, of) in enumerate(known)]
    extended = [call for call in whole if call[0] and len(call[0]) < len(prompt) and prompt[: len(call[0])] == call[0]]
    longest = max((len(call[0]) for call in extended), default=0)
    equal = [call for call in extended if len(call[0]) == longest]
    found = next((call for call in equal if call[1] == group), equal[0] if equal else None)
    return (found[2], longest) if found else None


def test_the_longest_prefix_wins() -> None:
    index = index_of(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]))
    assert name(index, 1, 2, 3, 4, 5, 5) == "1"
    assert name(index, 1, 2, 3, 4, 5, 6, 7) == "2"


def test_a_shorter_call_that_comes_later_is_found_too() -> None:
    index = index_of(([1, 2, 3, 4], [5]), ([1, 2], [3]))
    assert name(index, 1, 2, 3, 9) == "1"
    assert name(index, 1, 2, 3, 4, 5, 6) == "0"


def test_one_other_token_is_another_history() -> None:
    index = index_of((list(range(100)), [7]))
    prompt = [*range(100), 7, 8]
    assert name(index, *prompt) == "0"
    for position in (0, 50, 84, 99, 100):
        changed = list(prompt)
        changed[position] += 1
        assert name(index, *changed) is None


def test_a_prompt_that_adds_nothing_continues_nothing() -> None:
    index = index_of(([1, 2], [3]))
    assert name(index, 1, 2, 3) is None
    assert name(index, 1, 2, 3, 4) == "0"


def test_equal_sequences_prefer_the_own_thread_else_the_first() -> None:
    index = index_of(([1, 2], [3], "main"), ([1, 2], [3], "sub"))
    assert name(index, 1, 2, 3, 4, group="sub") == "1"
    assert name(index, 1, 2, 3, 4, group="other") == "0"


def test_a_call_without_ids_is_nobodys_parent() -> None:
    index = PrefixIndex()
    index.add("empty", array("i"), array("i"))
    assert name(index, 1) is None
    assert index.ids("empty") == array("i")


def test_what_it_was_given_may_change_afterwards() -> None:
    index, prompt = PrefixIndex(), ids(1, 2)
    index.add("a", prompt, ids(3))
    prompt[0] = 9
    assert index.parts("a") == (ids(1, 2), ids(3))
    index.ids("a")[0] = 9
    assert index.ids("a") == ids(1, 2, 3)


def test_a_long_session_holds_every_id_once() -> None:
    index, records = PrefixIndex(), long_session(40, 12_000)
    for record in records:
        index.add(record.call_id, record.prompt_ids, record.sampled_ids)
    last = records[-1]
    assert index.held == len(last.prompt_ids) + len(last.sampled_ids)


def test_histories_that_part_in_the_middle_share_what_comes_before() -> None:
    index, system = PrefixIndex(), list(range(1000))
    for number in range(20):
        placed = index.add(f"{number}", ids(system, 5000 + number), ids(7, 7))
        assert (placed.parent, placed.base, placed.shared) == (None, "0" if number else None, 1000 if number else 0)
    assert index.held == 1000 + 20 * 3


def test_what_is_shared_is_shared_with_the_shortest_call_that_has_it() -> None:
    """A log that loses a call loses those that needed its ids: they need no longer a call than they must."""
    index = index_of(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]))
    assert index.add("at its end", ids(1, 2, 9), ids(1)).base == "0"
    assert index.add("inside", ids(1, 2, 3, 9), ids(1)).base == "1"


def test_a_delta_that_begins_where_its_base_left_another_goes_back_to_that() -> None:
    index = index_of(([1, 2, 3], [4]), ([1, 2, 7], [8]), ([1, 2, 7, 8, 9], [9]))
    held = index.held
    index.add_after("2", 2, "again", ids(3), ids(4))
    index.add_after("2", 1, "short", ids(2, 3), ids(4))
    assert (index.ids("again"), index.ids("short"), index.held) == (ids(1, 2, 3, 4), ids(1, 2, 3, 4), held)


def test_a_tree_is_freed_when_it_is_let_go() -> None:
    """Not when the collector comes round: a process has thousands of them, one after the other."""
    whole = ids(range(50_000))
    gc.disable()
    tracemalloc.start()
    try:
        index = index_of((whole, [1]), (whole[:20_000] + whole, [1]))
        held = tracemalloc.get_traced_memory()[0]
        del index
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held > 4 * 100_000
    assert left < 10_000


@given(calls(), st.data())
def test_it_finds_what_comparing_lists_finds(known: list[Call], data: st.DataObject) -> None:
    prompt = data.draw(tokens)
    if known and data.draw(st.booleans()):
        before, sampled, _ = data.draw(st.sampled_from(known))
        prompt = before + sampled + prompt
    group = data.draw(st.sampled_from(["", "sub"]))
    found = index_of(*known).longest(ids(prompt), group)
    assert ((found.name, len(found)) if found else None) == naive(known, prompt, group)


@given(calls())
def test_a_call_that_is_added_learns_its_parent_and_what_it_shares(known: list[Call]) -> None:
    index = PrefixIndex()
    for number, (prompt, sampled, group) in enumerate(known):
        placed = index.add(f"{number}", ids(prompt), ids(sampled), group)
        parent = (placed.parent.name, len(placed.parent)) if placed.parent else None
        assert parent == naive(known[:number], prompt, group)
        earlier = [p + s for p, s, _ in known[:number]]
        shared = [sum(1 for i in range(len(prompt)) if prompt[: i + 1] == whole[: i + 1]) for whole in earlier]
        assert placed.shared == max(shared, default=0)
        if placed.base is not None:
            assert earlier[int(placed.base)][: placed.shared] == prompt[: placed.shared]


@given(calls())
def test_what_was_added_comes_back_and_no_beginning_is_held_twice(known: list[Call]) -> None:
    index = index_of(*known)
    for number, (prompt, sampled, _) in enumerate(known):
        assert index.parts(f"{number}") == (ids(prompt), ids(sampled))
        assert index.ids(f"{number}") == ids(prompt, sampled)
    whole = [prompt + sampled for prompt, sampled, _ in known]
    assert index.held == len({tuple(ids_[: i + 1]) for ids_ in whole for i in range(len(ids_))})


@given(calls())
def test_a_tree_made_of_deltas_is_the_same_tree(known: list[Call]) -> None:
    first, second = PrefixIndex(), PrefixIndex()
    for number, (prompt, sampled, _) in enumerate(known):
        placed = first.add(f"{number}", ids(prompt), ids(sampled))
        rest = ids(prompt)[placed.shared :]
        if placed.base is None:
            second.add(f"{number}", rest, ids(sampled))
        else:
            second.add_after(placed.base, placed.shared, f"{number}", rest, ids(sampled))
    for number, (prompt, sampled, _) in enumerate(known):
        assert second.parts(f"{number}") == (ids(prompt), ids(sampled))
    assert second.held == first.held


sizes = st.integers(0, 3 * BLOCK) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])


def line_of(*parts: "array[int]") -> Line:
    line = Line()
    for part in parts:
        line.extend(part)
    return line


@given(st.lists(sizes, max_size=3), sizes, sizes)
def test_a_line_gives_back_any_part_of_what_it_was_given(lengths: list[int], first: int, last: int) -> None:
    whole = ids(range(sum(lengths)))
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    line = line_of(*(whole[start : start + size] for start, size in zip(starts, lengths, strict=True)))
    first, last = sorted((min(first, len(whole)), min(last, len(whole))))
    found = ids(-1) * (last - first + 2)
    line.copy_to(found, 1, first, last)
    assert (len(line), found) == (len(whole), ids(-1) + whole[first:last] + ids(-1))


@given(sizes, sizes, sizes, sizes)
def test_a_line_and_ids_agree_up_to_their_first_difference(length: int, at: int, wrong: int, more: int) -> None:
    whole, at = ids(range(length)), min(at, length)
    asked = whole[at:] + ids(range(-more, 0))
    if wrong < len(asked):
        asked[wrong] = -9
    assert line_of(whole).agrees(at, as_ids(asked)) == min(wrong, length - at)


def test_sessions_longer_than_a_block_branch_and_come_back() -> None:
    whole = ids(range(2 * BLOCK + 5))
    index = PrefixIndex()
    index.add("0", whole, ids(1))
    for number, at in enumerate((BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK), start=1):
        prompt = whole[:at] + ids(-number, range(BLOCK))
        assert index.add(f"{number}", prompt, ids(7)).shared == at
        assert index.parts(f"{number}") == (prompt, ids(7))
    assert index.parts("0") == (whole, ids(1))
    assert name(index, *whole, 1, 2) == "0"
