"""Configuration: one frozen model per conf/ group, and the only reader of the process environment.

Unknown keys are refused with the nearest known name. Every duration is in seconds.
"""

import difflib
import os
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polar_env.errors import ConfigError
from polar_env.types import CallKind
from polar_env.verdict import Flag


def nearest(word: str, known: Iterable[str], every: str = "known keys") -> str:
    """``did you mean 'codex'?``, or all there is (``known keys: ...``) when nothing is near."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{every}: {', '.join(words)}"


class Group(BaseModel):
    """A conf/ group: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _suggest(cls, data: object) -> object:
        """Refuse unknown keys with the name that was probably meant."""
        if isinstance(data, Mapping):
            for key in cast("Mapping[str, Any]", data):
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r} in {cls.__name__}; {nearest(str(key), cls.model_fields)}")
        return cast("object", data)


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A duration: a budget of nothing, or of no number, would end every rollout as a failure of ours."""

Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A wait that may be none at all."""

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
"""A count of which 0 has a meaning of its own."""

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]


class EngineConfig(Group):
    """conf/engine: the model behind the proxy."""

    kind: Literal["vllm", "nemo_rl", "sglang", "text", "scripted"] = "vllm"
    base_urls: tuple[str, ...] = ()
    """Engine replicas, each with its ``/v1``; a session stays on one (rendezvous hash)."""
    model: str = ""
    """Served model name; empty asks ``GET /v1/models``."""
    api_key: str = "EMPTY"
    splice: Literal["auto", "on", "off"] = "auto"
    """Begin the prompt of a call that carries on an earlier one with that call's exact ids, so that no token is
    rendered twice. ``auto``: where the engine's start-up test proves that it can; ``on``: refuse to start otherwise."""
    stream: bool = True
    """Stream tokens with their ids from engines that can; false waits for whole replies."""
    connect_timeout: Seconds = 10.0
    idle_timeout: Seconds = 600.0
    """No byte from the engine for this long: it is down."""
    policy_version: str = ""
    """Which weights sample, for servers that do not tell (``nemo_rl``); what a trainer declares at run time outranks
    it. Empty: unknown, and said so."""
    max_policy_age: Amount | None = None
    """Updates by which the oldest tokens of a rollout may be behind the newest weights. A name that ends in a number
    (``step-12``) is counted by it, any other by its order of appearance. ``None``: no limit."""
    stale_rollouts: Literal["end", "mask", "report"] = "end"
    """What becomes of a rollout over that limit. ``end``: it is stopped at once, and masked; ``mask``: it runs to its
    end, and is masked; ``report``: it is only told (``policy_age``, ``policy_stale`` of its row)."""
    pause_lease: Seconds | None = 1800.0
    """Seconds after which a trainer that paused, and neither resumed nor paused again, counts as dead: what is held
    ends as engine_error. ``None``: what is held waits for as long as a sandbox may live (24 h)."""
    check_temperature: Temperature = 1.0
    check_top_p: TopP = 1.0
    """``nemo_rl``: the sampling of the start-up check, which must be the recipe's; the server refuses any other."""
    tokenizer: Path | None = None
    """Directory with tokenizer.json and tokenizer_config.json: the scripted engine's own, and the served model's for
    ``sglang``, which splices with it."""
    max_model_len: Count = 131072
    """Context window in tokens: of the scripted engine, and of a server that does not tell."""
    scripts: Annotated[tuple[str, ...], Field(min_length=1)] = ("fix", "fix", "give_up", "half")
    """Scripted engine: the script of rollout i of a group is ``scripts[i % len]``."""


class ProxyConfig(Group):
    """conf/proxy: what a session may do."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = None
    max_output_tokens: Count = 8192
    max_calls: Count = 200
    """Calls of one session; over it the harness is told to stop and the outcome is turn_limit."""
    max_total_prompt_tokens: Count | None = None
    """Prompt tokens of all calls of one session together; over it as over ``max_calls``. ``None``: no limit."""
    max_total_output_tokens: Count | None = None
    """Sampled tokens of all calls of one session together; likewise."""
    max_seconds: Seconds | None = None
    """Wall clock of one session from its first model call, for proxies without a rollout's agent budget around them;
    after it what runs is aborted and the outcome is agent_timeout."""
    max_concurrent: Count = 16
    max_body_bytes: Count = 64 * 1024 * 1024
    keep_alive: Seconds = 8.0
    """Seconds between keep-alive events while the engine works (design: at least every 10 s)."""
    retry_grace: Pause = 5.0
    """How long a generation whose client vanished waits for the harness's own retry before it is aborted."""
    steady_prompts: bool = True
    """Show the engine a fixed date and kernel release where a harness's prompt names today's and this machine's, and
    Claude Code's billing block without its nonce: the rollouts of a group then share their first prompt."""


