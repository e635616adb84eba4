"""Rows against themselves and against the durable logs of their sessions: what `polar verify` does.

What a row says more than once must agree: reward and masks with the verdict, metrics with what they count. Its session
is rebuilt from its log, its chains are built again as the row says they were, and every id, mask and log-probability
(as exact float32) is compared with what the row holds, as are its metrics and the digest chain over what it delivers.
Where the log is missing, its trajectories are held against the tensors that train.
"""

import base64
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from polar_env.digest import digest
from polar_env.errors import CaptureError, ConfigError, PolarError, boundary
from polar_env.gym import rows
from polar_env.gym.contract import TOKEN_KEYS, first_prompt_digest, trainable_items
from polar_env.reward import ENDINGS, Ending, Worth, decide
from polar_env.segment_log import SessionLog, read
from polar_env.trajectory import build, trim
from polar_env.types import CallKind, Chain, ChainTurn, Outcome, RewardDecision, Trajectory
from polar_env.verdict import Flag, Verdict, VerdictStatus

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
    found = list[str]()
    try:
        with boundary(ConfigError, "not a row of polar_env, or one of an older version"):
            found += (*_masks(row), *_reward(row), *_counted(row))
            found += _against_log(row, sessions)
    except PolarError as error:
        found.append(str(error))
    return found


# --- the row by itself ------------------------------------------------------------------------------------------


def _masks(row: Row) -> Iterator[str]:
    """What a row says more than once of whether it trains."""
    masked, links = row["mask_sample"], row["polar"]["digest"]["links"]
    if not isinstance(masked, bool) or row["instance_config"]["mask_sample"] is not masked:
        yield "mask_sample and instance_config.mask_sample differ"
    if not masked and not links:
        yield "mask_sample is False, and its digest chain has 0 links"
    if masked and not links and row["failure_kind"] is None:
        yield "mask_sample is True, and failure_kind does not say why"
    if row["first_prompt_digest"] != first_prompt_digest(row):
        yield "first_prompt_digest is not that of its first prompt"


def _empty(row: Row) -> bool:
    """Whether it was masked when it was made: a placeholder in place of tokens. One that was masked when it was graded
    again keeps its own."""
    return row["polar"]["digest"]["links"] == 0


@dataclass(frozen=True, slots=True)
class _Lenient:
    """The reward policy that trains all that any policy trains. A row does not say by which one it was rewarded."""

    train_timeouts: bool = True
    flags: Mapping[Flag, Worth] = field(default_factory=lambda: dict[Flag, Worth].fromkeys(Flag, "report"))


def _reward(row: Row) -> Iterator[str]:
    """Reward and mask against the ending and the verdict: what no policy gives is not the grader's."""
    polar, verdict = row["polar"], _verdict(row["polar"]["verdict"])
    outcome = Outcome(polar["outcome"])
    given = decide(outcome, verdict, polar["complete"], _Lenient())
    flags = verdict.flags if verdict else ()
    if row["resolved"] != (verdict is not None and verdict.status is VerdictStatus.RESOLVED):
        yield f"resolved is {row['resolved']}, polar.verdict.status is {verdict.status.value if verdict else None}"
    if verdict and (Flag.EGRESS in flags) is not bool(row["egress_packets"]):
        yield f"egress_packets is {row['egress_packets']}, polar.verdict.flags are {[flag.value for flag in flags]}"
    if given.masked and not row["mask_sample"]:
        yield f"mask_sample is False, and the rollout cannot train ({given.reason})"
    maskable = given.masked or flags or ENDINGS[outcome] is Ending.UNFINISHED
    if row["mask_sample"] and not _empty(row) and not maskable:
        yield "mask_sample is True, and by polar.outcome and polar.verdict the rollout trains"
    possible = [given.reward] if row["text_only"] or not row["mask_sample"] else [0.0]
    if row["text_only"] or flags:
        possible.append(0.0)
    if row["reward"] not in possible:
        found = "mask_sample" if row["mask_sample"] and not row["text_only"] else "polar.verdict"
        yield f"reward is {row['reward']}, by {found} it is {' or '.join(map(str, possible))}"


def _verdict(told: Mapping[str, Any] | None) -> Verdict | None:
    """What of a row's verdict decides its reward."""
    if told is None:
        return None
    return Verdict(
        VerdictStatus(told["status"]),
        flags=tuple(Flag(flag) for flag in told["flags"]),
        official=told["official"],
        score=told.get("score"),
    )


def _counted(row: Row) -> Iterator[str]:
    """Metrics against the part of the row that they count."""
    polar = row["polar"]
    trained = sum(len(item["generation_token_ids"]) for item in trainable_items(row))
    counts = {
        "trainable_tokens": (0 if _empty(row) else trained, "response.output"),
        "num_left_out": (len(polar["left_out"]), "polar.left_out"),
        "num_holes": (len(polar["holes"]), "polar.holes"),
        "patch_bytes": (len(base64.b64decode(polar["patch"])), "polar.patch"),
        "agent_timed_out": (polar["outcome"] == Outcome.AGENT_TIMEOUT, "polar.outcome"),
        "ended_early": (polar["outcome"] in rows.ENDED_EARLY, "polar.outcome"),
    }
    if row["trajectories"]:
        counts["num_chains"] = len(row["trajectories"]), "trajectories"
    for key, (count, where) in counts.items():
        if row[key] != count:
            yield f"{key} is {row[key]!r}, and {where} gives {float(count)!r}"


