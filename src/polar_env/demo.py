"""The main job: a GRPO group per harness through NeMo Gym, and a table of what came of it.

Four rollouts of one task for each harness. With the scripted engine two of them fix the bug through the harness's own
tools, one gives up and one does half; rewards come from the grader alone, and the demo fails when they are not
1, 1, 0, 0. With a real engine (``--engine vllm --model-url URL``) the same line runs and nothing is expected.
"""

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from polar_env.config import PolarConfig
from polar_env.engine import tokenizer
from polar_env.errors import ConfigError, PolarError, boundary
from polar_env.gym import contract, launch
from polar_env.gym.dataset import dataset_row
from polar_env.named import harness_named, make_harness
from polar_env.rollout import check
from polar_env.tasks import Task
from polar_env.tasks import rows as task_rows
from polar_env.tasks.prepare import prepare

HARNESSES = ("claude_code", "codex", "pi", "mini_swe_agent")
"""The CLIs of the demo, installed from the registry, unmodified."""

LIGHT = ("psf__requests-6028", "pytest-dev__pytest-7571", "sympy__sympy-13031", "sphinx-doc__sphinx-7440")
"""SWE-bench Verified instances that are quick to prepare and to grade (swebench_sdist facts), in order of weight."""

Result = tuple[dict[str, Any], dict[str, Any]]
"""A row as posted, and the row that came back."""

COLUMNS = ("harness", "rollout", "outcome", "reward", "calls", "chains", "trainable", "seconds")


@dataclass(frozen=True, slots=True)
class Demo:
    """What to run. ``expected`` is the reward each script of the scripted engine must get; others may get any."""

    config: PolarConfig
    harnesses: tuple[str, ...] = HARNESSES
    tasks: tuple[str, ...] = ()
    rollouts: int = 4
    out: Path = Path("out")
    expected: Mapping[str, float] = field(default_factory=lambda: {"fix": 1.0, "give_up": 0.0, "half": 0.0})


def say(text: str) -> None:
    """Progress, with the wall clock: the reader sees what takes long."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)  # noqa: T201 - the demo talks to a person


def run(demo: Demo) -> int:
    """Run it; 0 when every row is valid and every expected reward came from the grader. Raises PolarError."""
    if demo.rollouts < 1:
        raise ConfigError("a group needs at least one rollout (--rollouts)")
    with boundary(ConfigError, f"making {demo.out}, where the rows go (--out)"):
        demo.out.mkdir(parents=True, exist_ok=True)
    with alone(demo.out):
        done: list[Result] = []
        try:
            play(demo, done)
        except (KeyboardInterrupt, SystemExit):
            interrupted(demo, done)
            raise
        except PolarError:
            if done:
                interrupted(demo, done)
            raise
        return report(demo, sorted(done, key=lambda pair: (pair[0]["_ng_task_index"], pair[0]["_ng_rollout_index"])))


@contextmanager
def alone(out: Path) -> Generator[None]:
    """Hold the folder ``out``: two demos would write over each other's rows. Raises ConfigError when another has it."""
    handle = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"another polar demo is writing to {out}: name another --out") from error
    else:
        yield
    finally:
        os.close(handle)


def play(demo: Demo, done: list[Result]) -> None:
    """Make everything ready, start Gym, run every rollout; ``done`` fills as they finish."""
    tasks = choose(demo)
    asyncio.run(ready(demo, tasks))
    rows = [row for number, task in enumerate(tasks) for row in group_rows(demo, number, task)]
    say("NeMo Gym starts: resources server polar, agent polar_agent, environment server (on a local Ray)")
    with launch.running(settings(demo.config), demo.out.resolve() / "gym") as head:
        say(f"{len(rows)} rollouts posted: {len(tasks)} task(s) x {len(demo.harnesses)} harness(es) x {demo.rollouts}")
        asyncio.run(collect(rows, head, done))


def interrupted(demo: Demo, done: Sequence[Result]) -> None:
    """Keep the rows there are, and say what was kept and where."""
    kept = f"{len(done)} rollouts had ended"
    if done:
        kept += f", their rows are in {write(demo.out / 'interrupted.jsonl', done)}"
    store = demo.config.store
    say(
        f"interrupted: {kept}; logs of all that began are in {store.sessions}, what was installed is in {store.cache}, "
        "nothing else is left"
    )


def choose(demo: Demo) -> tuple[Task, ...]:
    """The tasks to run: as asked, else the lightest real instance there is, else the first of the data."""
    source = task_rows.resolve(demo.config.data)
    say(f"tasks: {source.detail}")
    if demo.tasks:
        return task_rows.load(demo.config.data, demo.tasks)
    every = {task.task_id: task for task in task_rows.load(demo.config.data)}
    return (every[next((name for name in LIGHT if name in every), next(iter(every)))],)


