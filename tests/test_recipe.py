"""A NeMo-RL recipe on its way from our examples to a cluster: what is written, and what is refused in time."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from polar_env import recipe
from polar_env.cli import main
from polar_env.errors import ConfigError
from polar_env.gym import CONFIG, ROOT, SERVERS
from polar_env.recipe import Request, render
from polar_env.tasks.embedded_rows import embedded_rows
from tasks_helpers import good_row, write_jsonl

BASE = """\
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 16, async_grpo: {enabled: false}}
policy:
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}}
  max_total_sequence_length: 8192
  generation: {temperature: 1.0, top_p: 1.0, val_temperature: "${.temperature}"}
env:
  nemo_gym:
    config_paths: [resources_servers/workplace_assistant/configs/workplace_assistant.yaml]
    policy_model: {extra_body: {enable_thinking: false}}
"""
"""The part of NeMo-RL's base recipe that ours stand on, in its own forms: a resolver we do not have among them."""

PAPER = "grpo_qwen3.5_4b_swe_codex"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder laid out like a NeMo-RL checkout."""
    folder = tmp_path / "nemo rl" / "examples" / "nemo_gym"
    folder.mkdir(parents=True)
    (folder / "run_grpo_nemo_gym.py").write_text("import sys\nprint(*sys.argv[1:])\n")
    (folder / "grpo_workplace_assistant_nemotron_nano_v2_9b.yaml").write_text(BASE)
    return tmp_path / "nemo rl"


@pytest.fixture
def request_(checkout: Path, tmp_path: Path) -> Request:
    """Six groups to train on: three tasks, each for two harnesses."""
    return Request(PAPER, nemo_rl=checkout, out=tmp_path / "my run", data="embedded", harnesses=("codex", "pi"))


def test_every_recipe_renders_into_what_nemo_rl_reads(request_):
    for name in recipe.names():
        made = render(replace(request_, name=name, out=request_.out / name))
        text = made.config.read_text() + (made.config.parent / "grpo_qwen3.5_4b_swe.yaml").read_text()
        assert "@nemo_rl@" not in text
        merged = recipe.inherited(made.config)
        assert Path(merged.data.train.data_path).is_file()
        assert merged.grpo.num_generations_per_prompt >= 2


def test_the_paper_s_setting(request_):
    merged = recipe.inherited(render(request_).config)
    assert (merged.grpo.num_prompts_per_step, merged.grpo.num_generations_per_prompt) == (4, 16)
    assert merged.policy.megatron_cfg.optimizer.lr == 1.0e-6
    assert merged.loss_fn.truncated_importance_sampling_type == "tis"
    assert not merged.policy.generation.colocated.enabled
    assert merged.grpo.async_grpo.enabled
    assert recipe.server_config(merged).harness.name == "codex"


def test_what_the_base_recipe_had_in_its_environment_is_gone(request_):
    """Its tool servers would be started as well, and its model block would switch the policy's thinking off."""
    gym = recipe.inherited(render(request_).config).env.nemo_gym
    assert list(gym.config_paths) == [f"{ROOT}/{CONFIG}"]
    assert Path(gym.config_paths[0]).is_file()
    assert "policy_model" not in gym
    assert "_override_" not in OmegaConf.to_yaml(gym)


def test_the_rows_name_their_agent_and_harness_and_carry_no_fix(request_):
    made = render(replace(request_, name="grpo_qwen3.5_4b_swe_mixed"))
    rows = [
        json.loads(line) for line in Path(recipe.inherited(made.config).data.train.data_path).read_text().splitlines()
    ]
    assert len(rows) == made.rows[str(request_.out.resolve() / "train.jsonl")] == 6
    assert [row["harness"] for row in rows[:2]] == ["codex", "pi"]
    assert {row["agent_ref"]["name"] for row in rows} == {"polar_agent"}
    assert not {"instance", "patch", "test_patch"} & set().union(*rows)


def test_collection_repeats_its_rows_because_nemo_rl_does_not(request_):
    """``collect_trajectories`` goes over the validation rows once, as they are."""
    made = render(replace(request_, name="collect_qwen3_0.6b_1gpu", tasks=("polar-env__spans-1",), harnesses=()))
    assert made.rows[str(request_.out.resolve() / "validation.jsonl")] == 4


def test_gym_finds_a_finished_environment_for_each_server(request_):
    merged = recipe.inherited(render(request_).config)
    for server in SERVERS:
        assert (Path(merged.env.nemo_gym.uv_venv_dir) / server / ".venv" / "bin" / "python").exists()
    assert merged.env.nemo_gym.skip_venv_if_present


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """Rows of which two are made here and two come as images."""
    made = embedded_rows()[:2]
    images = [good_row(instance_id=f"acme__gadget-{i}", image=f"acme/gadget:{i}") for i in (1, 2)]
    return str(write_jsonl(tmp_path / "rows.jsonl", images[0], *made, images[1]))


def test_tasks_that_the_sandbox_cannot_run_are_left_out_and_counted(request_, mixed: str):
    made = render(replace(request_, data=mixed))
    train = request_.out.resolve() / "train.jsonl"
    assert made.rows[str(train)] == 4
    assert {json.loads(line)["task_id"] for line in train.read_text().splitlines()} == {
        row["instance_id"] for row in embedded_rows()[:2]
    }
    left_out, *_ = made.notes
    assert left_out.startswith("2 of 4 tasks are left out, which the bubblewrap sandbox cannot run. The first: acme__")
    assert "set sandbox.provider to one that can" in left_out


