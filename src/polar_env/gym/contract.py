"""NeMo-RL's rules for a result row, as a gate: the last check before a row leaves, and the judge in tests.

The numbers are those of the contract NeMo-RL's own code enforces (or breaks on): it posts dataset rows to an agent's
``/run`` and makes one training row of each reply (``environments/nemo_gym.py``, ``experience/rollouts.py``,
``algorithms/grpo.py``). One bad row ends the whole batch, so a row is judged here, where it can still be replaced.
Rules 12 and 13 are about time (no call after ``/run`` returned, own deadlines) and cannot be seen on a row.
"""

import hashlib
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from polar_env.errors import PolarError
from polar_env.verdict import GRAIN

Row = Mapping[str, Any]

TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
THINK_TAGS = ("<think>", "</think>")
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
LEAKS = (*THINK_TAGS, *TOOL_TAGS)
"""Markup that the SWE recipes punish with -5 inside an output_text item: NeMo-RL's default ``thinking_tags`` and
``invalid_tool_call_patterns`` (``environments/nemo_gym.py``)."""

MAX_TOKEN_ID = 2**31 - 1

MAX_METRIC = 2.0**46
"""NeMo-RL puts every metric into a histogram of 64 bins, at least 1 wide: numpy cannot make it beyond 2**47."""

MAX_LOG_PROB = 1e-6
"""Float noise of log_softmax, the same as in ``capture.judge``."""


class ContractError(PolarError):
    """A row NeMo-RL would choke on, or train wrongly on, in silence."""


def check(row: Row, max_tokens: int | None = None) -> None:
    """Raises ContractError that lists every violation of ``row``."""
    if found := violations(row, max_tokens):
        raise ContractError("; ".join(found))


def violations(row: Row, max_tokens: int | None = None) -> list[str]:
    """What is wrong with a result row: one sentence each, beginning with the rule's number. Empty: NeMo-RL takes it.

    Args:
        row: the JSON object ``/run`` answers with; numbers may be arrays in it (``rows.compact``).
        max_tokens: the policy's max sequence length; ``None`` skips rule 10.
    """
    shape = list(_shape(row))
    if shape:
        return shape
    items = _output(row)
    trainable = trainable_items(row)
    broken = list(_tensors(items))
    if not trainable:
        broken.append("rule 5: no trainable item; a failed rollout needs a masked placeholder token")
    if not broken:
        broken = list(_sequence(trainable, max_tokens))
    return [*_json(row), *broken, *_masks(row), *_scalars(row), *_leaks(items)]


def trainable_items(row: Row) -> list[Mapping[str, Any]]:
    """The output items NeMo-RL makes training turns of: those with generation ids."""
    return [item for item in _output(row) if item.get("generation_token_ids")]


def _output(row: Row) -> list[Row]:
    return cast("list[Row]", row["response"]["output"])


def first_prompt_digest(row: Row) -> str:
    """SHA-256 (hex) of the first prompt's ids, int32: what NeMo-RL forms groups by (rule 8). ``""`` without one."""
    items = trainable_items(row)
    return hashlib.sha256(array("i", items[0]["prompt_token_ids"]).tobytes()).hexdigest() if items else ""


def group_disagreements(rows: Sequence[Row]) -> list[str]:
    """Rule 8 over the rollouts of one task: rows whose first prompt differs from the others', and where.

    Masked rows are left out: their placeholder has a prompt of its own on purpose.
    """
    live = [(number, row) for number, row in enumerate(rows) if not row.get("mask_sample") and trainable_items(row)]
    digests = {number: first_prompt_digest(row) for number, row in live}
    if len(set(digests.values())) <= 1:
        return []
    common = Counter(digests.values()).most_common(1)[0][0]
    model = next(number for number, digest in digests.items() if digest == common)
    reference = trainable_items(rows[model])[0]["prompt_token_ids"]
    return [
        f"rule 8: row {number} forms a group of its own, its advantage is 0: its first prompt differs from row "
        f"{model}'s at token {_first_difference(reference, trainable_items(row)[0]['prompt_token_ids'])}; "
        "remove what changes between rollouts (path, date, hostname, id) from the prompt"
        for number, row in live
        if digests[number] != common
    ]


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def _shape(row: Row) -> Iterator[str]:
    """Rule 2: what NeMo-RL indexes without asking."""
    response = row.get("response")
    output = cast("Row", response).get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in cast("list[Any]", output)):
        yield "rule 2: response.output must be a list of objects"
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping) or "input" not in params:
        yield "rule 2: responses_create_params.input must be echoed"
    reward = row.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not _exact(reward):
        yield f"rule 2: reward must be in [0, 1] and a multiple of 1/{GRAIN}, not {reward!r}"
    elif (parts := row.get("reward_components")) and not _adds_up(parts, reward):
        yield f"rule 2: reward_components must add up to the reward, {reward!r}: {parts!r}"


def _exact(reward: float) -> bool:
    """Rule 15."""
    return 0.0 <= reward <= 1.0 and (reward * GRAIN).is_integer()


def _adds_up(parts: Any, reward: float) -> bool:
    numbers = list(cast("Mapping[str, Any]", parts).values()) if isinstance(parts, Mapping) else []
    real = all(isinstance(number, int | float) for number in numbers)
    return real and math.isclose(sum(cast("list[float]", numbers)), reward, abs_tol=1e-6)