def _tensors(row: Row) -> Iterator[str]:
    """Without a log: the chain that ``trajectories`` calls delivered, against the tensors that train."""
    chains: Sequence[Row] = row["trajectories"]
    if _empty(row) or not chains:
        return
    if row["sampled_tokens"] != (masks := sum(sum(chain["loss_mask"]) for chain in chains)):
        yield f"sampled_tokens is {row['sampled_tokens']}, and the masks of trajectories train {masks}"
    delivered = [number for number, chain in enumerate(chains) if chain["delivered"]]
    if delivered != [row["polar"]["delivered"]]:
        yield f"polar.delivered is {row['polar']['delivered']}, and trajectories calls {delivered} delivered"
        return
    where, chain = f"trajectories[{delivered[0]}]", chains[delivered[0]]
    mask = list[int]()
    for number, item in enumerate(trainable_items(row)):
        prompt, sampled, log_probs = (item[key] for key in TOKEN_KEYS)
        own, span = f"trained call {number}", slice(len(prompt), len(prompt) + len(sampled))
        ids, priced = chain["token_ids"][: span.stop], chain["log_probs"][: span.stop]
        yield from _numbers(f"{where}.token_ids", ids, [*prompt, *sampled], "i", where, own)
        yield from _numbers(f"{where}.log_probs", priced, [*priced[: span.start], *log_probs], "f", where, own)
        mask += [0] * (len(prompt) - len(mask)) + [1] * len(sampled)
    yield from _numbers(f"{where}.loss_mask", chain["loss_mask"][: len(mask)], mask, "i", where, "response.output")


# --- against its log --------------------------------------------------------------------------------------------


def _against_log(row: Row, sessions: Path) -> Iterator[str]:
    polar, empty = row["polar"], _empty(row)
    name = polar["session_id"]
    if not name:
        yield from _unstarted(row)
        return
    try:
        log, policy = _log(sessions, name), _policy(polar["trajectory"])
    except CaptureError:
        yield from _tensors(row)
        raise
    yield from _ledger(row, log)
    trajectory = build(log.ledger, policy)
    yield from _metrics(row, log, trajectory, policy)
    if (polar["delivered"], polar["left_out"]) != (trajectory.delivered, dict(trajectory.left_out)):
        yield "another chain is delivered by the log, or other calls are left out"
    if row["trajectories"]:
        yield from _chains(row["trajectories"], rows.chains(trajectory, log.ledger.records, empty))
    expected = () if empty else _delivered(trajectory, policy)
    items = trainable_items(row)
    if empty:
        first = next((record.prompt_ids[0] for record in log.ledger.records if record.prompt_ids), 0)
        yield from _items(items, [ChainTurn("placeholder", array("i", [first]), array("i", [first]), _FLAT, True)])
    else:
        yield from _items(items, expected)
    yield from _digests(polar, () if empty else items, expected)


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
    if polar["holes"] != rows.holes(log.ledger.holes):
        yield f"the log has {len(log.ledger.holes)} holes, the row tells of {len(polar['holes'])}"
    elif polar["complete"] is not log.ledger.complete:
        yield f"polar.complete is {polar['complete']} in the row, {log.ledger.complete} by the log"
    if not log.ledger.complete and not row["mask_sample"]:
        yield "the log is incomplete and the row trains"


ELSEWHERE = ("reward", "policy_age", "policy_age_mean", "policy_stale")
"""Numbers that no log holds: the grader gave the reward, and how old a version is the trainer said."""


def _metrics(row: Row, log: SessionLog, trajectory: Trajectory, policy: Policy) -> Iterator[str]:
    """Every metric against those of a row that is made again of the log and of what only the row knows (verdict, patch,
    how the harness exited, seconds)."""
    polar, decision = row["polar"], RewardDecision(row["reward"], _empty(row))
    outcome, verdict = Outcome(polar["outcome"]), _verdict(polar["verdict"])
    result = rows.result_of(row, outcome, polar["detail"], verdict, decision, log.ledger, trajectory)
    made = rows.compact(result, {"input": []}, model="", max_tokens=policy.max_tokens, include_trajectories=False)
    told = {key: value for key, value in made.items() if isinstance(value, float) and key not in ELSEWHERE}
    told |= {f"polar.{key}": made["polar"][key] for key in made["polar"] if key.startswith("policy_version")}
    for key, value in told.items():
        found = polar[key.removeprefix("polar.")] if key.startswith("polar.") else row[key]
        if found != value:
            yield f"{key} is {found!r} in the row, {value!r} by the log"


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


def _numbers(
    where: str,
    found: Sequence[float],
    expected: Iterable[float],
    code: str,
    row: str = "the row",
    log: str = "the log",
) -> Iterator[str]:
    """The first number that differs, as stored: int32 or float32. ``row`` and ``log`` are who holds the two."""
    ours, theirs = _array(where, found, code), array(code, expected)
    if ours.tobytes() == theirs.tobytes():
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in pairs if array(code, [a]).tobytes() != array(code, [b]).tobytes()), None)
    if at is None:
        yield f"{where} has {len(ours)} values in {row}, {len(theirs)} in {log}"
    else:
        yield f"{where}[{at}] is {ours[at]} in {row}, {theirs[at]} in {log}"


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
