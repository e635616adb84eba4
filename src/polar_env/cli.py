"""polar: demo | rollout | proxy | control | harness | rebuild | verify | export | dataset | recipe | submit | ..."""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar_env import cli_training
from polar_env import cli_values as values
from polar_env.config import PolarConfig, compose, environment, override
from polar_env.control import ORDERS, send
from polar_env.errors import ConfigError, PolarError
from polar_env.export import FORMATS, Job
from polar_env.gym import ROOT
from polar_env.named import harness_class
from polar_env.rollout import RolloutJob, check, open_proxy, rollout
from polar_env.types import Sampling


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; a PolarError is printed as one sentence, and the exit code is 2 (130 after Ctrl-C)."""
    arguments = _parsed(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        return int(arguments.run(arguments))
    except PolarError as error:
        print(f"polar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; overrides may stand anywhere (argparse alone takes them in one place only)."""
    arguments, rest = _parser().parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest)):
        arguments.parser.error(arguments.parser.unknown(rest))
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> values.Parser:
    parser = values.Parser(prog="polar", description=__doc__)
    parser.add_argument("-v", "--verbose", action="store_true", help="say what happens inside")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = _command(commands, "demo", _demo, "run a GRPO group per harness through NeMo Gym and print the table")
    demo.add_argument("--harness", help="one harness, or several with commas (default: the four of the demo)")
    demo.add_argument("--rollouts", type=values.COUNT, default=4, help="rollouts per group (default 4)")
    demo.add_argument(
        "--out", type=values.folder_out, default=Path("out"), help="where rollouts.jsonl goes (default out/)"
    )
    _line_options(demo)
    single = _command(commands, "rollout", _rollout, "run one rollout without NeMo Gym and print its row")
    single.add_argument("--harness", help="the harness (default: the configuration's)")
    single.add_argument("--index", type=values.INDEX, default=0, help="index in its group")
    _line_options(single)
    _standalone(commands)
    _finished(commands)
    cli_training.add(commands, _command)
    dataset = _command(commands, "dataset", _dataset, "write task rows for Gym and NeMo-RL as JSONL")
    dataset.add_argument("--harness", help="stamp rows with a harness, or write one per harness (commas)")
    dataset.add_argument("--embed", action="store_true", help="carry whole task rows: the server then needs no data")
    dataset.add_argument("--out", type=values.file_out, required=True, help="the JSONL to write")
    _line_options(dataset)
    _line_options(_command(commands, "check", _check, "prove the engine gives ids and log-probs, or say why not"))
    _line_options(_command(commands, "config", _config, "print the configuration as composed"))
    root = _command(commands, "gym-root", _gym_root, "print the directory for NEMO_GYM_EXTRA_ROOTS")
    root.add_argument(
        "--venvs", type=values.folder_out, help="link this environment there for each server (Gym's ++uv_venv_dir)"
    )
    return parser


def _standalone(commands: Any) -> None:
    """Parts of the line on their own."""
    alone = _command(commands, "proxy", _proxy, "serve the proxy on this machine until SIGINT or SIGTERM")
    alone.add_argument("--port", type=values.PORT, default=0, help="port on 127.0.0.1 (default: any free one)")
    alone.add_argument(
        "--control-port", type=values.PORT, help="also take a trainer's orders, on this port of 127.0.0.1"
    )
    alone.add_argument("--session", action="append", help="open a session of this name; may be repeated")
    alone.add_argument("--harness", default="shell", help="whose marks tell calls apart (default: those of several)")
    _engine_options(alone)
    harness = commands.add_parser("harness", help="list the harnesses, or try one", description="List or try harnesses")
    actions = harness.add_subparsers(required=True, metavar="list|run")
    listed = _command(actions, "list", _harness_list, "print each harness's version and wire API, and if it is here")
    listed.add_argument("overrides", nargs="*", help="hydra overrides, e.g. store.cache=/node-local/polar")
    tried = _command(actions, "run", _harness_run, "run one harness once in a sandbox and print what it did")
    tried.add_argument("harness", metavar="NAME", help="a name of `polar harness list`, or module:Class")
    tried.add_argument("--prompt", help="what to ask it (not graded), instead of a --task")
    tried.add_argument(
        "--repo", type=values.folder_in, help="with --prompt: the folder it works on, shown copy-on-write"
    )
    _line_options(tried)
    orders = _command(commands, "control", _control, "orders to a polar process: hold, stop, date, list, cancel")
    orders.add_argument("order", choices=ORDERS)
    orders.add_argument("name", nargs="?", metavar="VERSION", help="of the weights: for version, and for resume")
    orders.add_argument("--url", required=True, help="its control door; the secret is in POLAR_CONTROL_SECRET")
    orders.add_argument("--mode", help="of pause: wait (default), abort or keep what runs")
    orders.add_argument("--task", help="of cancel: rollouts of this task id")
    orders.add_argument("--group", help="of cancel: of this group, by its _ng_task_index")
    orders.add_argument("--session", help="of cancel: the one with this session id")
    orders.add_argument(
        "--timeout", type=values.seconds, help="seconds to wait for an answer (default: as long as it takes)"
    )
    back = _command(commands, "rebuild", _rebuild, "print what a session's durable log holds")
    back.add_argument("directory", type=values.folder_in, help="the session's folder under store.sessions")
    back.add_argument("overrides", nargs="*", help="hydra overrides, e.g. trajectory.delivery=longest")


