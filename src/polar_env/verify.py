"""Rows against the durable logs of their sessions: what `polar verify` does.

Each session is rebuilt from its log, its chains are built again as the row says they were, and every id, mask and
log-probability (as exact float32) is compared with what the row holds, as is the digest chain over what it delivers.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from polar_env.digest import digest
from polar_env.errors import CaptureError, ConfigError, PolarError, boundary
from polar_env.gym import rows
from polar_env.gym.contract import TOKEN_KEYS, first_prompt_digest, trainable_items
from polar_env.joins import joins
from polar_env.segment_log import SessionLog, read
from polar_env.trajectory import build, trim
from polar_env.types import CallKind, Chain, ChainTurn, Trajectory

Row = Mapping[str, Any]

CODES = {
    "token_ids": "i",
    "loss_mask": "i",
    "log_probs": "f",
    "prompt_token_ids": "i",
    "generation_token_ids": "i",
    "generation_log_probs": "f",
}
"""Fields that are compared number by number -> how they are stored."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a row's chains were built (``polar.trajectory``)."""

    delivery: str
    trained_kinds: tuple[CallKind, ...]
    seed: int
    max_tokens: int | None


def run(rollouts: Path, sessions: Path, say: Callable[[str], None]) -> int:
    """Check every row of a JSONL file; ``say`` gets a line per row and a summary. The number of rows that do not hold.

    Args:
        rollouts: rows as NeMo Gym or `polar rollout` wrote them.
        sessions: ``store.sessions``: a directory per session.

    Raises:
        ConfigError: the file cannot be read, or holds no row.
    """
    seen, failed, count = dict[str, int](), 0, 0
    with boundary(ConfigError, f"reading {rollouts}"), rollouts.open(encoding="utf-8") as lines:
        for count, line in enumerate((line for line in lines if line.strip()), start=1):
            name, wrong, told = _judge(line, sessions)
            if name and (before := seen.setdefault(name, count)) != count:
                wrong = [f"this session is also row {before}: it would train twice", *wrong]
            failed += bool(wrong)
            say(f"FAIL {count} {name}: {_shorten(wrong)}" if wrong else f"ok   {count} {name}: {told}")
    if not count:
        raise ConfigError(f"{rollouts} holds no row: there is nothing to verify")
    say(f"{count} rows: {count - failed} hold, {failed} do not")
    return failed


def _judge(line: str, sessions: Path) -> tuple[str, list[str], str]:
    """(session id, what is wrong, what was checked) of one line."""
    try:
        with boundary(ConfigError, "not a row of polar_env"):
            row = json.loads(line)
            name = str(row["polar"]["session_id"])
    except ConfigError as error:
        return "", [str(error)], ""
    links, chains = row["polar"].get("digest", {}).get("links", 0), len(row.get("trajectories", ()))
    return name, violations(row, sessions), f"{links} links, {chains} chains, {row.get('trainable_tokens', 0):g} tokens"


def _shorten(wrong: Sequence[str], shown: int = 3) -> str:
    rest = f" (and {len(wrong) - shown} more)" if len(wrong) > shown else ""
    return "; ".join(wrong[:shown]) + rest


def violations(row: Row, sessions: Path) -> list[str]:
    """Where a row disagrees with its session's log or with itself; one sentence each. Empty: it holds."""
    try:
        with boundary(ConfigError, "not a row of polar_env, or one of an older version"):
            return [*_masks(row), *_against_log(row, sessions)]
    except PolarError as error:
        return [str(error)]


def _masks(row: Row) -> Iterator[str]:
    """What a row says of itself more than once."""
    masked, links = row["mask_sample"], row["polar"]["digest"]["links"]
    if not isinstance(masked, bool) or row["instance_config"]["mask_sample"] is not masked:
        yield "mask_sample and instance_config.mask_sample differ"
    if masked is not (links == 0):
        yield f"mask_sample is {masked}, and its digest chain has {links} links"
    if row["reward"] != (0.0 if masked and not row.get("text_only") else row["resolved"]):
        yield f"reward is {row['reward']}, resolved is {row['resolved']}, mask_sample is {masked}"
    if row["first_prompt_digest"] != first_prompt_digest(row):
        yield "first_prompt_digest is not that of its first prompt"


def _against_log(row: Row, sessions: Path) -> Iterator[str]:
    polar, masked = row["polar"], row["mask_sample"]
    name = polar["session_id"]
    if not name:
        yield from _unstarted(row)
        return
    log, policy = _log(sessions, name), _policy(polar["trajectory"])
    yield from _ledger(row, log)
    trajectory = build(log.ledger, policy)
    if (polar["delivered"], polar["left_out"]) != (trajectory.delivered, dict(trajectory.left_out)):
        yield "another chain is delivered by the log, or other calls are left out"
    if row["trajectories"]:
        yield from _chains(row["trajectories"], rows.chains(trajectory, log.ledger.records, masked))
    expected = () if masked else _delivered(trajectory, policy)
    items = trainable_items(row)
    if masked:
        first = next((record.prompt_ids[0] for record in log.ledger.records if record.prompt_ids), 0)
        yield from _items(items, [ChainTurn("placeholder", array("i", [first]), array("i", [first]), _FLAT, True)])
    else:
        yield from _items(items, expected)
    yield from _digests(polar, () if masked else items, expected)


