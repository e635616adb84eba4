"""Our own schema: a line per chain, everything a trainer may want, nothing of any trainer. JSONL, Parquet or Arrow.

| field | type | |
|---|---|---|
| session_id, task_id, harness, group_id, outcome | string | the rollout; rollouts of one group share ``group_id`` |
| reward | float32 or null | of the rollout; null: exported from a session log, nobody graded it |
| masked | bool or null | true: must not train (its ``loss_mask`` is all 0, its ``weight`` 0) |
| chain | int32 | number in its rollout |
| kind, thread | string | agent, sub_agent, compaction; the harness's thread, empty for the main one |
| branched_from | string or null | call id after which it left an earlier chain |
| delivered | bool | the chain a one-row trainer gets |
| weight | float64 | share of its rollout: an unmasked rollout's add up to 1, so it counts once |
| call_ids, policy_versions | list of string | in order; more than one version: an update in the middle |
| token_ids | list of int32, [T] | the whole sequence: prompts, answers, what came between |
| loss_mask | list of int8, [T] | 1: sampled, and trained in this chain: each sampled token in exactly one |
| log_probs | list of float32, [T] | of the sampled tokens, as the engine reported them; 0.0 elsewhere |
| answers | list of string | engine ``text``, which gives no ids: each answer as a Chat message in JSON; else empty |

Chains are whole, whatever ``trajectory.max_tokens`` was; with ``--max-tokens`` those that train are cut after a whole
call, and one of which no call fits is left out.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from polar_env.export import Job
from polar_env.export.samples import ChainSample, Rollout, bounded


def lines(rollouts: Iterable[Rollout], job: Job) -> Iterator[dict[str, Any]]:
    """All chains (or the delivered ones), masked rollouts too."""
    for rollout in rollouts:
        for chain in bounded(rollout.chains, job.max_tokens, job):
            if (chain.token_ids or chain.answers) and (chain.delivered or job.chains != "delivered"):
                yield _line(rollout, chain)


def _line(rollout: Rollout, chain: ChainSample) -> dict[str, Any]:
    return {
        "session_id": rollout.session_id,
        "task_id": rollout.task_id,
        "harness": rollout.harness,
        "group_id": rollout.group_id,
        "outcome": rollout.outcome,
        "reward": rollout.reward,
        "masked": rollout.masked,
        "chain": chain.number,
        "kind": chain.kind,
        "thread": chain.thread,
        "branched_from": chain.branched_from,
        "delivered": chain.delivered,
        "weight": chain.weight,
        "call_ids": list(chain.call_ids),
        "policy_versions": list(chain.policy_versions),
        "token_ids": chain.token_ids,
        "loss_mask": chain.loss_mask,
        "log_probs": chain.log_probs,
        "answers": list(chain.answers),
    }
