"""polar recipe | submit: a training run made ready for NeMo-RL, and its way onto a cluster."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polar_env import cli_values as values
from polar_env import submit

Command = Callable[[Any, str, Any, str], argparse.ArgumentParser]


def add(commands: Any, command: Command) -> None:
    """Add ``recipe`` and ``submit`` to the parser's subcommands; ``command`` adds one."""
    recipe = command(commands, "recipe", _recipe, "make one of our NeMo-RL recipes ready to run here, and check it")
    recipe.add_argument("name", nargs="?", metavar="NAME", help="without it: list the recipes")
    recipe.add_argument("--nemo-rl", type=Path, default=Path(), help="folder of a NeMo-RL checkout (default: .)")
    recipe.add_argument("--out", type=values.folder_out, default=Path("out/recipe"), help="a folder every node sees")
    recipe.add_argument("--data", default="", help="task rows to train on: parquet, JSONL or folder, hub:NAME")
    recipe.add_argument("--validation", default="", help="task rows held out (default: those of --data)")
    recipe.add_argument("--task", help="task id, or several with commas")
    recipe.add_argument("--harness", help="rows for each of these (commas) instead of the recipe's own")
    recipe.add_argument("overrides", nargs="*", help="values over the recipe: grpo.num_prompts_per_step=8")
    submit = commands.add_parser("submit", help="submit a recipe or a command", description="Submit to a cluster")
    doors = submit.add_subparsers(required=True, metavar="slurm|ray|k8s")
    slurm = _door(command, doors, "slurm", _submit_slurm, "sbatch on NeMo-RL's ray.sub")
    slurm.add_argument("--nemo-rl", type=Path, required=True, help="folder of a NeMo-RL checkout")
    slurm.add_argument("--image", required=True, help="container image of NeMo-RL")
    slurm.add_argument("--mount", action="append", default=[], help="host:container; may be repeated")
    slurm.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="such as --account=me")
    ray = _door(command, doors, "ray", _submit_ray, "ray job submit to a running cluster")
    ray.add_argument("--address", required=True, help="the cluster's job server, http://head:8265")
    k8s = _door(command, doors, "k8s", _submit_k8s, "a KubeRay RayJob, by kubectl")
    k8s.add_argument("--image", required=True, help="container image of NeMo-RL")
    k8s.add_argument("--namespace", default="default")
    k8s.add_argument("--volume", default="", help="PersistentVolumeClaim to mount at /shared in every pod")


def _door(command: Command, doors: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    door = command(doors, name, run, text)
    work = door.add_mutually_exclusive_group(required=True)
    work.add_argument("--recipe", type=Path, metavar="DIR", help="a folder made by `polar recipe`")
    work.add_argument("--command", help="a shell command instead")
    door.add_argument("--name", default="polar", help="the job's name, with --command")
    door.add_argument("--nodes", type=values.COUNT, default=1)
    door.add_argument("--gpus", type=values.INDEX, default=8, help="GPUs of each node (default 8)")
    door.add_argument("--setup", default="", help="run on every node before Ray starts, such as pip install WHEEL")
    door.add_argument("--dry-run", action="store_true", help="print what would run, exactly, and stop")
    return door


def _recipe(arguments: argparse.Namespace) -> int:
    from polar_env import recipe

    if not arguments.name:
        print("\n".join(recipe.names()))
        return 0
    made = recipe.render(
        recipe.Request(
            name=arguments.name,
            nemo_rl=arguments.nemo_rl,
            out=arguments.out,
            data=arguments.data,
            validation=arguments.validation,
            tasks=_names(arguments.task),
            harnesses=_names(arguments.harness),
            overrides=tuple(arguments.overrides),
        )
    )
    for path, count in made.rows.items():
        print(f"{count} rows in {path}")
    for note in made.notes:
        print(f"- {note}")
    print(f"recipe {made.config}: checked\nrun it: {made.script}, or polar submit ... --recipe {made.script.parent}")
    return 0


def _work(arguments: argparse.Namespace) -> submit.Work:
    if arguments.recipe:
        return submit.recipe_work(arguments.recipe, arguments.nodes, arguments.gpus)
    return submit.Work(arguments.name, arguments.command, arguments.nodes, arguments.gpus)


def _submit_slurm(arguments: argparse.Namespace) -> int:
    job = submit.slurm(
        _work(arguments), arguments.nemo_rl, arguments.image, arguments.mount, arguments.setup, arguments.sbatch
    )
    return submit.run(job, print, dry=arguments.dry_run)


def _submit_ray(arguments: argparse.Namespace) -> int:
    if not arguments.dry_run:
        submit.answering(arguments.address)
    return submit.run(submit.ray(_work(arguments), arguments.address), print, dry=arguments.dry_run)


def _submit_k8s(arguments: argparse.Namespace) -> int:
    job = submit.kubernetes(_work(arguments), arguments.image, arguments.namespace, arguments.setup, arguments.volume)
    return submit.run(job, print, dry=arguments.dry_run)


def _names(value: str | None) -> tuple[str, ...]:
    return tuple(name for name in (value or "").split(",") if name)
