"""`polar recipe`: one of our NeMo-RL recipes made ready for an installation, and checked before a GPU is asked for.

A recipe cannot find anything by itself: NeMo-RL (utils/config.py) knows relative and absolute paths and no resolver of
ours. So it is rendered: marks such as ``@train@`` become absolute paths, and beside it come the rows it names, the
links by which Gym runs our servers in this environment, and a script that starts the training with its variables set.
"""

import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from polar_env.config import PolarConfig, SandboxConfig, load
from polar_env.errors import ConfigError, boundary
from polar_env.gym import CONFIG, ROOT
from polar_env.gym.dataset import dataset_row, write
from polar_env.gym.venvs import link_venvs
from polar_env.tasks import Task
from polar_env.tasks import rows as task_rows
from polar_env.tasks.prepare import image_of

DRIVER = "examples/nemo_gym/run_grpo_nemo_gym.py"
"""NeMo-RL's entry point for environments of NeMo Gym, under its checkout."""

SERVER = ("env", "nemo_gym", "polar_resources_server", "resources_servers", "polar", "polar")
"""Where a recipe keeps polar's configuration."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a user wants rendered. ``data`` and ``validation`` are task rows as `polar dataset` takes them."""

    name: str
    nemo_rl: Path
    out: Path
    data: str
    validation: str = ""
    tasks: tuple[str, ...] = ()
    harnesses: tuple[str, ...] = ()
    """Rows for each of them; empty: the recipe's own harness."""
    overrides: tuple[str, ...] = ()
    """``grpo.num_prompts_per_step=8``: dotlist values over the recipe, kept in the rendered file."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A recipe on disk. ``script`` starts the training; it takes NeMo-RL overrides as arguments."""

    config: Path
    script: Path
    rows: Mapping[str, int]
    """File -> number of rows written."""
    notes: tuple[str, ...] = ()
    """What is not wrong and should be known before GPUs are asked for."""


def recipes() -> Path:
    """The folder of our recipes: inside an installed package, or examples/ of a checkout. Raises ConfigError."""
    package = Path(__file__).resolve().parent
    for folder in (package / "recipes", package.parents[1] / "examples" / "nemo_rl"):
        if any(folder.glob("*.yaml")):
            return folder
    raise ConfigError("the recipes are neither in the installed polar_env nor in examples/: reinstall it")


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in recipes().glob("*.yaml")))


def render(request: Request) -> Rendered:
    """Write the recipe, its rows, links and script below ``request.out``; nothing in it depends on a working directory.

    Tasks that the recipe's sandbox cannot run are left out of the rows, and ``notes`` says so: each would come back
    masked, step after step.

    Raises ConfigError: an unknown recipe, no NeMo-RL there, no rows or none that can run, or a recipe that would fail
    or waste its run (``problems``), each with what to change.
    """
    source = recipes() / f"{request.name}.yaml"
    if not source.is_file():
        raise ConfigError(f"there is no recipe {request.name!r}; there are: {', '.join(names())}")
    nemo_rl = request.nemo_rl.expanduser().resolve()
    if not (nemo_rl / DRIVER).is_file():
        raise ConfigError(f"{nemo_rl} holds no {DRIVER}: give the folder of a NeMo-RL checkout (in its container, too)")
    if not request.data:
        raise ConfigError("give the rows to train on: --data rows.parquet (or JSONL, a folder, hub:NAME, embedded)")
    out = request.out.expanduser().resolve()
    train, validation = out / "train.jsonl", out / "validation.jsonl"
    marks = {"nemo_rl": nemo_rl, "gym_root": ROOT, "out": out, "train": train, "validation": validation}
    marks["venvs"] = link_venvs(out / "venvs")
    config = _write(source, out, marks, request.overrides)
    merged = inherited(config)
    group = int(_number(merged, "grpo", "num_generations_per_prompt") or 1)
    polar = server_config(merged)
    sources = {train: _Rows(request, request.data, 1, polar.sandbox)}
    again = group if _collects(merged) else 1
    sources[validation] = _Rows(request, request.validation or request.data, again, polar.sandbox)
    counts = {str(path): rows.write(path) for path, rows in sources.items()}
    if found := (*problems(merged), *_row_problems(merged, counts[str(train)])):
        raise ConfigError(f"{config} would not run well: " + "; ".join(found))
    held_out = sources[validation].notes() if request.validation else _same_rows(merged)
    notes = (*sources[train].notes(), *held_out, _budget_note(merged, polar))
    return Rendered(config, _script(out, nemo_rl, config), counts, notes)


