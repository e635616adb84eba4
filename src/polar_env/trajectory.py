"""Records -> prefix DAG -> chains: what a session sampled, as contiguous sequences of ids. Pure.

Each call's parent is the longest earlier call whose prompt+sampled ids its prompt strictly extends. The calls that
train form a forest; every leaf gives one chain, its path from the root. A call that lies on several paths is trained
in one of them and is context (``trained=False``) in the others, so each sampled token trains exactly once.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from polar_env.prefix import PrefixIndex
from polar_env.types import CallKind, CallRecord, Chain, ChainTurn, SealedLedger, Trajectory


class Policy(Protocol):
    """The part of ``config.TrajectoryConfig`` that ``build`` reads."""

    @property
    def delivery(self) -> str: ...
    @property
    def trained_kinds(self) -> tuple[CallKind, ...]: ...
    @property
    def seed(self) -> int: ...


NO_IDS = "the engine gives no token ids"
"""Why a call of a text engine does not train. It is in the chains all the same: they are what was said."""

Path = tuple[CallRecord, ...]
"""Calls from a root to a leaf, each strictly extending the one before."""


def build(ledger: SealedLedger, config: Policy) -> Trajectory:
    """Chains of everything the session sampled; the order of ``ledger.records`` does not matter.

    The sum of ``trainable_tokens`` over the chains equals ``sampled_tokens``: the tokens of every delivered, valid,
    not superseded call of a trained kind. Calls left out are named in ``left_out`` with the reason.
    """
    records = sorted(ledger.records, key=lambda record: record.index)
    holed = frozenset(hole.call_id for hole in ledger.holes)
    left_out = {record.call_id: why for record in records if (why := _exclusion(record, ledger, holed, config))}
    calls = [record for record in records if record.call_id not in left_out]
    left_out |= {record.call_id: NO_IDS for record in calls if not record.ids}
    parents = _parents(calls)
    paths = _paths(calls, parents)
    main = _main_path(calls, paths)
    if config.delivery == "task":
        main = _task_path(calls, paths, main)
    chains = _chains(_by_priority(paths, main, config.delivery))
    return Trajectory(
        chains=chains,
        delivered=_deliver(chains, main, ledger.session_id, config),
        sampled_tokens=sum(len(record.sampled_ids) for record in calls),
        left_out=left_out,
        policy={
            "delivery": config.delivery,
            "trained_kinds": [kind.value for kind in config.trained_kinds],
            "seed": config.seed,
        },
    )


def trim(chain: Chain, max_tokens: int) -> tuple[Chain, bool]:
    """Cut ``chain`` after a whole call to at most ``max_tokens`` ids in all (NeMo-RL rule 10).

    Returns the chain and whether anything was cut. No turn is left when even the first call is too long.
    """
    kept = tuple(turn for turn in chain.turns if len(turn.prompt_ids) + len(turn.sampled_ids) <= max_tokens)
    return replace(chain, turns=kept), len(kept) < len(chain.turns)


def _exclusion(record: CallRecord, ledger: SealedLedger, holed: frozenset[str | None], config: Policy) -> str | None:
    """Why a call does not train, ``None`` when it does."""
    if record.holes or record.call_id in holed:
        return "hole"
    if record.call_id not in ledger.delivered:
        return "undelivered"
    if record.call_id in ledger.superseded:
        return "superseded"
    if record.kind not in config.trained_kinds:
        return f"kind: {record.kind}"
    return None if record.sampled_ids or not record.ids else "empty generation"


def _parents(calls: Sequence[CallRecord]) -> dict[str, str | None]:
    """call_id -> the call it continues. ``calls`` in order of ``index``; only earlier calls can be parents.

    Calls without ids continue what their messages carry on.
    """
    known = {call.call_id for call in calls}
    index, parents = PrefixIndex(), dict[str, str | None]()
    for call in calls:
        if not call.ids:
            parents[call.call_id] = call.continues if call.continues in known else None
            continue
        parent = index.add(call.call_id, call.prompt_ids, call.sampled_ids, call.thread).parent
        parents[call.call_id] = parent.name if parent else None
    return parents


def _paths(calls: Sequence[CallRecord], parents: Mapping[str, str | None]) -> list[Path]:
    """One path per leaf of the forest, in order of the leaves."""
    lines = dict[str, Path]()
    for call in calls:
        parent = parents[call.call_id]
        lines[call.call_id] = (*(lines[parent] if parent else ()), call)
    inner = set(parents.values())
    return [line for name, line in lines.items() if name not in inner]


def _main_path(calls: Iterable[CallRecord], paths: Sequence[Path]) -> Path | None:
    """The path the harness finished on: it holds the last agent call of the main thread (else the last call)."""
    known = list(calls)
    last = [call for call in known if call.kind is CallKind.AGENT and not call.thread] or known
    if not last:
        return None
    holding = [path for path in paths if any(call is last[-1] for call in path)]
    return max(holding, key=lambda path: (path[-1] is last[-1], _weight(path), -path[-1].index))


def _task_path(calls: Sequence[CallRecord], paths: Sequence[Path], main: Path | None) -> Path | None:
    """The main path when it starts with the task's prompt (the first agent call), else the heaviest that does.

    NeMo-RL forms groups by the first prompt's ids (contract rule 8): a row that starts after a compaction is a group of
    its own, its advantage is 0, and its siblings lose a member of their baseline.
    """
    if not calls:
        return None
    first = next((call for call in calls if call.kind is CallKind.AGENT and not call.thread), calls[0])
    starting = [path for path in paths if path[0] is first]
    return main if main in starting else max(starting, key=lambda path: (_weight(path), -path[-1].index), default=main)


def _weight(path: Path) -> int:
    return sum(len(call.sampled_ids) for call in path)


def _by_priority(paths: Sequence[Path], main: Path | None, delivery: str) -> list[Path]:
    """Who owns shared calls: the path to deliver first, then the one that sampled most."""
    first = main if delivery != "longest" else None
    return sorted(paths, key=lambda path: (path is not first, -_weight(path), path[-1].index))


def _chains(paths: Iterable[Path]) -> tuple[Chain, ...]:
    """Paths in order of ownership -> chains in order of the first call each owns."""
    owned, chains = set[str](), list[tuple[int, Chain]]()
    for path in paths:
        fresh = [call for call in path if call.call_id not in owned]
        context = path[: len(path) - len(fresh)]
        turns = tuple(_turn(call, trained=call.ids and call.call_id not in owned) for call in path)
        owned.update(call.call_id for call in fresh)
        branch = context[-1].call_id if context else None
        chains.append((fresh[0].index, Chain(turns, fresh[0].kind, fresh[0].thread, branch)))
    return tuple(chain for _, chain in sorted(chains, key=lambda item: item[0]))


def _turn(call: CallRecord, *, trained: bool) -> ChainTurn:
    return ChainTurn(call.call_id, call.prompt_ids, call.sampled_ids, call.log_probs, trained)


def _deliver(chains: Sequence[Chain], main: Path | None, session_id: str, config: Policy) -> int | None:
    """The chain a trainer that takes one row per rollout gets."""
    if main is None:
        return None
    weights = [chain.trainable_tokens for chain in chains]
    if config.delivery == "longest":
        return weights.index(max(weights))
    if config.delivery == "sample" and any(weights):
        draw = random.Random(f"{config.seed}:{session_id}")  # noqa: S311 - reproducible, nothing to keep secret
        return draw.choices(range(len(chains)), weights)[0]
    return next(i for i, chain in enumerate(chains) if chain.turns[-1].call_id == main[-1].call_id)
