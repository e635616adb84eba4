"""NeMo-RL's own code on our rows: what it takes, what it refuses, which tokens train, and who is compared with whom.

Runs where ``nemo_rl`` is importable with what it imports (its container; or a checkout on PYTHONPATH beside torch, ray
and transformers); skipped elsewhere. Nothing of it is replaced: a row goes through the actor's post-processing, the
group's batch, the mask filter, the flattening and the GRPO advantages as in ``algorithms/grpo.py``; the model's passes,
which need GPUs, are left out.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_env.config import TrajectoryConfig
from polar_env.gym.contract import trainable_items, violations
from polar_env.gym.rows import row
from polar_env.types import Outcome, RolloutResult, SealedLedger, StopReason, ToolCall
from polar_env.verdict import VerdictStatus
from trajectory_helpers import Conversation, call, call_trees, ledger, rollout

WHY = "NeMo-RL is not importable: run in its container, or with a checkout (and torch, ray, transformers) on PYTHONPATH"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # collected with warnings as errors, which are ours to keep
    gym = pytest.importorskip("nemo_rl.environments.nemo_gym", reason=WHY, exc_type=ImportError)
    grpo = pytest.importorskip("nemo_rl.algorithms.grpo", reason=WHY, exc_type=ImportError)
    torch = pytest.importorskip("torch", reason=WHY)
    from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.experience import rollouts
    from nemo_rl.experience.interfaces import Completion, PromptGroupRecord
    from nemo_rl.experience.payload import record_to_train_batch
    from nemo_rl.utils.timer import Timer
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

pytestmark = [pytest.mark.nemo_rl, pytest.mark.filterwarnings("ignore")]

Row = dict[str, Any]
PARAMS: Row = {"input": [{"role": "user", "content": "fix it"}], "temperature": 1.0}
PAD = 999
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0")), pad_token=f"w{PAD}"
)
TASK = range(10, 40)
"""The task's first prompt."""

SOLVED, FAILED = VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED
BASH = ToolCall("toolu_1", "bash", '{"command": "ls"}')


# --- NeMo-RL's line, in its own functions -----------------------------------------------------------------------


def taken(made_row: Row) -> Row:
    """What the NemoGym actor makes of a row that came over HTTP; raises what it raises."""
    received = json.loads(json.dumps(made_row))
    actor = SimpleNamespace(cfg={})
    process = gym.NemoGym.__ray_metadata__.modified_class._postprocess_nemo_gym_to_nemo_rl_result
    result = process(actor, {"responses_create_params": PARAMS}, received, TOKENIZER)
    if gym._has_nan_generation_logprobs(result):
        raise RuntimeError("Generation logprobs contain NaN")
    rollouts._tensorize_nemo_gym_result(result)
    return result


@dataclass
class Step:
    """A training step up to the loss; every row's tokens without the padding."""

    tokens: list[list[int]]
    trains: list[list[int]]
    log_probs: list[list[float]]
    advantages: list[float]
    flagged: list[bool]
    metrics: Row


def stepped(*rows: Row, max_tokens: int = 4096, leave_one_out: bool = True) -> Step:
    """One group of siblings through ``grpo_train``'s own sequence of calls."""
    results = [taken(made_row) for made_row in rows]
    asked = [{"agent_ref": {"name": "polar"}, "responses_create_params": PARAMS} for _ in rows]
    policy = SimpleNamespace(cfg={"vllm_cfg": {"max_model_len": max_tokens}})
    given_batch = BatchedDataDict({"loss_multiplier": torch.ones(len(rows))})
    group = rollouts._postprocess_single_nemo_gym_group(
        asked, results, Timer(), "timing", policy, given_batch, TOKENIZER, log_full_result_tables=True
    )
    batch = group.final_batch
    grpo._apply_mask_sample_filter(batch)
    first = grpo.extract_initial_prompt_messages(batch["message_log"], batch["length"])
    prompts, _ = batched_message_log_to_flat_message(first, pad_value_dict={"token_ids": PAD})
    grpo.add_grpo_token_loss_masks_and_generation_logprobs(batch["message_log"])
    flat, lengths = batched_message_log_to_flat_message(batch["message_log"], pad_value_dict={"token_ids": PAD})
    mask = flat["token_loss_mask"] * batch["loss_multiplier"].unsqueeze(-1)
    return Step(
        tokens=unpadded(flat["token_ids"], lengths),
        trains=unpadded(mask.int(), lengths),
        log_probs=unpadded(flat["generation_logprobs"], lengths),
        advantages=advantages(prompts["token_ids"], batch["total_reward"], mask, leave_one_out),
        flagged=[any(flags(message) for message in log) for log in batch["message_log"]],
        metrics=group.rollout_metrics,
    )


