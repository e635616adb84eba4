"""A finished rollout -> the result row NeMo Gym stores and NeMo-RL trains on. Pure; imports nothing of either.

One row is one linear chain. What must not train is not there to be trained on: a masked row holds the text of what
happened and one placeholder token behind a prompt of its own, so that it leaves its siblings' baseline alone whatever
the trainer does with masks (rule 5). All that was sampled stays in ``trajectories``.
"""

import base64
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from polar_env.conversation import as_message
from polar_env.digest import digest
from polar_env.gym.contract import ContractError, first_prompt_digest, violations
from polar_env.gym.items import clean, items, placeholder
from polar_env.joins import joins
from polar_env.trajectory import NO_IDS, trim
from polar_env.types import (
    CallKind,
    CallRecord,
    Chain,
    Egress,
    HarnessExit,
    Hole,
    Outcome,
    RewardDecision,
    RolloutResult,
    SealedLedger,
    Trajectory,
)
from polar_env.verdict import Verdict, VerdictStatus

FAILURE_KINDS: Mapping[Outcome, str | None] = {
    Outcome.COMPLETED: None,
    Outcome.AGENT_ERROR: "agent_run_error",
    Outcome.AGENT_TIMEOUT: "agent_timeout",
    Outcome.GRADE_ERROR: "verifier_error",
    Outcome.CANCELLED: "cancelled",
} | {
    outcome: f"polar_env:{outcome}"
    for outcome in (
        Outcome.TURN_LIMIT,
        Outcome.CONTEXT_OVERFLOW,
        Outcome.NO_CALLS,
        Outcome.SANDBOX_ERROR,
        Outcome.ENGINE_ERROR,
        Outcome.REQUEST_REFUSED,
        Outcome.CAPTURE_INCOMPLETE,
        Outcome.STALE_POLICY,
        Outcome.STRAGGLER,
        Outcome.GROUP_TIMEOUT,
    )
}
"""Outcome -> ``nemo_gym.failure_kinds`` where it has a word, else ours in its ``<server>:<kind>`` form."""

ENDED_EARLY = (Outcome.STALE_POLICY, Outcome.STRAGGLER, Outcome.GROUP_TIMEOUT, Outcome.CANCELLED)
"""Rollouts that somebody ended from outside."""

