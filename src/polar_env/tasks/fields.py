"""What the shapes of a row share: fields checked one by one, the repository's source, the words for the agent. Pure.

Every complaint names the row, the field and what to do about it.
"""

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any, cast

from polar_env.errors import ConfigError
from polar_env.tasks import WORKDIR

SOURCE_KINDS = ("sdist", "git", "files", "embedded", "image", "sif")


def need(row: Mapping[str, Any], field: str, where: str, *, else_do: str, empty: bool = False) -> str:
    """A text field. ``else_do`` is what to do when it is missing and nothing is there under a similar name."""
    if field not in row:
        near = difflib.get_close_matches(field, list(row), n=1, cutoff=0.75)
        raise ConfigError(f"{where}: field {field!r} is missing; {f'is it called {near[0]!r}?' if near else else_do}")
    value = row[field]
    if not isinstance(value, str) or (not value.strip() and not empty):
        raise ConfigError(f"{where}: field {field!r} must be a non-empty text, not {value!r:.60}")
    return value


def id_list(row: Mapping[str, Any], field: str, where: str) -> list[str]:
    """Test ids, given as a list or as the JSON text of one (both are in circulation)."""
    value = row.get(field)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[object]", value)):
        raise ConfigError(f"{where}: field {field!r} must be a list of test ids, or the JSON text of one")
    return cast("list[str]", value)


def mapping(value: Any, where: str, field: str) -> Mapping[str, Any]:
    """An object, given as a mapping or as its JSON text (parquet has no free-form columns)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where}: field {field!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: field {field!r} must be an object, or the JSON text of one, not {value!r:.60}")
    return cast("dict[str, Any]", value)


def own_source(row: Mapping[str, Any], where: str, kinds: Collection[str] = SOURCE_KINDS) -> Mapping[str, Any] | None:
    """The row's own ``polar_source``, if it has one."""
    own = row.get("polar_source")
    if own is None:
        return None
    if isinstance(own, str) and own.startswith("{"):
        own = mapping(own, where, "polar_source")
    if not isinstance(own, dict) or cast("dict[str, Any]", own).get("kind") not in kinds:
        raise ConfigError(f"{where}: polar_source must be a mapping whose 'kind' is one of {', '.join(kinds)}")
    found = cast("dict[str, Any]", own)
    if found["kind"] == "files" and not (isinstance(found.get("files"), dict) and found["files"]):
        raise ConfigError(f"{where}: polar_source of kind files must give 'files': path -> text")
    return found


def instruction(issue: str) -> str:
    """What the agent is asked. The same for every rollout of a task: no dates, ids or host paths in it."""
    return (
        f"The git repository in {WORKDIR} has the problem described below. Change its source code so that the problem "
        "is solved.\n\n"
        f"<issue>\n{issue.strip()}\n</issue>\n\n"
        "What counts:\n"
        f"- Work in {WORKDIR}. `python` there is the project's own environment with everything installed; there is no "
        "network.\n"
        "- Fix the cause in the project's code, completely and for the general case, not only for the example given.\n"
        "- Leave existing tests and test configuration as they are. Hidden tests decide, and they replace test files.\n"
        "- Check your change by running the relevant tests or a small script; delete scripts you made for that.\n"
        "- Leave the change in the working tree. There is nothing to commit or to submit.\n"
    )
