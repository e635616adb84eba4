"""Samples for slime: ``Sample`` objects, one chain a line.

Consumer: THUDM/slime at 624b824a (2026-08-21), ``slime/utils/types.py``, ``Sample.from_dict(line)``, and
``slime/ray/rollout.py``: the loss mask must be ``response_length`` long, and samples with one ``rollout_id`` are
averaged within their rollout, so that all chains are given and each rollout still counts once.

| field | type | |
|---|---|---|
| group_index, rollout_id, index | int | group and rollout by order of appearance, sample by position |
| tokens | list of int, [T] | the whole sequence |
| response_length | int, R | tokens from the first that trains to the end |
| loss_mask, rollout_log_probs | list of int / float, [R] | over the last R tokens |
| reward | float | of the rollout |
| weight_versions | list of string | policy versions that sampled, in order |
| status | string | completed; truncated (the agent used up a budget); failed (it broke) |
| session_id, metadata | | metadata: task_id, harness, outcome, kind, weight |
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polar_env.export import Job
from polar_env.export.samples import Rollout, trained
from polar_env.types import Outcome

STATUS: Mapping[Outcome, str] = {
    Outcome.COMPLETED: "completed",
    Outcome.AGENT_TIMEOUT: "truncated",
    Outcome.TURN_LIMIT: "truncated",
    Outcome.CONTEXT_OVERFLOW: "truncated",
    Outcome.GROUP_TIMEOUT: "truncated",
    Outcome.AGENT_ERROR: "failed",
}
"""The endings that may train -> ``Sample.Status``."""


def lines(rollouts: Iterable[Rollout], job: Job) -> Iterator[dict[str, Any]]:
    """All chains of every rollout that trains."""
    groups = dict[str, int]()
    for index, (rollout, chain, weight) in enumerate(trained(rollouts, job, default="all")):
        start = chain.prompt_length
        yield {
            "group_index": groups.setdefault(rollout.group_id, len(groups)),
            "rollout_id": rollout.number,
            "index": index,
            "tokens": chain.token_ids,
            "response_length": len(chain.token_ids) - start,
            "loss_mask": chain.loss_mask[start:],
            "rollout_log_probs": chain.log_probs[start:],
            "reward": rollout.reward,
            "weight_versions": list(chain.policy_versions),
            "status": STATUS[Outcome(rollout.outcome)],
            "session_id": rollout.session_id,
            "metadata": {
                "task_id": rollout.task_id,
                "harness": rollout.harness,
                "outcome": rollout.outcome,
                "kind": chain.kind,
                "weight": weight,
            },
        }
