"""Samples for TRL's GRPO: what a ``rollout_func`` returns, one rollout a line.

Consumer: TRL 1.16.0 ``trl/trainer/grpo_trainer.py`` (``_generate``): ``prompt_ids``, ``completion_ids`` and
``logprobs`` are required; ``env_mask`` (1: the model's token, 0: the environment's) multiplies the completion mask;
every other field goes to the reward functions, so ``reward`` is there for one that just returns it. Lines are collated
by key.

| field | type | |
|---|---|---|
| prompt_ids | list of int, [P] | all before the first token that trains |
| completion_ids | list of int, [C] | the rest: answers, tool results, what came between |
| logprobs, env_mask | list of float / int, [C] | 0.0 and 0 where the environment spoke, as TRL's own tool loop does |
| reward, weight | float | weight: share of its rollout, 1.0 unless ``--chains all`` |
| session_id, task_id, harness, group_id | string | TRL pairs completions with prompts by position: sort by group |

TRL takes one completion per prompt and generation, so a rollout gives its delivered chain.
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
            "completion_ids": chain.token_ids[start:],
            "logprobs": chain.log_probs[start:],
            "env_mask": chain.loss_mask[start:],
            "reward": rollout.reward,
            "weight": weight,
            "session_id": rollout.session_id,
            "task_id": rollout.task_id,
            "harness": rollout.harness,
            "group_id": rollout.group_id,
        }