def test_under_a_sandbox_that_runs_images_all_rows_stay_and_what_the_nodes_need_is_said(request_, mixed: str):
    made = render(replace(request_, data=mixed, overrides=(f"{POLAR}.sandbox.provider=docker",)))
    assert made.rows[str(request_.out.resolve() / "train.jsonl")] == 8
    assert made.notes[0] == "2 tasks come as images: every node needs docker and room for them"


def test_rows_of_which_none_can_run_are_refused(request_, tmp_path: Path):
    data = str(write_jsonl(tmp_path / "rows.jsonl", good_row()))
    with pytest.raises(ConfigError, match=r"none of the 1 tasks of .* can run: acme__gadget-1 comes as acme/gadget"):
        render(replace(request_, data=data))


def test_validation_on_the_training_rows_is_said(request_, mixed: str):
    told = "validation is on the training rows: give held-out ones with --validation"
    assert told in render(request_).notes
    held_out = render(replace(request_, validation=mixed)).notes
    assert told not in held_out
    assert any(note.startswith("2 of 4 tasks are left out") for note in held_out)
    looking = render(replace(request_, name="collect_qwen3_0.6b_1gpu"))
    assert told not in looking.notes


def test_how_long_a_step_may_take_is_said(request_):
    budget = ",".join(f"{phase}: {seconds}" for phase, seconds in (("start", 60), ("agent", 600), ("finalise", 60)))
    few = (f"{POLAR}.budget={{{budget},grade: 480}}", f"{POLAR}.concurrency=24")
    assert render(replace(request_, overrides=few)).notes[-1] == (
        "a rollout may take 20 min (start 60 s, agent 600, finalise 60, grade 480); "
        "a step of 64 rollouts, 24 at a time, 60 min at worst"
    )


def test_without_data_it_is_said_what_to_give(request_):
    with pytest.raises(ConfigError, match=r"give the rows to train on: --data rows\.parquet"):
        render(replace(request_, data=""))


def test_the_script_runs_nemo_rl_in_its_own_folder_with_the_recipe_and_the_user_s_overrides(request_):
    made = render(request_)
    env = {"NEMO_RL_RUN": "python3", "PATH": "/usr/bin:/bin:/usr/local/bin"}
    done = subprocess.run([made.script, "grpo.seed=7"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split(" ", 1)[0] == "--config"
    assert done.stdout.endswith(f"{made.config} grpo.seed=7\n")


def test_overrides_are_kept_in_the_recipe(request_):
    made = render(replace(request_, overrides=("grpo.num_prompts_per_step=5", "cluster.num_nodes=2")))
    merged = recipe.inherited(made.config)
    assert (merged.grpo.num_prompts_per_step, merged.cluster.num_nodes) == (5, 2)
    assert recipe.server_config(merged).harness.name == "codex"


def test_rows_that_fill_no_step_are_refused_where_training_would_end_at_once(request_):
    with pytest.raises(ConfigError, match="2 rows do not fill one step"):
        render(replace(request_, tasks=("polar-env__spans-1",)))


POLAR = "env.nemo_gym.polar_resources_server.resources_servers.polar.polar"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("env.should_use_nemo_gym=false", "does not ask polar at all"),
        ("env.should_mask_flagged_samples=false", "train as reward 0"),
        ("env.nemo_gym.config_paths=[]", "does not name resources_servers/polar"),
        (f"{POLAR}.engine.kind=scripted", "plays scripts"),
        ("policy.max_total_sequence_length=16000", "context_window exceeds"),
        (f"{POLAR}.trajectory.max_tokens=null", "a longer row ends the step"),
        (f"{POLAR}.proxy.max_output_tokens=49152", "leaves no room"),
        ("policy.generation.temperature=0.7", "must be equal"),
        ("policy.generation.top_p=0.9", "must be equal"),
        ("grpo.num_generations_per_prompt=1", "has no advantage"),
        ("policy.train_global_batch_size=48", "must divide"),
        (f"{POLAR}.budget.agnet=5", "did you mean 'agent'"),
    ],
)
def test_a_recipe_that_would_fail_or_train_on_nothing_is_refused(request_, override: str, told: str):
    with pytest.raises(ConfigError, match=told):
        render(replace(request_, overrides=(override,)))


def test_an_unknown_recipe_is_answered_with_the_known_ones(request_):
    with pytest.raises(ConfigError, match=PAPER.replace(".", r"\.")):
        render(replace(request_, name="grpo_llama"))


def test_a_folder_that_is_no_checkout_is_told_so(request_, tmp_path: Path):
    with pytest.raises(ConfigError, match="NeMo-RL checkout"):
        render(replace(request_, nemo_rl=tmp_path))


def test_a_checkout_whose_base_recipe_moved_is_told_so(request_, checkout: Path):
    (checkout / "examples/nemo_gym/grpo_workplace_assistant_nemotron_nano_v2_9b.yaml").unlink()
    with pytest.raises(ConfigError, match="reading the recipe"):
        render(request_)


def test_the_command_lists_renders_and_says_how_to_run(checkout: Path, tmp_path: Path, capsys):
    assert main(["recipe"]) == 0
    assert PAPER in capsys.readouterr().out.split()
    out = tmp_path / "r"
    words = ["--nemo-rl", str(checkout), "--data", "embedded", "--out", str(out)]
    assert main(["recipe", PAPER, *words, "--harness", "codex,pi", "grpo.seed=1"]) == 0
    printed = capsys.readouterr().out
    assert "6 rows in" in printed
    assert "\n- validation is on the training rows" in printed
    assert str(out / "run.sh") in printed
    assert main(["recipe", PAPER, "--nemo-rl", str(tmp_path), "--data", "embedded", "--out", str(out)]) == 2
    assert "NeMo-RL checkout" in capsys.readouterr().err
