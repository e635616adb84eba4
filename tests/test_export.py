"""`polar export`: the same tokens in every trainer's own shape, and each rollout counted once."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finished_helpers import LOOKED, TASK, Finished, branched, finish, of_session, request, two_turns, write_rows
from polar_env.cli import main
from polar_env.errors import CaptureError, EngineError
from polar_env.export import FORMATS, ExportError, Job
from polar_env.export.samples import rollouts
from polar_env.export.slime import STATUS
from polar_env.export.write import SCHEMA, export, size
from polar_env.gym.contract import violations
from polar_env.gym.environment import unstarted
from polar_env.gym.rows import row as row_of
from polar_env.reward import ENDINGS, Ending
from polar_env.types import INFRASTRUCTURE, CallKind, Outcome, SealedLedger, StopReason, ToolCall
from polar_env.verdict import VerdictStatus
from trajectory_helpers import Conversation, call, call_trees

GOLDEN = Path(__file__).parent / "golden"
Line = dict[str, Any]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Finished]:
    """A group: solved, solved with a seeded sub-agent, out of time and unsolved, masked."""
    folder = tmp_path_factory.mktemp("four")
    return [
        finish(folder),
        finish(folder, branched()),
        finish(folder, two_turns("parser.2"), Outcome.AGENT_TIMEOUT, VerdictStatus.UNRESOLVED),
        finish(folder, two_turns("parser.3"), Outcome.ENGINE_ERROR, None),
    ]


def exported(finished: list[Finished], name: str, tmp_path: Path, **job: Any) -> tuple[list[Line], Job]:
    wanted = Job(sessions=finished[0].sessions, **job)
    rows = write_rows(tmp_path / "rollouts.jsonl", [entry.row for entry in finished])
    count = export(name, rows, tmp_path / "out.jsonl", wanted)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="ascii").splitlines()]
    assert len(lines) == count
    return lines, wanted


# --- each format, as it is --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_in_every_format_is_what_it_has_always_been(four: list[Finished], name: str, tmp_path: Path) -> None:
    """A changed golden file is a changed format: the consumers named in the format's docstring read it."""
    lines, _ = exported(four, name, tmp_path)
    golden = GOLDEN / f"export_{name}.jsonl"
    assert lines == [json.loads(line) for line in golden.read_text(encoding="ascii").splitlines()]


def test_nemo_rl_gets_the_rows_themselves_without_the_other_chains(four: list[Finished], tmp_path: Path) -> None:
    lines, _ = exported(four, "nemo_rl", tmp_path)
    assert lines == [entry.row | {"trajectories": []} for entry in four]
    assert all(violations(line) == [] for line in lines)


def test_a_row_nemo_rl_would_refuse_is_left_out_and_counted(four: list[Finished], tmp_path: Path) -> None:
    bad = Finished(four[0].row | {"reward": 0.3}, four[0].sessions)
    lines, job = exported([bad, four[1]], "nemo_rl", tmp_path)
    assert len(lines) == 1
    ((reason, count),) = job.skipped.items()
    assert (count, "rule 2: reward must be in [0, 1]" in reason) == (1, True)


def test_neutral_has_every_chain_of_every_rollout_masked_ones_too(four: list[Finished], tmp_path: Path) -> None:
    lines, _ = exported(four, "neutral", tmp_path)
    assert [(line["session_id"], line["chain"]) for line in lines] == [
        (f"parser.{rollout}", chain) for rollout in range(4) for chain in range(2)
    ]
    assert [line["masked"] for line in lines] == [False] * 6 + [True] * 2
    assert not any(any(line["loss_mask"]) or line["weight"] for line in lines[6:])
    assert list(lines[0]) == SCHEMA.names


def test_trl_gets_the_delivered_chain_with_the_environment_masked(four: list[Finished], tmp_path: Path) -> None:
    (line, *_), job = exported(four, "trl", tmp_path)
    assert (line["prompt_ids"], line["completion_ids"]) == ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10])
    assert line["env_mask"] == [1, 1, 0, 0, 1, 1, 1]
    assert [bool(value) for value in line["logprobs"]] == [True, True, False, False, True, True, True]
    assert job.skipped == {"masked": 1}


