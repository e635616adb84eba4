"""The official ``swebench`` package in processes of its own: its import takes seconds and 170 MB, and a log parser's
regular expression can run for ever on a hostile log. Parsers of our own (``results``) read there too.

Run as ``python -m polar_env.grade.report`` it answers JSON lines. ``Worker`` is the other end of one: started at first
use, kept, and ended by the kernel when an answer takes more of a processor than any honest log of its length.
``Workers`` are the few of them that a process of ours has: one, and others while logs keep it busy.
"""

import asyncio
import atexit
import importlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, ParamSpec, Protocol, TypeVar, cast

from polar_env.config import child_environment
from polar_env.errors import GradeError, boundary
from polar_env.grade import results
from polar_env.grade.phases import conflicting

TIMEOUT = 120.0
"""Seconds one answer may take at least, the import included; one with more processor time has three times that."""
PROCESSOR, PER_MIB = 15.0, 1.0
"""Seconds of a processor one answer may take: to import the package (3), and for each MiB of a log. The package's
parsers take 0.1 to 0.35 for one that is nothing but results (measured)."""
ANSWER_LIMIT = 8 * 1024 * 1024
"""Bytes of an answer: the results of some 50,000 tests. To read JSON holds up every rollout of the process."""
MEMORY = 2 * 1024**3
"""Bytes that an answer may take beside the package: a log of 64 MB needs 1 GB to be read. Without a limit a hostile one
would have the process shot for want of memory, which says nothing of the log."""
MOST = max(2, min(8, len(os.sched_getaffinity(0))))
"""Grading processes at the same time: two at least, or one hostile log would hold up every grading."""
HURRY = 5.0
"""Seconds a request waits for a process that is there before another is started, which takes about as long."""
_FIELDS = ("instance_id", "image", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type",
           "eval_script")  # fmt: skip
"""What ``swebench.harness.utils.make_test_spec`` of 5.0 reads of a row."""
_OWN_FIELDS = ("FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "polar_expected")
"""What ``results`` reads of one."""


class UnreadableError(GradeError):
    """The package was asked and had its time, and has no answer for this log: it raised, or it computes for ever.

    Where it reads the log of the row's own fix, that says something of what was printed, and so of the patch."""


class Asked(Protocol):
    """What answers requests: one process, or some."""

    def ask(self, request: Mapping[str, Any], processor: float | None = None) -> dict[str, Any]: ...


class Worker:
    """One grading process. Thread-safe; requests are answered one at a time."""

    def __init__(self, argv: tuple[str, ...] = (sys.executable, "-m", "polar_env.grade.report")) -> None:
        self._argv = argv
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def ask(self, request: Mapping[str, Any], processor: float | None = None) -> dict[str, Any]:
        """One request, one answer, with ``PROCESSOR`` or other seconds of a processor. Blocks: call it ``apart``.

        Raises:
            UnreadableError: it raised, or used up its time on a processor (the kernel ends it then).
            GradeError: the worker died, or got no processor.
        """
        seconds = PROCESSOR if processor is None else processor
        with self._lock, boundary(GradeError, "reading the grading process's answer"):
            try:
                process = self._running()
                self._allow(process, seconds)
                assert process.stdin is not None
                process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
                process.stdin.flush()
                line = self._line(process, max(TIMEOUT, 3 * seconds))
            except OSError as error:  # it died (BrokenPipeError), was too slow (TimeoutError) or could not be started
                words, code = self._words(), self._end()
                if code == -signal.SIGXCPU:
                    raise UnreadableError(f"after {seconds:.0f} s of a processor there was no answer") from None
                raise GradeError(f"the grading process failed ({error or type(error).__name__}): {words}") from None
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
        resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))  # a limit that is reached would dump one
        return self._process

    @staticmethod
    def _allow(process: subprocess.Popen[bytes], seconds: float) -> None:
        """Let it have so many more seconds of a processor."""
        with suppress(ProcessLookupError):  # it has ended, which is told where its answer is read
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
            used = sum(map(int, stat.rpartition(") ")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
            _, most = resource.prlimit(process.pid, resource.RLIMIT_CPU)
            allowed = math.ceil(used + seconds)
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (allowed if most < 0 else min(allowed, most), most))

    @staticmethod
    def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout)
        if not ready:
            raise TimeoutError(f"no answer after {timeout:.0f} s")
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise BrokenPipeError("it ended")
        return line

    def _words(self) -> str:
        """The end of what the process printed to standard error."""
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 500))
        return self._errors.read().decode("utf-8", "replace").strip()

    def _end(self) -> int | None:
        """Kill it, and wait. Its exit code."""
        code = None
        if self._process is not None:
            # Leaving the block closes its pipes and waits; a request that it did not take is flushed once more.
            with suppress(BrokenPipeError), self._process:
                self._process.kill()
            code, self._process = self._process.returncode, None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        return code


