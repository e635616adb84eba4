"""`polar verify`: a finished row holds against its session's log, and no single change of either passes."""

import copy
import json
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finished_helpers import Finished, branched, finish, of_session, request, two_turns, write_rows
from polar_env.config import TrajectoryConfig
from polar_env.errors import ConfigError, EngineError
from polar_env.frames import Frame, FrameKind, encode_frame, frames
from polar_env.gym.environment import unstarted
from polar_env.gym.rows import row as row_of
from polar_env.gym.rows import told
from polar_env.segment_log import FILE_NAME
from polar_env.types import Hole, HoleKind, Outcome, SealedLedger
from polar_env.verdict import Flag, Verdict, VerdictStatus
from polar_env.verify import run, violations
from trajectory_helpers import call, call_trees

Row = dict[str, Any]


def wrong(finished: Finished, **changes: Any) -> list[str]:
    return violations(finished.row | changes, finished.sessions)


def rewrite(finished: Finished, change: Callable[[list[Any]], list[Any]]) -> list[str]:
    """What is found after the log's frames were changed, each with checksums that are right."""
    path = finished.log / FILE_NAME
    found = change(list(frames(path.read_bytes())))
    path.write_bytes(b"".join(encode_frame(f.kind, f.header, f.body) for f in found))
    return wrong(finished)


# --- what holds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [two_turns, branched])
@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.AGENT_TIMEOUT, Outcome.ENGINE_ERROR])
@pytest.mark.parametrize("delivery", ["task", "main", "longest", "sample"])
def test_a_finished_row_holds_however_it_ended(
    tmp_path: Path, calls: Callable[[], Any], outcome: Outcome, delivery: str
) -> None:
    policy = TrajectoryConfig.model_validate({"delivery": delivery, "seed": 3})
    assert wrong(finish(tmp_path, calls(), outcome, trajectory=policy)) == []


@pytest.mark.parametrize("max_tokens", [2, 6, 10, 100])
def test_a_row_that_was_cut_or_did_not_fit_holds(tmp_path: Path, max_tokens: int) -> None:
    finished = finish(tmp_path, max_tokens=max_tokens)
    assert finished.row["polar"]["digest"]["links"] == {2: 0, 6: 2, 10: 4, 100: 4}[max_tokens]
    assert wrong(finished) == []


def test_marks_of_the_session_are_part_of_what_holds(tmp_path: Path) -> None:
    calls = [*two_turns()[:1], (of_session("parser.0", call(1, [1, 2, 3], [9])), None)]
    finished = finish(tmp_path, calls, undelivered=["parser.0-0001"])
    assert finished.row["polar"]["left_out"] == {"parser.0-0001": "undelivered"}
    assert wrong(finished) == []


def test_an_incomplete_capture_is_masked_and_holds(tmp_path: Path) -> None:
    hole = Hole(HoleKind.BAD_LOG_PROB, "parser.0-0000", "nan")
    bad = call(0, [1, 2], [3], holes=(hole,), log_probs=array("f", [math.nan]))
    finished = finish(tmp_path, [(of_session("parser.0", bad), None)])
    assert finished.row["mask_sample"] is True
    assert wrong(finished) == []


def test_a_rollout_that_never_began_has_nothing_to_check(tmp_path: Path) -> None:
    result = unstarted("task", "pi", EngineError("no engine"))
    made = json.loads(json.dumps(row_of(result, {"input": []}, model="m", max_tokens=None)))
    assert violations(made, tmp_path) == []
    assert "names no session" in " ".join(violations(made | {"trajectories": [{}]}, tmp_path))


def test_a_row_written_without_its_trajectories_is_checked_for_what_it_delivers(tmp_path: Path) -> None:
    finished = finish(tmp_path)
    assert wrong(finished, trajectories=[]) == []
    item = next(item for item in finished.row["response"]["output"] if "generation_token_ids" in item)
    item["generation_token_ids"][0] += 1
    assert len(wrong(finished, trajectories=[])) == 2, "the item, and the digest of the row's own tokens"