def test_verl_and_trl_split_alike(four: list[Finished], tmp_path: Path) -> None:
    trl, verl = exported(four, "trl", tmp_path)[0], exported(four, "verl", tmp_path)[0]
    assert [line["completion_ids"] for line in trl] == [line["response_ids"] for line in verl]
    assert [line["env_mask"] for line in trl] == [line["response_mask"] for line in verl]
    assert [line["reward_score"] for line in verl] == [1.0, 1.0, 0.0]
    assert len({line["extra_fields"]["uid"] for line in verl}) == 1


def test_slime_gets_all_chains_and_averages_within_a_rollout(four: list[Finished], tmp_path: Path) -> None:
    lines, _ = exported(four, "slime", tmp_path)
    assert [(line["rollout_id"], line["index"]) for line in lines] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert [line["status"] for line in lines] == ["completed"] * 4 + ["truncated"] * 2
    for line in lines:
        assert len(line["loss_mask"]) == len(line["rollout_log_probs"]) == line["response_length"]
        assert line["loss_mask"][0] == 1
    assert lines[3]["tokens"] == [1, 2, 9, 8, 8]
    assert lines[3]["response_length"] == 2, "the trunk is trained in the other chain: here it is prompt"


def test_every_ending_that_trains_has_a_word_in_slime() -> None:
    assert set(STATUS) == {outcome for outcome, ending in ENDINGS.items() if ending is not Ending.INFRASTRUCTURE}
    assert not set(STATUS) & INFRASTRUCTURE


# --- conversations ----------------------------------------------------------------------------------------------


def test_sft_takes_accepted_rollouts_as_they_were_spoken(four: list[Finished], tmp_path: Path) -> None:
    lines, job = exported(four, "sft", tmp_path)
    assert [line["session_id"] for line in lines] == ["parser.0", "parser.1"]
    assert lines[0]["messages"] == [*TASK, *LOOKED, {"role": "assistant", "content": "Done."}]
    assert lines[0]["tools"] == [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    assert job.skipped == {"not accepted": 2}


def test_the_last_answer_keeps_its_thought_and_its_calls(tmp_path: Path) -> None:
    talk, tool = Conversation(), ToolCall("t1", "bash", "{not json")
    talk.turn([1], [2], text="", reasoning="hm", tools=(tool,), stop=StopReason.TOOL_CALLS)
    finished = finish(tmp_path, [(of_session("s", talk.records[0]), request(TASK))])
    (line,), _ = exported([finished], "sft", tmp_path)
    assert line["messages"][-1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "bash", "arguments": "{not json"}}],
    }


def test_a_session_recorded_without_messages_gives_no_conversation(tmp_path: Path) -> None:
    lines, job = exported([finish(tmp_path, messages=False)], "sft", tmp_path)
    assert (lines, dict(job.skipped)) == ([], {"recorded without messages (store.messages)": 1})


def test_sft_without_the_logs_is_refused(four: list[Finished], tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [four[0].row])
    with pytest.raises(ExportError, match="--sessions"):
        export("sft", rows, tmp_path / "o", Job())
    with pytest.raises(CaptureError, match="reading the session log"):
        export("sft", rows, tmp_path / "o", Job(sessions=tmp_path))
    assert not (tmp_path / "o").exists()


# --- columns ----------------------------------------------------------------------------------------------------


def plain(table: Any) -> list[Line]:
    return table.to_pylist()


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_hold_what_the_lines_hold_exactly(four: list[Finished], tmp_path: Path, suffix: str) -> None:
    lines, _ = exported(four, "neutral", tmp_path)
    out = tmp_path / f"chains.{suffix}"
    assert export("neutral", tmp_path / "rollouts.jsonl", out, Job()) == len(lines)
    table = parquet.read_table(out) if suffix == "parquet" else pyarrow.ipc.open_file(str(out)).read_all()
    assert plain(table) == lines
    assert table.schema.field("token_ids").type == pyarrow.list_(pyarrow.int32())
    assert table.schema.field("log_probs").type == pyarrow.list_(pyarrow.float32())
    assert table.schema.metadata[b"schema"] == b"polar_env chains 1"


def test_columns_are_a_fraction_of_the_rows(tmp_path: Path) -> None:
    rng = range(3000)
    talk = Conversation()
    for turn in range(20):
        talk.turn([at * 7919 % 150_000 for at in rng[:200]], [at * 104_729 % 150_000 for at in rng[turn : turn + 100]])
    finished = finish(tmp_path, [(of_session("long", entry), None) for entry in talk.records])
    rows = write_rows(tmp_path / "r.jsonl", [finished.row])
    export("neutral", rows, tmp_path / "c.parquet", Job())
    assert size(tmp_path / "c.parquet") < 0.1 * size(rows)