_FLAT = array("f", [0.0])


def _unstarted(row: Row) -> Iterator[str]:
    """A rollout that could not begin has nothing to compare, and nothing that trains."""
    if row["mask_sample"] is not True or row["trajectories"] or row["polar"]["digest"]["links"]:
        yield "the row names no session, and holds something to train on"


def _log(sessions: Path, name: str) -> SessionLog:
    if Path(name).name != name:
        raise ConfigError(f"{name!r} is no session id")
    if not (sessions / name).is_dir():
        raise CaptureError(f"no session log {name} in {sessions}: name the directory of store.sessions")
    return read(sessions / name)


def _policy(told: Mapping[str, Any]) -> Policy:
    kinds = tuple(CallKind(kind) for kind in told["trained_kinds"])
    return Policy(told["delivery"], kinds, told["seed"], told["max_tokens"])


def _ledger(row: Row, log: SessionLog) -> Iterator[str]:
    """What the row says of the capture, and whether the log is all of it."""
    polar = row["polar"]
    if log.ledger.session_id != polar["session_id"]:
        yield f"the log is of session {log.ledger.session_id}"
    if not log.sealed:
        yield "the log has no end: it was cut, or the session never closed"
    if polar["complete"] is not log.ledger.complete or polar["holes"] != rows.holes(log.ledger.holes):
        yield f"the log has {len(log.ledger.holes)} holes, the row tells of {len(polar['holes'])}"
    if not log.ledger.complete and not row["mask_sample"]:
        yield "the log is incomplete and the row trains"
    if any(row[f"joins_{join}"] != count for join, count in joins(log.ledger).items()):
        yield "the log's calls join otherwise than the row says"
    if len(log.ledger.records) != row["num_model_calls"]:
        yield f"the log has {len(log.ledger.records)} calls, the row {row['num_model_calls']:g}"


def _chains(found: Sequence[Row], expected: Sequence[Row]) -> Iterator[str]:
    if len(found) != len(expected):
        yield f"{len(found)} chains in the row, {len(expected)} in the log"
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        for key, value in theirs.items():
            if key in CODES:
                yield from _numbers(f"chain {number} {key}", ours[key], value, CODES[key])
            elif ours[key] != value:
                yield f"chain {number} {key} is {ours[key]!r} in the row, {value!r} in the log"


def _delivered(trajectory: Trajectory, policy: Policy) -> tuple[ChainTurn, ...]:
    """The turns whose tensors the row must hold."""
    chain: Chain | None = trajectory.main
    if chain is not None and policy.max_tokens is not None:
        chain, _ = trim(chain, policy.max_tokens)
    return tuple(turn for turn in chain.turns if turn.trained) if chain else ()


def _items(items: Sequence[Row], expected: Sequence[ChainTurn]) -> Iterator[str]:
    if len(items) != len(expected):
        yield f"{len(items)} output items carry tokens, the log has {len(expected)}"
    for item, turn in zip(items, expected, strict=False):
        values = (turn.prompt_ids, turn.sampled_ids, turn.log_probs)
        for key, value in zip(TOKEN_KEYS, values, strict=True):
            yield from _numbers(f"{turn.call_id} {key}", item[key], value, CODES[key])


def _numbers(where: str, found: Sequence[float], expected: Iterable[float], code: str) -> Iterator[str]:
    """The first number that differs, as stored: int32 or float32."""
    ours, theirs = _array(where, found, code), array(code, expected)
    if ours.tobytes() == theirs.tobytes():
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in pairs if array(code, [a]).tobytes() != array(code, [b]).tobytes()), None)
    if at is None:
        yield f"{where} has {len(ours)} values in the row, {len(theirs)} in the log"
    else:
        yield f"{where}[{at}] is {ours[at]} in the row, {theirs[at]} in the log"


def _array(where: str, values: Sequence[float], code: str) -> "array[Any]":
    try:
        return array(code, cast("Sequence[Any]", values))
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _digests(polar: Mapping[str, Any], items: Sequence[Row], expected: Sequence[ChainTurn]) -> Iterator[str]:
    """The chain in the row: over its own tensors, and over the log's."""
    told, name = polar["digest"], polar["session_id"]
    calls = told["calls"]
    if len(calls) != len(items):
        yield f"the digest names {len(calls)} calls, {len(items)} carry tokens"
        return
    own = [
        ChainTurn(call_id, *(_array(call_id, item[key], CODES[key]) for key in TOKEN_KEYS), trained=True)
        for call_id, item in zip(calls, items, strict=True)
    ]
    for turns, whose in ((own, "the row's own tokens"), (expected, "the log")):
        made = asdict(digest(name, turns))
        if told != made | {"calls": list(made["calls"])}:
            yield f"the digest is not that of {whose}"
