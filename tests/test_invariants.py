"""What holds of any session, by playing random ones: harnesses that retry, lose replies, go back, fork sub-agents with
their history, compact, are cut at a length, say nothing, call on the side, and meet holes.

Every token of a session here has an id of its own, and its log-probability is made of that id: so a token trained
twice, nowhere, in a wrong place or with another's log-probability is seen at once.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from engine_helpers import PATIENT
from polar_env.capture import Ledger, SegmentLog, rebuild
from polar_env.config import TrajectoryConfig
from polar_env.gym import contract, rows
from polar_env.trajectory import build
from polar_env.types import CallKind, CallRecord, Hole, HoleKind, Outcome, SealedLedger, StopReason, Trajectory
from trajectory_helpers import SESSION, call, ledger, rollout

END = 1
"""The token that ends a turn in the template; nothing samples it in a turn that is cut."""

DELIVERIES = ("task", "main", "longest", "sample")


def log_prob(token: int) -> float:
    return -(token % 89 + 1) / 64  # exact in float32


@dataclass
class Thread:
    """One conversation of a harness: what its next prompt begins with, and the calls that must have come before."""

    kind: CallKind
    history: list[int] = field(default_factory=list[int])
    after: int | None = None
    was: list[tuple[list[int], int | None]] = field(default_factory=list[tuple[list[int], int | None]])
    """Earlier states it can be rewound to."""


class Play:
    """A session as it unfolds. ``needs[i]``: the call that call i is an answer to, so must have arrived before."""

    def __init__(self) -> None:
        self.records: list[CallRecord] = []
        self.needs: list[int | None] = []
        self.undelivered: set[str] = set()
        self.superseded: set[str] = set()
        self.threads = {"": Thread(CallKind.AGENT)}
        self._next = 10

    def fresh(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def sample(self, name: str, prompt: list[int], count: int, **more: Any) -> CallRecord:
        """One call of a thread on ``prompt``; the thread is not moved."""
        thread, sampled = self.threads[name], self.fresh(count)
        record = call(
            len(self.records),
            prompt,
            sampled,
            thread=name,
            log_probs=array("f", map(log_prob, sampled)),
            **{"kind": thread.kind, **more},
        )
        self.records.append(record)
        self.needs.append(thread.after)
        return record

    def went_on(self, name: str, record: CallRecord) -> None:
        """The thread's history is now what this call saw and said."""
        thread = self.threads[name]
        thread.was.append((thread.history, thread.after))
        ended = [END] if record.turn.stop is StopReason.LENGTH else []
        thread.history = [*record.prompt_ids, *record.sampled_ids, *ended]
        thread.after = record.index

    # --- what a harness may do ---

    def turn(self, name: str, size: int) -> None:
        self.went_on(name, self.sample(name, self._asked(name), size))

    def cut(self, name: str, size: int) -> None:
        self.went_on(name, self.sample(name, self._asked(name), size, stop=StopReason.LENGTH))

    def empty(self, name: str, size: int) -> None:
        self.went_on(name, self.sample(name, self._asked(name), 0))

    def lost(self, name: str, size: int) -> None:
        self.undelivered.add(self.sample(name, self._asked(name), size).call_id)

    def retried(self, name: str, size: int) -> None:
        """Asked, answered in full, and asked again with the same prompt."""
        prompt = self._asked(name)
        thrown_away = self.sample(name, prompt, size)
        self.threads[name].after = thrown_away.index
        self.superseded.add(thrown_away.call_id)
        self.went_on(name, self.sample(name, prompt, size))

    def rewound(self, name: str, size: int) -> None:
        thread = self.threads[name]
        if thread.was:
            history, _ = thread.was[size % len(thread.was)]
            thread.history = history  # it knows all it has seen, so what comes now comes after that

    def compacted(self, name: str, size: int) -> None:
        summary = self.sample(name, self._asked(name), size, kind=CallKind.COMPACTION)
        self.went_on(name, summary)
        self.threads[name].history = self.fresh(3)  # the summary, in other tokens

    def forked(self, name: str, size: int) -> None:
        """A sub-agent seeded with the history of the thread that starts it."""
        parent = self.threads[name]
        child = f"sub-{len(self.threads)}"
        self.threads[child] = Thread(CallKind.SUB_AGENT, list(parent.history), parent.after)
        self.turn(child, size)

    def started(self, name: str, size: int) -> None:
        """A sub-agent with a prompt of its own."""
        child = f"sub-{len(self.threads)}"
        self.threads[child] = Thread(CallKind.SUB_AGENT, [], self.threads[name].after)
        self.turn(child, size)

    def aside(self, name: str, size: int) -> None:
        self.sample(name, self.fresh(2), size, kind=CallKind.SIDE)

    def holed(self, name: str, size: int) -> None:
        record = self.sample(name, self._asked(name), size)
        hole = Hole(HoleKind.BAD_LOG_PROB, record.call_id, "a test says so")
        self.records[record.index] = replace(record, holes=(hole,))
        self.went_on(name, record)

    def _asked(self, name: str) -> list[int]:
        return [*self.threads[name].history, *self.fresh(2)]

    def sealed(self, records: Sequence[CallRecord] | None = None) -> SealedLedger:
        given_records = self.records if records is None else records
        return ledger(*given_records, undelivered=self.undelivered, superseded=self.superseded)