PHASES = ("queue", "start", "agent", "grade", "finalise", "held")


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one row delivers of a rollout."""

    chain: Chain | None
    truncated: bool
    failure_kind: str | None
    failure_reason: str | None
    masked: bool
    max_tokens: int | None


def row(
    result: RolloutResult,
    params: Mapping[str, Any],
    *,
    model: str,
    max_tokens: int | None,
    include_trajectories: bool = True,
) -> dict[str, Any]:
    """The result row of a rollout as a JSON object: always valid, with the same keys for every ending.

    Args:
        result: the finished rollout.
        params: the dataset row's ``responses_create_params``, echoed.
        model: served model name.
        max_tokens: the policy's max sequence length; the delivered chain is cut after a whole call to fit.
        include_trajectories: add every chain (ids, loss mask, log-probs) for trainers that take several rows.

    Raises:
        ContractError: ``params`` cannot be sent as JSON, so that not even a placeholder row is valid.
    """
    return plain(compact(result, params, model=model, max_tokens=max_tokens, include_trajectories=include_trajectories))


def compact(
    result: RolloutResult,
    params: Mapping[str, Any],
    *,
    model: str,
    max_tokens: int | None,
    include_trajectories: bool = True,
) -> dict[str, Any]:
    """``row`` with arrays in place of lists of numbers: those of the trajectory, not copied.

    The prompts of 150 turns that end at 136K tokens are 10M numbers. As Python objects they hold the interpreter for
    60 ms when they are let go, and every call of every other rollout of the process waits.
    """
    delivery = _delivery(result, max_tokens)
    made = _row(result, params, model, delivery, include_trajectories)
    found = violations(made, max_tokens)
    if not found:
        return made
    refused = Delivery(
        delivery.chain, delivery.truncated, "polar_env:contract_violation", "; ".join(found), True, max_tokens
    )
    made = _row(result, params, model, refused, include_trajectories)
    if found := violations(made, max_tokens):
        raise ContractError("; ".join(found))
    return made


def plain(value: Any) -> Any:
    """``value`` with lists in place of arrays, all the way down."""
    match value:
        case array():
            return cast("array[Any]", value).tolist()
        case dict():
            return {key: plain(inner) for key, inner in cast("dict[Any, Any]", value).items()}
        case list():
            return [plain(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def result_of(
    row: Mapping[str, Any],
    outcome: Outcome,
    detail: str,
    verdict: Verdict | None,
    decision: RewardDecision,
    ledger: SealedLedger,
    trajectory: Trajectory,
) -> RolloutResult:
    """The rollout of a row, as far as its session's log and the row tell: what the harness printed is in neither.

    Raises KeyError, TypeError or ValueError: the row is not as ``row`` writes them.
    """
    polar, code = row["polar"], row["harness_exit_code"]
    return RolloutResult(
        task_id=polar["task_id"],
        harness=polar["harness"],
        outcome=outcome,
        detail=detail,
        verdict=verdict,
        decision=decision,
        trajectory=trajectory,
        ledger=ledger,
        patch=base64.b64decode(polar["patch"]),
        exit=None if code == -1.0 else HarnessExit(int(code), "", ""),
        seconds={phase: row[f"seconds_{phase}"] for phase in PHASES},
        egress=None if (tried := polar.get("egress")) is None else Egress(**tried),
    )


def _delivery(result: RolloutResult, max_tokens: int | None) -> Delivery:
    chain, truncated = result.trajectory.main, False
    if chain is not None and max_tokens is not None:
        chain, truncated = trim(chain, max_tokens)
    kind, reason = _failure(result)
    if not result.decision.masked and (chain is None or not chain.trainable_tokens):
        kind, reason = "polar_env:no_trainable_tokens", "no call of the delivered chain fits the policy and trains"
        if text_only(result.ledger.records):
            kind, reason = "polar_env:text_only", f"{NO_IDS}: nothing to train on by ids; export it as sft or neutral"
    masked = result.decision.masked or kind in ("polar_env:no_trainable_tokens", "polar_env:text_only")
    return Delivery(chain, truncated, kind, reason, masked, max_tokens)


def _failure(result: RolloutResult) -> tuple[str | None, str | None]:
    """(failure_kind, failure_reason): both ``None`` for a rollout that ended by itself and trains."""
    kind = FAILURE_KINDS[result.outcome]
    if kind is None and result.decision.masked:
        kind = "polar_env:capture_incomplete" if result.ledger.holes else _ungraded(result.verdict)
    if kind is None:
        return None, None
    return kind, clean(result.detail or result.decision.reason or result.outcome)


def _ungraded(verdict: Verdict | None) -> str:
    """Why a rollout that ended well and is whole is masked all the same: no verdict, or flags that mask."""
    failed = verdict is None or verdict.status is VerdictStatus.ERROR
    return "verifier_error" if failed else "polar_env:flagged"


def _row(
    result: RolloutResult, params: Mapping[str, Any], model: str, delivery: Delivery, include_trajectories: bool
) -> dict[str, Any]:
    """The row for a delivery, not yet judged."""
    turns, records = delivery.chain.turns if delivery.chain else (), result.ledger.records
    text = text_only(records)  # nobody trains on it by ids, so no sibling's baseline asks for a 0: evaluation wants it
    said = {record.call_id: record.turn for record in records}
    output = [item for turn in turns for item in items(turn, said[turn.call_id], with_ids=not delivery.masked)]
    if delivery.masked:
        output.append(placeholder(result))
    made: dict[str, Any] = {
        "responses_create_params": {"input": [], **params},
        "response": _response(result, params, model, output),
        "reward": 0.0 if delivery.masked and not text else float(result.decision.reward),
        "mask_sample": delivery.masked,
        "instance_config": {"mask_sample": delivery.masked},
        "failure_kind": delivery.failure_kind,
        "failure_reason": delivery.failure_reason,
        **_metrics(result, delivery),
        "polar": _polar(result, delivery),
        "trajectories": chains(result.trajectory, records, delivery.masked) if include_trajectories else [],
    }
    return made | {"first_prompt_digest": first_prompt_digest(made)}


def _response(result: RolloutResult, params: Mapping[str, Any], model: str, output: list[Any]) -> dict[str, Any]:
    """A Responses API body (``nemo_gym.openai_utils.NeMoGymResponse``)."""
    records = result.ledger.records
    return {
        "id": f"resp_{result.ledger.session_id}",
        "object": "response",
        "created_at": records[-1].ended if records else 0.0,
        "model": model,
        "output": output,
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
    }


# --- what else a row says ---------------------------------------------------------------------------------------


def _metrics(result: RolloutResult, delivery: Delivery) -> dict[str, float]:
    """Top-level numbers: Gym and NeMo-RL average each. Always the same keys, always finite.

    Seconds are rounded: numpy makes no histogram (rule 9) of two numbers that differ in their last few bits only.
    """
    trajectory, records = result.trajectory, result.ledger.records
    trained = delivery.chain.trainable_tokens if delivery.chain and not delivery.masked else 0
    code = result.exit.code if result.exit else None
    verdict = result.verdict
    sampled_by = _span(result, delivery)
    return {
        "num_model_calls": float(len(records)),
        "num_chains": float(len(trajectory.chains)),
        "num_left_out": float(len(trajectory.left_out)),
        "num_holes": float(len(result.ledger.holes)),
        "sampled_tokens": float(trajectory.sampled_tokens),
        "trainable_tokens": float(trained),
        "delivered_fraction": trained / trajectory.sampled_tokens if trajectory.sampled_tokens else 0.0,
        "total_tokens": float(delivery.chain.total_tokens if delivery.chain else 0),
        "truncated": float(delivery.truncated),
        "text_only": float(text_only(result.ledger.records)),
        "num_policy_versions": float(len(_names(sampled_by))),
        **_ages(result, delivery.chain),
        "num_calls_across_versions": float(sum("+" in version for version in sampled_by)),
        **{f"joins_{join}": float(count) for join, count in joins(result.ledger).items()},
        "starts_with_task": float(_starts_with_task(result, delivery)),
        "resolved": float(verdict is not None and verdict.status is VerdictStatus.RESOLVED),
        "patch_bytes": float(len(result.patch)),
        "egress_packets": float(result.egress.packets if result.egress else 0),
        "harness_exit_code": -1.0 if code is None else float(code),
        "agent_timed_out": float(result.outcome is Outcome.AGENT_TIMEOUT),
        "ended_early": float(result.outcome in ENDED_EARLY),
        **{f"seconds_{phase}": round(float(result.seconds.get(phase, 0.0)), 6) for phase in PHASES},
    }


def _ages(result: RolloutResult, chain: Chain | None) -> dict[str, float]:
    """Updates that the weights behind the delivered tokens were behind when the rollout ended, masked or not: of the
    oldest, and the mean over tokens; and whether the rollout is over the limit (``engine.max_policy_age``)."""
    versions = {record.call_id: record.policy_version for record in result.ledger.records}
    turns = [turn for turn in (chain.turns if chain else ()) if turn.trained]
    ages = [max(result.ages.get(name, 0) for name in versions[turn.call_id].split("+")) for turn in turns]
    tokens = [len(turn.sampled_ids) for turn in turns]
    mean = sum(age * count for age, count in zip(ages, tokens, strict=True)) / max(1, sum(tokens))
    return {
        "policy_age": float(max(ages, default=0)),
        "policy_age_mean": round(mean, 6),
        "policy_stale": float(bool(result.stale)),
    }


def _starts_with_task(result: RolloutResult, delivery: Delivery) -> bool:
    """Whether the row's first prompt is the session's own: after a compaction it is not, and NeMo-RL puts the row in
    a group of its own (rule 8)."""
    agent = (record for record in result.ledger.records if record.kind is CallKind.AGENT and not record.thread)
    task = min(agent, key=lambda record: record.index, default=None)
    trained = [turn for turn in (delivery.chain.turns if delivery.chain else ()) if turn.trained]
    return not delivery.masked and bool(trained) and task is not None and trained[0].prompt_ids == task.prompt_ids


def _polar(result: RolloutResult, delivery: Delivery) -> dict[str, Any]:
    """What is not a number: for people, tables, grading again and `polar verify`. ``patch`` is base64: it may hold any
    bytes. ``digest`` covers the tensors of the row; a masked row has none, so its chain has no link."""
    turns = delivery.chain.turns if delivery.chain and not delivery.masked else ()
    first, *_, last = _names(_span(result, delivery)) * 2 or ("", "")
    return {
        "task_id": result.task_id,
        "harness": result.harness,
        "session_id": result.ledger.session_id,
        "outcome": result.outcome.value,
        "ended": (result.ended or result.outcome).value,
        "detail": clean(result.detail),
        "masked_reason": clean(result.decision.reason or (delivery.failure_reason or "" if delivery.masked else "")),
        "verdict": None if result.verdict is None else told(result.verdict),
        "patch": base64.b64encode(result.patch).decode("ascii"),
        "egress": None if result.egress is None else asdict(result.egress),
        "complete": result.ledger.complete,
        "delivered": result.trajectory.delivered,
        "left_out": dict(result.trajectory.left_out),
        "holes": holes(result.ledger.holes),
        "trajectory": {**result.trajectory.policy, "max_tokens": delivery.max_tokens},
        "policy_versions": _versions(result.ledger.records),
        "policy_version_first": first,
        "policy_version_last": last,
        "digest": asdict(digest(result.ledger.session_id, turns)),
    }


def told(verdict: Verdict) -> dict[str, Any]:
    """A verdict as a row tells it (``polar.verdict``)."""
    plain = asdict(verdict) | {"status": verdict.status.value, "detail": clean(verdict.detail)}
    return {key: value for key, value in plain.items() if key != "score" or value is not None}


def text_only(records: Iterable[CallRecord]) -> bool:
    """Whether an engine without token ids answered (``engine.kind=text``)."""
    return any(not record.ids for record in records)


def holes(found: Iterable[Hole]) -> list[str]:
    """Holes as a row tells them."""
    return [f"{hole.kind}: {clean(hole.detail)}" for hole in found]


def _versions(records: Iterable[CallRecord]) -> list[str]:
    """The policy versions that sampled, in order of first use: more than one is an update in the middle."""
    return list(dict.fromkeys(record.policy_version for record in records))


def _span(result: RolloutResult, delivery: Delivery) -> list[str]:
    """The policy version of every call the row trains, in order; ``a+b`` for a call whose weights changed under it."""
    chain = delivery.chain if not delivery.masked else None
    trained = {turn.call_id for turn in (chain.turns if chain else ()) if turn.trained}
    return [record.policy_version for record in result.ledger.records if record.call_id in trained]


def _names(versions: Iterable[str]) -> list[str]:
    """The versions by themselves, in order of first use."""
    return list(dict.fromkeys(name for version in versions for name in version.split("+")))


def chains(trajectory: Trajectory, records: Iterable[CallRecord], masked: bool) -> list[dict[str, Any]]:
    """Every chain, numbers as arrays. Weights of an unmasked rollout add up to 1, so that it counts once however many
    chains it has."""
    known = {record.call_id: record for record in records}
    total = 0 if masked else sum(chain.trainable_tokens for chain in trajectory.chains)
    return [
        {
            "kind": chain.kind.value,
            "thread": chain.thread,
            "branched_from": chain.branched_from,
            "delivered": number == trajectory.delivered,
            "weight": chain.trainable_tokens / total if total else 0.0,
            "policy_versions": _versions(known[turn.call_id] for turn in chain.turns),
            "answers": [
                json.dumps(as_message(known[turn.call_id].turn)) for turn in chain.turns if not known[turn.call_id].ids
            ],
            "call_versions": [known[turn.call_id].policy_version for turn in chain.turns],
            **dict(_flat(chain, masked)),
        }
        for number, chain in enumerate(trajectory.chains)
    ]


def _flat(chain: Chain, masked: bool) -> Iterator[tuple[str, Any]]:
    """The chain as one sequence: ids, loss mask (1: trains) and log-probs (0.0 where nothing was sampled), each [T]."""
    last = chain.turns[-1]
    mask, log_probs = array("b", bytes(chain.total_tokens)), array("f", bytes(4 * chain.total_tokens))
    for turn in chain.turns:
        span = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids))
        log_probs[span] = turn.log_probs
        if turn.trained and not masked:
            mask[span] = array("b", b"\x01" * len(turn.sampled_ids))
    yield "call_ids", [turn.call_id for turn in chain.turns]
    yield "token_ids", last.prompt_ids + last.sampled_ids
    yield "loss_mask", mask
    yield "log_probs", log_probs
