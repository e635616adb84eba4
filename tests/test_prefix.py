"""Which call does a prompt continue: exact prefixes only, the longest one, and never an empty step."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from polar_env.prefix import PrefixIndex
from trajectory_helpers import ids

tokens = st.lists(st.integers(0, 2), max_size=6)


def index_of(*calls: tuple[list[int], list[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for number, (prompt, sampled) in enumerate(calls):
        index.add(f"call-{number}", ids(prompt), ids(sampled))
    return index


def name(index: PrefixIndex, *prompt: int, group: str = "") -> str | None:
    entry = index.longest(ids(prompt), group)
    return entry.name if entry else None


def test_the_longest_prefix_wins() -> None:
    index = index_of(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]))
    assert name(index, 1, 2, 3, 4, 5, 5) == "call-1"
    assert name(index, 1, 2, 3, 4, 5, 6, 7) == "call-2"


def test_one_other_token_is_another_history() -> None:
    index = index_of((list(range(100)), [7]))
    prompt = [*range(100), 7, 8]
    assert name(index, *prompt) == "call-0"
    for position in (0, 50, 84, 99, 100):
        changed = list(prompt)
        changed[position] += 1
        assert name(index, *changed) is None


def test_a_prompt_that_adds_nothing_continues_nothing() -> None:
    index = index_of(([1, 2], [3]))
    assert name(index, 1, 2, 3) is None
    assert name(index, 1, 2, 3, 4) == "call-0"


def test_equal_sequences_prefer_the_own_thread_else_the_first() -> None:
    index = PrefixIndex()
    index.add("main", ids(1, 2), ids(3), group="")
    index.add("sub", ids(1, 2), ids(3), group="sub")
    assert name(index, 1, 2, 3, 4, group="sub") == "sub"
    assert name(index, 1, 2, 3, 4, group="other") == "main"


def test_a_call_without_ids_is_nobodys_parent() -> None:
    index = PrefixIndex()
    index.add("empty", array("i"), array("i"))
    assert name(index, 1) is None


@given(st.lists(st.tuples(tokens, tokens), max_size=8), tokens)
def test_it_finds_what_comparing_lists_finds(calls: list[tuple[list[int], list[int]]], prompt: list[int]) -> None:
    found = index_of(*calls).longest(ids(prompt))
    lengths = [len(p + s) for p, s in calls if p + s and len(p + s) < len(prompt) and prompt[: len(p + s)] == p + s]
    assert (len(found) if found else 0) == max(lengths, default=0)