WHOLE: tuple[Callable[[Play, str, int], None], ...] = (
    *[Play.turn] * 4,
    Play.cut,
    Play.empty,
    Play.lost,
    Play.retried,
    Play.rewound,
    Play.compacted,
    Play.forked,
    Play.started,
    Play.aside,
)


@st.composite
def plays(draw: st.DrawFn, *also: Callable[[Play, str, int], None]) -> Play:
    """A session of up to a dozen steps, each in any of its threads."""
    play = Play()
    for _ in range(draw(st.integers(0, 12))):
        step = draw(st.sampled_from([*WHOLE, *also]))
        name = draw(st.sampled_from(sorted(play.threads)))
        event(step.__name__)
        step(play, name, draw(st.integers(1, 3)))
    return play


def to_train(play: Play) -> set[int]:
    """The tokens that must train, from what happened and not from what was built."""
    return {
        token
        for record in play.records
        if record.call_id not in play.undelivered | play.superseded
        and record.kind is not CallKind.SIDE
        and not record.holes
        for token in record.sampled_ids
    }


def chains_of(trajectory: Trajectory, sealed: SealedLedger) -> list[dict[str, Any]]:
    return [rows.plain(chain) for chain in rows.chains(trajectory, sealed.records, masked=False)]


# --- the invariants ---------------------------------------------------------------------------------------------


@PATIENT
@given(plays(Play.holed), st.sampled_from(DELIVERIES))
def test_every_token_that_was_sampled_and_kept_trains_once_with_its_own_log_prob_and_no_other_does(
    play: Play, delivery: str
) -> None:
    sealed = play.sealed()
    trajectory = build(sealed, TrajectoryConfig(delivery=delivery))
    trained = [
        (token, value)
        for chain in chains_of(trajectory, sealed)
        for token, mask, value in zip(chain["token_ids"], chain["loss_mask"], chain["log_probs"], strict=True)
        if mask
    ]
    assert sorted(trained) == sorted((token, log_prob(token)) for token in to_train(play))
    assert trajectory.sampled_tokens == len(trained)


@PATIENT
@given(plays(Play.holed))
def test_a_token_stands_behind_exactly_what_the_engine_had_seen(play: Play) -> None:
    """Wherever a call is in a chain, the chain up to its end is its prompt and what it sampled."""
    sealed = play.sealed()
    seen = {record.call_id: [*record.prompt_ids, *record.sampled_ids] for record in play.records}
    for chain in chains_of(build(sealed, TrajectoryConfig()), sealed):
        for call_id in chain["call_ids"]:
            assert chain["token_ids"][: len(seen[call_id])] == seen[call_id]
        assert chain["token_ids"] == seen[chain["call_ids"][-1]]


@PATIENT
@given(plays(Play.holed))
def test_a_log_prob_stands_where_a_call_of_the_chain_sampled_and_nowhere_else(play: Play) -> None:
    """In a prompt there may be tokens of a call that does not train: for this chain they are text."""
    sealed = play.sealed()
    sampled = {record.call_id: {*record.sampled_ids} for record in play.records}
    for chain in chains_of(build(sealed, TrajectoryConfig()), sealed):
        own = {token for call_id in chain["call_ids"] for token in sampled[call_id]}
        assert chain["log_probs"] == [log_prob(token) if token in own else 0.0 for token in chain["token_ids"]]


def fate(play: Play, record: CallRecord, trained: frozenset[CallKind]) -> str | None:
    """Why a call must not train, from what happened to it; ``None``: it must."""
    if record.holes:
        return "hole"
    if record.call_id in play.undelivered:
        return "undelivered"
    if record.call_id in play.superseded:
        return "superseded"
    if record.kind not in trained:
        return f"kind: {record.kind}"
    return None if record.sampled_ids else "empty generation"


@PATIENT
@given(plays(Play.holed), st.frozensets(st.sampled_from(CallKind)))
def test_every_call_trains_in_one_chain_or_is_left_out_with_the_reason(
    play: Play, trained: frozenset[CallKind]
) -> None:
    """Whatever kinds the trainer wants."""
    trajectory = build(play.sealed(), TrajectoryConfig(trained_kinds=tuple(trained)))
    expected = {record.call_id: fate(play, record, trained) for record in play.records}
    assert trajectory.left_out == {call_id: why for call_id, why in expected.items() if why}
    owners = [turn.call_id for chain in trajectory.chains for turn in chain.turns if turn.trained]
    assert sorted(owners) == sorted(call_id for call_id, why in expected.items() if not why)


