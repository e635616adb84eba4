"""The engine room: where a prompt becomes sampled tokens. One file per engine; ``ENGINES`` is the table.

Every engine gives the exact ids and log-probabilities of what it sampled, or it is refused at start (``check``). One
kind, ``text``, gives none and says so everywhere: its rollouts are graded and imitated (SFT), never trained on by ids.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from polar_env.types import Delta, EngineReply, ModelRequest, Sampling

ENGINES: dict[str, str] = {
    "vllm": "polar_env.engine.vllm:VllmEngine",
    "nemo_rl": "polar_env.engine.nemo_rl:NemoRlEngine",
    "sglang": "polar_env.engine.sglang:SglangEngine",
    "text": "polar_env.engine.text:TextEngine",
    "scripted": "polar_env.engine.scripted:ScriptedEngine",
}
"""Engine kind (config ``engine.kind``) -> dotted path of a class built as ``cls(config: EngineConfig)``."""


@dataclass(frozen=True, slots=True)
class Session:
    """What an engine may know of the session a call belongs to."""

    session_id: str
    """Routing affinity: all calls of one session go to one replica."""
    harness: str = ""
    task_id: str = ""
    script: str = ""
    """Scripted engine only: which policy plays this rollout."""
    gold_patch: str = ""
    """Scripted engine only: the fix its scripts apply. Never part of a prompt."""
    side: bool = False
    """The call is one whose tokens never train (a title, a quota check): how old its weights are is nobody's matter."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What ``check`` proved about an engine before any rollout starts."""

    model: str
    max_model_len: int
    policy_version: str
    real_tensors: bool
    """False for scripted log-probabilities: shown on screen wherever results are."""
    notes: tuple[str, ...] = ()
    ids: bool = True
    """False: no token ids and no log-probabilities; rollouts are text (engine ``text``)."""


class Engine(Protocol):
    async def check(self) -> EngineFacts:
        """Prove ids, log-probs and lengths with one tiny generation. Raises EngineError with the reason."""
        ...

    def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncIterator[Delta | EngineReply]:
        """Yield deltas as they come (none at all is allowed), then exactly one EngineReply, last.

        Closing the iterator aborts the generation upstream. Raises EngineOverflow, EngineBusy, EngineError.
        """
        ...

    async def count_tokens(self, request: ModelRequest) -> int:
        """Length of the rendered prompt in tokens; never generates."""
        ...

    async def aclose(self) -> None: ...
