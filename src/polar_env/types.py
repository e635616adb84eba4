"""Facts that cross rooms: frozen, slotted, without behaviour beyond derived properties.

Token ids are ``array('i')`` (int32) and log-probabilities ``array('f')`` (float32), never lists of Python ints:
a session of 150 turns and 136K tokens must stay cheap to hold and to rebuild.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from polar_env.messages import ChatMessage, Replaced, ToolSpec
from polar_env.verdict import Verdict

# --- closed lists -----------------------------------------------------------------------------------------------


class WireApi(StrEnum):
    """The wire API a harness speaks to us."""

    ANTHROPIC = "anthropic"
    CHAT = "chat"
    RESPONSES = "responses"
    GEMINI = "gemini"


class StopReason(StrEnum):
    """Why the engine stopped sampling, whatever the wire later calls it."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    ABORT = "abort"


class CallKind(StrEnum):
    """What a model call is for; decides whether its tokens train (TrajectoryConfig.trained_kinds)."""

    AGENT = "agent"
    SUB_AGENT = "sub_agent"
    COMPACTION = "compaction"
    SIDE = "side"


class Outcome(StrEnum):
    """How a rollout ended. ``INFRASTRUCTURE`` lists the ones that are masked, never trained, never scored 0."""

    COMPLETED = "completed"
    AGENT_ERROR = "agent_error"
    AGENT_TIMEOUT = "agent_timeout"
    TURN_LIMIT = "turn_limit"
    CONTEXT_OVERFLOW = "context_overflow"
    NO_CALLS = "no_calls"
    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    REQUEST_REFUSED = "request_refused"
    """The engine is well and took none of the harness's requests: the two do not fit. Nothing was sampled."""
    GRADE_ERROR = "grade_error"
    CANCELLED = "cancelled"
    STALE_POLICY = "stale_policy"
    """What it sampled first is older than ``engine.max_policy_age`` allows: too far off the policy to train."""
    STRAGGLER = "straggler"
    """Most of its group had long finished (``stragglers``, then ``mask``)."""
    GROUP_TIMEOUT = "group_timeout"
    """The same where being slow is to cost something (``stragglers``, then ``grade``): graded as it stands."""
    CAPTURE_INCOMPLETE = "capture_incomplete"


INFRASTRUCTURE: frozenset[Outcome] = frozenset(
    {
        Outcome.NO_CALLS,
        Outcome.SANDBOX_ERROR,
        Outcome.ENGINE_ERROR,
        Outcome.REQUEST_REFUSED,
        Outcome.GRADE_ERROR,
        Outcome.CANCELLED,
        Outcome.STALE_POLICY,
        Outcome.STRAGGLER,
        Outcome.CAPTURE_INCOMPLETE,
    }
)


class HoleKind(StrEnum):
    """One way the capture contract can fail (design: capture contract per call)."""

    MISSING_IDS = "missing_ids"
    LENGTH_MISMATCH = "length_mismatch"
    BAD_LOG_PROB = "bad_log_prob"
    MANY_CHOICES = "many_choices"
    UNKNOWN_FINISH = "unknown_finish"
    NO_POLICY_VERSION = "no_policy_version"
    LOST_RECORD = "lost_record"