def advantages(prompts: Any, rewards: Any, mask: Any, leave_one_out: bool = True) -> list[float]:
    config = SimpleNamespace(use_leave_one_out_baseline=leave_one_out, normalize_rewards=True)
    per_token = GRPOAdvantageEstimator(config, None).compute_advantage(prompts, rewards, mask)
    return per_token[:, 0].tolist()


def unpadded(tensor: Any, lengths: Any) -> list[list[Any]]:
    return [line[:length].tolist() for line, length in zip(tensor, lengths, strict=True)]


def flags(message: Row) -> bool:
    return bool(message.get("is_invalid_tool_call") or message.get("has_malformed_thinking"))


def single_controller(*rows: Row) -> Any:
    """The batch of ``run_grpo_single_controller``, which takes all prompts' length from the group's first row."""
    results = [taken(made_row) for made_row in rows]
    done = [Completion(r["message_log"], r["full_result"], False, float(r["full_result"]["reward"])) for r in results]
    record = PromptGroupRecord(0, results[0]["input_message_log"], None, {}, done, {})
    return record_to_train_batch(record, pad_value_dict={"token_ids": PAD})


# --- our rows ---------------------------------------------------------------------------------------------------


def made(result: RolloutResult, max_tokens: int | None = None) -> Row:
    made_row = row(result, PARAMS, model="policy", max_tokens=max_tokens)
    assert violations(made_row, max_tokens) == []
    assert made_row["failure_kind"] != "polar_env:contract_violation"
    return made_row


def session(seed: int = 100, prompt: Sequence[int] = TASK) -> SealedLedger:
    """Look, edit, say so: 30 + 2, 2 + 2 and 2 + 2 ids, of which 6 were sampled."""
    talk = Conversation()
    talk.turn(prompt, [seed, 3], text="", tools=(BASH,), reasoning="let me look", stop=StopReason.TOOL_CALLS)
    talk.turn([5, 6], [seed + 1, 8], text="Editing.", tools=(BASH, replace(BASH, id="toolu_2")))
    talk.turn([9, 1], [seed + 2, 12], text="Done.")
    return ledger(*talk.records)


def live(status: VerdictStatus, seed: int) -> Row:
    return made(rollout(session(seed), status=status))


def siblings() -> list[Row]:
    """One of three solved the task; each said something else."""
    return [live(SOLVED, 100), live(FAILED, 200), live(FAILED, 300)]


def placeholder(sealed: SealedLedger | None = None) -> Row:
    return made(rollout(session() if sealed is None else sealed, Outcome.ENGINE_ERROR, detail="vLLM died"))


# --- what trains ------------------------------------------------------------------------------------------------


def test_a_row_trains_on_exactly_what_was_sampled_with_its_log_probs() -> None:
    sealed = session()
    step = stepped(made(rollout(sealed)))
    last = sealed.records[-1]
    assert step.tokens == [[*last.prompt_ids, *last.sampled_ids]]
    assert step.trains == [[0] * 30 + [1, 1] + [0, 0, 1, 1] * 2]
    sampled = [p for p, on in zip(step.log_probs[0], step.trains[0], strict=True) if on]
    assert sampled == [p for record in sealed.records for p in record.log_probs]
    assert [p for p, on in zip(step.log_probs[0], step.trains[0], strict=True) if not on] == [0.0] * 34


def test_reasoning_and_tool_calls_are_not_flagged() -> None:
    assert stepped(live(SOLVED, 100)).flagged == [False]


def test_a_row_cut_to_fit_trains_on_its_first_calls() -> None:
    step = stepped(made(rollout(session()), max_tokens=37), max_tokens=37)
    assert [len(tokens) for tokens in step.tokens] == [36]
    assert sum(step.trains[0]) == 4


