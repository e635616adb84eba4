"""Rows of SWE-bench's v5 schema: they bring their evaluation script and the name of the parser of its log. Pure."""

from collections.abc import Mapping
from typing import Any

from polar_env.errors import ConfigError
from polar_env.tasks import Task
from polar_env.tasks.fields import id_list, instruction, need, own_source
from polar_env.tasks.sources import sdist_table

_TEXT_FIELDS = (
    "instance_id",
    "repo",
    "version",
    "base_commit",
    "patch",
    "test_patch",
    "problem_statement",
    "eval_script",
    "log_parser",
    "eval_type",
)
_MAY_BE_EMPTY = frozenset({"patch", "test_patch", "version"})
_LIST_FIELDS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_EVAL_TYPES = ("pass_and_fail", "fail_only")


def task(row: Mapping[str, Any], where: str) -> Task:
    """A validated row as a task. Raises ConfigError."""
    clean = _validated(row, where)
    return Task(str(clean["instance_id"]), instruction(clean["problem_statement"]), clean, _source(clean, where))


def _validated(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    clean = {"image": ""} | dict(row)
    older = "rows of SWE-bench before v5 lack it: take the v5 dataset"
    for field in _TEXT_FIELDS:
        need(row, field, where, else_do=older, empty=field in _MAY_BE_EMPTY)
    for field in _LIST_FIELDS:
        clean[field] = id_list(row, field, where)
    if row["eval_type"] not in _EVAL_TYPES:
        raise ConfigError(f"{where}: field 'eval_type' must be one of {', '.join(_EVAL_TYPES)}")
    if not clean["FAIL_TO_PASS"]:
        raise ConfigError(f"{where}: field 'FAIL_TO_PASS' is empty: every patch would be resolved; leave the row out")
    return clean


def _source(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The row's own ``polar_source``, else our sdist recipe for the instance, else its image."""
    own = own_source(row, where)
    if own is not None:
        return own
    return sdist_table().get(str(row["instance_id"])) or {"kind": "image", "image": str(row.get("image") or "")}