# --- the conversation -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. ``None`` means "not asked for" in a request and "engine default" in a policy."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """The earlier call whose conversation a request carries on, message for message (``continuation``)."""

    call_id: str
    ids: "array[int]"
    """[P + S]: that call's exact prompt and sampled ids. An engine that splices begins the next prompt with them."""
    messages: int
    """How many of the request's messages those ids hold, that call's own turn included; the rest is new."""
    cut: bool = False
    """True when that call sampled to its length limit, so that its turn has no end token of its own."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A harness's model call, decoded from its wire API and free of it."""

    wire: WireApi
    model: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    """``auto``, ``none``, ``required`` or the name of the one tool that must be called."""
    parallel_tool_calls: bool = True
    stream: bool = False
    asked: Sampling = Sampling()
    """What the harness asked for: recorded, never obeyed (the session's policy samples)."""
    custom_tools: frozenset[str] = frozenset()
    """Names of freeform (Codex ``custom``) tools that were mapped to a function with one string ``input``."""
    namespaces: Mapping[str, str] = field(default_factory=dict[str, str])
    """Function name sent to the model -> Codex tool namespace it came from."""
    ignored: tuple[str, ...] = ()
    """Names of request fields nobody understood: ignored and counted, never a 400."""
    include_usage: bool = True
    """Chat streaming only: ``stream_options.include_usage``."""
    sse: bool = True
    """Gemini streaming only: ``alt=sse``; without it the stream is one JSON array."""
    continues: Continuation | None = None
    """Set by the session, never by a wire API; an engine that cannot splice ignores it."""
    replaced: tuple[Replaced, ...] = ()
    """What differs in ``messages`` from what the harness sent, in the order it was changed."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model made: ``arguments`` is the exact text it produced, valid JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """What the model said, parsed by the engine: the content of one reply in every wire API."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    stop: StopReason
    usage: Usage
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A streamed fragment of the turn. ``index`` numbers tool calls from 0; a call opens with its id and name."""

    kind: Literal["reasoning", "text", "tool_open", "tool_args"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


# --- capture ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hole:
    """A broken capture contract: which call (``None``: unknown), how, and what was seen."""

    kind: HoleKind
    call_id: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class EngineReply:
    """One generation as the engine reported it, before the capture contract has judged it.

    Shapes: ``prompt_ids`` [P], ``sampled_ids`` [S], ``log_probs`` [S] (natural log, float32).
    ``turn`` and the tensors describe the same sampling event; nothing here is ever re-tokenised.
    """

    turn: AssistantTurn
    prompt_ids: "array[int]"
    sampled_ids: "array[int]"
    log_probs: "array[float]"
    policy_version: str
    choices: int = 1
    finish: str = ""
    """The engine's own word for why it stopped, kept for the record."""
    spliced: bool = False
    """True when the prompt was sent as ``request.continues.ids`` and the rendering of what is new."""
    versioned: bool = True
    """False when the engine itself did not tell ``policy_version``: one that the trainer declared is better."""
    ids: bool = True
    """False for an API that gives no token ids (engine ``text``): a conversation to imitate, no tensors to train on."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One committed model call: the unit of the ledger. Appended before the terminal event leaves the proxy."""

    call_id: str
    session_id: str
    index: int
    """Order of arrival in the session, from 0."""
    kind: CallKind
    wire: WireApi
    thread: str
    """Harness thread (sub-agent id); ``""`` is the main thread."""
    body_digest: str
    """SHA-256 (hex) of the request body as received, for retries and for `polar verify`."""
    turn: AssistantTurn
    prompt_ids: "array[int]"
    sampled_ids: "array[int]"
    log_probs: "array[float]"
    policy_version: str
    sampling: Sampling
    asked: Sampling
    message_count: int
    """Messages in the request, in Chat form."""
    started: float
    """Seconds since the epoch when the request was read."""
    ended: float
    holes: tuple[Hole, ...] = ()
    ignored: tuple[str, ...] = ()
    continues: str | None = None
    """call_id of the earlier call whose conversation the request carried on; ``None``: it began or rewrote one."""
    spliced: bool = False
    """True when the engine was sent that call's exact ids and the rendering of what is new."""
    replaced: tuple[Replaced, ...] = ()
    """What the engine was shown in another form than the harness wrote it; ``proxy.steady.restored`` undoes it."""
    ids: bool = True
    """As ``EngineReply.ids``."""