def _write(source: Path, out: Path, marks: Mapping[str, Path], overrides: Sequence[str]) -> Path:
    """Render ``source`` and those of our recipes it builds on; overrides go on top, in a file of their own."""
    for path in (source, *(recipes() / name for name in _parents(source))):
        text = re.sub(r"@(\w+)@", lambda mark: str(marks.get(mark[1], mark[0])), path.read_text("utf-8"))
        (out / path.name).write_text(text, encoding="utf-8")
    if not overrides:
        return out / source.name
    with boundary(ConfigError, "reading the recipe's overrides"):
        given = OmegaConf.from_dotlist(list(overrides))
    top = out / "recipe.yaml"
    top.write_text(f"defaults: {source.name}\n" + OmegaConf.to_yaml(given), encoding="utf-8")
    return top


def _parents(source: Path) -> Iterator[str]:
    for default in _defaults(OmegaConf.load(source)):
        if (recipes() / default).is_file():
            yield default
            yield from _parents(recipes() / default)


def _defaults(config: Any) -> list[str]:
    named: Any = config.get("defaults") or []
    return [named] if isinstance(named, str) else [str(name) for name in named]


class _Rows:
    """The rows of one file: of the tasks that can run, for each harness. They name the data and never carry it: no fix
    and no test of a task is in a file a harness could see."""

    def __init__(self, request: Request, data: str, repeats: int, sandbox: SandboxConfig) -> None:
        """Raises ConfigError: the data cannot be read, or the sandbox can run none of its tasks."""
        self._where = str(Path(data).expanduser().resolve()) if Path(data).expanduser().exists() else data
        self._harnesses, self._repeats, self._sandbox = request.harnesses or ("",), repeats, sandbox
        self._tasks, self._refusals = list[Task](), list[str]()
        for task in task_rows.load(self._where, request.tasks):
            try:
                image_of(task, sandbox)
            except ConfigError as error:
                self._refusals.append(str(error))
            else:
                self._tasks.append(task)
        if not self._tasks:
            raise ConfigError(f"none of the {len(self._refusals)} tasks of {data} can run: {self._refusals[0]}")

    def write(self, path: Path) -> int:
        """How many rows were written."""
        tasks, repeats = self._tasks, range(self._repeats)
        return write((dataset_row(t, h, self._where) for t in tasks for h in self._harnesses for _ in repeats), path)

    def notes(self) -> Iterator[str]:
        if self._refusals:
            known, by = len(self._refusals) + len(self._tasks), self._sandbox.provider
            yield (
                f"{len(self._refusals)} of {known} tasks are left out, which the {by} sandbox cannot run. The first: "
                f"{self._refusals[0]}"
            )
        images = sum(bool(image_of(task, self._sandbox)) for task in self._tasks)
        if images:
            yield f"{images} tasks come as images: every node needs {self._sandbox.provider} and room for them"


def _same_rows(config: DictConfig) -> Iterator[str]:
    if not _collects(config):
        yield "validation is on the training rows: give held-out ones with --validation"


def _budget_note(config: DictConfig, polar: PolarConfig) -> str:
    """How long a step can take: its rollouts, each with its whole budget, as many at a time as the server allows."""
    budget = polar.budget
    longest = budget.start + budget.agent + budget.finalise + budget.grade
    prompts, group = (_number(config, "grpo", f"num_{name}") or 1 for name in _STEP)
    rounds = math.ceil(prompts * group / polar.concurrency)
    return (
        f"a rollout may take {longest / 60:.0f} min (start {budget.start:g} s, agent {budget.agent:g}, finalise "
        f"{budget.finalise:g}, grade {budget.grade:g}); a step of {prompts * group:g} rollouts, {polar.concurrency} at "
        f"a time, {rounds * longest / 60:.0f} min at worst"
    )


_STEP = ("prompts_per_step", "generations_per_prompt")


def _script(out: Path, nemo_rl: Path, config: Path) -> Path:
    """The command of the run: relative paths in NeMo-RL's recipes are meant from its own folder."""
    script = out / "run.sh"
    lines = (
        "#!/usr/bin/env bash",
        f"# Made by `polar recipe` with {sys.prefix}; arguments are passed on to NeMo-RL as overrides.",
        "set -euo pipefail",
        f'export NEMO_GYM_EXTRA_ROOTS={shlex.quote(str(ROOT))}"${{NEMO_GYM_EXTRA_ROOTS:+:$NEMO_GYM_EXTRA_ROOTS}}"',
        f"cd {shlex.quote(str(nemo_rl))}",
        f'exec ${{NEMO_RL_RUN:-uv run}} {DRIVER} --config {shlex.quote(str(config))} "$@"',
    )
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    script.chmod(0o755)
    return script


# --- what NeMo-RL will see ----------------------------------------------------------------------------------------


