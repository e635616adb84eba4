"""Dataset rows as Gym and NeMo-RL read them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.gym import ROOT, dataset
from polar_env.tasks import rows as task_rows
from polar_env.tasks.rows import task_of
from tasks_helpers import good_row

TASK = task_of(good_row())


def test_a_row_names_its_task_and_the_agent_that_runs_it():
    row = dataset.dataset_row(TASK)
    assert row["task_id"] == "acme__gadget-1"
    assert row["agent_ref"] == {"type": "responses_api_agents", "name": "polar_agent"}
    assert row["responses_create_params"]["input"] == [{"role": "user", "content": TASK.instruction}]
    assert set(row) == {"task_id", "agent_ref", "responses_create_params"}


def test_sampling_is_left_to_the_trainer():
    """NeMo-RL writes temperature and top_p onto rows; a value of ours would only look as if it counted."""
    assert set(dataset.dataset_row(TASK)["responses_create_params"]) == {"input"}


def test_a_row_may_carry_harness_data_and_the_whole_instance():
    row = dataset.dataset_row(TASK, "codex", "/data/rows.parquet", embed=True)
    assert (row["harness"], row["data"]) == ("codex", "/data/rows.parquet")
    assert task_of(row["instance"]) == TASK


@pytest.mark.parametrize("task", task_rows.load("embedded"), ids=lambda task: task.task_id)
def test_an_embedded_instance_survives_the_file(task, tmp_path: Path):
    path = tmp_path / "deep" / "train.jsonl"
    assert dataset.write([dataset.dataset_row(task, embed=True)], path) == 1
    (row,) = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert task_of(row["instance"]) == task


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers()), max_size=4))
def test_one_line_a_row_whatever_is_in_it(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    assert dataset.write(rows, path) == len(rows)
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] == rows


def test_the_shipped_example_is_what_the_command_writes_for_the_embedded_tasks():
    shipped = ROOT / "resources_servers" / "polar" / "data" / "example.jsonl"
    lines = [json.loads(line) for line in shipped.read_text(encoding="utf-8").splitlines()]
    assert lines == [dataset.dataset_row(task, data="embedded") for task in task_rows.load("embedded")]