class HarnessConfig(Group):
    """conf/harness: which CLI, which version."""

    name: str = "claude_code"
    version: str = ""
    """Empty: the version the preset pins and was tested with."""
    command: tuple[str, ...] = ()
    """``shell`` harness: the argv to run; ``{instruction_file}`` is replaced."""
    extra_args: tuple[str, ...] = ()
    max_turns: Count = 100
    """Calls of the agent itself, without sub-agents, compactions and retries. The harness's own limit where it has
    one, else the proxy's."""
    context_window: Count = 131072


class SandboxConfig(Group):
    """conf/sandbox: a nemo_gym.sandbox provider and its limits."""

    provider: str = "bubblewrap"
    provider_options: dict[str, Any] = Field(default_factory=dict)
    memory_mib: Amount | None = None
    """MiB of one sandbox, the files it writes to memory included. ``None``: half of the machine's, at most 16 GiB; 0:
    no limit. An agent that uses them up is killed, and that is its own failure."""
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    pids: Count = 4096
    """Processes and threads of one sandbox."""
    disk_mib: Amount = 4096
    """MiB that may be written to each file system of a sandbox, and the longest file. 0: no limit."""
    prewarm: Amount = 1
    """Tasks whose own fix is measured for the grading at one time while agents work. 0: the first grading does it."""


class BudgetConfig(Group):
    """conf/budget: separate wall-clock budgets; queueing is free, so is the time that calls are held for a change of
    weights, and finalise always runs."""

    start: Seconds = 600.0
    agent: Seconds = 1800.0
    grade: Seconds = 1800.0
    finalise: Seconds = 120.0


class TrajectoryConfig(Group):
    """conf/trajectory: what is trained and what a one-row trainer gets."""

    delivery: Literal["task", "main", "longest", "sample"] = "task"
    """``task``: the main chain, or when that starts after a compaction the heaviest that starts with the task's prompt
    (the only ones GRPO on NeMo-RL gives an advantage). ``main``: the chain the harness finished on, whatever it starts
    with. ``longest``: most trainable tokens. ``sample``: drawn in proportion to them."""
    trained_kinds: tuple[CallKind, ...] = (CallKind.AGENT, CallKind.SUB_AGENT, CallKind.COMPACTION)
    max_tokens: Count | None = None
    """Longest row the trainer takes (its max sequence length); longer rows are cut after a whole call."""
    seed: int = 0


class RewardConfig(Group):
    """conf/reward: which endings carry a reward that trains."""

    train_timeouts: bool = True
    """A budget the agent itself exhausted is signal: graded and trained. False masks it."""
    flags: dict[Flag, Literal["zero", "mask", "report"]] = Field(
        default_factory=dict[Flag, Literal["zero", "mask", "report"]]
    )
    """What a flag of the grading does to a rollout, where it differs from ``reward.FLAGS``: reward 0, masked, or only
    told on the row."""


class StoreConfig(Group):
    """conf/store: where things are kept."""

    cache: Path = Path("~/.cache/polar_env")
    """Installed CLIs, prepared tasks, tokenizer: made once, shared."""
    sessions: Path = Path("out/sessions")
    """Durable segment logs, one directory per session."""
    messages: bool = True
    """Keep what each call was asked in its session's log, compressed and once. Only SFT export needs it."""


class WorkersConfig(Group):
    """conf/workers: where rollouts run. Alone, the server's own process runs them all."""

    ray: bool = False
    """One worker on every node of the Ray cluster the server belongs to; ``concurrency`` is then that of each."""
    resource: str = ""
    """Custom Ray resource a node must offer to get a worker (``ray start --resources``); empty: every node."""
    retries: Amount = 1
    """How often a rollout is started again because its worker or node was lost."""
    wait: Pause = 300.0
    """Seconds a row waits for a cluster without any node that serves."""
    refresh: Seconds = 5.0
    """Seconds between two looks at the cluster for nodes that joined."""


class StragglersConfig(Group):
    """conf/stragglers: when the last rollouts of a group have had their time. Off unless ``after_fraction`` is set."""

    after_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of a group that must have finished; ``None``: never."""
    patience: Pause = 1.5
    """What the rest then gets, as a multiple of the finished siblings' median agent seconds ..."""
    min_seconds: Pause = 60.0
    """... and at least this. Waiting for a slot, starting and grading are not in it, nor is time at the fence."""
    group_size: Count | None = None
    """Rollouts of a group (NeMo-RL's ``num_generations_per_prompt``); ``None``: as many as were posted so far."""
    then: Literal["mask", "grade"] = "mask"
    """What ends them. ``mask``: they do not train. That loses the tail of long rollouts, and says nothing false.
    ``grade``: what stands is graded and trained (outcome group_timeout), so a reward that hangs on how fast siblings
    were, and on the machine's load: right only where being slow is to cost something. Neither is unbiased; off is."""