def inherited(path: Path) -> DictConfig:
    """The recipe with all it builds on, merged as NeMo-RL does (utils/config.py): parents first, ``_override_`` drops
    what a parent had under that top-level key. Raises ConfigError for a parent that is not there."""
    try:
        own = cast("DictConfig", OmegaConf.load(path))
        merged = OmegaConf.create({})
        for default in _defaults(own):
            merged = _over(merged, inherited(path.parent / default))
        own.pop("defaults", None)
        return _over(merged, own)
    except (OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"reading the recipe {path}: {error}") from error


def _over(below: DictConfig, above: DictConfig) -> DictConfig:
    for key, value in above.items():
        if isinstance(value, DictConfig) and value.pop("_override_", False):
            below.pop(key, None)
    return cast("DictConfig", OmegaConf.merge(below, above))


def _at(config: DictConfig, *path: str) -> Any:
    """The value as written: NeMo-RL's own resolvers (``mul``) are not ours, so what needs one stays text."""
    node: Any = OmegaConf.to_container(config, resolve=False)
    for key in path:
        node = cast("Mapping[str, Any]", node).get(key) if isinstance(node, Mapping) else None
    return node


def _number(config: DictConfig, *path: str) -> float | None:
    value = _at(config, *path)
    return value if isinstance(value, int | float) else None


def _collects(config: DictConfig) -> bool:
    return bool(_at(config, "env", "nemo_gym", "is_trajectory_collection"))


def server_config(config: DictConfig) -> PolarConfig:
    """polar's own configuration inside a recipe, as its server will read it. Raises ConfigError naming a wrong key."""
    block: Any = OmegaConf.select(config, ".".join(SERVER)) or OmegaConf.create({})
    with boundary(ConfigError, "resolving polar's part of the recipe"):
        plain = OmegaConf.to_container(block, resolve=True)
    return load(cast("Mapping[str, Any]", plain))


def problems(config: DictConfig) -> Iterator[str]:
    """What NeMo-RL would accept and we know to fail, stall or train on nothing, each with the remedy."""
    polar = server_config(config)
    if not _at(config, "env", "should_use_nemo_gym"):
        yield "set env.should_use_nemo_gym=true, or NeMo-RL does not ask polar at all"
    if not _at(config, "env", "should_mask_flagged_samples"):
        yield "set env.should_mask_flagged_samples=true, or failures of the infrastructure train as reward 0"
    if not any(str(path).endswith(CONFIG) for path in _at(config, "env", "nemo_gym", "config_paths") or ()):
        yield f"env.nemo_gym.config_paths does not name {CONFIG}"
    if polar.engine.kind == "scripted":
        yield "polar.engine.kind=scripted plays scripts; a recipe trains a policy: use nemo_rl"
    if polar.engine.kind == "text":
        yield "polar.engine.kind=text gives no token ids to train on; use nemo_rl"
    yield from _window_problems(_number(config, "policy", "max_total_sequence_length"), polar)
    yield from _sampling_problems(config, polar)
    yield from _batch_problems(config)


def _window_problems(window: float | None, polar: PolarConfig) -> Iterator[str]:
    if window and polar.harness.context_window > window:
        yield f"polar.harness.context_window exceeds policy.max_total_sequence_length={window}: harnesses overflow"
    if window and (polar.trajectory.max_tokens is None or polar.trajectory.max_tokens > window):
        yield f"set polar.trajectory.max_tokens={window} (policy.max_total_sequence_length): a longer row ends the step"
    if polar.proxy.max_output_tokens >= polar.harness.context_window:
        yield "polar.proxy.max_output_tokens leaves no room for a prompt in polar.harness.context_window"


def _sampling_problems(config: DictConfig, polar: PolarConfig) -> Iterator[str]:
    """NeMo-RL's endpoint refuses another temperature or top_p than the policy's (nemo_rl_contract, last part)."""
    for key in ("temperature", "top_p"):
        asked, given = getattr(polar.proxy, key), _number(config, "policy", "generation", key)
        if given is not None and given != asked:
            yield f"policy.generation.{key}={given} and polar.proxy.{key}={asked} must be equal"


def _row_problems(config: DictConfig, rows: int) -> Iterator[str]:
    """NeMo-RL's loader drops the last batch that is not full (algorithms/grpo.py, ``drop_last=True``)."""
    prompts = _number(config, "grpo", "num_prompts_per_step") or 1
    if rows < prompts and not _collects(config):
        yield f"{rows} rows do not fill one step of grpo.num_prompts_per_step={prompts:g}: nothing would be trained"


def _batch_problems(config: DictConfig) -> Iterator[str]:
    prompts = _number(config, "grpo", "num_prompts_per_step") or 1
    group = _number(config, "grpo", "num_generations_per_prompt") or 1
    if group < 2:
        yield "grpo.num_generations_per_prompt=1: a group of one has no advantage"
    batch = _number(config, "policy", "train_global_batch_size")
    if batch and prompts * group % batch:
        yield f"policy.train_global_batch_size={batch} must divide {prompts} prompts x {group} rollouts"
