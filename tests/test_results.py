"""What test runs print, as statuses: pytest's lines, JUnit XML, and the readings of R2E-Gym and SWE-Gym."""

import json
import subprocess
import sys
import xml.sax.saxutils as sax
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.errors import GradeError
from polar_env.grade import report as official
from polar_env.grade.phases import log
from polar_env.grade.results import PARSERS, junit, plain, printed, pydantic, pytest_lines, r2e, report

STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
PARAMETERS = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="[]\n\r"), max_size=8).map(
    lambda text: text.strip()
)
PARAMETERS_WITH_DASHES = st.lists(PARAMETERS, min_size=1, max_size=3).map(" - ".join)
IDS = st.builds(
    lambda file, cls, name, parameter: f"tests/{file}.py::{cls}{name}{parameter}",
    NAMES,
    st.one_of(st.just(""), NAMES.map(lambda name: f"T{name}::")),
    NAMES.map(lambda name: f"test_{name}"),
    st.one_of(st.just(""), PARAMETERS_WITH_DASHES.map(lambda text: f"[{text}]")),
)
MESSAGES = st.sampled_from(["", " - assert 1 == 2", " - ValueError: a - b", " - KeyError: ']'"])


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, str]]:
    """Test id -> status, and the message behind it: only what did not pass has one."""
    statuses = draw(st.dictionaries(IDS, st.sampled_from(STATUSES), max_size=6))
    return statuses, {test: "" if told == "PASSED" else draw(MESSAGES) for test, told in statuses.items()}


def row(**fields: Any) -> dict[str, Any]:
    return {"log_parser": "pytest", "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": ["t.py::b"]} | fields


def judged(text: str, **fields: Any) -> dict[str, Any]:
    return report(row(**fields), log(text.encode(), 0).decode())


# --- pytest's lines ---------------------------------------------------------------------------------------------


@given(runs(), st.booleans())
def test_lines_of_a_summary_are_read_with_their_whole_ids(
    run: tuple[dict[str, str], dict[str, str]], coloured: bool
) -> None:
    statuses, messages = run
    head, tail = ("\x1b[32m", "\x1b[0m") if coloured else ("", "")
    lines = [f"{head}{told}{tail} {test}{messages[test]}" for test, told in statuses.items()]
    assert pytest_lines("\n".join(["=== short test summary info ===", *lines, "=== 1 passed in 0.1s ==="])) == statuses


def test_a_test_that_passed_and_broke_down_afterwards_did_not_pass() -> None:
    both = ["PASSED t.py::a", "ERROR t.py::a - OSError: left open"]
    assert pytest_lines("\n".join(both)) == pytest_lines("\n".join(both[::-1])) == {"t.py::a": "ERROR"}


def test_what_a_test_prints_in_the_middle_of_a_line_is_no_result() -> None:
    assert pytest_lines("it PASSED t.py::a\n PASSED t.py::a\nPASSEDt.py::a") == {}


@given(st.text())
def test_no_log_breaks_a_parser(text: str) -> None:
    for parse in (*PARSERS.values(), r2e):
        assert all(told in STATUSES for told in parse(text).values())


# --- JUnit XML --------------------------------------------------------------------------------------------------


def case(where: str, name: str, told: str) -> str:
    inside = {"FAILED": "<failure message='no'/>", "ERROR": "<error/>", "SKIPPED": "<skipped/>"}.get(told, "")
    return f"<testcase classname={sax.quoteattr(where)} name={sax.quoteattr(name)}>{inside}</testcase>"


@given(st.dictionaries(st.tuples(NAMES, NAMES, PARAMETERS), st.sampled_from(["PASSED", "FAILED", "ERROR", "SKIPPED"])))
def test_xml_names_a_test_as_pytest_does_and_as_other_runners_do(cases: dict[tuple[str, str, str], str]) -> None:
    body = "".join(case(f"tests.{file}.T", f"{name}[{text}]", told) for (file, name, text), told in cases.items())
    found = junit(f"<?xml version='1.0' encoding='utf-8'?><testsuites><testsuite>{body}</testsuite></testsuites>\n")
    for (file, name, text), told in cases.items():
        assert found[f"tests/{file}.py::T::{name}[{text}]"] == told
        assert found[f"tests.{file}.T::{name}[{text}]"] == told


