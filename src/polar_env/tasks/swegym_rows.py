"""Rows of SWE-Gym (2,438 of 11 Python repositories) and SWE-Gym Lite: SWE-bench's fields without a script. Pure.

The script and the parser are those of SWE-Gym's fork of the harness (SWE-Gym/SWE-Bench-Fork, ``harness/``:
``constants.py``, ``test_spec.py``, ``log_parsers.py``); the image is its authors', ``xingyaoww/sweb.eval.x86_64.<id>``.
What comes out is a row of SWE-bench's v5 schema, with its rules and guards. Their install lines reach for the network;
a sandbox of ours has none, so they leave what the image brings as it is.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from polar_env.tasks import Task, swebench_rows
from polar_env.tasks.fields import need

_PIP = "python -m pip install"
_CONAN = "; ".join(f"{_PIP} -r conans/requirements{name}.txt" for name in ("", "_server", "_dev"))
_DVC = (
    f'{_PIP} --upgrade pip wheel GitPython; {_PIP} "cython<3.0.0" && {_PIP} --no-build-isolation pyyaml==5.4.1; '
    f"{_PIP} -r tests/requirements.txt || true; {_PIP} -r test-requirements.txt || true; "
    f'{_PIP} -e ".[tests,dev,all_remotes,all,testing]"'
)
_NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_CASE = re.compile(r"\[case ([^\]]+)\]")
_TESTED = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_CHANGED = re.compile(r"^--- a/(.*)$", re.MULTILINE)
_WORD = "EOF_114329324912"


def _conan(version: tuple[int, ...]) -> str:
    old = "echo 'cython<3' > /tmp/constraint.txt; export PIP_CONSTRAINT=/tmp/constraint.txt; "
    return _CONAN if version >= (1, 60) and version != (2, 0) else old + _CONAN


def _mypy(version: tuple[int, ...]) -> str:
    more = "; pip install pytest pytest-xdist" if version < (1,) else ""
    return f"{_PIP} -r test-requirements.txt; {_PIP} -e .{more}; hash -r"


def _bokeh(version: tuple[int, ...]) -> str:
    if version >= (3,):
        return f"{_PIP} -e .; {_PIP} bokeh_sampledata;"
    return 'pip install "setuptools<66" "jinja2<3.1"; printf "1\\n" | python setup.py develop; bokeh sampledata;'


def _pandas(version: tuple[int, ...]) -> str:
    line = f"{_PIP} -ve . --no-build-isolation -Ceditable-verbose=true; pip uninstall pytest-qt -y;"
    return line if version >= (2, 2) else f"{_PIP} 'numpy<2'; {line}"


_INSTALL: Mapping[str, Callable[[tuple[int, ...]], str]] = {
    "python/mypy": _mypy,
    "getmoto/moto": lambda _: "make init",
    "conan-io/conan": _conan,
    "dask/dask": lambda _: f"{_PIP} --no-deps -e .",
    "project-monai/monai": lambda _: f"{_PIP} -r requirements-dev.txt; python setup.py develop;",
    "iterative/dvc": lambda v: _DVC if v >= (3, 4) else f'{_DVC}; {_PIP} "numpy<=1.20"; {_PIP} "pytest<8";',
    "bokeh/bokeh": _bokeh,
    "modin-project/modin": lambda _: f"{_PIP} -e .;",
    "pydantic/pydantic": lambda _: '{ export PATH="$HOME/.local/bin:$PATH"; pdm add pre-commit; make install; }',
    "pandas-dev/pandas": _pandas,
    "facebookresearch/hydra": lambda _: "pip install -r requirements/dev.txt; pip install -e .;",
    "hypothesisworks/hypothesis": lambda _: f"{_PIP} -r requirements/test.txt; {_PIP} -e hypothesis-python/;",
}
_TEST: Mapping[str, str] = {
    "dask/dask": "pytest -n0 -rA  --color=no",
    "project-monai/monai": "pytest -rA ",
    "iterative/dvc": "pytest -rA",
    "bokeh/bokeh": "pytest -rA -n0",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "facebookresearch/hydra": "pytest -rA --tb=long",
    "hypothesisworks/hypothesis": "pytest -n0 -rA --tb=no --no-header",
}
_USUAL = "pytest -n0 -rA"
_BEFORE: Mapping[str, str] = {"conan-io/conan": "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)"}
REPOSITORIES = frozenset(_INSTALL)


def is_one(row: Mapping[str, Any]) -> bool:
    """Does a row without ``polar_grader`` look like one? It has SWE-bench's older fields and a known repository."""
    return "eval_script" not in row and "test_patch" in row and str(row.get("repo", "")).lower() in REPOSITORIES


def task(row: Mapping[str, Any], where: str) -> Task:
    """A validated row as a task. Raises ConfigError."""
    for field in ("instance_id", "repo", "version", "base_commit", "test_patch", "problem_statement"):
        need(row, field, where, else_do="rows of SWE-Gym have it", empty=field == "version")
    made = {
        "patch": "",
        "image": image(str(row["instance_id"])),
        "log_parser": "swe_gym_pydantic" if row["repo"].lower() == "pydantic/pydantic" else "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
    return swebench_rows.task({**made, **row, "eval_script": eval_script(row)}, where)


def image(instance_id: str) -> str:
    """Its image: lower case, and ``__`` is ``_s_`` (a name may not hold two underscores)."""
    return f"xingyaoww/sweb.eval.x86_64.{instance_id.lower().replace('__', '_s_')}:latest"


def command(row: Mapping[str, Any]) -> str:
    """The command that runs the tests the test patch touches; mypy's are chosen by the cases it adds."""
    repo = str(row["repo"]).lower()
    if repo == "python/mypy":
        newest = _version(str(row["version"])) >= (1, 7)
        cases = " or ".join(_CASE.findall(str(row["test_patch"])))
        return f'{"pytest -rA" if newest else _USUAL} -k "{cases}"'
    files = [path for path in _TESTED.findall(str(row["test_patch"])) if not path.endswith(_NOT_TESTS)]
    return " ".join([_TEST.get(repo, _USUAL), *files])


def eval_script(row: Mapping[str, Any]) -> str:
    """Their script in the form of SWE-bench's: the same steps, and markers around the tests."""
    repo, base, patch = str(row["repo"]).lower(), row["base_commit"], str(row["test_patch"])
    changed = " ".join(_CHANGED.findall(patch))
    return "\n".join(
        [
            "#!/bin/bash",
            "set -xo pipefail",
            "source /opt/miniconda3/bin/activate",
            "conda activate testbed",
            "cd /testbed",
            *([_BEFORE[repo]] if repo in _BEFORE else []),
            "git config --global --add safe.directory /testbed",
            "git status",
            "git show",
            f"git diff {base}",
            "source /opt/miniconda3/bin/activate",
            "conda activate testbed",
            _INSTALL[repo](_version(str(row["version"]))) if repo in _INSTALL else ":",
            f"git checkout {base} {changed}",
            f"git apply -v - <<'{_WORD}'\n{patch}\n{_WORD}",
            ": '>>>>> Start Test Output'",
            command(row),
            ": '>>>>> End Test Output'",
            f"git checkout {base} {changed}",
            "",
        ]
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
