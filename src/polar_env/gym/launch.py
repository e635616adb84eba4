"""Start NeMo Gym with polar in it, and collect rollouts, through the calls NeMo-RL itself makes.

NeMo-RL: ``RunHelper().start(GlobalConfigDictParserConfig(...))`` in a process that has Ray already, then
``RolloutCollectionHelper().run_examples(rows)`` (NeMo-RL, environments/nemo_gym.py). We do the same, from our venv.
"""

import contextlib
import random
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import nemo_gym
import psutil
import ray
from nemo_gym.cli.env import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import BaseServerConfig
from omegaconf import DictConfig

from polar_env.config import environment, export, exported
from polar_env.errors import SandboxError, boundary
from polar_env.gym import CONFIG, ROOT
from polar_env.gym.venvs import link_venvs
from polar_env.sandbox import janitor

RAY_GRACE = 5.0
"""Seconds Ray's processes get to end by themselves."""


def use_root() -> None:
    """Make Gym, in this process and in the servers it starts, find polar beside its own environments."""
    known = environment("NEMO_GYM_EXTRA_ROOTS")
    root = str(ROOT)
    if root not in known.split(":"):
        export("NEMO_GYM_EXTRA_ROOTS", f"{root}:{known}" if known else root)
    nemo_gym._augment_sys_path()  # pyright: ignore[reportPrivateUsage] - Gym extends sys.path at import only


HEAD_PORTS = range(4000, 5000)
"""Where Gym's head server listens: it takes a number, not a socket, so the number must be one that neither Gym's
servers (5000-5999), Ray's workers (10002-19999) nor outgoing connections (32768 up) can take in between."""


def free_port() -> int:
    """A loopback port of HEAD_PORTS that nobody listens on. Raises SandboxError when there is none."""
    for port in random.sample(HEAD_PORTS, len(HEAD_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise SandboxError(f"no free port in {HEAD_PORTS.start}-{HEAD_PORTS.stop - 1} for NeMo Gym's head server")


def start_ray(tries: int = 3) -> None:
    """A local Ray, as NeMo-RL has one before it starts Gym.

    Ray gives its own agents 15 s and its raylet 30 s to come up, fixed (ray/_private/node.py); a machine that is
    busy for a moment misses that, so it is tried again. Ray's token authentication stays as it is (on): without it Ray
    runs whatever the network sends it.

    Raises:
        SandboxError: when Ray did not start; its logs are under /tmp/ray/session_latest/logs.
    """
    for last in (False,) * (tries - 1) + (True,):
        try:
            ray.init(include_dashboard=False, ignore_reinit_error=True, log_to_driver=False)
        except Exception as error:  # Ray raises a bare Exception when it times out
            ray.shutdown()
            if last:
                raise SandboxError(
                    f"Ray did not start in {tries} tries ({error}): is the machine overloaded?"
                ) from error
        else:
            return


@contextmanager
def own_ray() -> Generator[None]:
    """Ray until the end of the block, and nothing of it afterwards: its agents may need a minute to notice that it
    ended (they first report to a server that is gone), so they are killed."""
    before = set(psutil.Process().children(recursive=True))
    try:
        start_ray()
        for part in set(psutil.Process().children(recursive=True)) - before:
            with suppress(OSError):
                janitor.kill_later(part.pid)
        yield
    finally:
        rays = [child for child in psutil.Process().children(recursive=True) if child not in before]
        ray.shutdown()
        for left in psutil.wait_procs(rays, timeout=RAY_GRACE)[1]:
            with suppress(psutil.NoSuchProcess):
                left.kill()


@contextmanager
def _terminable() -> Generator[None]:
    """SIGTERM ends the block as Ctrl-C does, with a shell's exit code; Ray's own handler, which it sets when it starts,
    aborts. Only the main thread may have handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: what is being taken down must not be interrupted
    raise SystemExit(128 + number)


@contextmanager
def scratch() -> Generator[None]:
    """A folder for the servers' temporary files, which goes with them: Gym kills a server a second after it asked it to
    end, whatever that still has there. Ray keeps its own place: the paths of its sockets must be short."""
    folder = Path(tempfile.mkdtemp(prefix="polar-gym-"))
    janitor.remove_later(folder)
    try:
        with exported(TMPDIR=str(folder), RAY_TMPDIR=environment("RAY_TMPDIR", tempfile.gettempdir())):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():  # else the janitor tries longer, once we are gone
            janitor.removed(folder)


@contextmanager
def running(polar: Mapping[str, Any], workdir: Path) -> Generator[BaseServerConfig]:
    """NeMo Gym with our three servers up, on a local Ray; everything is stopped at the end of the block.

    Args:
        polar: conf/ groups for the `polar` resources server.
        workdir: where venv links are kept.
    """
    use_root()
    head = BaseServerConfig(host="127.0.0.1", port=free_port())
    settings = {
        "config_paths": [str(ROOT / CONFIG)],
        "polar_resources_server": {"resources_servers": {"polar": {"polar": dict(polar)}}},
        "policy_base_url": "",
        "policy_api_key": "",
        "policy_model_name": "",
        "skip_venv_if_present": True,
        "uv_venv_dir": str(link_venvs(workdir / "venvs")),
        "head_server": {"host": head.host, "port": head.port},
        "port_range_low": 5000,  # NeMo-RL's range: Gym's default overlaps Ray's worker ports
        "port_range_high": 5999,
    }
    helper = RunHelper()
    with own_ray(), _terminable(), scratch():
        with boundary(SandboxError, "starting NeMo Gym"):
            helper.start(
                GlobalConfigDictParserConfig(skip_load_from_cli=True, initial_global_config_dict=DictConfig(settings))
            )
        try:
            yield head
        finally:
            helper.shutdown()


async def collect(
    rows: Sequence[dict[str, Any]], head: BaseServerConfig
) -> AsyncGenerator[tuple[dict[str, Any], dict[str, Any]]]:
    """(row, result) pairs as rollouts finish; all rows are posted at once, as NeMo-RL does.

    Raises SandboxError: Gym's servers are gone, or answered with an error.
    """
    futures = cast(
        "Iterator[Awaitable[tuple[dict[str, Any], dict[str, Any]]]]",
        RolloutCollectionHelper().run_examples(examples=list(rows), head_server_config=head),
    )
    for future in futures:
        try:
            pair = await future
        except Exception as error:  # Gym raises its HTTP client's own
            raise SandboxError(
                f"a rollout was lost with NeMo Gym's servers: {type(error).__name__}: {error}"
            ) from error
        yield pair