def test_pytests_own_xml_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\nclass TestIt:\n    def test_a(self): pass\n    @pytest.mark.parametrize('x', [1])\n"
        "    def test_b(self, x): assert not x\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "--junit-xml=x.xml", "."]
    subprocess.run(argv, cwd=tmp_path, check=False, capture_output=True)
    found = junit((tmp_path / "x.xml").read_text())
    names = ("test_it.py::TestIt::test_a", "test_it.py::TestIt::test_b[1]", "test_it.py::test_c")
    assert [found[name] for name in names] == ["PASSED", "FAILED", "SKIPPED"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no tests ran",
        "<testsuite><testcase",
        "<!DOCTYPE x [<!ENTITY a 'aaa'>]><testsuite><testcase classname='t' name='&a;'/></testsuite>",
    ],
)
def test_what_is_no_plain_xml_holds_no_result(text: str) -> None:
    assert junit(text) == {}


# --- what is decided --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("PASSED t.py::a\nPASSED t.py::b\nFAILED t.py::c", True),
        ("PASSED t.py::a\nXFAIL t.py::b", True),
        ("XFAIL t.py::a\nPASSED t.py::b", False),
        ("PASSED t.py::a\nSKIPPED t.py::b", False),
        ("PASSED t.py::a", False),
        ("PASSED t.py::a\nERROR t.py::b", False),
    ],
)
def test_every_listed_test_must_have_passed(text: str, resolved: bool) -> None:
    assert judged(text)["resolved"] is resolved


def test_counts_are_of_the_lists() -> None:
    found = judged("PASSED t.py::b\nFAILED t.py::a - no")["tests_status"]
    assert found["FAIL_TO_PASS"] == {"success": [], "failure": ["t.py::a"]}
    assert found["PASS_TO_PASS"] == {"success": ["t.py::b"], "failure": []}


def test_a_log_without_results_says_so() -> None:
    assert judged("Segmentation fault\n") == {
        "resolved": False,
        "infra_failure_reason": "no result of any test was printed",
    }


def test_only_what_the_tests_printed_is_read(tmp_path: Path) -> None:
    whole = log(b"PASSED t.py::a\nPASSED t.py::b\n", 1)
    assert printed(whole.decode()) == "PASSED t.py::a\nPASSED t.py::b\n"
    (tmp_path / "log").write_bytes(b"PASSED t.py::z\n" + whole)
    assert official.statuses(row(), tmp_path / "log") == {"t.py::a": "PASSED", "t.py::b": "PASSED"}
    assert official.report(row(), "x", tmp_path / "log")["resolved"]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("pytest", "PASSED [" + " - " * 300_000),
        ("swe_gym_pydantic", "FAILED [" * 200_000),
        ("junit:", f'<testcase classname="{"a." * 500_000}" name="b"/>'),
    ],
)
def test_a_log_made_to_keep_its_reader_busy_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: str, text: str
) -> None:
    """One line of a patch's own printing: were its length to count twice over, it would take hours."""
    monkeypatch.setattr(official, "TIMEOUT", 30.0)
    (tmp_path / "log").write_bytes(log(f"{text}\nPASSED t.py::a\n".encode(), 0))
    assert official.statuses(row(log_parser=parser.rstrip(":")), tmp_path / "log")


def test_a_log_is_read_in_another_process(tmp_path: Path) -> None:
    """A reader that never ends can be killed there, and does not hold up the rollouts beside it."""
    (tmp_path / "log").write_bytes(log(b"PASSED t.py::a\n", 0))
    with pytest.raises(GradeError):
        official.report(row(), "x", tmp_path / "log", official.Worker(("/bin/false",)))


# --- R2E-Gym ----------------------------------------------------------------------------------------------------

R2E_LOG = """\
============================= test session starts ==============================
platform linux -- Python 3.8.20, pytest-8.3.3, pluggy-1.5.0
collected 4 items

r2e_tests/test_1.py ..F.                                                 [100%]

=========================== short test summary info ============================
PASSED r2e_tests/test_1.py::test_bounds
PASSED r2e_tests/test_1.py::TestShape::test_of[a::b]
FAILED r2e_tests/test_1.py::test_left - AssertionError: 1 - 2
\x1b[31mERROR\x1b[0m r2e_tests/test_1.py::test_set_up - OSError
========================= 1 failed, 2 passed in 0.57s =========================
"""
R2E_STATUSES = {"test_bounds": "PASSED", "TestShape.test_of[a.b]": "PASSED", "test_left": "FAILED",
                "test_set_up": "ERROR"}  # fmt: skip


