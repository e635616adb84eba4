"""Rows as NeMo-RL takes them: one chain each, judged by the contract; the other chains are left out.

Consumer: NeMo-RL ``environments/nemo_gym.py`` (see ``gym.contract`` for the rules). A row that breaks one would end its
batch, so it is not written.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from polar_env.export import ExportError, Job
from polar_env.export.samples import Rollout, refuse_text
from polar_env.gym.contract import violations


def lines(rollouts: Iterable[Rollout], job: Job) -> Iterator[dict[str, Any]]:
    """The rows with ``trajectories`` emptied."""
    for rollout in rollouts:
        if rollout.row is None:
            raise ExportError("NeMo-RL takes rows: give the JSONL of finished rollouts, not session logs")
        refuse_text(rollout)
        if found := violations(rollout.row, job.max_tokens):
            job.skipped[f"NeMo-RL would refuse it ({found[0]})"] += 1
        else:
            yield {**rollout.row, "trajectories": []}