def test_more_chains_than_a_batch_are_all_written(tmp_path: Path) -> None:
    row = finish(tmp_path).row
    rows = write_rows(tmp_path / "r.jsonl", [row] * 70)
    assert export("neutral", rows, tmp_path / "c.parquet", Job()) == 140
    assert parquet.read_table(tmp_path / "c.parquet").num_rows == 140


def test_nothing_is_an_empty_file_of_the_right_columns(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [])
    assert export("neutral", rows, tmp_path / "c.parquet", Job()) == 0
    assert parquet.read_table(tmp_path / "c.parquet").schema.names == SCHEMA.names


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "neutral"])
def test_only_the_neutral_format_has_columns(tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match="is for the neutral format"):
        export(name, tmp_path / "r.jsonl", tmp_path / "c.parquet", Job())


# --- which chains, and how much they count ----------------------------------------------------------------------


def test_chains_can_be_chosen_and_a_rollout_still_counts_once(four: list[Finished], tmp_path: Path) -> None:
    every, _ = exported(four, "trl", tmp_path, chains="all")
    assert [line["weight"] for line in every] == [5 / 6, 1 / 6, 0.5, 0.5, 5 / 6, 1 / 6]
    one, _ = exported(four, "slime", tmp_path, chains="delivered")
    assert [(line["rollout_id"], line["metadata"]["weight"]) for line in one] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert len(exported(four, "neutral", tmp_path, chains="delivered")[0]) == 4


