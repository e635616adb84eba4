"""Dataset rows -> tasks. Rows are SWE-bench's v5 schema or one of ``SHAPES``, from wherever the user has them.

``data`` is a parquet or JSONL file, a folder of them, a folder of Harbor task folders (or ``harbor:PATH``),
``hub:<dataset name>[:split]``, ``embedded`` or ``""`` (the folder named by POLAR_SWEBENCH_DATA, else the embedded
tasks).

A row may say itself how its repository and environment are made, as a mapping (or its JSON text) ``polar_source``:
``{"kind": "git", "mirror": PATH, ...}`` with either ``python``, ``pip`` and ``requirements`` (exact pins) or an
``environment_yml`` (text) or ``environment_ymls`` (JSON file, instance_id -> text), and optionally ``install`` (shell
line; default: the eval script's own), ``edits``, ``tag``, ``base_date`` and ``rewrites`` of the eval script;
``{"kind": "files", "files": {PATH: TEXT}}`` with ``python``, ``requirements`` and ``install``;
``{"kind": "image", "image": NAME}``; or ``{"kind": "sif", "path": PATH}``.
"""

import difflib
import gzip
import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow.parquet as parquet

from polar_env.config import environment
from polar_env.errors import ConfigError
from polar_env.tasks import Task, custom_rows, harbor, r2e_rows, swebench_rows, swegym_rows, tests_pass_rows
from polar_env.tasks.embedded_rows import embedded_rows

_LOG = logging.getLogger(__name__)

DATA_VARIABLE = "POLAR_SWEBENCH_DATA"

_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")

SHAPES: Mapping[str, Callable[[Mapping[str, Any], str], Task]] = {
    "swebench": swebench_rows.task,
    "tests_pass": tests_pass_rows.task,
    "swe_gym": swegym_rows.task,
    "r2e": r2e_rows.task,
    "harbor": harbor.task,
    "module:Class": custom_rows.task,
}
"""What a row may say its grader is (``polar_grader``) -> how the row, and where it stands, becomes a task."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from. ``detail`` is one sentence for the screen: what, and why that."""

    kind: Literal["files", "folders", "hub", "embedded"]
    detail: str
    paths: tuple[Path, ...] = ()
    dataset: str = ""
    split: str = "test"


def resolve(data: str) -> Source:
    """Which rows ``data`` means. Raises ConfigError when it names nothing readable."""
    if data == "embedded":
        return Source("embedded", "the embedded tasks, as asked")
    if data.startswith("hub:"):
        name, _, split = data.removeprefix("hub:").partition(":")
        split = split or "test"
        return Source("hub", f"{name} ({split}) from the Hugging Face hub", dataset=name, split=split)
    if data.startswith("harbor:"):
        return _folders(Path(data.removeprefix("harbor:")).expanduser(), data)
    if data:
        return _files(data, data)
    if folder := environment(DATA_VARIABLE):
        return _files(folder, f"{folder} ({DATA_VARIABLE})")
    return Source("embedded", f"the embedded tasks: no data was given and {DATA_VARIABLE} is not set")


def load(data: str, ids: Sequence[str] = ()) -> tuple[Task, ...]:
    """The tasks that ``data`` holds, in its order; with ``ids``, those tasks in the order asked for.

    Raises:
        ConfigError: a row cannot be used (names row, field and fix), an id is unknown (names its neighbours), the
            source cannot be read, or nothing is left of it.
    """
    source, rows = resolve(data), dict[str, tuple[str, Mapping[str, Any]]]()
    for where, row in _read(source):
        name = _name(row)
        # The same instance in two files (Verified and Lite) is one task: the first file wins.
        first, kept = rows.setdefault(name if isinstance(name, str) and name else where, (where, row))
        if first != where and first.rsplit(" ", 2)[0] == where.rsplit(" ", 2)[0] and kept != row:
            _LOG.warning("%s left out: %s has the same instance_id %s, and is another task", where, first, name)
    unknown = [wanted for wanted in ids if wanted not in rows]
    if unknown:
        near = difflib.get_close_matches(unknown[0], rows, n=3) or sorted(rows)[:3]
        raise ConfigError(f"no task {unknown[0]!r} among {len(rows)}; the nearest ids are {', '.join(near)}")
    if ids:
        return tuple(task_of(rows[name][1], rows[name][0]) for name in dict.fromkeys(ids))
    tasks = tuple(task_of(row, where) for where, row in rows.values() if not _proves_nothing(row, where))
    if not tasks:
        raise ConfigError(f"no task in {source.detail}: {len(rows)} rows were read, and none can be used")
    return tasks


