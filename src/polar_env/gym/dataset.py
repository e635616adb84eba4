"""Dataset rows for Gym and NeMo-RL: one JSON object per task, stamped with the agent that runs it.

NeMo-RL needs ``agent_ref`` on every row (environments/nemo_gym.py) and `gym dataset collate` 0.7.0 does not write it.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polar_env.tasks import Task

AGENT = {"type": "responses_api_agents", "name": "polar_agent"}
"""The agent of root/resources_servers/polar/configs/polar.yaml."""


def dataset_row(task: Task, harness: str = "", data: str = "", *, embed: bool = False) -> dict[str, Any]:
    """One row.

    Args:
        task: the task; its instruction is the row's input, for logs and viewers.
        harness: run this row with a harness of its own (groups of several harnesses in one run).
        data: where the server finds the task, when not in its configured data.
        embed: carry the whole task row, so that the server needs no data at all.
    """
    row: dict[str, Any] = {
        "responses_create_params": {"input": [{"role": "user", "content": task.instruction}]},
        "agent_ref": AGENT,
        "task_id": task.task_id,
    }
    extra: Mapping[str, Any] = {"harness": harness, "data": data, "instance": dict(task.row) if embed else None}
    return {**row, **{key: value for key, value in extra.items() if value}}


def write(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as JSONL; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, default=str) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)