@dataclass(frozen=True, slots=True)
class SealedLedger:
    """All that was captured in one session; nothing can be added any more."""

    session_id: str
    records: Sequence[CallRecord]
    """In order of arrival (``index``)."""
    delivered: frozenset[str]
    """call_ids whose reply reached the client in full."""
    superseded: frozenset[str]
    """call_ids that the harness sampled again (identical body after a full delivery)."""
    holes: tuple[Hole, ...]
    """Holes of the session itself plus those of every record."""

    @property
    def complete(self) -> bool:
        """True when no record was lost and every record kept the capture contract."""
        return not self.holes


# --- trajectory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainTurn:
    """One call inside a chain. ``prompt_ids`` is the full prompt; it starts with everything before it in the chain."""

    call_id: str
    prompt_ids: "array[int]"
    sampled_ids: "array[int]"
    log_probs: "array[float]"
    trained: bool
    """False when another chain owns these tokens, or the call's kind, delivery or holes keep it from training."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Calls joined by exact token prefix: one contiguous sequence of ids."""

    turns: tuple[ChainTurn, ...]
    kind: CallKind
    thread: str
    branched_from: str | None
    """call_id after which this chain left an earlier one, ``None`` for a root."""

    @property
    def trainable_tokens(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns if turn.trained)

    @property
    def total_tokens(self) -> int:
        """Length of the whole sequence: the last prompt and what was sampled on it."""
        return len(self.turns[-1].prompt_ids) + len(self.turns[-1].sampled_ids) if self.turns else 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Everything a session sampled, as chains; ``delivered`` indexes the chain a one-row trainer gets."""

    chains: tuple[Chain, ...]
    delivered: int | None
    sampled_tokens: int
    """Sum over delivered, valid calls of trained kinds: equals the sum of ``trainable_tokens`` over chains."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """call_id -> why its tokens do not train (undelivered, superseded, kind, hole)."""
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What decided it (``delivery``, ``trained_kinds``, ``seed``), as JSON: it can be built again, and checked."""

    @property
    def main(self) -> Chain | None:
        return None if self.delivered is None else self.chains[self.delivered]


# --- ending -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewardDecision:
    """``reward`` in {0.0, 1.0}; ``masked`` samples are delivered and never trained."""

    reward: float
    masked: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HarnessExit:
    """How the harness process ended. ``code`` is ``None`` when it was killed at its deadline."""

    code: int | None
    stdout: str
    stderr: str
    timed_out: bool = False
    seconds: float = 0.0
    out_of_memory: bool = False
    """The kernel killed a process of it at the sandbox's memory limit."""


@dataclass(frozen=True, slots=True)
class Egress:
    """What a sandbox sent to others than its model, all of it refused. ``tried``: ``dns NAME``, ``tcp ADDRESS:PORT``,
    ``udp …``, ``icmp ADDRESS`` -> packets, repetitions included; ``more``: packets beyond those that are listed."""

    tried: Mapping[str, int]
    more: int = 0

    @property
    def packets(self) -> int:
        return sum(self.tried.values()) + self.more


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """One rollout, finished: what the gym door and the CLI turn into rows and tables."""

    task_id: str
    harness: str
    outcome: Outcome
    detail: str
    """The first real error, or why the outcome is what it is; empty for a plain completion."""
    verdict: Verdict | None
    decision: RewardDecision
    trajectory: Trajectory
    ledger: SealedLedger
    patch: bytes
    exit: HarnessExit | None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Wall-clock seconds by phase: queue, start, agent, grade, finalise; held: how much was spent at the fence."""
    ages: Mapping[str, int] = field(default_factory=dict[str, int])
    """Name of each policy version that sampled -> how many updates it was behind when the rollout ended."""
    stale: str = ""
    """Why it is older than ``engine.max_policy_age`` allows; empty when it is not."""
    ended: Outcome | None = None
    """How the agent ended, where ``outcome`` names a failure that came after it."""
    egress: Egress | None = None
    """``None``: its sandbox could not be watched."""