def test_the_loss_mask_is_that_of_the_delivered_trajectory() -> None:
    made_row = live(SOLVED, 100)
    step = stepped(made_row)
    (chain,) = made_row["trajectories"]
    assert (step.tokens[0], step.trains[0], step.log_probs[0]) == (
        chain["token_ids"],
        chain["loss_mask"],
        chain["log_probs"],
    )


def test_a_masked_row_has_no_token_that_trains() -> None:
    step = stepped(live(SOLVED, 100), placeholder())
    assert [sum(trains) for trains in step.trains] == [6, 0]


def test_every_number_of_a_row_becomes_a_metric() -> None:
    made_row = live(SOLVED, 100)
    metrics = stepped(made_row, placeholder()).metrics
    numbers = {key for key, value in made_row.items() if isinstance(value, float | bool)}
    assert len(numbers) > 20
    assert {f"polar/{key}/mean" for key in numbers} <= metrics.keys()
    assert metrics["polar/mask_sample/mean"] == 0.5


@settings(max_examples=60, deadline=None)
@given(
    call_trees(),
    st.sampled_from([*Outcome, *[Outcome.COMPLETED] * 6]),
    st.sampled_from([None, *VerdictStatus, *[VerdictStatus.RESOLVED] * 6]),
    st.none() | st.integers(2, 12),
)
def test_nemo_rl_takes_the_row_of_any_session(
    sealed: SealedLedger, outcome: Outcome, status: VerdictStatus | None, max_tokens: int | None
) -> None:
    made_row = made(rollout(sealed, outcome, status), max_tokens)
    step = stepped(made_row, live(SOLVED, 100))
    sampled = [] if made_row["mask_sample"] else trainable_items(made_row)
    assert sum(step.trains[0]) == sum(len(item["generation_token_ids"]) for item in sampled)
    assert step.flagged == [False, False]
    assert all(math.isfinite(value) for value in step.advantages)


# --- what is refused --------------------------------------------------------------------------------------------

Change = Callable[[Row], object]


def item(made_row: Row, number: int) -> Row:
    return trainable_items(made_row)[number]  # type: ignore[return-value]


REFUSED: list[tuple[str, type[Exception] | tuple[type[Exception], ...], str, Change]] = [
    ("rule 2", KeyError, "response", lambda r: r.pop("response")),
    ("rule 2", KeyError, "reward", lambda r: r.pop("reward")),
    ("rule 2", ValueError, "reward_components sum to", lambda r: r.update(reward_components={"tests": 0.25})),
    ("rule 3", KeyError, "prompt_token_ids", lambda r: item(r, 1).pop("prompt_token_ids")),
    ("rule 3", RuntimeError, "NaN", lambda r: item(r, 1).update(generation_log_probs=[math.nan, -1.0])),
    ("rule 3", TypeError, "float", lambda r: item(r, 2).update(generation_token_ids=[1.0, 2.0])),
    ("rule 3", OverflowError, "out of range", lambda r: item(r, 2).update(generation_token_ids=[-1, 2])),
    ("rule 3", ValueError, "Overflow", lambda r: item(r, 2).update(generation_token_ids=[2**70, 2])),
    ("rule 4", AssertionError, "Non-contiguous", lambda r: item(r, 1).update(prompt_token_ids=[*TASK, 100, 4, 5, 6])),
    ("rule 4", AssertionError, "Non-contiguous", lambda r: item(r, 2).update(prompt_token_ids=[9, 1])),
    ("rule 5", ValueError, "no generation data", lambda r: r["response"].update(output=[])),
    ("rule 6", RuntimeError, "consistent types", lambda r: item(r, 2)["prompt_token_ids"].__delitem__(slice(-2, None))),
    ("rule 9", (ValueError, AttributeError), "not finite|numerator", lambda r: r.update(seconds_agent=math.inf)),
    ("rule 9", ValueError, "Too many bins", lambda r: r.update(nanoseconds=1_700_000_000_000_000_000)),
    ("rule 9", OverflowError, "too large", lambda r: r.update(count=10**400)),
]


@pytest.mark.parametrize(
    ("rule", "error", "told", "change"), REFUSED, ids=[f"{i}-{rule}" for i, (rule, *_) in enumerate(REFUSED)]
)
def test_what_nemo_rl_refuses_the_judge_refuses(rule: str, error: Any, told: str, change: Change) -> None:
    made_row = live(SOLVED, 100)
    change(made_row)
    with pytest.raises(error, match=told):
        stepped(made_row, live(FAILED, 200))
    assert any(found.startswith(rule) for found in violations(made_row))


