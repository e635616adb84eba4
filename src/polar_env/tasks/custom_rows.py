"""Rows that name their own grader (``polar_grader: "my_package.grader:Grader"``). Pure.

Needed are ``instance_id``, ``problem_statement``, ``base_commit`` and ``polar_source``; whatever else the row holds is
the grader's own affair (``grade.grading.Grader`` says what that is).
"""

from collections.abc import Mapping
from typing import Any

from polar_env.errors import ConfigError
from polar_env.tasks import Task
from polar_env.tasks.fields import instruction, need, own_source


def task(row: Mapping[str, Any], where: str) -> Task:
    """A validated row as a task. Raises ConfigError."""
    for field in ("instance_id", "problem_statement", "base_commit", "polar_grader"):
        need(row, field, where, else_do="a row with a grader of its own needs it")
    source = own_source(row, where)
    if source is None:
        raise ConfigError(
            f"{where}: field 'polar_source' is missing; it says how the repository and its environment are made"
        )
    clean: dict[str, Any] = {"test_patch": "", "FAIL_TO_PASS": [], "PASS_TO_PASS": [], **row}
    said = instruction(str(row["problem_statement"]))
    return Task(str(row["instance_id"]), said, clean, source, str(row["polar_grader"]))
