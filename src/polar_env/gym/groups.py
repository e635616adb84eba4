"""Which rollouts belong together, which ones an order means, and when the last of a group have had their time. Pure.

A group is what NeMo Gym and NeMo-RL say it is: rows of one ``_ng_task_index``, or, where the trainer sends none
(synchronous GRPO), of one task; of one harness, because harnesses of one task are groups of their own. It lives from
its first row until none of its rows is being played.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from polar_env.config import StragglersConfig
from polar_env.errors import BadRequest, GroupTimeout, Straggler
from polar_env.types import INFRASTRUCTURE, Outcome

TASK_INDEX, ROLLOUT_INDEX, ROW_INDEX = "_ng_task_index", "_ng_rollout_index", "_rowidx"
"""Keys of a posted row: Gym's group and number in it (nemo_gym/global_config.py); NeMo-RL's place in the batch, with
``_ng_task_index`` in asynchronous GRPO only (nemo_rl/algorithms/async_utils/trajectory_collector.py)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands among the others."""

    task: str
    harness: str
    group: str
    """``_ng_task_index`` as text; empty when the row has none."""
    index: str


def place_of(row: Mapping[str, Any], task: str, harness: str) -> Place:
    """The place of a posted row, whatever its fields hold."""
    group, first, second = (row.get(key) for key in (TASK_INDEX, ROLLOUT_INDEX, ROW_INDEX))
    index = second if first is None else first
    return Place(task, harness, "" if group is None else str(group), "" if index is None else str(index))


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rollouts that an order means: those to which all that is given applies."""

    task: str | None = None
    group: str | None = None
    session: str | None = None
    keys: frozenset[str] | None = None

    def has(self, key: str, place: Place, session: str) -> bool:
        return (
            self.task in (None, place.task)
            and self.group in (None, place.group)
            and self.session in (None, session)
            and (self.keys is None or key in self.keys)
        )


def chosen(fields: Mapping[str, Any]) -> Chosen:
    """The rollouts an order's JSON names. Raises BadRequest when it names none: no order ends everything by mistake."""
    names = {name: fields.get(name) for name in ("task", "group", "session")}
    given = {name: str(value) for name, value in names.items() if isinstance(value, str | int) and value != ""}
    keys = fields.get("keys")
    if not given and not isinstance(keys, list):
        raise BadRequest("say which rollouts: a task (its id), a group (its _ng_task_index) or a session")
    listed = frozenset(map(str, cast("list[Any]", keys))) if isinstance(keys, list) else None
    return Chosen(given.get("task"), given.get("group"), given.get("session"), listed)


@dataclass(frozen=True, slots=True)
class Rest:
    """The last of a group: their keys, the seconds of play each still has, and what then ends them."""

    keys: frozenset[str]
    seconds: float
    error: Straggler


@dataclass(slots=True)
class _Group:
    """One group while any of its rows is being played."""

    playing: Counter[str] = field(default_factory=Counter[str])
    """How often each key is: twice while a rollout that was given up is torn down and its row was posted again."""
    finished: set[str] = field(default_factory=set[str])
    seconds: list[float] = field(default_factory=list[float])
    """Agent seconds of those that ended by themselves, time at the fence not counted."""


class Stragglers:
    """Says when the rest of a group has to come to an end (``stragglers``)."""

    def __init__(self, config: StragglersConfig) -> None:
        self._config = config
        self._groups: dict[tuple[str, str, str], _Group] = {}

    def began(self, key: str, place: Place) -> Rest | None:
        """A row was posted. The last ones of a group may come when the others have finished already."""
        group = self._groups.setdefault(_name(place), _Group())
        group.playing[key] += 1
        group.finished.discard(key)
        return self._rest(group, (key,))

    def ended(self, key: str, place: Place, answer: Mapping[str, Any]) -> Rest | None:
        """A row was answered (with nothing: it was given up). What the rest of its group is to be told, if anything."""
        group = self._groups.get(_name(place))
        if group is None:
            return None
        group.playing[key] -= 1
        if group.playing[key] > 0:
            return None
        del group.playing[key]
        group.finished.add(key)
        if not group.playing:
            del self._groups[_name(place)]
            return None
        if _by_itself(answer):
            group.seconds.append(_number(answer, "seconds_agent") - _number(answer, "seconds_held"))
        return self._rest(group, group.playing)

    def _rest(self, group: _Group, keys: Iterable[str]) -> Rest | None:
        share, size = self._config.after_fraction, self._config.group_size
        size = size or len(group.finished | group.playing.keys())
        if share is None or not group.seconds or len(group.finished) < share * size:
            return None
        median = statistics.median(group.seconds)
        seconds = max(self._config.min_seconds, self._config.patience * median)
        error = Straggler if self._config.then == "mask" else GroupTimeout
        return Rest(
            frozenset(keys),
            seconds,
            error(
                f"{len(group.finished)} of its group of {size} had finished, in {median:.1f} s (median), and the rest "
                f"was given {seconds:.1f} s (stragglers)"
            ),
        )


def _name(place: Place) -> tuple[str, str, str]:
    return place.group, place.task, place.harness


def _by_itself(answer: Mapping[str, Any]) -> bool:
    """Whether the agent came to an end of its own: only then does its time say how long the task takes."""
    polar: Mapping[str, Any] = answer.get("polar") or {}
    outcome = polar.get("outcome")
    return outcome in list(Outcome) and outcome not in INFRASTRUCTURE and outcome != Outcome.GROUP_TIMEOUT


def _number(answer: Mapping[str, Any], name: str) -> float:
    value = answer.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
