"""polar: demo | rollout | dataset | check | config | gym-root."""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar_env.config import PolarConfig, compose, environment, override
from polar_env.errors import ConfigError, PolarError
from polar_env.gym import ROOT
from polar_env.rollout import RolloutJob, harness_class, make_engine, open_proxy, rollout
from polar_env.types import Sampling


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; a PolarError is printed as one sentence, and the exit code is 2 (130 after Ctrl-C)."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        return int(arguments.run(arguments))
    except PolarError as error:
        print(f"polar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="polar", description=__doc__)
    parser.add_argument("-v", "--verbose", action="store_true", help="say what happens inside")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = _command(commands, "demo", _demo, "run a GRPO group per harness through NeMo Gym and print the table")
    demo.add_argument("--harness", help="one harness, or several with commas (default: the four of the demo)")
    demo.add_argument("--rollouts", type=int, default=4, help="rollouts per group (default 4)")
    demo.add_argument("--out", type=Path, default=Path("out"), help="where rollouts.jsonl goes (default out/)")
    _line_options(demo)
    single = _command(commands, "rollout", _rollout, "run one rollout without NeMo Gym and print its row")
    single.add_argument("--harness", help="the harness (default: the configuration's)")
    single.add_argument("--index", type=int, default=0, help="index in its group")
    _line_options(single)
    dataset = _command(commands, "dataset", _dataset, "write task rows for Gym and NeMo-RL as JSONL")
    dataset.add_argument("--harness", help="stamp rows with a harness, or write one per harness (commas)")
    dataset.add_argument("--embed", action="store_true", help="carry whole task rows: the server then needs no data")
    dataset.add_argument("--out", type=Path, required=True, help="the JSONL to write")
    _line_options(dataset)
    _line_options(_command(commands, "check", _check, "prove the engine gives ids and log-probs, or say why not"))
    _line_options(_command(commands, "config", _config, "print the configuration as composed"))
    _command(commands, "gym-root", _gym_root, "print the directory for NEMO_GYM_EXTRA_ROOTS")
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _line_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", help="task id, or several with commas")
    parser.add_argument("--data", help="task rows: parquet, JSONL or folder, hub:NAME, or embedded")
    parser.add_argument("--engine", choices=("scripted", "vllm"), help="default: scripted for demo, else vllm")
    parser.add_argument("--model-url", help="the engine's base URL, or several with commas")
    parser.add_argument("overrides", nargs="*", help="hydra overrides, e.g. proxy.max_calls=50 budget.agent=600")


def _settings(arguments: argparse.Namespace, engine: str) -> PolarConfig:
    """conf/ plus the flags. POLAR_CACHE moves the cache, as CI and clusters need."""
    overrides = [f"engine={arguments.engine or engine}"]
    harnesses = _names(getattr(arguments, "harness", None))
    for name in harnesses:
        harness_class(name)
    if len(harnesses) == 1:
        overrides.append(override("harness.name", harnesses[0]))
    if arguments.data:
        overrides.append(override("data", arguments.data))
    if arguments.model_url:
        overrides.append(override("engine.base_urls", _names(arguments.model_url)))
    if cache := environment("POLAR_CACHE"):
        overrides.append(override("store.cache", cache))
    return compose([*overrides, *arguments.overrides])


def _names(value: str | None) -> tuple[str, ...]:
    return tuple(name for name in (value or "").split(",") if name)


def _demo(arguments: argparse.Namespace) -> int:
    from polar_env import demo

    return demo.run(
        demo.Demo(
            config=_settings(arguments, "scripted"),
            harnesses=_names(arguments.harness) or demo.HARNESSES,
            tasks=_names(arguments.task),
            rollouts=arguments.rollouts,
            out=arguments.out,
        )
    )


def _rollout(arguments: argparse.Namespace) -> int:
    if len(_names(arguments.harness)) > 1 or len(_names(arguments.task)) > 1:
        raise ConfigError("polar rollout runs one harness on one task; polar demo runs groups of several")
    print(json.dumps(asyncio.run(_one(_settings(arguments, "vllm"), arguments))))
    return 0


async def _one(config: PolarConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    from polar_env.gym import rows
    from polar_env.tasks import rows as task_rows

    task = task_rows.load(config.data, _names(arguments.task))[0]
    sampling = Sampling(
        config.proxy.temperature, config.proxy.top_p, config.proxy.top_k, config.proxy.max_output_tokens
    )
    async with open_proxy(config) as proxy:
        result = await rollout(RolloutJob(task, config.harness, sampling, arguments.index), proxy, config)
    return rows.row(result, {"input": task.instruction}, model="policy", max_tokens=config.trajectory.max_tokens)


def _dataset(arguments: argparse.Namespace) -> int:
    from polar_env.gym import dataset
    from polar_env.tasks import rows as task_rows

    config = _settings(arguments, "vllm")
    tasks = task_rows.load(config.data, _names(arguments.task))
    data = str(Path(config.data).resolve()) if config.data and Path(config.data).exists() else config.data
    harnesses = _names(arguments.harness) or ("",)
    rows = [dataset.dataset_row(t, h, data, embed=arguments.embed) for t in tasks for h in harnesses]
    print(f"{dataset.write(rows, arguments.out)} rows in {arguments.out}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    facts = asyncio.run(_facts(_settings(arguments, "vllm")))
    print(f"model {facts.model}: window {facts.max_model_len} tokens, policy version {facts.policy_version}")
    print(
        "ids and log-probs are the model's"
        if facts.real_tensors
        else "LOG-PROBABILITIES ARE SCRIPTED: nothing to train on"
    )
    for note in facts.notes:
        print(f"- {note}")
    return 0


async def _facts(config: PolarConfig) -> Any:
    engine = make_engine(config)
    try:
        return await engine.check()
    finally:
        await engine.aclose()


def _config(arguments: argparse.Namespace) -> int:
    print(_settings(arguments, "vllm").model_dump_json(indent=2))
    return 0


def _gym_root(_: argparse.Namespace) -> int:
    print(ROOT)
    return 0