def test_a_row_graded_again_holds(tmp_path: Path) -> None:
    finished = finish(tmp_path)
    again = finished.row["polar"] | {"verdict": told(Verdict(VerdictStatus.UNRESOLVED))}
    assert wrong(finished, reward=0.0, resolved=False, polar=again) == []


@pytest.mark.parametrize(
    "verdict", [Verdict(VerdictStatus.ERROR), Verdict(VerdictStatus.UNRESOLVED, flags=(Flag.PLANTED,))]
)
def test_a_row_masked_when_it_was_graded_again_keeps_its_tokens_and_holds(tmp_path: Path, verdict: Verdict) -> None:
    finished = finish(tmp_path)
    masked = {"reward": 0.0, "resolved": False, "mask_sample": True, "instance_config": {"mask_sample": True}}
    assert wrong(finished, **masked, polar=finished.row["polar"] | {"verdict": told(verdict)}) == []
    fine = told(Verdict(VerdictStatus.UNRESOLVED))
    assert wrong(finished, **masked, polar=finished.row["polar"] | {"verdict": fine}) == [
        "mask_sample is True, and by polar.outcome and polar.verdict the rollout trains"
    ]
    finished.row["trajectories"][0]["loss_mask"][0] = 1
    assert "loss_mask[0]" in " ".join(wrong(finished, **masked))


@pytest.mark.parametrize(
    ("verdict", "rewards"),
    [
        (Verdict(VerdictStatus.UNRESOLVED, score=0.75), {0.75}),
        (Verdict(VerdictStatus.RESOLVED, flags=(Flag.PLANTED,)), {0.0, 1.0}),
        (Verdict(VerdictStatus.REFUSED, flags=(Flag.OUTSIDE,), official=True), {0.0, 1.0}),
        (Verdict(VerdictStatus.PATCH_FAILED), {0.0}),
    ],
)
def test_a_reward_that_some_policy_gives_for_the_verdict_holds_and_no_other(
    tmp_path: Path, verdict: Verdict, rewards: set[float]
) -> None:
    finished = finish(tmp_path)
    polar = finished.row["polar"] | {"verdict": told(verdict)}
    resolved = float(verdict.status is VerdictStatus.RESOLVED)
    for reward in (0.0, 0.25, 0.75, 1.0):
        found = wrong(finished, reward=reward, resolved=resolved, polar=polar)
        assert (found == []) is (reward in rewards)


@settings(deadline=None, max_examples=40)
@given(call_trees(), st.none() | st.integers(2, 12))
def test_any_session_s_row_holds(sealed: SealedLedger, max_tokens: int | None) -> None:
    if not sealed.records:
        return
    calls = [(of_session("any", entry), request([])) for entry in sealed.records]
    names = {old.call_id: new.call_id for old, (new, _) in zip(sealed.records, calls, strict=True)}
    lost = [names[entry.call_id] for entry in sealed.records if entry.call_id not in sealed.delivered]
    with TemporaryDirectory() as folder:
        twice = [names[name] for name in sealed.superseded]
        assert wrong(finish(Path(folder), calls, max_tokens=max_tokens, undelivered=lost, superseded=twice)) == []


# --- one change of the row --------------------------------------------------------------------------------------

