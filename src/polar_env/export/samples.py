"""Rollouts to export, from the rows of a JSONL file or from a directory of session logs."""

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polar_env.config import TrajectoryConfig
from polar_env.errors import boundary
from polar_env.export import ExportError, Job
from polar_env.gym import rows
from polar_env.segment_log import FILE_NAME, read
from polar_env.trajectory import build

GROUPED_BY = ("_ng_task_index",)
"""What NeMo Gym adds to a row that tells groups of one task and harness apart."""


@dataclass(frozen=True, slots=True)
class ChainSample:
    """One chain as one sequence. ``token_ids``, ``loss_mask`` and ``log_probs`` are [T]."""

    number: int
    kind: str
    thread: str
    branched_from: str | None
    delivered: bool
    weight: float
    """Share of its rollout: the weights of an unmasked rollout add up to 1."""
    call_ids: tuple[str, ...]
    policy_versions: tuple[str, ...]
    call_versions: tuple[str, ...]
    """The policy version of each call; empty in rows that do not tell."""
    token_ids: "array[int]"
    loss_mask: "array[int]"
    log_probs: "array[float]"
    answers: tuple[str, ...] = ()
    """Chains without ids: what the model said, call by call, each a Chat message as JSON."""

    @property
    def trained(self) -> int:
        """Tokens that train."""
        return self.loss_mask.count(1)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that trains: what trainers call the prompt. All of them when none does."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.loss_mask)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout: facts and chains. ``reward`` and ``masked`` are ``None`` for a session log: nobody graded it."""

    number: int
    session_id: str
    task_id: str
    harness: str
    group_id: str
    outcome: str
    reward: float | None
    masked: bool | None
    chains: tuple[ChainSample, ...]
    row: Mapping[str, Any] | None = None
    text_only: bool = False
    """No token ids (engine ``text``): masked for trainers that need them, graded like any other."""
    max_tokens: int | None = None
    """The ``trajectory.max_tokens`` its row was made with."""


def rollouts(source: Path) -> Iterator[Rollout]:
    """Every rollout of a JSONL file of rows, or of a directory of session logs, in order.

    Raises:
        ExportError: ``source`` is neither, or a row is not one of polar_env's.
    """
    if source.is_dir():
        yield from _logs(source)
        return
    with boundary(ExportError, f"reading {source}"), source.open(encoding="utf-8") as lines:
        for number, line in enumerate(line for line in lines if line.strip()):
            with boundary(ExportError, f"row {number + 1} of {source} is not a row of polar_env"):
                rollout = _from_row(number, json.loads(line))
            yield rollout


def trained(found: Iterable[Rollout], job: Job, default: str) -> Iterator[tuple[Rollout, ChainSample, float]]:
    """What a trainer takes: (rollout, chain, weight) of every chain that trains. Weights of a rollout add up to 1.
    Chains are cut to ``Job.max_tokens``, without it to the ``trajectory.max_tokens`` the row was made with.

    Masked rollouts are left out: these trainers have no mask that keeps a sample out of its group's baseline.
    """
    for rollout in found:
        if rollout.reward is None:
            raise ExportError("a session log knows no reward: export the rollouts' rows, or use the neutral format")
        refuse_text(rollout)
        limit = rollout.max_tokens if job.max_tokens is None else job.max_tokens
        chains = bounded(rollout.chains, limit, job)
        chosen = [chain for chain in chains if chain.delivered or (job.chains or default) == "all"]
        chosen = [chain for chain in chosen if 1 in chain.loss_mask]
        if rollout.masked or not chosen:
            job.skipped["masked" if rollout.masked else "nothing of it trains"] += 1
            continue
        total = sum(chain.weight for chain in chosen)
        yield from ((rollout, chain, chain.weight / total) for chain in chosen)


