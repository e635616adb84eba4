"""The export room: finished rollouts as other trainers read them. No NeMo Gym is needed here.

``samples`` reads rows (and session logs) · one file per format makes lines of them · ``write`` puts those into a file.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from polar_env.errors import PolarError

FORMATS = {
    "nemo_rl": "polar_env.export.nemo_rl:lines",
    "neutral": "polar_env.export.neutral:lines",
    "trl": "polar_env.export.trl:lines",
    "verl": "polar_env.export.verl:lines",
    "slime": "polar_env.export.slime:lines",
    "sft": "polar_env.export.sft:lines",
}
"""Format name -> ``lines(rollouts, job)``, which yields one JSON object per line."""


class ExportError(PolarError):
    """What was given cannot become what was asked for."""


@dataclass(slots=True)
class Job:
    """What an export was asked for, and what it left out and why."""

    chains: Literal["all", "delivered"] | None = None
    """Which chains of a rollout become samples; ``None``: as the format's trainer takes them."""
    sessions: Path | None = None
    """``store.sessions``, for formats that need more than a row holds."""
    max_tokens: int | None = None
    """The longest chain the trainer takes. ``None``: what the rows were made with; the neutral format is whole then."""
    shortened: int = 0
    """Chains that were cut to it."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Why rollouts were left out -> how many."""
