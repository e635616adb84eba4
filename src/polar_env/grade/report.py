"""The official ``swebench`` package in a process of its own: its import takes seconds and 170 MB, and a log parser's
regular expression can run for ever on a hostile log. Parsers of our own (``results``) read there too.

Run as ``python -m polar_env.grade.report`` it answers JSON lines. ``Worker`` is the other end: started at first use,
kept, killed and started anew when an answer takes too long.
"""

import atexit
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from polar_env.config import child_environment
from polar_env.errors import GradeError, boundary
from polar_env.grade import results

TIMEOUT = 120.0
"""Seconds one answer may take, the import included."""
_FIELDS = ("instance_id", "image", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type",
           "eval_script")  # fmt: skip
"""What ``swebench.harness.utils.make_test_spec`` of 5.0 reads of a row."""
_OWN_FIELDS = ("FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "polar_expected")
"""What ``results`` reads of one."""


class UnreadableError(GradeError):
    """The package was asked and had its time, and has no answer for this log: it raised, or it computes for ever.

    Where it reads the log of the row's own fix, that says something of what was printed, and so of the patch."""


class Worker:
    """One grading process. Thread-safe; requests are answered one at a time."""

    def __init__(self, argv: tuple[str, ...] = (sys.executable, "-m", "polar_env.grade.report")) -> None:
        self._argv = argv
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def ask(self, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """One request, one answer, within ``TIMEOUT`` or other seconds. Blocks: call it in a thread.

        Raises:
            UnreadableError: it raised, or was slow (it is killed then) with a processor for a quarter of its time.
            GradeError: the worker died, or got no processor.
        """
        timeout, computed = TIMEOUT if timeout is None else timeout, 0.0
        with self._lock, boundary(GradeError, "reading the grading process's answer"):
            try:
                process = self._running()
                computed = self._computed()
                assert process.stdin is not None
                process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
                process.stdin.flush()
                line = self._line(process, timeout)
            except OSError as error:  # it died (BrokenPipeError), was too slow (TimeoutError) or could not be started
                busy = isinstance(error, TimeoutError) and self._computed() - computed > timeout / 4
                words = self._words()
                self._end()
                failure = UnreadableError if busy else GradeError
                raise failure(f"the grading process failed ({error or type(error).__name__}): {words}") from None
            answer = cast("dict[str, Any]", json.loads(line))
        if "error" in answer:
            raise UnreadableError(f"the official grader could not {request['do']}: {answer['error']}")
        return answer

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._errors = tempfile.TemporaryFile(prefix="polar-grade-")  # noqa: SIM115 - lives as long as the process
        package = Path(__file__).parents[2]
        env = {
            **child_environment(),
            "PYTHONPATH": os.fspath(package),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env, cwd="/"
        )
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout)
        if not ready:
            raise TimeoutError(f"no answer after {timeout:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise BrokenPipeError("it ended")
        return line

    def _computed(self) -> float:
        """Seconds the process was on a processor so far."""
        if self._process is None:
            return 0.0
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return 0.0
        return sum(map(int, stat.rpartition(") ")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def _words(self) -> str:
        """The end of what the process printed to standard error."""
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 500))
        return self._errors.read().decode("utf-8", "replace").strip()

    def _end(self) -> None:
        if self._process is not None:
            # Leaving the block closes its pipes and waits; what a dead process was to be told cannot be flushed.
            with suppress(BrokenPipeError), self._process:
                self._process.kill()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None


WORKER = Worker()
"""The worker of this process."""
atexit.register(WORKER.close)


def eval_script(row: Mapping[str, Any], worker: Worker = WORKER) -> str:
    """The official evaluation script of a row, which records the tests' own exit code. Blocks. Raises GradeError."""
    return str(worker.ask({"do": "script", "row": _row(row)})["script"])


def report(
    row: Mapping[str, Any], patch: str, log: Path, worker: Worker = WORKER, timeout: float | None = None
) -> dict[str, Any]:
    """``swebench.harness.grading.get_eval_report`` of one instance: ``resolved``, ``tests_status``, … Blocks.

    Raises:
        UnreadableError: the package has no answer for this log.
        GradeError: the worker failed; says nothing about the patch.
    """
    request = {"do": "report", "row": _row(row), "patch": patch, "log": os.fspath(log)}
    return cast("dict[str, Any]", worker.ask(request, timeout)["report"])


def statuses(row: Mapping[str, Any], log: Path, worker: Worker = WORKER) -> dict[str, str]:
    """Test id -> PASSED, FAILED, ERROR, SKIPPED or XFAIL, as the row's own parser reads the log. Blocks. Raises as
    ``report`` does."""
    answer = worker.ask({"do": "statuses", "row": _row(row), "log": os.fspath(log)})
    return cast("dict[str, str]", answer["statuses"])


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get("log_parser") in results.PARSERS:
        return {name: row[name] for name in _OWN_FIELDS if name in row}
    missing = [name for name in _FIELDS if name not in row]
    if missing:
        raise GradeError(f"the row lacks {', '.join(missing)}: SWE-bench rows of the 5.0 schema are needed")
    return {name: row[name] for name in _FIELDS}


# --- the process itself -----------------------------------------------------------------------------------------


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    row = request["row"]
    if row["log_parser"] in results.PARSERS:
        text = Path(request["log"]).read_text("utf-8")
        if request["do"] == "report":
            return {"report": results.report(row, text)}
        return {"statuses": results.PARSERS[row["log_parser"]](results.printed(text))}
    grading: Any = importlib.import_module("swebench.harness.grading")  # seconds, and only this process pays them
    utils: Any = importlib.import_module("swebench.harness.utils")
    spec = utils.make_test_spec(row)
    if request["do"] == "script":
        return {"script": spec.eval_script}
    if request["do"] == "statuses":
        return {"statuses": grading.get_logs_eval(spec, request["log"])[0]}
    prediction = {"instance_id": spec.instance_id, "model_patch": request["patch"], "model_name_or_path": "polar"}
    found = grading.get_eval_report(spec, prediction, request["log"], include_tests_status=True)
    return {"report": found[spec.instance_id]}


def main() -> None:
    """Answer requests until standard input ends. What the package prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever the package raises is an answer, and the next row's turn
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