ALONE = (*dict.fromkeys(WHOLE), Play.holed)


@pytest.mark.parametrize("step", ALONE, ids=lambda step: step.__name__)
def test_a_session_of_one_kind_of_step_keeps_all_of_it(step: Callable[[Play, str, int], None]) -> None:
    """All turns cut at their length, nothing but empty ones, one retry after the other, ..."""
    play = Play()
    for size in (1, 2, 3, 2):
        step(play, "", size)
    result = rollout(play.sealed())
    trained = [
        token
        for chain in result.trajectory.chains
        for turn in chain.turns
        if turn.trained
        for token in turn.sampled_ids
    ]
    assert sorted(trained) == sorted(to_train(play))
    row = rows.row(result, {"input": "x"}, model="policy", max_tokens=None)
    assert contract.violations(row) == []
    lines = {Play.turn: 1, Play.cut: 1, Play.retried: 1, Play.compacted: 4, Play.forked: 4, Play.started: 4}
    assert len(result.trajectory.chains) == lines.get(step, 0)


@PATIENT
@given(plays(), st.sampled_from(DELIVERIES))
def test_every_chain_passes_the_judge_of_nemo_rl(play: Play, delivery: str) -> None:
    """Not only the one that is delivered: each could be."""
    result = rollout(play.sealed(), trajectory=TrajectoryConfig(delivery=delivery))
    for number in range(len(result.trajectory.chains)):
        chosen = replace(result, trajectory=replace(result.trajectory, delivered=number))
        row = rows.row(chosen, {"input": "x"}, model="policy", max_tokens=None)
        assert contract.violations(row) == []
        trains = result.trajectory.chains[number].trainable_tokens
        assert (row["trainable_tokens"], row["mask_sample"]) == (trains, trains == 0)


@PATIENT
@given(plays(), st.sampled_from(DELIVERIES), st.integers(2, 40))
def test_a_row_that_must_fit_has_the_first_calls_of_its_chain_each_whole(
    play: Play, delivery: str, max_tokens: int
) -> None:
    result = rollout(play.sealed(), trajectory=TrajectoryConfig(delivery=delivery))
    row = rows.row(result, {"input": "x"}, model="policy", max_tokens=max_tokens)
    assert contract.violations(row, max_tokens) == []
    turns = [turn for turn in (result.trajectory.main.turns if result.trajectory.main else ()) if turn.trained]
    fitting = [turn for turn in turns if len(turn.prompt_ids) + len(turn.sampled_ids) <= max_tokens]
    assert fitting == turns[: len(fitting)]
    assert row["mask_sample"] is (not fitting)
    assert row["trainable_tokens"] == sum(len(turn.sampled_ids) for turn in fitting)
    items = [item["generation_token_ids"] for item in contract.trainable_items(row)]
    assert not fitting or items == [turn.sampled_ids.tolist() for turn in fitting]


@PATIENT
@given(plays(Play.holed))
def test_what_is_delivered_is_what_the_policy_says(play: Play) -> None:
    sealed = play.sealed()
    made = {delivery: build(sealed, TrajectoryConfig(delivery=delivery)) for delivery in DELIVERIES}
    assume(made["task"].chains)
    heaviest = made["longest"].main
    assert heaviest is not None
    assert heaviest.trainable_tokens == max(chain.trainable_tokens for chain in made["longest"].chains)
    agent = [record for record in play.records if record.kind is CallKind.AGENT and not record.thread]
    kept = [record for record in agent if record.call_id not in made["task"].left_out]
    if kept:
        task, main = made["task"].main, made["main"].main
        assert task is not None
        assert main is not None
        assert kept[-1].call_id in [turn.call_id for turn in main.turns]
        begins_with_it = [chain for chain in made["task"].chains if chain.turns[0].call_id == kept[0].call_id]
        assert not begins_with_it or task in begins_with_it
    drawn = made["sample"].main
    assert drawn is not None
    assert drawn.trainable_tokens > 0
    assert build(sealed, TrajectoryConfig(delivery="sample")) == made["sample"]


@PATIENT
@given(plays(Play.holed))
def test_a_hole_masks_the_rollout_and_a_session_without_one_is_never_masked_for_its_shape(play: Play) -> None:
    sealed = play.sealed()
    outcome = Outcome.COMPLETED if sealed.complete else Outcome.CAPTURE_INCOMPLETE
    row = rows.row(rollout(sealed, outcome), {"input": "x"}, model="policy", max_tokens=None)
    assert contract.violations(row) == []
    assert row["mask_sample"] is (not sealed.complete or not to_train(play))
    assert row["mask_sample"] is (row["trainable_tokens"] == 0)