def _proves_nothing(row: Mapping[str, Any], where: str) -> bool:
    """True for a row without FAIL_TO_PASS: the official report resolves every patch on it (Multilingual has one)."""
    if row.get("FAIL_TO_PASS") not in ("[]", []):
        return False
    _LOG.warning("%s (%s) left out: its FAIL_TO_PASS is empty, so every patch would count", where, row["instance_id"])
    return True


def task_of(row: Mapping[str, Any], where: str = "row") -> Task:
    """One validated task. ``where`` names the row in errors. Raises ConfigError."""
    name = _name(row)
    where = f"{where} ({name})" if isinstance(name, str) and name and name not in where else where
    return SHAPES[_shape(row, where)](row, where)


def _name(row: Mapping[str, Any]) -> Any:
    return r2e_rows.name(row) if r2e_rows.is_one(row) else row.get("instance_id")


def _shape(row: Mapping[str, Any], where: str) -> str:
    """The row's own word (``polar_grader``), else what its fields look like."""
    told = row.get("polar_grader")
    if told is None:
        known = (("tests_pass", tests_pass_rows), ("r2e", r2e_rows), ("swe_gym", swegym_rows))
        return next((shape for shape, rows in known if rows.is_one(row)), "swebench")
    if isinstance(told, str) and (told in SHAPES or ":" in told):
        return told if told in SHAPES else "module:Class"
    raise ConfigError(f"{where}: field 'polar_grader' must be one of {', '.join(SHAPES)}, not {told!r:.60}")


def _files(data: str, shown: str) -> Source:
    path = Path(data).expanduser()
    if path.is_file() and path.name.endswith(_SUFFIXES):
        return Source("files", f"rows of {shown}", paths=(path,))
    if path.is_dir():
        names = [p for p in sorted(path.iterdir()) if p.name.endswith(_SUFFIXES) and _holds_rows(p)]
        # Verified first: it is the best checked, and the first file wins where an instance is in two.
        found = tuple(sorted(names, key=lambda p: "Verified" not in p.name))
        if not found and harbor.folders(path):
            return _folders(path, shown)
        if found:
            return Source("files", f"rows of {', '.join(p.name for p in found)} in {shown}", paths=found)
    raise ConfigError(
        f"no rows at {shown}: give a .parquet, .jsonl or .jsonl.gz file, a folder that holds one, "
        "hub:<dataset name>, or embedded"
    )


def _folders(path: Path, shown: str) -> Source:
    if not path.is_dir():
        raise ConfigError(f"no task folders at {shown}: it is no directory")
    found = harbor.told_apart(path)
    return Source("folders", f"{len(found)} Harbor task folders in {shown}", paths=found)


def _holds_rows(path: Path) -> bool:
    """False for the other records a folder may hold (indexes, logs): they have no problem statement."""
    if path.suffix == ".parquet":
        return "problem_statement" in parquet.read_schema(path).names
    return any("problem_statement" in row for _, row in islice(_jsonl(path), 1))


def _read(source: Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) pairs."""
    if source.kind == "embedded":
        yield from ((str(row["instance_id"]), row) for row in embedded_rows())
    elif source.kind == "hub":
        yield from _hub(source)
    elif source.kind == "folders":
        yield from ((str(path), harbor.row_of(path)) for path in source.paths)
    else:
        for path in source.paths:
            yield from _parquet(path) if path.suffix == ".parquet" else _jsonl(path)


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = cast("list[dict[str, Any]]", parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:  # Arrow's own errors are kinds of these
        raise ConfigError(f"{path} cannot be read as parquet: {error}") from error
    for number, row in enumerate(rows):
        yield f"{path.name} row {number}", row


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path.name} line {number}", _object(line, f"{path.name} line {number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as JSONL: {error}") from error


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); JSONL has one object a line") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a {type(value).__name__}, not an object; JSONL has one object a line")
    return cast("dict[str, Any]", value)


def _hub(source: Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        hub = importlib.import_module("datasets")
        table: Iterable[Mapping[str, Any]] = hub.load_dataset(source.dataset, split=source.split)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{source.detail}: {type(error).__name__}: {error}. Without access to the hub, download the parquet file "
            f"elsewhere and name it with --data PATH or {DATA_VARIABLE}, or use --data embedded"
        ) from error
    for number, row in enumerate(table):
        yield f"{source.dataset} row {number}", dict(row)
