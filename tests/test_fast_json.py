"""JSON by the fast way and by the slow one: the same values, nothing refused that JSON can say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env import fast_json

CHARACTERS = st.characters(codec=None)  # lone surrogates too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(CHARACTERS),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(CHARACTERS), inner),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read_back_by_any_reader(value: object) -> None:
    assert json.loads(fast_json.write(value)) == value
    assert json.loads(fast_json.text(value)) == value


@given(VALUES)
def test_whatever_json_writes_is_read_as_json_reads_it(value: object) -> None:
    told = json.dumps(value)
    read = fast_json.read(told)
    assert read == (value if read == value else json.loads(told, parse_int=_as_orjson))
    assert fast_json.read(told.encode()) == read


def _as_orjson(digits: str) -> float | int:
    """An integer that 64 bits do not hold is a float: the one difference the module names."""
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else float(digits)


@given(st.dictionaries(st.text(CHARACTERS, min_size=1), VALUES, min_size=2, max_size=4))
def test_a_canonical_form_does_not_depend_on_the_order_of_keys(value: dict[str, object]) -> None:
    turned = dict(reversed(value.items()))
    assert fast_json.canonical(turned) == fast_json.canonical(value)
    assert json.loads(fast_json.canonical(value)) == value


@pytest.mark.parametrize("value", ["\ud83d cut", {"\udc00": 1}, 1 << 70, {1: 2}])
def test_what_orjson_refuses_is_written_all_the_same(value: object) -> None:
    assert json.loads(fast_json.write(value)) == json.loads(json.dumps(value))


def test_nesting_deeper_than_orjson_goes_is_kept() -> None:
    deep: object = 0
    for _ in range(500):
        deep = [deep]
    assert json.loads(fast_json.write(deep)) == json.loads(fast_json.canonical(deep)) == deep


def test_not_a_number_in_an_answer_is_read_and_left_to_the_capture_contract() -> None:
    assert str(fast_json.read(b'{"logprob": NaN}')["logprob"]) == "nan"


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_somebody_else_wrote_has_no_word_that_json_has_not(word: str) -> None:
    with pytest.raises(ValueError, match=f"^{word} is not JSON"):
        fast_json.strict(f'{{"temperature": [1, {word}]}}')


def test_what_somebody_else_wrote_keeps_every_digit_of_an_integer() -> None:
    assert fast_json.strict(b'{"id": 123456789012345678901234567890, "a": "NaN", "b": 1.5}') == {
        "id": 123456789012345678901234567890,
        "a": "NaN",
        "b": 1.5,
    }


@pytest.mark.parametrize("inside", ["0", "123456789012345678901234567890", '"\\ud800"'])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a": ', "}"), ("[0, ", "]")])
def test_what_somebody_else_wrote_is_as_deep_as_can_be_written_again(opens: str, closes: str, inside: str) -> None:
    """Whatever makes orjson refuse it."""

    def nested(levels: int) -> str:
        return opens * levels + inside + closes * levels

    kept = fast_json.strict(nested(fast_json.DEPTH))
    assert fast_json.canonical([kept]) == json.dumps([kept], separators=(",", ":")).encode()
    for levels in (fast_json.DEPTH + 1, 5000, 100_000):
        with pytest.raises(ValueError, match="nested deeper than 254 levels"):
            fast_json.strict(nested(levels))


@pytest.mark.parametrize("text", [b"", b"{", b"word", b"\xff", '{"a": }'])
def test_what_is_no_json_is_refused(text: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"."):
        fast_json.read(text)
