"""How each call's prompt relates to the call whose conversation it carries on. Pure.

A row stays one sequence only where prompts extend what was sampled. These classes say where they do, and why not where
they do not; they are counted on every row and shown by `polar rebuild`.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from polar_env.prefix import PrefixIndex
from polar_env.types import CallKind, CallRecord, SealedLedger


class Join(StrEnum):
    """By ids, not by what an engine said it did."""

    EXACT = "exact"
    """Rendered whole, and it strictly extends an earlier call's prompt and sampled ids."""
    SPLICED = "spliced"
    """It was sent as those very ids and the rendering of what is new."""
    RETOKENISED = "retokenised"
    """It carries on an earlier call message for message, and other ids came of it: thoughts dropped, arguments spelled
    anew, an engine that does not splice."""
    REWRITTEN = "rewritten"
    """It carries on none of its thread's calls: the history was edited, or a summary took its place."""
    NEW = "new"
    """It begins something: the first call of the agent or of a sub-agent, a summary's own prompt, a side call."""


AGENTS = (CallKind.AGENT, CallKind.SUB_AGENT)


def classify(ledger: SealedLedger) -> dict[str, Join]:
    """call_id -> class, for every delivered call that has ids; ``index`` says which calls came before."""
    index, known = PrefixIndex(), dict[str, CallRecord]()
    begun, found = set[str](), dict[str, Join]()
    for record in sorted(ledger.records, key=lambda record: record.index):
        placed = index.add(record.call_id, record.prompt_ids, record.sampled_ids, record.thread)
        carried = known.get(record.continues or "")
        extends = _extends(record, carried) if carried else placed.parent is not None
        if record.call_id in ledger.delivered and record.ids:
            found[record.call_id] = _join(record, extends=extends, carries=carried is not None, begun=begun)
            if record.kind in AGENTS and record.call_id not in ledger.superseded:  # asked again, it begins there
                begun.add(record.thread)
        known[record.call_id] = record
    return found


def joins(ledger: SealedLedger) -> Mapping[Join, int]:
    """How many delivered calls there are of each class; every class is there."""
    counts = Counter(classify(ledger).values())
    return {join: counts[join] for join in Join}


def _join(record: CallRecord, *, extends: bool, carries: bool, begun: set[str]) -> Join:
    if extends:
        return Join.SPLICED if carries and record.spliced else Join.EXACT
    if carries:
        return Join.RETOKENISED
    return Join.REWRITTEN if record.kind in AGENTS and record.thread in begun else Join.NEW


def _extends(record: CallRecord, carried: CallRecord) -> bool:
    """Whether the prompt strictly extends the carried call's prompt and sampled ids."""
    cut, size = len(carried.prompt_ids), len(carried.prompt_ids) + len(carried.sampled_ids)
    prompt = record.prompt_ids
    return size < len(prompt) and prompt[:cut] == carried.prompt_ids and prompt[cut:size] == carried.sampled_ids
