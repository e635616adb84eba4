"""Samples for verl: what an agent loop returns, one rollout a line.

Consumer: verl 0.9.0 ``verl/experimental/agent_loop/agent_loop.py``, ``AgentLoopOutput.model_validate(line)``.

| field | type | |
|---|---|---|
| prompt_ids | list of int, [P] | all before the first token that trains |
| response_ids | list of int, [R] | the rest: answers, tool results, what came between |
| response_mask, response_logprobs | list of int / float, [R] | 1 and a log-prob where the policy sampled, else 0s |
| reward_score | float | of the rollout |
| num_turns | int | two per model call: what it was asked, what it answered |
| metrics | object | empty: verl's own defaults |
| extra_fields | object | uid (the group, as GRPO in verl wants it), session_id, task_id, harness, weight |

An agent loop returns one output per rollout, so a rollout gives its delivered chain.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from polar_env.export import Job
from polar_env.export.samples import Rollout, trained


def lines(rollouts: Iterable[Rollout], job: Job) -> Iterator[dict[str, Any]]:
    """The delivered chain of every rollout that trains."""
    for rollout, chain, weight in trained(rollouts, job, default="delivered"):
        start = chain.prompt_length
        yield {
            "prompt_ids": chain.token_ids[:start],
            "response_ids": chain.token_ids[start:],
            "response_mask": chain.loss_mask[start:],
            "response_logprobs": chain.log_probs[start:],
            "reward_score": rollout.reward,
            "num_turns": 2 * len(chain.call_ids),
            "metrics": {},
            "extra_fields": {
                "uid": rollout.group_id,
                "session_id": rollout.session_id,
                "task_id": rollout.task_id,
                "harness": rollout.harness,
                "weight": weight,
            },
        }
