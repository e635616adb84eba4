"""NeMo-RL's own loader and its MasterConfig on every recipe we ship.

Runs where ``nemo_rl`` is importable with what it imports (its container; or a checkout on PYTHONPATH beside torch, ray
and transformers); skipped elsewhere.
"""

import warnings
from pathlib import Path

import pytest

from polar_env import recipe

WHY = "NeMo-RL is not importable: run in its container, or with a checkout (and torch, ray, transformers) on PYTHONPATH"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # collected with warnings as errors, which are ours to keep
    pytest.importorskip("nemo_rl.environments.nemo_gym", reason=WHY, exc_type=ImportError)
    grpo = pytest.importorskip("nemo_rl.algorithms.grpo", reason=WHY, exc_type=ImportError)
    import nemo_rl
    from nemo_rl.environments.nemo_gym import setup_nemo_gym_config, should_use_nemo_gym
    from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
    from omegaconf import OmegaConf

pytestmark = [pytest.mark.nemo_rl, pytest.mark.filterwarnings("ignore")]

CHECKOUT = Path(nemo_rl.__file__).parents[1]


@pytest.fixture(params=recipe.names())
def rendered(request, tmp_path: Path) -> recipe.Rendered:
    return recipe.render(recipe.Request(request.param, CHECKOUT, tmp_path, "embedded", harnesses=("codex", "pi")))


def loaded(made: recipe.Rendered, *overrides: str):
    """As run_grpo_nemo_gym.py reads a recipe, up to where it would ask for GPUs."""
    register_omegaconf_resolvers()
    config = load_config(str(made.config))
    if overrides:
        config = parse_hydra_overrides(config, list(overrides))
    return grpo.MasterConfig(**OmegaConf.to_container(config, resolve=True))


def test_nemo_rl_takes_the_recipe_and_asks_polar(rendered):
    config = loaded(rendered)
    setup_nemo_gym_config(config, tokenizer=None)
    assert should_use_nemo_gym(config)
    assert config.policy["generation"]["vllm_cfg"]["expose_http_server"]
    assert Path(config.data["train"]["data_path"]).is_file()


def test_nemo_rl_merges_what_we_merged(rendered):
    """``recipe.inherited`` judges the recipe: it must see what NeMo-RL will see."""
    theirs = OmegaConf.to_container(load_config(str(rendered.config)), resolve=False)
    assert theirs == OmegaConf.to_container(recipe.inherited(rendered.config), resolve=False)


def test_a_step_s_rollouts_fill_whole_batches(rendered):
    config = loaded(rendered)
    step = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    assert step % config.policy["train_global_batch_size"] == 0


def test_overrides_on_the_command_line_reach_polar(rendered):
    key = "env.nemo_gym.polar_resources_server.resources_servers.polar.polar"
    config = loaded(rendered, f"{key}.budget.agent=99", "++grpo.seed=5")
    polar = config.env["nemo_gym"]["polar_resources_server"]["resources_servers"]["polar"]["polar"]
    assert (polar["budget"]["agent"], config.grpo.seed) == (99, 5)