def test_r2e_names_a_test_without_its_file_and_with_dots() -> None:
    assert r2e(R2E_LOG) == R2E_STATUSES


@pytest.mark.parametrize(
    ("expected", "resolved"),
    [
        (R2E_STATUSES, True),
        ({**R2E_STATUSES, "test_left": "PASSED"}, False),
        ({k: v for k, v in R2E_STATUSES.items() if k != "test_bounds"}, False),
        ({**R2E_STATUSES, "test_more": "PASSED"}, False),
        (
            {"\x1b[1mtest_bounds\x1b[0m": "PASSED", **{k: v for k, v in R2E_STATUSES.items() if k != "test_bounds"}},
            True,
        ),
        ({k if k != "test_left" else "test_left - AssertionError: other": v for k, v in R2E_STATUSES.items()}, True),
        ({}, False),
    ],
)
def test_r2e_wants_every_status_and_no_other_test(expected: dict[str, str], resolved: bool) -> None:
    """Failures that the right fix has too are expected, whatever their message."""
    fields = {"log_parser": "r2e", "polar_expected": expected, "PASS_TO_PASS": []}
    assert judged(R2E_LOG, FAIL_TO_PASS=["r2e_tests/test_1.py::test_bounds"], **fields)["resolved"] is resolved


@given(st.dictionaries(NAMES, st.sampled_from(["PASSED", "FAILED", "ERROR"]), min_size=1), st.data())
def test_r2e_resolves_a_log_of_what_it_expects_and_no_other(statuses: dict[str, str], data: st.DataObject) -> None:
    def text(told: dict[str, str]) -> str:
        lines = [f"{status} r2e_tests/test_1.py::{name}" for name, status in told.items()]
        return "\n".join(["=== short test summary info ===", *lines, "=== done ==="])

    fields = {"log_parser": "r2e", "polar_expected": statuses, "FAIL_TO_PASS": ["x"], "PASS_TO_PASS": []}
    assert judged(text(statuses), **fields)["resolved"]
    changed = data.draw(st.sampled_from(sorted(statuses)))
    other = "FAILED" if statuses[changed] == "PASSED" else "PASSED"
    assert not judged(text({**statuses, changed: other}), **fields)["resolved"]


def test_only_the_first_summary_counts_for_r2e() -> None:
    again = f"{R2E_LOG}=== short test summary info ===\nPASSED r2e_tests/test_1.py::test_left\n"
    assert r2e(again)["test_left"] == "FAILED"
    assert r2e("PASSED r2e_tests/test_1.py::test_left") == {}
    assert plain("\x1b[32mtest_a\x1b[0m - why") == "test_a"


@pytest.mark.parametrize(
    ("told", "resolved"), [("PASSED", True), ("XFAIL", True), ("SKIPPED", False), ("FAILED", False)]
)
def test_swe_gyms_rules_take_an_expected_failure_for_a_pass(told: str, resolved: bool) -> None:
    text = f"{told} t.py::a\nSKIPPED t.py::b"
    assert judged(text, log_parser="swe_gym_pydantic")["resolved"] is resolved


# --- SWE-Gym's pydantic -----------------------------------------------------------------------------------------


def test_pydantics_lines_are_read_in_either_order() -> None:
    text = "\n".join(
        [
            "tests/test_main.py::test_a PASSED",
            "tests/test_main.py::test_b FAILED",
            "\x1b[31mFAILED\x1b[0m [ 50%] tests/test_main.py::test_c - assert 0",
            "PASSED tests/test_main.py::test_d",
            "all of them PASSED",
            "",
        ]
    )
    names = "abcd"
    assert {name: pydantic(text).get(f"tests/test_main.py::test_{name}") for name in names} == {
        "a": "PASSED", "b": "FAILED", "c": "FAILED", "d": "PASSED",
    }  # fmt: skip


def test_the_names_of_parsers_are_none_of_the_official_ones(tmp_path: Path) -> None:
    """Else a row of SWE-bench would be read by ours."""
    assert not [name for name in PARSERS if name.startswith("parse_log")]
    (tmp_path / "log").write_bytes(log(b"PASSED t.py::a b\n", 0))
    of_theirs = row(log_parser="parse_log_pytest", instance_id="x", image="", repo="a/b", version="1",
                    eval_type="pass_and_fail", eval_script="", FAIL_TO_PASS=json.dumps([]))  # fmt: skip
    assert official.statuses(of_theirs, tmp_path / "log") == {"t.py::a": "PASSED"}
