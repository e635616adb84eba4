"""Lines into a file: JSONL, or for the neutral schema Parquet and Arrow with typed columns."""

import json
import pkgutil
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet as parquet

from polar_env.errors import boundary
from polar_env.export import FORMATS, ExportError, Job
from polar_env.export.samples import rollouts

pa: Any = pyarrow  # it has no types

PLAIN = cast("Any", array).tolist
"""What JSON writes for an array: a list."""

BATCH = 64
"""Chains written at a time: bounds memory (64 of 136K tokens are 80 MB)."""

TENSORS = {"token_ids": "i", "loss_mask": "b", "log_probs": "f"}
"""Columns that hold a number per token -> how they are stored."""

TEXT = ("session_id", "task_id", "harness", "group_id", "outcome")
SCHEMA: Any = pa.schema(
    [
        *((name, pa.string()) for name in TEXT),
        ("reward", pa.float32()),
        ("masked", pa.bool_()),
        ("chain", pa.int32()),
        ("kind", pa.string()),
        ("thread", pa.string()),
        ("branched_from", pa.string()),
        ("delivered", pa.bool_()),
        ("weight", pa.float64()),
        ("call_ids", pa.list_(pa.string())),
        ("policy_versions", pa.list_(pa.string())),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("log_probs", pa.list_(pa.float32())),
        ("answers", pa.list_(pa.string())),
    ],
    metadata={"schema": "polar_env chains 1"},
)
"""The neutral schema (``export.neutral``) as Arrow types."""


def export(name: str, source: Path, out: Path, job: Job) -> int:
    """Write ``source`` in a format; returns the number of lines. ``out`` appears whole or not at all.

    Args:
        name: a key of ``FORMATS``.
        source: rows as JSONL, or a directory of session logs (neutral only: they know no reward).
        out: ``.parquet`` and ``.arrow`` are for the neutral format; anything else is JSONL.

    Raises:
        ExportError: a file cannot be read or written, or the format cannot be made of it.
    """
    columns = out.suffix in (".parquet", ".arrow")
    if columns and name != "neutral":
        raise ExportError(f"{name} is written as JSONL; {out.suffix} is for the neutral format")
    if out.exists() and out.samefile(source):
        raise ExportError(f"{out} is what is exported: name another OUT")
    lines: Iterator[dict[str, Any]] = pkgutil.resolve_name(FORMATS[name])(rollouts(source), job)
    part = out.with_name(f".{out.name}.part")
    with boundary(ExportError, f"writing {out}"):
        try:
            count = _columns(lines, part, out.suffix) if columns else _jsonl(lines, part)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    return count


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


def _jsonl(lines: Iterable[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="ascii") as file:
        for line in lines:
            file.write(json.dumps(line, default=PLAIN, allow_nan=False) + "\n")
            count += 1
    return count


def _columns(lines: Iterator[Mapping[str, Any]], path: Path, suffix: str) -> int:
    count = 0
    with _writer(path, suffix) as writer:
        while batch := list(islice(lines, BATCH)):
            arrays = [_column(field, [line[field.name] for line in batch]) for field in SCHEMA]
            writer.write(pa.record_batch(arrays, schema=SCHEMA))
            count += len(batch)
    return count


def _writer(path: Path, suffix: str) -> AbstractContextManager[Any]:
    if suffix == ".parquet":
        return parquet.ParquetWriter(path, SCHEMA, compression="zstd")
    options: Any = pa.ipc.IpcWriteOptions(compression="zstd")
    return pa.ipc.new_file(str(path), SCHEMA, options=options)


def _column(field: Any, values: list[Any]) -> Any:
    """One column. Tensors go in as buffers: no Python number is made of a token."""
    if field.name not in TENSORS:
        return pa.array(values, field.type)
    offsets = array("i", [0])
    flat: array[Any] = array(TENSORS[field.name])
    for value in values:
        flat.extend(value)
        offsets.append(len(flat))
    item = field.type.value_type
    return pa.ListArray.from_arrays(
        pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)]),
        pa.Array.from_buffers(item, len(flat), [None, pa.py_buffer(flat)]),
        type=field.type,
    )