def test_log_probs_of_another_length_are_taken_and_shift_all_later_ones() -> None:
    made_row = live(SOLVED, 100)
    right = stepped(made_row).log_probs[0]
    item(made_row, 0)["generation_log_probs"].append(-7.0)
    assert stepped(made_row).log_probs[0] == [*right[:32], -7.0, *right[32:]]
    assert any(found.startswith("rule 3") for found in violations(made_row))


def test_a_mask_at_top_level_alone_is_not_read() -> None:
    made_row = live(SOLVED, 100) | {"mask_sample": True}
    assert sum(stepped(made_row).trains[0]) == 6
    assert any(found.startswith("rule 7") for found in violations(made_row))


def test_a_row_as_long_as_the_policys_limit_counts_as_truncated_and_a_longer_one_does_not() -> None:
    rates = [stepped(live(SOLVED, 100), max_tokens=limit).metrics["truncation_rate"] for limit in (41, 40, 39)]
    assert rates == [0, 1, 0]
    assert any(found.startswith("rule 10") for found in violations(live(SOLVED, 100), 39))


MARKUP = [*gym.DEFAULT_INVALID_TOOL_CALL_PATTERNS, *gym.DEFAULT_THINKING_TAGS]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["message", "reasoning"]),
    st.lists(st.sampled_from([*MARKUP, "<thi", "nk>", "a", " "]), max_size=4).map("".join),
)
def test_what_nemo_rl_flags_the_judge_names(kind: str, text: str) -> None:
    part = {"type": "output_text" if kind == "message" else "summary_text", "text": text}
    said = {"type": kind, ("content" if kind == "message" else "summary"): [part]}
    made_row = live(SOLVED, 100)
    last = made_row["response"]["output"][-1]
    tensors = {key: value for key, value in last.items() if key.startswith(("prompt_", "generation_"))}
    made_row["response"]["output"][-1] = said | tensors
    named = any(found.startswith("rule 11") for found in violations(made_row))
    assert any(map(flags, taken(made_row)["message_log"])) == named


# --- who is compared with whom ----------------------------------------------------------------------------------


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_a_masked_placeholder_leaves_its_siblings_advantages_alone(leave_one_out: bool) -> None:
    alone = stepped(*siblings(), leave_one_out=leave_one_out).advantages
    step = stepped(*siblings(), placeholder(), leave_one_out=leave_one_out)
    assert step.advantages == [*alone, 0.0]
    assert alone[0] > 0 > alone[1] == alone[2]


def test_a_masked_row_with_the_groups_own_prompt_would_lower_its_baseline() -> None:
    counted = live(FAILED, 400)
    counted.update(mask_sample=True, instance_config={"mask_sample": True})
    step = stepped(*siblings(), counted)
    assert sum(step.trains[3]) == 0
    assert step.advantages[1] > stepped(*siblings()).advantages[1]


def test_placeholders_of_other_tasks_share_a_group_without_harm() -> None:
    other = placeholder(session(prompt=[10, 77]))
    assert stepped(*siblings(), placeholder(), other).advantages[3:] == [0.0, 0.0]


def test_a_row_that_starts_after_a_compaction_is_alone_and_learns_nothing() -> None:
    compacted = call(3, [10, 77], [55, 56], call_id="after")
    sealed = ledger(*session(400).records, compacted)
    made_row = made(rollout(sealed, trajectory=TrajectoryConfig(delivery="main")))
    step = stepped(*siblings(), made_row)
    assert made_row["starts_with_task"] == 0.0
    assert step.advantages == [*stepped(*siblings()).advantages, 0.0]


@pytest.mark.parametrize("at", [0, 3])
def test_the_single_controller_reads_no_mask_and_still_learns_nothing_from_a_placeholder(at: int) -> None:
    rows = siblings()
    rows.insert(at, placeholder())
    batch = single_controller(*rows)
    assert batch["sample_mask"].tolist() == [1.0] * 4
    told = advantages(batch["prompt_ids_for_adv"], batch["total_reward"], batch["token_mask"])
    assert told.pop(at) == 0.0
    assert told == stepped(*siblings()).advantages