class PolarConfig(Group):
    """The whole configuration; conf/ groups mirror its fields one to one."""

    engine: EngineConfig = EngineConfig()
    proxy: ProxyConfig = ProxyConfig()
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    budget: BudgetConfig = BudgetConfig()
    trajectory: TrajectoryConfig = TrajectoryConfig()
    reward: RewardConfig = RewardConfig()
    store: StoreConfig = StoreConfig()
    workers: WorkersConfig = WorkersConfig()
    stragglers: StragglersConfig = StragglersConfig()
    data: str = ""
    """Task rows: a parquet or JSONL path or folder, ``hub:<dataset name>``, ``embedded``, or empty (see tasks.rows)."""
    concurrency: Count = 8
    """Rollouts running at once in this process; the rest queue for free."""


def load(data: Mapping[str, Any]) -> PolarConfig:
    """Validate a plain mapping. Raises ConfigError naming the key and what to write instead."""
    try:
        return PolarConfig.model_validate(dict(data))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'config'}: {item['msg']}" for item in error.errors()]
        raise ConfigError("; ".join(lines)) from error


def conf_dir() -> Path:
    """The folder conf/: inside an installed package, at the root of a checkout. ConfigError if it is in neither."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError("conf/ is neither in the installed polar_env nor beside src/: reinstall, or name a config_dir")


def override(key: str, value: object) -> str:
    """One Hydra override with any text quoted: paths with spaces, commas or ``=`` stay one value."""
    if isinstance(value, (list, tuple)):
        items = [override("", item).removeprefix("=") for item in cast("Sequence[object]", value)]
        return f"{key}=[{','.join(items)}]"
    if isinstance(value, str | Path):
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))
        text = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
        return f"{key}='{text}'"
    return f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> PolarConfig:
    """Compose conf/ with Hydra and validate the result.

    Args:
        overrides: Hydra's own syntax: ``engine=scripted`` picks conf/engine/scripted.yaml, ``proxy.max_calls=50`` sets
            a value. A leading ``+`` or ``++`` is allowed and never needed.
        config_dir: another folder laid out like conf/; relative paths are taken from the working directory.

    Raises:
        ConfigError: for an unknown key (with the nearest name), a value of the wrong type or a group file that is not
            there.
    """
    folder = (config_dir or conf_dir()).expanduser().resolve()
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"no config.yaml in {folder}: name a folder laid out like polar_env's conf/")
    groups = {path.name for path in folder.iterdir() if path.is_dir()}
    for text in overrides:
        _pickable(text.lstrip("+"), folder, groups)
    try:
        with _own_hydra(), initialize_config_dir(str(folder), version_base=None):
            node = hydra_compose("config", overrides=[_settle(text, groups) for text in overrides])
            data = OmegaConf.to_container(node, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    return load(cast("Mapping[str, Any]", data))


def _pickable(text: str, folder: Path, groups: set[str]) -> None:
    """Refuse a group file that is not there in fewer words than Hydra's, with the nearest."""
    group, _, name = text.partition("=")
    if group in groups and re.fullmatch(r"\w+", name) and not (folder / group / f"{name}.yaml").is_file():
        files = sorted(path.stem for path in (folder / group).glob("*.yaml"))
        hint = nearest(name, files, "there are")
        raise ConfigError(f"{text}: there is no {name!r} in conf/{group}; {hint}")


def _settle(text: str, groups: set[str]) -> str:
    """Let a value override through to our own validation, which knows the nearest name; Hydra picks group files."""
    bare = text.lstrip("+")
    return bare if bare.startswith("~") or re.split("[=@]", bare)[0] in groups else f"++{bare}"


@contextmanager
def _own_hydra() -> Generator[None]:
    """Set aside a Hydra that is already initialised (NeMo Gym's and NeMo-RL's entry points are Hydra apps)."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def environment(name: str, default: str = "") -> str:
    """The one place the process environment is read."""
    return os.environ.get(name, default)


def child_environment(*prefixes: str) -> dict[str, str]:
    """The parts of our environment a build step needs (PATH, registry settings); secrets stay out."""
    keep = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    wanted = (
        *prefixes,
        "PIP_",
        "UV_",
        "npm_config_",
        "NPM_CONFIG_",
        "NODE_EXTRA_CA_CERTS",
        "HTTP_PROXY",
        "HTTPS_PROXY",
    )
    also = ("http_proxy", "https_proxy", "no_proxy", "NO_PROXY")
    return {k: v for k, v in os.environ.items() if k in keep or k in also or k.startswith(wanted)}


@contextmanager
def exported(**values: str) -> Generator[None]:
    """``export`` of each, until the end of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def export(name: str, value: str) -> None:
    """Set a variable for this process and the processes it starts."""
    os.environ[name] = value
