"""The grading processes: one that hangs, dies or is kept busy by a hostile log is no other rollout's trouble."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from polar_env.errors import GradeError
from polar_env.grade import report as official
from polar_env.grade.report import UnreadableError, Worker, Workers

READS = "import json, os, sys, time\nfor line in sys.stdin:\n    what = json.loads(line)\n"
ANSWERS = f"{READS}    print(json.dumps({{'pid': os.getpid(), **what}}), flush=True)\n"
"""Answers each request with its process and the request itself."""
SPINS = (
    f"{READS}    while what['do'] == 'spin': pass\n    time.sleep(what.get('sleeps', 0))\n"
    "    print(json.dumps({'pid': os.getpid()}), flush=True)\n"
)
"""Spins for ever when it is told to: a regular expression on a hostile log does that."""


def process(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


# --- one process ------------------------------------------------------------------------------------------------


def test_a_worker_is_kept_and_one_that_was_shot_is_replaced() -> None:
    worker = Worker(process(ANSWERS))
    first = worker.ask({})["pid"]
    assert worker.ask({})["pid"] == first
    assert worker._process is not None
    os.kill(first, signal.SIGKILL)
    worker._process.wait()
    assert worker.ask({})["pid"] != first
    worker.close()
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_worker_that_gets_no_processor_is_ended_and_says_nothing_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "TIMEOUT", 0.2)
    slow = Worker(process("import time; time.sleep(7021.25)"))
    with pytest.raises(GradeError, match="no answer") as told:
        slow.ask({"do": "script"}, processor=0.05)
    assert not isinstance(told.value, UnreadableError)
    assert slow._process is None


def test_a_worker_that_computes_for_ever_is_ended_by_its_processor_time_and_the_log_is_unreadable() -> None:
    worker, started = Worker(process(SPINS)), time.monotonic()
    pid = worker.ask({"do": "tell"})["pid"]
    with pytest.raises(UnreadableError, match="after 1 s of a processor"):
        worker.ask({"do": "spin"}, processor=1.0)
    assert time.monotonic() - started < 60
    assert worker.ask({"do": "tell"})["pid"] != pid
    worker.close()


def test_each_request_has_processor_time_of_its_own() -> None:
    """What earlier ones used is not held against the next: it would end a process in the midst of an honest log."""
    spin = (
        "    end = time.process_time() + 0.6\n    while time.process_time() < end: pass\n    print('{}', flush=True)\n"
    )
    worker = Worker(process(READS + spin))
    for _ in range(3):
        assert worker.ask({}, processor=1.0) == {}
    worker.close()


def test_a_worker_that_dies_leaves_its_last_words() -> None:
    dying = Worker(process("import sys; sys.exit('bad disk')"))
    with pytest.raises(GradeError, match="bad disk"):
        dying.ask({"do": "script"})
    with pytest.raises(GradeError, match="No such file"):
        Worker(("/nowhere/python",)).ask({"do": "script"})


@pytest.mark.parametrize("length", [1, 1_000_000])
def test_a_worker_that_no_longer_listens_is_named_and_leaves_nothing_open(length: int) -> None:
    """A short request stays in our buffer, and closing the pipe flushes it once more, into the same broken pipe."""
    deaf = Worker(process("import os; input(); os.close(0); print('{}', flush=True); os.read(os.pipe()[0], 1)"))
    assert deaf.ask({}) == {}
    assert deaf._process is not None
    pid = deaf._process.pid
    with pytest.raises(GradeError, match="Broken pipe"):
        deaf.ask({"do": "script", "row": "x" * length})
    assert (deaf._process, deaf._errors) == (None, None)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_half_an_answer_is_the_processs_failure_and_not_the_logs() -> None:
    with pytest.raises(GradeError, match="it ended") as told:
        Worker(process("print('{', end='')")).ask({"do": "report"})
    assert not isinstance(told.value, UnreadableError)


def test_more_results_than_any_suite_has_are_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read them would hold up every rollout of this process."""
    lines = "".join(f"PASSED t.py::test_{at:060}\n" for at in range(200_000))
    (tmp_path / "log").write_text(f"+ : '>>>>> Start Test Output'\n{lines}+ : '>>>>> End Test Output'\n")
    row = {"FAIL_TO_PASS": [], "PASS_TO_PASS": [], "log_parser": "pytest"}
    worker = Worker()
    with pytest.raises(UnreadableError, match="bytes of results"):
        official.statuses(row, tmp_path / "log", worker)
    worker.close()


OWN = {"do": "report", "row": {"log_parser": "pytest"}}


def answering(code: str) -> Worker:
    """The real process, with another answer."""
    patched = f"from polar_env.grade import report\ndef answer(request): {code}\nreport._own = answer\nreport.main()"
    return Worker(process(patched))


def test_a_log_that_takes_more_memory_than_any_is_unreadable() -> None:
    worker = answering("return {'report': len(bytearray(8 << 30))}")
    with pytest.raises(UnreadableError, match="MemoryError"):
        worker.ask(OWN)
    worker.close()