TENSORS = (
    "prompt_token_ids",
    "generation_token_ids",
    "generation_log_probs",
    "token_ids",
    "loss_mask",
    "log_probs",
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Finished rollouts that are only read."""
    folder = tmp_path_factory.mktemp("kept")
    return {
        "plain": finish(folder / "plain"),
        "branched": finish(folder / "branched", branched()),
        "masked": finish(folder / "masked", outcome=Outcome.ENGINE_ERROR),
    }


def tensors(row: Row) -> Iterator[tuple[str, list[Any]]]:
    for holder in (*row["response"]["output"], *row["trajectories"]):
        yield from ((key, holder[key]) for key in TENSORS if key in holder)


kinds = st.sampled_from(["plain", "branched", "masked"])


@settings(deadline=None, max_examples=200)
@given(kinds, st.data())
def test_one_changed_number_anywhere_in_a_row_is_caught(
    kept: dict[str, Finished], kind: str, choice: st.DataObject
) -> None:
    """Prompt, sampled, mask, log-prob; by the least it can change."""
    made = copy.deepcopy(kept[kind].row)
    key, values = choice.draw(st.sampled_from(list(tensors(made))))
    at = choice.draw(st.integers(0, len(values) - 1))
    if key.endswith("log_probs"):
        values[at] = float(np.nextafter(np.float32(values[at]), np.float32(-10)))
    else:
        values[at] ^= choice.draw(st.sampled_from([1, 2, 1 << 20]))
    assert violations(made, kept[kind].sessions) != []


@settings(deadline=None, max_examples=60)
@given(kinds, st.data())
def test_one_number_less_or_more_is_caught(kept: dict[str, Finished], kind: str, choice: st.DataObject) -> None:
    made = copy.deepcopy(kept[kind].row)
    _, values = choice.draw(st.sampled_from(list(tensors(made))))
    at = choice.draw(st.integers(0, len(values) - 1))
    if choice.draw(st.booleans()):
        del values[at]
    else:
        values.insert(at, values[at])
    assert violations(made, kept[kind].sessions) != []


CHANGES: dict[str, Callable[[Row], Any]] = {
    "mask": lambda r: r.update(mask_sample=True),
    "both masks": lambda r: (r.update(mask_sample=True), r["instance_config"].update(mask_sample=True)),
    "nested mask": lambda r: r["instance_config"].update(mask_sample=True),
    "mask as a number": lambda r: r.update(mask_sample=0),
    "reward": lambda r: r.update(reward=0.0),
    "digest": lambda r: r["polar"]["digest"].update(sha256="0" * 64),
    "links": lambda r: r["polar"]["digest"].update(links=6),
    "digest's calls": lambda r: r["polar"]["digest"]["calls"].reverse(),
    "fewer calls": lambda r: r["polar"]["digest"]["calls"].pop(),
    "first prompt": lambda r: r.update(first_prompt_digest="0" * 64),
    "weight": lambda r: r["trajectories"][0].update(weight=1.0),
    "delivered flag": lambda r: r["trajectories"][1].update(delivered=True),
    "delivered chain": lambda r: r["polar"].update(delivered=1),
    "left out": lambda r: r["polar"]["left_out"].clear(),
    "policy version": lambda r: r["trajectories"][0]["policy_versions"].append("step-8"),
    "a chain less": lambda r: r["trajectories"].pop(),
    "an item less": lambda r: r["response"]["output"].pop(),
    "a hole less": lambda r: r["polar"].update(complete=False),
    "calls": lambda r: r.update(num_model_calls=3.0),
    "another session": lambda r: r["polar"].update(session_id="parser.1"),
    "a path": lambda r: r["polar"].update(session_id="../parser.0"),
    "a token that is none": lambda r: r["trajectories"][0]["token_ids"].__setitem__(0, "1"),
    "a token beyond int32": lambda r: r["trajectories"][0]["token_ids"].__setitem__(0, 2**40),
    "an older row": lambda r: r["polar"].pop("digest"),
    "no policy": lambda r: r["polar"].pop("trajectory"),
    "an unknown kind": lambda r: r["polar"]["trajectory"].update(trained_kinds=["agents"]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_other_change_of_a_row_is_caught(kept: dict[str, Finished], what: str) -> None:
    made = copy.deepcopy(kept["plain"].row)
    assert violations(made, kept["plain"].sessions) == []
    CHANGES[what](made)
    assert violations(made, kept["plain"].sessions) != []


def test_a_placeholder_cannot_be_unmasked(kept: dict[str, Finished]) -> None:
    made = copy.deepcopy(kept["masked"].row)
    made["mask_sample"] = made["instance_config"]["mask_sample"] = False
    found = " ".join(violations(made, kept["masked"].sessions))
    assert "mask_sample is False, and its digest chain has 0 links" in found


def test_a_difference_is_told_with_its_place_and_both_values(kept: dict[str, Finished]) -> None:
    made = copy.deepcopy(kept["plain"].row)
    made["trajectories"][0]["token_ids"][5] = 99
    assert violations(made, kept["plain"].sessions) == ["chain 0 token_ids[5] is 99 in the row, 6 in the log"]


AGAINST_ITSELF: dict[str, tuple[Callable[[Row], Any], str]] = {
    "reward": (lambda r: r.update(reward=0.0), "reward is 0.0, by polar.verdict it is 1.0"),
    "resolved": (lambda r: r.update(resolved=0.0), "resolved is 0.0, polar.verdict.status is resolved"),
    "verdict": (
        lambda r: r["polar"]["verdict"].update(status="unresolved"),
        "resolved is 1.0, polar.verdict.status is unresolved; reward is 1.0, by polar.verdict it is 0.0",
    ),
    "no verdict": (
        lambda r: r["polar"].update(verdict=None),
        "mask_sample is False, and the rollout cannot train (nothing was graded)",
    ),
    "outcome": (
        lambda r: r["polar"].update(outcome="engine_error"),
        "mask_sample is False, and the rollout cannot train (infrastructure: engine_error)",
    ),
    "incomplete": (lambda r: r["polar"].update(complete=False), "cannot train (the capture is incomplete)"),
    "whole": (lambda r: r["polar"].update(complete=False), "polar.complete is False in the row, True by the log"),
    "timed out": (lambda r: r["polar"].update(outcome="agent_timeout"), "agent_timed_out is 0.0, and polar.outcome"),
    "trainable tokens": (lambda r: r.update(trainable_tokens=9.0), "trainable_tokens is 9.0, and response.output"),
    "chains": (lambda r: r.update(num_chains=1.0), "num_chains is 1.0, and trajectories gives 2.0"),
    "left out": (lambda r: r.update(num_left_out=0.0), "num_left_out is 0.0, and polar.left_out gives 1.0"),
    "holes": (lambda r: r.update(num_holes=1.0), "num_holes is 1.0, and polar.holes gives 0.0"),
    "patch": (lambda r: r["polar"].update(patch=""), "and polar.patch gives 0.0"),
    "egress": (
        lambda r: r["polar"].update(egress={"tried": {"dns pypi.org": 2}, "more": 0}),
        "egress_packets is 0.0 in the row, 2.0 by the log",
    ),
    "egress unflagged": (lambda r: r.update(egress_packets=2.0), "egress_packets is 2.0, polar.verdict.flags are []"),
    "fraction": (lambda r: r.update(delivered_fraction=1.0), "delivered_fraction is 1.0 in the row, 0.8"),
    "sampled": (lambda r: r.update(sampled_tokens=5.0), "sampled_tokens is 5.0 in the row, 6.0 by the log"),
    "total": (lambda r: r.update(total_tokens=5.0), "total_tokens is 5.0 in the row, 10.0 by the log"),
    "cut": (lambda r: r.update(truncated=1.0), "truncated is 1.0 in the row, 0.0 by the log"),
    "joins": (lambda r: r.update(joins_new=1.0), "joins_new is 1.0 in the row, 3.0 by the log"),
    "first": (lambda r: r.update(starts_with_task=0.0), "starts_with_task is 0.0 in the row, 1.0 by the log"),
    "version": (
        lambda r: r["polar"].update(policy_version_last="step-8"),
        "polar.policy_version_last is 'step-8' in the row, 'step-7' by the log",
    ),
}


@pytest.mark.parametrize("what", AGAINST_ITSELF)
def test_a_field_that_was_edited_by_hand_is_named_with_what_it_should_be(kept: dict[str, Finished], what: str) -> None:
    made = copy.deepcopy(kept["plain"].row)
    change, words = AGAINST_ITSELF[what]
    change(made)
    assert words in "; ".join(violations(made, kept["plain"].sessions))


def test_a_masked_row_has_no_reward_and_nothing_of_it_trains(kept: dict[str, Finished]) -> None:
    made = copy.deepcopy(kept["masked"].row)
    made["reward"] = 1.0
    assert violations(made, kept["masked"].sessions) == ["reward is 1.0, by mask_sample it is 0.0"]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(["plain", "branched"]), st.data())
def test_without_its_log_trajectories_are_held_against_the_tensors_that_train(
    kept: dict[str, Finished], kind: str, choice: st.DataObject
) -> None:
    made = copy.deepcopy(kept[kind].row)
    chain = made["trajectories"][made["polar"]["delivered"]]
    key = choice.draw(st.sampled_from(["token_ids", "loss_mask", "log_probs"]))
    at = choice.draw(st.integers(0, len(chain[key]) - 1))
    if key == "log_probs" and not chain["loss_mask"][at]:
        return  # nothing trains there
    chain[key][at] = -0.25 if key == "log_probs" else chain[key][at] ^ 1
    *found, missing = violations(made, Path("/nowhere"))
    assert "no session log" in missing
    assert any(f"trajectories[{made['polar']['delivered']}].{key}[{at}] is" in line for line in found)


def test_without_its_log_a_row_that_agrees_with_itself_misses_only_the_log(kept: dict[str, Finished]) -> None:
    for finished in kept.values():
        (found,) = violations(finished.row, Path("/nowhere"))
        assert "no session log" in found


def test_two_equal_rows_differ_only_below_float32(tmp_path: Path) -> None:
    """JSON written by a tool that prints float32 with nine digits holds: the numbers that train are the same."""
    finished = finish(tmp_path)
    for key, values in tensors(finished.row):
        if key.endswith("log_probs"):
            values[:] = [float(f"{value:.9g}") for value in values]
    assert wrong(finished) == []


# --- one change of the log --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_log_cut_anywhere_is_caught(kept: dict[str, Finished], choice: st.DataObject) -> None:
    data = (kept["plain"].log / FILE_NAME).read_bytes()
    cut = choice.draw(st.integers(0, len(data) - 1))
    with TemporaryDirectory() as folder:
        (Path(folder) / "parser.0").mkdir()
        (Path(folder) / "parser.0" / FILE_NAME).write_bytes(data[:cut])
        assert violations(kept["plain"].row, Path(folder)) != []


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_changed_byte_of_the_log_is_caught(kept: dict[str, Finished], choice: st.DataObject) -> None:
    data = bytearray((kept["plain"].log / FILE_NAME).read_bytes())
    data[choice.draw(st.integers(0, len(data) - 1))] ^= choice.draw(st.integers(1, 255))
    with TemporaryDirectory() as folder:
        (Path(folder) / "parser.0").mkdir()
        (Path(folder) / "parser.0" / FILE_NAME).write_bytes(data)
        assert violations(kept["plain"].row, Path(folder)) != []


@pytest.mark.parametrize("place", range(9))
def test_a_frame_taken_out_of_the_log_whole_is_caught(tmp_path: Path, place: int) -> None:
    finished = finish(tmp_path)
    kinds = [frame.kind for frame in frames((finished.log / FILE_NAME).read_bytes()) if isinstance(frame, Frame)]
    needed = [at for at, kind in enumerate(kinds) if kind not in (FrameKind.OPEN, FrameKind.MESSAGES)]
    assert len(needed) == 9, "four calls, four deliveries, one seal"
    assert rewrite(finished, lambda found: found[: needed[place]] + found[needed[place] + 1 :]) != []


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("field", ["prompt_ids", "sampled_ids", "log_probs"])
def test_a_log_whose_tokens_were_changed_with_their_checksums_is_caught(
    tmp_path: Path, number: int, field: str
) -> None:
    finished = finish(tmp_path)
    calls = two_turns()
    entry, asked = calls[number]
    values = getattr(entry, field)[:]
    values[-1] += -0.5 if field == "log_probs" else 100
    calls[number] = replace(entry, **{field: values}), asked
    other = finish(tmp_path / "other", calls)
    assert violations(finished.row, other.sessions) != []
    assert violations(other.row, other.sessions) == []


def test_a_log_of_another_session_is_not_this_one_s(tmp_path: Path) -> None:
    finished, other = finish(tmp_path / "a"), finish(tmp_path / "b", two_turns("other"))
    (other.sessions / "other").rename(other.sessions / "parser.0")
    assert "the log is of session other" in violations(finished.row, other.sessions)


def test_a_hole_the_log_knows_of_and_the_row_does_not_is_caught(tmp_path: Path) -> None:
    def add(found: list[Any]) -> list[Any]:
        hole = {"kind": "lost_record", "call_id": None, "detail": "disk full"}
        return [*found[:-1], replace(found[0], kind=FrameKind.HOLE, header=hole), found[-1]]

    assert rewrite(finish(tmp_path), add)[:2] == [
        "the log has 1 holes, the row tells of 0",
        "the log is incomplete and the row trains",
    ]


# --- the file ---------------------------------------------------------------------------------------------------


def checked(tmp_path: Path, *rows: Row, text: str = "") -> tuple[int, list[str]]:
    said: list[str] = []
    path = write_rows(tmp_path / "rollouts.jsonl", rows)
    path.write_text(path.read_text() + text)
    return run(path, tmp_path / "s", said.append), said


def test_every_row_gets_a_line(tmp_path: Path) -> None:
    rows = [finish(tmp_path / "s", two_turns(f"parser.{n}")).row for n in range(3)]
    rows[1]["trajectories"][0]["loss_mask"][0] = 1
    failed, said = checked(tmp_path, *rows)
    assert failed == 1
    assert said == [
        "ok   1 parser.0: 4 links, 2 chains, 5 tokens",
        "FAIL 2 parser.1: chain 0 loss_mask[0] is 1 in the row, 0 in the log",
        "ok   3 parser.2: 4 links, 2 chains, 5 tokens",
        "3 rows: 2 hold, 1 do not",
    ]


def test_a_missing_session_is_said_with_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    failed, (line, _) = checked(tmp_path, finish(tmp_path / "elsewhere").row)
    assert failed == 1
    assert "no session log parser.0" in line
    assert "store.sessions" in line


def test_a_session_in_two_rows_would_train_twice(tmp_path: Path) -> None:
    made = finish(tmp_path / "s").row
    failed, said = checked(tmp_path, made, made)
    assert failed == 1
    assert said[1].startswith("FAIL 2 parser.0: this session is also row 1")


@pytest.mark.parametrize("line", ["{not json", "[]", '{"polar": {}}', "3"])
def test_a_line_that_is_no_row_fails_and_the_rest_is_checked(tmp_path: Path, line: str) -> None:
    failed, said = checked(tmp_path, finish(tmp_path / "s").row, text=f"\n{line}\n")
    assert (failed, len(said)) == (1, 3)
    assert said[1].startswith("FAIL 2 : not a row of polar_env")


def test_many_differences_are_counted_not_listed(tmp_path: Path) -> None:
    made = finish(tmp_path / "s").row
    for key, values in tensors(made):
        if key == "token_ids":
            values[0] += 1
    made["reward"], made["num_model_calls"], made["first_prompt_digest"] = 0.5, 9.0, ""
    _, said = checked(tmp_path, made)
    assert said[0].count("; ") == 2
    assert said[0].endswith(" (and 2 more)")


def test_rows_that_hold_are_told_apart_by_status(tmp_path: Path) -> None:
    masked = finish(tmp_path / "s", two_turns("m"), Outcome.COMPLETED, VerdictStatus.ERROR).row
    failed, said = checked(tmp_path, masked)
    assert (failed, said[0]) == (0, "ok   1 m: 0 links, 2 chains, 0 tokens")


def test_a_file_without_rows_verifies_nothing(tmp_path: Path) -> None:
    """A run that wrote none must not look like one whose rows all hold."""
    (tmp_path / "rollouts.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no row"):
        run(tmp_path / "rollouts.jsonl", tmp_path, lambda line: None)
