"""The sandbox room: where a harness and a test run happen. ``bubblewrap`` is our NeMo Gym provider (entry point
``nemo_gym.sandbox_providers``); ``sandbox`` opens any Gym provider behind one handle; ``netns`` puts the proxy's
listener inside the sandbox's own network namespace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Overlay:
    """A host directory shown copy-on-write at ``target``: the sandbox may write, the host never sees it."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class Box:
    """What a sandbox is made of. Hostname, HOME and paths are fixed: a group's first prompts must be identical."""

    workdir: str
    overlays: tuple[Overlay, ...] = ()
    read_only: tuple[tuple[Path, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    image: str = ""
    """For providers that run images (docker, apptainer); empty for bubblewrap."""
    memory_mib: int | None = None
    """MiB for all its processes and the files they write to memory; ``None``: as configured, 0: no limit."""
    cpus: float | None = None
    network: bool = False
    """True shares the host's network: only for building environments, never for an agent or a grading."""
    blackholes: tuple[str, ...] = ()
    """IPv4 networks (``10.0.0.0/8``) where connecting times out instead of being unreachable: some tests want that."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """A finished command. ``code`` is ``None`` when it was killed at its timeout."""

    code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    seconds: float
    out_of_memory: bool = False
    """The kernel killed a process of the sandbox meanwhile, because it had used up its memory limit."""
