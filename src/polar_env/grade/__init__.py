"""The grade room: what the harness left behind becomes a verdict. ``patch`` extracts and judges the change, ``grading``
chooses who grades it, ``swebench`` runs the official evaluation in a fresh sandbox, ``report`` is the worker process
around the package.
"""

from collections.abc import Mapping

GRADERS: Mapping[str, str] = {
    "swebench": "polar_env.grade.swebench",
    "tests_pass": "polar_env.grade.swebench",
    "r2e": "polar_env.grade.swebench",
    "harbor": "polar_env.grade.harbor",
}
"""Graders of our own: the name a task bears -> the module whose ``grade`` (and ``prewarm``, if it has one) is called;
``grade.grading.Grader`` says how."""