def test_groups_are_told_apart_by_task_harness_and_gym_s_index(four: list[Finished], tmp_path: Path) -> None:
    found = [Finished(entry.row | {"_ng_task_index": at // 2}, entry.sessions) for at, entry in enumerate(four[:3])]
    lines, _ = exported(found, "slime", tmp_path)
    assert [line["group_index"] for line in lines] == [0, 0, 0, 0, 1, 1]
    assert [e.group_id for e in rollouts(tmp_path / "rollouts.jsonl")][2] == "demo__parser-1/claude_code/1"


@settings(deadline=None, max_examples=40)
@given(call_trees())
def test_of_any_session_every_format_trains_each_sampled_token_once(sealed: SealedLedger) -> None:
    if not sealed.records:
        return
    calls = [(of_session("any", entry), request([])) for entry in sealed.records]
    with TemporaryDirectory() as name:
        folder = Path(name)
        finished = finish(folder, calls)
        neutral, _ = exported([finished], "neutral", folder)
        slime, _ = exported([finished], "slime", folder)
        trl, _ = exported([finished], "trl", folder)
    sampled = 0.0 if finished.row["mask_sample"] else finished.row["sampled_tokens"]
    assert sum(sum(line["loss_mask"]) for line in neutral) == sampled
    assert sum(sum(line["loss_mask"]) for line in slime) == sampled
    weights = defaultdict[str, float](float)
    for line in slime:
        weights[line["session_id"]] += line["metadata"]["weight"]
    assert all(math.isclose(weight, 1.0) for weight in weights.values())
    assert sum(sum(line["env_mask"]) for line in trl) == finished.row["trainable_tokens"]


# --- no longer than the trainer takes ---------------------------------------------------------------------------


def long_rollout(tmp_path: Path, max_tokens: int | None = None) -> Finished:
    """Calls that end at 4, 8 and 12 tokens under three versions, and a sub-agent that ends at 6."""
    talk = Conversation()
    for _ in range(3):
        talk.turn([1, 2], [3, 4])
    aside = call(3, [9, 9, 9], [5, 5, 5], kind=CallKind.SUB_AGENT, thread="x")
    calls = [replace(entry, policy_version=f"step-{entry.index}") for entry in (*talk.records, aside)]
    return finish(tmp_path, [(of_session("long", entry), request(TASK)) for entry in calls], max_tokens=max_tokens)


@pytest.mark.parametrize(("limit", "length", "answers"), [(12, 12, 3), (11, 8, 2), (8, 8, 2), (7, 4, 1), (4, 4, 1)])
def test_a_chain_is_cut_after_the_last_whole_call_that_fits(
    tmp_path: Path, limit: int, length: int, answers: int
) -> None:
    (line,), job = exported([long_rollout(tmp_path)], "verl", tmp_path, max_tokens=limit)
    assert len(line["prompt_ids"]) + len(line["response_ids"]) == length
    assert sum(line["response_mask"]) == 2 * answers
    assert line["num_turns"] == 2 * answers
    assert line["response_mask"][-1] == 1
    assert job.shortened == int(limit < 12) + int(limit < 6), "both chains are looked at, one is delivered"


def test_without_a_bound_of_its_own_an_export_keeps_the_rows(tmp_path: Path) -> None:
    finished = long_rollout(tmp_path, max_tokens=9)
    (line,), job = exported([finished], "trl", tmp_path)
    assert (len(line["prompt_ids"] + line["completion_ids"]), job.shortened) == (8, 1)
    assert sum(line["env_mask"]) == finished.row["trainable_tokens"]
    (wider,), _ = exported([finished], "trl", tmp_path, max_tokens=100)
    assert len(wider["prompt_ids"] + wider["completion_ids"]) == 12


def test_what_is_left_of_a_rollout_counts_once(tmp_path: Path) -> None:
    lines, _ = exported([long_rollout(tmp_path)], "slime", tmp_path, max_tokens=9)
    assert [(line["metadata"]["weight"], line["weight_versions"]) for line in lines] == [
        (4 / 7, ["step-0", "step-1"]),
        (3 / 7, ["step-3"]),
    ]
    lines, _ = exported([long_rollout(tmp_path / "again")], "slime", tmp_path, max_tokens=5)
    assert [(len(line["tokens"]), line["metadata"]["weight"]) for line in lines] == [(4, 1.0)]


def test_a_rollout_of_which_no_call_fits_is_left_out_and_counted(tmp_path: Path) -> None:
    lines, job = exported([long_rollout(tmp_path)], "trl", tmp_path, max_tokens=3)
    assert (lines, dict(job.skipped)) == ([], {"nothing of it trains": 1})


def test_neutral_is_whole_unless_it_is_asked_not_to_be(tmp_path: Path) -> None:
    finished = long_rollout(tmp_path, max_tokens=9)
    assert [len(line["token_ids"]) for line in exported([finished], "neutral", tmp_path)[0]] == [12, 6]
    lines, job = exported([finished], "neutral", tmp_path, max_tokens=5)
    assert [(len(line["token_ids"]), line["call_ids"], line["weight"]) for line in lines] == [(4, ["long-0000"], 1.0)]
    assert job.shortened == 2


def test_a_masked_chain_has_nothing_to_cut_after(tmp_path: Path) -> None:
    masked = finish(tmp_path, outcome=Outcome.ENGINE_ERROR, status=None)
    whole, _ = exported([masked], "neutral", tmp_path)
    assert exported([masked], "neutral", tmp_path, max_tokens=3)[0] == whole


def test_a_row_longer_than_nemo_rl_takes_is_left_out(tmp_path: Path) -> None:
    lines, job = exported([long_rollout(tmp_path)], "nemo_rl", tmp_path, max_tokens=11)
    assert lines == []
    assert "rule 10: 12 tokens" in next(iter(job.skipped))


@settings(deadline=None, max_examples=40)
@given(call_trees(), st.integers(2, 12))
def test_of_any_session_what_is_cut_is_what_a_row_of_that_length_delivers(sealed: SealedLedger, limit: int) -> None:
    if not sealed.records:
        return
    calls = [(of_session("any", entry), request([])) for entry in sealed.records]
    with TemporaryDirectory() as name:
        folder = Path(name)
        lines, _ = exported([finish(folder, calls)], "trl", folder, max_tokens=limit)
        row = finish(folder / "short", calls, max_tokens=limit).row
    carrying = [item for item in row["response"]["output"] if item.get("generation_token_ids")]
    expected = [] if row["mask_sample"] else [carrying[-1]["prompt_token_ids"] + carrying[-1]["generation_token_ids"]]
    assert [line["prompt_ids"] + line["completion_ids"] for line in lines] == expected


# --- what it is made of -----------------------------------------------------------------------------------------


def test_session_logs_alone_give_neutral_chains_without_a_reward(four: list[Finished], tmp_path: Path) -> None:
    lines, _ = exported(four[:2], "neutral", tmp_path)
    out = tmp_path / "logs.jsonl"
    assert export("neutral", four[0].sessions, out, Job()) == 8
    bare = [json.loads(line) for line in out.read_text().splitlines()]
    told = ("session_id", "chain", "kind", "token_ids", "loss_mask", "log_probs", "weight", "call_ids", "delivered")
    assert [[line[key] for key in told] for line in bare[:4]] == [[line[key] for key in told] for line in lines]
    assert {(line["reward"], line["masked"], line["task_id"]) for line in bare} == {(None, None, "")}
    export("neutral", four[0].sessions, tmp_path / "logs.parquet", Job())
    assert plain(parquet.read_table(tmp_path / "logs.parquet")) == bare


@pytest.mark.parametrize("name", ["nemo_rl", "trl", "verl", "slime"])
def test_session_logs_alone_have_no_reward_to_train_on(four: list[Finished], tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match="session log"):
        export(name, four[0].sessions, tmp_path / "o", Job())


def test_a_rollout_that_never_began_is_a_rollout_without_chains(tmp_path: Path) -> None:
    result = unstarted("task", "pi", EngineError("no engine"))
    never = Finished(json.loads(json.dumps(row_of(result, {"input": []}, model="m", max_tokens=None))), tmp_path)
    assert exported([never], "neutral", tmp_path)[0] == []
    lines, job = exported([never], "slime", tmp_path)
    assert (lines, job.skipped) == ([], {"masked": 1})


def spoil(change: Callable[[Line], Any]) -> Callable[[Line], str]:
    def text(row: Line) -> str:
        made = json.loads(json.dumps(row))
        change(made)
        return json.dumps(made)

    return text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lambda row: "{", "row 2"),
        (lambda row: "[]", "row 2"),
        (spoil(lambda row: row.pop("polar")), "row 2"),
        (spoil(lambda row: row.update(trajectories=[])), "written without its trajectories"),
        (spoil(lambda row: row["trajectories"][0].pop("policy_versions")), "policy_versions"),
        (spoil(lambda row: row["trajectories"][0]["token_ids"].append(2**40)), "row 2"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_nothing_is_written(
    four: list[Finished], tmp_path: Path, text: Callable[[Line], str], words: str
) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [four[0].row])
    rows.write_text(rows.read_text() + text(four[1].row) + "\n")
    with pytest.raises(ExportError, match=words):
        export("neutral", rows, tmp_path / "o.jsonl", Job())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.jsonl"]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="reading"):
        export("neutral", tmp_path / "nothing.jsonl", tmp_path / "o", Job())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match="no session log in"):
        export("neutral", tmp_path / "empty", tmp_path / "o", Job())
    rows = write_rows(tmp_path / "r.jsonl", [])
    with pytest.raises(ExportError, match="writing"):
        export("neutral", rows, tmp_path / "no" / "folder", Job())


# --- the command ------------------------------------------------------------------------------------------------


def test_the_command_says_what_was_written_left_out_and_how_small_it_is(
    four: list[Finished], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rollouts.jsonl", [entry.row for entry in four])
    out = tmp_path / "trl.jsonl"
    assert main(["export", "--format", "trl", str(rows), str(out)]) == 0
    share = f"{size(out) / size(rows):.2f}"
    assert capsys.readouterr().out == (
        f"3 lines in {out}: {size(out)} bytes, {share} of {rows}\n- left out 1: masked\n"
    )


def test_the_command_says_how_many_chains_it_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rollouts.jsonl", [long_rollout(tmp_path).row])
    assert main(["export", "--format", "neutral", "--max-tokens", "9", str(rows), str(tmp_path / "out.jsonl")]) == 0
    assert "- cut 1 chains to 9 tokens or fewer" in capsys.readouterr().out


def test_verify_on_the_command_line_fails_when_a_row_does(
    four: list[Finished], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rollouts.jsonl", [entry.row for entry in four])
    arguments = ["verify", str(rows), "--sessions", str(four[0].sessions)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 rows: 4 hold, 0 do not"
    write_rows(rows, [four[0].row | {"reward": 0.0}])
    assert main(arguments) == 1
    assert "FAIL 1 parser.0: reward is 0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["verify", "/nowhere.jsonl", "--sessions", "/"], ["export", "--format", "trl", "/no", "/o"]]
)
def test_files_that_are_not_there_are_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "there is no file" in capsys.readouterr().err.splitlines()[-1]