def test_an_error_that_holds_the_log_is_cut() -> None:
    """It ends up in the verdict, and so in the row."""
    worker = answering("raise KeyError('x' * 1_000_000)")
    with pytest.raises(UnreadableError, match="KeyError: 'xxx") as told:
        worker.ask(OWN)
    assert len(str(told.value)) < 1000
    worker.close()


def test_tests_of_two_results_are_found_where_a_long_log_is_nobody_elses_time(tmp_path: Path) -> None:
    lines = "FAILED t.py::a - first\nPASSED t.py::a\nPASSED t.py::b\nFAILED t.py::other\nPASSED t.py::other\n"
    text = f"+ : '>>>>> Start Test Output'\n{lines}+ : '>>>>> End Test Output'\n"
    (tmp_path / "log").write_text(text)
    row = {"FAIL_TO_PASS": '["t.py::a"]', "PASS_TO_PASS": ["t.py::b"], "log_parser": "parse_log_pytest"}
    row |= dict.fromkeys(("instance_id", "image", "repo", "version", "eval_script"), "x")
    worker = Worker()
    found = official.report({**row, "eval_type": "pass_and_fail"}, "x", tmp_path / "log", worker)
    assert (found["resolved"], found["conflicting"]) == (True, ["t.py::a"])
    worker.close()


def test_a_longer_log_may_take_longer(tmp_path: Path) -> None:
    class Notes:
        def ask(self, request: Any, processor: float | None = None) -> dict[str, Any]:
            return {"statuses": processor}

    row = {"FAIL_TO_PASS": [], "PASS_TO_PASS": [], "log_parser": "pytest"}
    (tmp_path / "short").write_bytes(b"")
    (tmp_path / "long").write_bytes(bytes(4 << 20))
    told: list[Any] = [official.statuses(row, tmp_path / name, Notes()) for name in ("short", "long")]
    assert told == [official.PROCESSOR, official.PROCESSOR + 4 * official.PER_MIB]
    with pytest.raises(GradeError, match="reading a log"):
        official.statuses(row, tmp_path / "gone", Notes())


# --- some of them -----------------------------------------------------------------------------------------------


@pytest.fixture
def made() -> list[Worker]:
    return []


def pool(made: list[Worker], most: int, code: str = SPINS) -> Workers:
    def make() -> Worker:
        made.append(Worker(process(code)))
        return made[-1]

    return Workers(most, make)


def alive(made: list[Worker]) -> int:
    return sum(worker._process is not None for worker in made)


def test_one_process_serves_as_long_as_it_is_quick(made: list[Worker]) -> None:
    workers = pool(made, 4)
    with ThreadPoolExecutor(8) as threads:
        pids = {found["pid"] for found in threads.map(lambda _: workers.ask({"do": "tell"}), range(40))}
    assert (len(pids), len(made)) == (1, 1)
    workers.close()
    assert alive(made) == 0


def test_an_honest_log_does_not_wait_for_hostile_ones(made: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen at once held every other rollout's grading for half an hour."""
    monkeypatch.setattr(official, "HURRY", 0.05)
    workers, failed = pool(made, 2), list[UnreadableError]()

    def hostile() -> None:
        try:
            workers.ask({"do": "spin"}, processor=2.0)
        except UnreadableError as error:
            failed.append(error)

    thread = threading.Thread(target=hostile)
    thread.start()
    assert [workers.ask({"do": "tell"})["pid"] for _ in range(3)]
    assert not failed, "the hostile log was still being read"
    thread.join()
    assert len(failed) == 1
    assert len(made) == 2
    workers.close()
    assert alive(made) == 0


def test_the_processes_are_few_and_those_that_are_not_needed_end(
    made: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official, "HURRY", 0.01)
    workers = pool(made, 3)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: workers.ask({"do": "tell", "sleeps": 0.15}), range(6)))
    assert 1 < len(made) <= 3
    assert alive(made) == 1
    workers.close()


def test_waiting_for_a_turn_is_no_time_of_the_answer(made: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for a log that nobody can read, or for a grading process that has failed."""
    monkeypatch.setattr(official, "TIMEOUT", 1.0)
    workers = pool(made, 1)
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: workers.ask({"do": "tell", "sleeps": 0.4}, 0.3), range(6)))
    assert len(answers) == 6
    workers.close()


def test_a_process_that_fails_is_no_loss_to_the_others(made: list[Worker]) -> None:
    workers = pool(made, 1, "import sys; sys.exit('bad disk')")
    for _ in range(3):
        with pytest.raises(GradeError, match="bad disk"):
            workers.ask({"do": "tell"})
    assert len(made) == 1


async def test_requests_that_wait_hold_no_thread_of_the_rollouts() -> None:
    name = await official.apart(lambda: threading.current_thread().name)
    assert name.startswith("grade")