def bounded(chains: tuple[ChainSample, ...], max_tokens: int | None, job: Job) -> tuple[ChainSample, ...]:
    """Chains of one rollout, those that train cut after a whole call to at most ``max_tokens`` ids; its weight goes to
    what is left. A call that trains is a run of 1s in the loss mask: the next one adds at least a prompt token.
    """
    if max_tokens is None:
        return chains
    cut = tuple(_cut(chain, max_tokens) for chain in chains)
    job.shortened += sum(before is not after for before, after in zip(chains, cut, strict=True))
    total = sum(chain.trained for chain in cut)
    return tuple(replace(chain, weight=chain.trained / total if total else 0.0) for chain in cut)


def _cut(chain: ChainSample, max_tokens: int) -> ChainSample:
    mask = chain.loss_mask.tobytes()
    ends = [run.end() for run in re.finditer(b"\x01+", mask)]
    kept = [end for end in ends if end <= max_tokens]
    if len(mask) <= max_tokens or len(kept) == len(ends):
        return chain
    length, calls = kept[-1] if kept else 0, len(chain.call_ids) - (len(ends) - len(kept))
    versions = chain.call_versions[:calls]
    return replace(
        chain,
        call_ids=chain.call_ids[:calls],
        call_versions=versions,
        policy_versions=tuple(dict.fromkeys(versions)) or chain.policy_versions,
        token_ids=chain.token_ids[:length],
        loss_mask=chain.loss_mask[:length],
        log_probs=chain.log_probs[:length],
    )


def refuse_text(rollout: Rollout) -> None:
    """Raises ExportError for a rollout that has no token ids: a trainer that takes ids has nothing to take."""
    if rollout.text_only:
        raise ExportError(
            f"session {rollout.session_id} has no token ids (engine.kind=text): export it as sft or neutral"
        )


def _from_row(number: int, row: Mapping[str, Any]) -> Rollout:
    polar = row["polar"]
    if row["num_chains"] and not row["trajectories"]:
        raise ExportError(
            f"row {number + 1} was written without its trajectories: nothing but nemo_rl can be made of it"
        )
    return Rollout(
        number=number,
        session_id=polar["session_id"],
        task_id=polar["task_id"],
        harness=polar["harness"],
        group_id="/".join([polar["task_id"], polar["harness"], *(str(row[key]) for key in GROUPED_BY if key in row)]),
        outcome=polar["outcome"],
        reward=float(row["reward"]),
        masked=bool(row["mask_sample"]),
        chains=_chains(row["trajectories"]),
        row=row,
        text_only=bool(row.get("text_only")),
        max_tokens=polar.get("trajectory", {}).get("max_tokens"),
    )


def _logs(folder: Path) -> Iterator[Rollout]:
    """Sessions as their logs tell them, by the default trajectory policy: without task, harness and reward."""
    found = sorted(path.parent for path in folder.glob(f"*/{FILE_NAME}"))
    if not found:
        raise ExportError(f"no session log in {folder}: name the directory of store.sessions")
    for number, directory in enumerate(found):
        ledger = read(directory).ledger
        chains = _chains(rows.chains(build(ledger, TrajectoryConfig()), ledger.records, masked=not ledger.complete))
        yield Rollout(number, ledger.session_id, "", "", "", "", None, None, chains)


def _chains(told: Iterable[Mapping[str, Any]]) -> tuple[ChainSample, ...]:
    return tuple(
        ChainSample(
            number=number,
            kind=chain["kind"],
            thread=chain["thread"],
            branched_from=chain["branched_from"],
            delivered=chain["delivered"],
            weight=chain["weight"],
            call_ids=tuple(chain["call_ids"]),
            policy_versions=tuple(chain["policy_versions"]),
            call_versions=tuple(chain.get("call_versions", ())),
            token_ids=_array("i", chain["token_ids"]),
            loss_mask=_array("b", chain["loss_mask"]),
            log_probs=_array("f", chain["log_probs"]),
            answers=tuple(chain.get("answers", ())),
        )
        for number, chain in enumerate(told)
    )


def _array(code: str, values: list[Any]) -> "array[Any]":
    try:
        return array(code, values)
    except OverflowError as error:
        raise ValueError(str(error)) from error