def _finished(commands: Any) -> None:
    """What is done with rollouts that are over."""
    verify = _command(commands, "verify", _verify, "check rows against the durable logs of their sessions")
    verify.add_argument("rollouts", type=values.file_in, metavar="ROLLOUTS.jsonl")
    verify.add_argument("--sessions", type=values.folder_in, required=True, help="the folder of store.sessions")
    export = _command(commands, "export", _export, "write finished rollouts as another trainer reads them")
    export.add_argument("--format", required=True, choices=tuple(FORMATS))
    export.add_argument(
        "source", type=values.either_in, metavar="IN", help="rollouts.jsonl, or for neutral a folder of session logs"
    )
    export.add_argument("out", type=values.file_out, metavar="OUT", help="JSONL; for neutral also .parquet or .arrow")
    export.add_argument(
        "--sessions", type=values.folder_in, help="the folder of store.sessions; sft reads conversations there"
    )
    export.add_argument("--chains", choices=("all", "delivered"), help="default: as the format's trainer takes them")
    export.add_argument(
        "--max-tokens",
        type=values.COUNT,
        help="cut longer chains after a whole call; default: what the rows were made with",
    )


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run, parser=parser)
    return parser


def _line_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", help="task id, or several with commas")
    parser.add_argument("--data", help="task rows: parquet, JSONL or folder, hub:NAME, or embedded")
    _engine_options(parser)


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=ENGINES, help="default: scripted for demo, else vllm")
    parser.add_argument("--model-url", help="the engine's base URL, or several with commas")
    parser.add_argument("overrides", nargs="*", help="hydra overrides, e.g. proxy.max_calls=50 budget.agent=600")


def _settings(arguments: argparse.Namespace, engine: str) -> PolarConfig:
    """conf/ plus the flags. POLAR_CACHE moves the cache, as CI and clusters need."""
    overrides = [f"engine={getattr(arguments, 'engine', None) or engine}"]
    harnesses = _names(getattr(arguments, "harness", None))
    for name in harnesses:
        harness_class(name)
    if len(harnesses) == 1:
        overrides.append(override("harness.name", harnesses[0]))
    if data := getattr(arguments, "data", None):
        overrides.append(override("data", data))
    if urls := _names(getattr(arguments, "model_url", None)):
        overrides.append(override("engine.base_urls", urls))
    if cache := environment("POLAR_CACHE"):
        overrides.append(override("store.cache", cache))
    return compose([*overrides, *arguments.overrides])


def _storing(arguments: argparse.Namespace, engine: str) -> PolarConfig:
    """The configuration of a command that installs and records; its folders must be such."""
    config = _settings(arguments, engine)
    for key in ("cache", "sessions"):
        with values.named(f"store.{key}"):
            values.folder_out(str(getattr(config.store, key)))
    return config


ENGINES = ("vllm", "nemo_rl", "sglang", "text", "scripted")


def _names(value: str | None) -> tuple[str, ...]:
    return tuple(name for name in (value or "").split(",") if name)


def _demo(arguments: argparse.Namespace) -> int:
    from polar_env import demo

    arguments.overrides = [override("store.sessions", arguments.out / "sessions"), *arguments.overrides]
    return demo.run(
        demo.Demo(
            config=_storing(arguments, "scripted"),
            harnesses=_names(arguments.harness) or demo.HARNESSES,
            tasks=_names(arguments.task),
            rollouts=arguments.rollouts,
            out=arguments.out,
        )
    )