@PATIENT
@given(plays(), st.sampled_from(DELIVERIES))
def test_chains_of_a_rollout_count_as_one_rollout(play: Play, delivery: str) -> None:
    sealed = play.sealed()
    made = chains_of(build(sealed, TrajectoryConfig(delivery=delivery)), sealed)
    assume(made)
    assert abs(sum(chain["weight"] for chain in made) - 1.0) < 1e-9
    assert sum(chain["delivered"] for chain in made) == 1


@PATIENT
@given(plays(Play.holed), st.randoms(use_true_random=False), st.sampled_from(DELIVERIES))
def test_the_order_in_which_records_were_committed_never_matters(play: Play, random: Any, delivery: str) -> None:
    shuffled = list(play.records)
    random.shuffle(shuffled)
    config = TrajectoryConfig(delivery=delivery)
    assert build(play.sealed(shuffled), config) == build(play.sealed(), config)


async def logged(play: Play, folder: Path) -> SealedLedger:
    """The session as it happened, in a durable log."""
    async with SegmentLog(folder) as log:
        session = Ledger(SESSION, log)
        for record in play.records:
            await session.append(record)
            if record.call_id not in play.undelivered:
                session.mark_delivered(record.call_id)
        for call_id in sorted(play.superseded):
            session.mark_superseded(call_id)
        return session.seal()


@settings(PATIENT, max_examples=40)
@given(plays(Play.holed), st.sampled_from(DELIVERIES))
def test_chains_built_of_the_log_are_those_of_the_live_session(play: Play, delivery: str) -> None:
    config = TrajectoryConfig(delivery=delivery)
    with TemporaryDirectory() as folder:
        live = asyncio.run(logged(play, Path(folder)))
        again = build(rebuild(Path(folder)), config)
    assert again == build(live, config) == build(play.sealed(), config)


@PATIENT
@given(plays(Play.holed), st.randoms(use_true_random=False))
def test_calls_in_flight_together_may_arrive_in_any_order(play: Play, random: Any) -> None:
    """The same session, its parallel threads interleaved in another way: the same sequences, the same tokens."""
    waiting, arrived = list(range(len(play.records))), list[int]()
    while waiting:
        ready = [i for i in waiting if play.needs[i] is None or play.needs[i] in arrived]
        arrived.append(random.choice(ready))
        waiting.remove(arrived[-1])
    again = play.sealed([replace(play.records[old], index=new) for new, old in enumerate(arrived)])
    first, second = (
        {tuple(chain["token_ids"]) for chain in chains_of(build(sealed, TrajectoryConfig()), sealed)}
        for sealed in (play.sealed(), again)
    )
    assert first == second
    assert build(again, TrajectoryConfig()).sampled_tokens == len(to_train(play))


@PATIENT
@given(plays())
def test_a_sub_agent_seeded_with_a_history_hangs_on_the_call_that_ended_it(play: Play) -> None:
    """Its chain has the parent's tokens as context, and branches where it was seeded."""
    trajectory = build(play.sealed(), TrajectoryConfig())
    kept = {record.call_id: record for record in play.records if record.call_id not in trajectory.left_out}
    for chain in trajectory.chains:
        own = [turn for turn in chain.turns if turn.trained]
        first = kept[own[0].call_id]
        earlier = [
            other
            for other in kept.values()
            if other.index < first.index
            and len(first.prompt_ids) > len(other.prompt_ids) + len(other.sampled_ids)
            and [*first.prompt_ids][: len(other.prompt_ids) + len(other.sampled_ids)]
            == [*other.prompt_ids, *other.sampled_ids]
        ]
        longest = max(earlier, key=lambda other: len(other.prompt_ids) + len(other.sampled_ids), default=None)
        assert chain.branched_from == (longest.call_id if longest else None)


@PATIENT
@given(plays())
def test_a_main_thread_that_never_went_back_is_one_chain_whatever_its_sub_agents_did(play: Play) -> None:
    main = [record for record in play.records if not record.thread and record.kind is CallKind.AGENT]
    kept = [record for record in main if record.call_id not in play.undelivered | play.superseded]
    grows = all([*b.prompt_ids[: len(a.prompt_ids)]] == [*a.prompt_ids] for a, b in pairwise(kept))
    trained = [record for record in kept if record.sampled_ids]
    assume(grows and trained)
    event("checked")
    delivered = build(play.sealed(), TrajectoryConfig()).main
    assert delivered is not None
    calls = [turn.call_id for turn in delivered.turns if turn.trained]
    assert calls[: len(trained)] == [record.call_id for record in trained]
    assert all(record.call_id not in calls[len(trained) :] for record in main), "what hangs on its last call may follow"