def _tensors(items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rule 3: prompt, sampled ids and log-probs together, of one length, and real."""
    for at, item in enumerate(items):
        present = [key for key in TOKEN_KEYS if item.get(key) is not None]
        if not present:
            continue
        if not all(isinstance(item.get(key), list | array) and item[key] for key in TOKEN_KEYS):
            yield f"rule 3: output[{at}] needs all of {', '.join(TOKEN_KEYS)}, lists, none empty, or none at all"
            continue
        sampled, log_probs = item["generation_token_ids"], item["generation_log_probs"]
        if len(sampled) != len(log_probs):
            yield f"rule 3: output[{at}] has {len(sampled)} sampled ids and {len(log_probs)} log-probs"
        if not all(isinstance(p, int | float) and math.isfinite(p) and p <= MAX_LOG_PROB for p in log_probs):
            yield f"rule 3: output[{at}] has a log-prob that is no log-probability"


def _sequence(items: Sequence[Mapping[str, Any]], max_tokens: int | None) -> Iterator[str]:
    """Rules 4, 6 and 10: one linear chain, each call adds a prompt token, and the whole fits (3: ids are ids)."""
    seen: Sequence[int] = items[0]["prompt_token_ids"][:0]
    for turn, item in enumerate(items):
        prompt: Sequence[int] = item["prompt_token_ids"]
        if prompt[: len(seen)] != seen:
            at = _first_difference(seen, prompt)
            yield f"rule 4: trainable item {turn} does not continue the row: token {at} of {len(seen)} differs"
        elif len(prompt) == len(seen):
            yield f"rule 6: trainable item {turn} adds no prompt token to the row"
        elif wrong := _not_ids([*prompt[len(seen) :], *item["generation_token_ids"]]):
            yield f"rule 3: trainable item {turn} has {wrong}"
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
    if max_tokens is not None and len(seen) > max_tokens:
        yield f"rule 10: {len(seen)} tokens, the policy takes {max_tokens}; trim to the longest prefix of whole calls"


def _not_ids(values: Sequence[int]) -> str:
    """What keeps ``values`` from being token ids (one float: NeMo-RL's tensor has another dtype); ``""`` if nothing."""
    if odd := {type(value).__name__ for value in values} - {"int"}:
        return f"a token id that is a {min(odd)}"
    if min(values) < 0:
        return "a negative token id"
    return "a token id above int32" if max(values) > MAX_TOKEN_ID else ""


def _masks(row: Row) -> Iterator[str]:
    """Rule 7: which of the two is read depends on the version, so they must agree."""
    instance = row.get("instance_config")
    nested = cast("Row", instance).get("mask_sample") if isinstance(instance, Mapping) else None
    top = row.get("mask_sample")
    if not isinstance(top, bool) or nested is not top:
        yield f"rule 7: mask_sample is {top!r} at top level and {nested!r} in instance_config; set both alike"


def _scalars(row: Row) -> Iterator[str]:
    """Rule 9: top-level numbers become metrics."""
    for key, value in row.items():
        if isinstance(value, int | float) and not abs(value) <= MAX_METRIC:
            shown = f"{value}" if isinstance(value, float) else "an integer"
            yield f"rule 9: {key} is {shown}; a metric must be finite and at most 2**46"


def _leaks(items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rule 11: reasoning belongs in a reasoning item, tool calls in function_call items."""
    for at, item in enumerate(items):
        if leak := punished(item):
            yield f"rule 11: {leak} in the text of output[{at}]"


def punished(item: Row) -> str:
    """The markup for which NeMo-RL would flag ``item`` if it carried a call's tokens; ``""`` without.

    In a message: any. In a reasoning item, which is looked at only when it carries the tokens: a tool call's, and a
    thinking tag that is there twice (stricter than NeMo-RL: every part is read, and items without tokens too, but
    reasoning without tokens may hold anything).
    """
    text = "\n".join(_texts(item.get("content")))
    if found := [leak for leak in LEAKS if leak in text]:
        return found[0]
    if not item.get("generation_token_ids"):
        return ""
    return markup(_texts(item.get("summary")))


def markup(thoughts: Iterable[str]) -> str:
    """What NeMo-RL flags a reasoning item of ``thoughts`` for when it carries a call's tokens; ``""`` if nothing."""
    text = "\n".join(thoughts)
    found = [tag for tag in TOOL_TAGS if tag in text] + [tag for tag in THINK_TAGS if text.count(tag) > 1]
    return found[0] if found else ""


def _texts(parts: Any) -> list[str]:
    listed = cast("list[Any]", parts) if isinstance(parts, list) else []
    texts = [cast("Row", part).get("text") for part in listed if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]


def _json(row: Row) -> Iterator[str]:
    """Rule 1: the reply must be a JSON object in UTF-8 (Gym writes it with orjson: no NaN, no lone surrogates).

    Token tensors are checked by ``_tensors`` and left out here: they are most of the bytes.
    """
    output = [{key: value for key, value in item.items() if key not in TOKEN_KEYS} for item in _output(row)]
    rest = {key: value for key, value in row.items() if key != "trajectories"}
    rest["response"] = {**row["response"], "output": output}
    try:
        json.dumps(rest, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        yield f"rule 1: not a JSON object in UTF-8: {error}"