async def ready(demo: Demo, tasks: Sequence[Task]) -> None:
    """Install, fetch and prepare everything once, visibly: the servers then find it in the cache."""
    store = demo.config.store.cache.expanduser()
    if demo.config.engine.kind != "scripted":
        facts = await check(demo.config)
        say(f"engine {demo.config.engine.kind}: {facts.model}, window {facts.max_model_len}, {facts.policy_version}")
    for name in demo.harnesses:
        harness = make_harness(harness_named(demo.config.harness, name))
        say(f"harness {name}: installing from the registry if it is not in {store}")
        await harness.install(store)
    for task in tasks:
        say(f"task {task.task_id}: building repository and environment if they are not cached")
        prepared = await prepare(task, store, sandbox=demo.config.sandbox)
        say(f"task {task.task_id}: ready at base commit {prepared.base_commit[:12] or prepared.image}")
    if demo.config.engine.kind == "scripted":
        say(f"engine scripted: real tokenizer and chat template from {await asyncio.to_thread(tokenizer.fetch, store)}")
        say("engine scripted: token ids are real tokenisations; LOG-PROBABILITIES ARE SCRIPTED, no model ran")
    elif demo.config.engine.kind == "text":
        say("engine text: NO TOKEN IDS, rollouts are graded and masked; export them as sft or neutral")
    else:
        say(f"engine {demo.config.engine.kind}: token ids and log-probabilities are the model's own")


def settings(config: PolarConfig) -> dict[str, Any]:
    """The configuration as plain data for a Gym config, paths made absolute: servers start in other directories."""
    plain = config.model_dump(mode="json", exclude_unset=True)
    cache, sessions = config.store.cache.expanduser(), config.store.sessions.expanduser()
    plain["store"] = {"cache": str(cache.resolve()), "sessions": str(sessions.resolve())}
    if config.data and Path(config.data).exists():
        plain["data"] = str(Path(config.data).resolve())
    return plain


def group_rows(demo: Demo, number: int, task: Task) -> list[dict[str, Any]]:
    """Rows as NeMo-RL posts them: one per rollout, all of a group alike but for their index."""
    return [
        {
            **dataset_row(task, harness),
            "_ng_task_index": number * len(demo.harnesses) + place,
            "_ng_rollout_index": index,
        }
        for place, harness in enumerate(demo.harnesses)
        for index in range(demo.rollouts)
    ]


async def collect(rows: list[dict[str, Any]], head: Any, done: list[Result]) -> None:
    """Every (row, result) into ``done`` as it finishes, with a line on screen."""
    async for row, result in launch.collect(rows, head):
        done.append((row, result))
        polar = result.get("polar", {})
        detail = f" ({polar['detail']})" if polar.get("detail") else ""
        say(
            f"{len(done):>3}/{len(rows)} {row['harness']} #{row['_ng_rollout_index']}: {polar.get('outcome')}, "
            f"reward {result['reward']}{detail}"
        )


def report(demo: Demo, results: Sequence[Result]) -> int:
    """Write rollouts.jsonl, print the table, and say what is wrong, if anything."""
    print(table([line(row, result) for row, result in results]))  # noqa: T201 - the table is the demo's answer
    path = write(demo.out / "rollouts.jsonl", results)
    wrong = [problem for row, result in results for problem in problems(demo, row, result)]
    wrong += [problem for group in groups(results) for problem in contract.group_disagreements(group)]
    if all(result["mask_sample"] for _, result in results):
        wrong.append("every row is masked: nothing here would train")
    for problem in wrong:
        say(f"WRONG: {problem}")
    say(f"{len(results)} rows in {path}; {'all' if not wrong else 'NOT all'} valid for NeMo-RL and as expected")
    return 1 if wrong or not results else 0


def write(path: Path, results: Sequence[Result]) -> Path:
    """The result rows as JSONL, whole or not at all. A file of an earlier run is kept under a number, and said."""
    with boundary(ConfigError, f"writing {path} (free some space, or name another --out)"):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for _, result in results)
        if path.exists():
            numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
            earlier = path.rename(next(name for name in numbered if not name.exists()))
            say(f"{path} of an earlier run is now {earlier}")
        part.replace(path)
    return path


def groups(results: Sequence[Result]) -> list[list[dict[str, Any]]]:
    """Results by prompt group: the rollouts of one task in one harness."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row, result in results:
        found.setdefault(row["_ng_task_index"], []).append(result)
    return list(found.values())


def problems(demo: Demo, row: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Contract violations of a row, and a reward other than its script must get."""
    name = f"{row['task_id']} {row['harness']} #{row['_ng_rollout_index']}"
    found = [f"{name}: {violation}" for violation in contract.violations(result)]
    if demo.config.engine.kind != "scripted":
        return found
    scripts = demo.config.engine.scripts
    script = scripts[int(row["_ng_rollout_index"]) % len(scripts)]
    want = demo.expected.get(script)
    if want is not None and (result["reward"] != want or result["mask_sample"]):
        found.append(
            f"{name}: script {script} must get reward {want}, got {result['reward']} masked={result['mask_sample']}"
        )
    return found


def line(row: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, ...]:
    """One table line."""
    polar = result.get("polar", {})
    masked = " masked" if result.get("mask_sample") else ""
    return (
        str(row["harness"]),
        f"{row['task_id']} #{row['_ng_rollout_index']}",
        str(polar.get("outcome", "?")),
        f"{result['reward']:.1f}{masked}",
        f"{result.get('num_model_calls', 0):.0f}",
        f"{result.get('num_chains', 0):.0f}",
        f"{result.get('trainable_tokens', 0):.0f}",
        f"{sum(value for key, value in result.items() if key.startswith('seconds_')):.1f}",
    )


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell."""
    whole = [COLUMNS, *lines]
    widths = [max(len(cells[i]) for cells in whole) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in whole)