def _rollout(arguments: argparse.Namespace) -> int:
    if len(_names(arguments.harness)) > 1 or len(_names(arguments.task)) > 1:
        raise ConfigError("polar rollout runs one harness on one task; polar demo runs groups of several")
    print(json.dumps(asyncio.run(_one(_storing(arguments, "vllm"), arguments))))
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


def _proxy(arguments: argparse.Namespace) -> int:
    from polar_env import standalone

    if len(_names(arguments.harness)) > 1:
        raise ConfigError("polar proxy tells calls apart by the marks of one --harness")
    names = arguments.session or ["session"]
    config = _storing(arguments, "vllm")
    asyncio.run(standalone.serve(config, names, arguments.port, _say, arguments.control_port))
    return 0


def _control(arguments: argparse.Namespace) -> int:
    """The secret is no argument: every process of the machine can read those."""
    if arguments.name is not None and arguments.order not in ("version", "resume"):
        raise ConfigError(f"polar control {arguments.order} takes no VERSION; {arguments.name!r} would be ignored")
    if arguments.mode is not None and arguments.order != "pause":
        raise ConfigError(f"--mode is of polar control pause; {arguments.order} has none")
    fields = {name: getattr(arguments, name) for name in ("mode", "task", "group", "session")}
    fields["version"] = arguments.name
    if not (secret := environment("POLAR_CONTROL_SECRET")):
        raise ConfigError("POLAR_CONTROL_SECRET is not set: give the secret of the door, as its process has it")
    print(json.dumps(send(arguments.url, secret, arguments.order, timeout=arguments.timeout, **fields)))
    return 0


def _harness_list(arguments: argparse.Namespace) -> int:
    from polar_env import standalone

    print(standalone.catalogue(_settings(arguments, "vllm").store.cache))
    return 0


def _harness_run(arguments: argparse.Namespace) -> int:
    from polar_env import standalone

    if len(_names(arguments.harness)) > 1:
        raise ConfigError("polar harness run tries one harness; polar demo runs groups of several")
    trial = standalone.Trial(arguments.task or "", arguments.prompt or "", arguments.repo)
    return asyncio.run(standalone.try_harness(_storing(arguments, "vllm"), trial, _say))


def _rebuild(arguments: argparse.Namespace) -> int:
    from polar_env import standalone

    text, readable = standalone.describe(arguments.directory, _settings(arguments, "vllm"))
    print(text)
    return 0 if readable else 1


def _say(line: str) -> None:
    print(line, flush=True)


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


def _verify(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a row does not hold."""
    from polar_env import verify

    return int(verify.run(arguments.rollouts, arguments.sessions, print) > 0)


def _export(arguments: argparse.Namespace) -> int:
    from polar_env.export import write

    job = Job(chains=arguments.chains, sessions=arguments.sessions, max_tokens=arguments.max_tokens)
    count = write.export(arguments.format, arguments.source, arguments.out, job)
    before, after = write.size(arguments.source), write.size(arguments.out)
    print(f"{count} lines in {arguments.out}: {after} bytes, {after / max(1, before):.2f} of {arguments.source}")
    if job.shortened:
        print(f"- cut {job.shortened} chains to {arguments.max_tokens or 'trajectory.max_tokens'} tokens or fewer")
    for reason, rollouts in job.skipped.items():
        print(f"- left out {rollouts}: {reason}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    facts = asyncio.run(check(_settings(arguments, "vllm")))
    print(f"model {facts.model}: window {facts.max_model_len} tokens, policy version {facts.policy_version}")
    print(
        "NO TOKEN IDS: rollouts are text, to be graded and imitated (SFT)"
        if not facts.ids
        else "ids and log-probs are the model's"
        if facts.real_tensors
        else "LOG-PROBABILITIES ARE SCRIPTED: nothing to train on"
    )
    for note in facts.notes:
        print(f"- {note}")
    return 0


def _config(arguments: argparse.Namespace) -> int:
    print(_settings(arguments, "vllm").model_dump_json(indent=2))
    return 0


def _gym_root(arguments: argparse.Namespace) -> int:
    if arguments.venvs:
        from polar_env.gym.venvs import link_venvs

        link_venvs(arguments.venvs.resolve())
    print(ROOT)
    return 0