class Workers:
    """Grading processes, at most ``most`` at a time. Thread-safe.

    One answers everything, as long as nobody waits ``HURRY`` seconds for it; then another is started, and it ends when
    it is not needed. So a log that takes its reader's whole time holds up the next request for seconds.
    """

    def __init__(self, most: int = MOST, make: Callable[[], Worker] = Worker) -> None:
        self._most, self._make = most, make
        self._change = threading.Condition()
        self._free: list[Worker] = []
        self._count = self._waiting = 0

    def ask(self, request: Mapping[str, Any], processor: float | None = None) -> dict[str, Any]:
        """As ``Worker.ask``; the time a request waits for its turn is none of its answer's."""
        worker = self._take()
        try:
            return worker.ask(request, processor)
        finally:
            self._give(worker)

    def close(self) -> None:
        with self._change:
            for worker in self._free:
                worker.close()

    def _take(self) -> Worker:
        with self._change:
            self._waiting += 1
            try:
                if self._count:
                    self._change.wait_for(lambda: self._free, HURRY)
                if not self._free and self._count < self._most:
                    self._count += 1
                    return self._make()
                self._change.wait_for(lambda: self._free)
                return self._free.pop()
            finally:
                self._waiting -= 1

    def _give(self, worker: Worker) -> None:
        with self._change:
            needed = self._waiting or not self._free
            if needed:
                self._free.append(worker)
                self._change.notify()
            else:
                self._count -= 1
        if not needed:
            worker.close()


WORKERS = Workers()
"""The grading processes of this process."""
atexit.register(WORKERS.close)
_THREADS = ThreadPoolExecutor(MOST, thread_name_prefix="grade")
_Args = ParamSpec("_Args")
_Found = TypeVar("_Found")


async def apart(function: Callable[_Args, _Found], *args: _Args.args, **kwargs: _Args.kwargs) -> _Found:
    """Run what asks a grading process in a thread for that: requests that wait hold none of the threads that write a
    rollout's files."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(function, *args, **kwargs))


def eval_script(row: Mapping[str, Any], workers: Asked = WORKERS) -> str:
    """The official evaluation script of a row, which records the tests' own exit code. Blocks. Raises GradeError."""
    return str(workers.ask({"do": "script", "row": _row(row)})["script"])


def report(row: Mapping[str, Any], patch: str, log: Path, workers: Asked = WORKERS) -> dict[str, Any]:
    """``swebench.harness.grading.get_eval_report`` of one instance: ``resolved``, ``tests_status``, … Blocks. Of a
    resolved one also ``conflicting``: the listed tests that have two results.

    Raises:
        UnreadableError: the package has no answer for this log.
        GradeError: the worker failed; says nothing about the patch.
    """
    request = {"do": "report", "row": _row(row), "patch": patch, "log": os.fspath(log)}
    return cast("dict[str, Any]", workers.ask(request, _processor(log))["report"])


def statuses(row: Mapping[str, Any], log: Path, workers: Asked = WORKERS) -> dict[str, str]:
    """Test id -> PASSED, FAILED, ERROR, SKIPPED or XFAIL, as the row's own parser reads the log. Blocks. Raises as
    ``report`` does."""
    answer = workers.ask({"do": "statuses", "row": _row(row), "log": os.fspath(log)}, _processor(log))
    return cast("dict[str, str]", answer["statuses"])


def _processor(log: Path) -> float:
    """Seconds of a processor for reading a log."""
    with boundary(GradeError, "reading a log"):
        return PROCESSOR + PER_MIB * log.stat().st_size / 2**20


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get("log_parser") in results.PARSERS:
        return {name: row[name] for name in _OWN_FIELDS if name in row}
    missing = [name for name in _FIELDS if name not in row]
    if missing:
        raise GradeError(f"the row lacks {', '.join(missing)}: SWE-bench rows of the 5.0 schema are needed")
    return {name: row[name] for name in _FIELDS}


# --- the process itself -----------------------------------------------------------------------------------------


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["row"]["log_parser"] in results.PARSERS:
        _bound()
        return _own(request)
    grading: Any = importlib.import_module("swebench.harness.grading")  # seconds, and only this process pays them
    utils: Any = importlib.import_module("swebench.harness.utils")
    _bound()
    spec = utils.make_test_spec(request["row"])
    if request["do"] == "script":
        return {"script": spec.eval_script}
    if request["do"] == "statuses":
        return {"statuses": grading.get_logs_eval(spec, request["log"])[0]}
    prediction = {"instance_id": spec.instance_id, "model_patch": request["patch"], "model_name_or_path": "polar"}
    found = grading.get_eval_report(spec, prediction, request["log"], include_tests_status=True)
    return {"report": _with_conflicts(found[spec.instance_id], request)}


def _own(request: dict[str, Any]) -> dict[str, Any]:
    row, text = request["row"], Path(request["log"]).read_text("utf-8")
    if request["do"] == "report":
        return {"report": _with_conflicts(results.report(row, text), request)}
    return {"statuses": results.PARSERS[row["log_parser"]](results.printed(text))}


def _with_conflicts(report: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Of a resolved run also the listed tests that are said to have passed and to have failed. To look for them takes
    seconds for a long log, and holds the interpreter: here it is nobody else's."""
    if not report["resolved"]:
        return report
    lists = (request["row"][field] for field in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    wanted = {test for value in lists for test in (json.loads(value) if isinstance(value, str) else value)}
    return {**report, "conflicting": sorted(conflicting(Path(request["log"]).read_bytes()) & wanted)}


def _bound() -> None:
    """No more memory than ``MEMORY`` beside what is there; what importing takes goes by the machine's processors."""
    there = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (there + MEMORY if most < 0 else min(there + MEMORY, most), most))


def main() -> None:
    """Answer requests until standard input ends. What the package prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever the package raises is an answer, and the next row's turn
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        told = json.dumps(answer).encode()
        if len(told) > ANSWER_LIMIT:
            told = json.dumps({"error": f"there are {len(told):,} bytes of results"}).encode()
        answers.write(told + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
