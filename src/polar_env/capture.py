"""What the policy sampled, call by call: the capture contract and the ledger of one session.

Capture never breaks a call, and a hole is never hidden: whatever could not be recorded exactly is a typed ``Hole``,
which makes the ledger incomplete, and an incomplete rollout is masked by construction.
"""

from array import array
from collections.abc import Iterator

import numpy as np

from polar_env.errors import CaptureError
from polar_env.frames import FrameKind
from polar_env.records import RecordStore
from polar_env.segment_log import SegmentLog, rebuild
from polar_env.types import CallRecord, EngineReply, Hole, HoleKind, ModelRequest, SealedLedger, StopReason

__all__ = ["Ledger", "SegmentLog", "judge", "rebuild"]

MAX_LOG_PROB = 1e-6
"""log_softmax in float32 may end a few ulp above 0; more than this is no probability. Values are kept as they came."""

MIN_LOG_PROB = -9000.0
"""vLLM writes -9999.0 where it has no log-probability."""

FINISH_WORDS = frozenset({"", "stop", "length", "tool_calls", "function_call", "stop_sequence", "abort"})
"""What engines call the end of a generation; empty when an engine has no word beyond its typed ``StopReason``."""


def judge(call_id: str, reply: EngineReply) -> tuple[Hole, ...]:
    """Hold one generation against the capture contract; an empty tuple means it may train.

    What an engine without ids cannot give is no breach: its calls never train (``trajectory``), so nothing is missing.
    """
    return tuple(Hole(kind, call_id, detail) for kind, detail in _breaches(reply))


def _breaches(reply: EngineReply) -> Iterator[tuple[HoleKind, str]]:
    if reply.ids:
        yield from _id_breaches(reply)
        yield from _length_breaches(reply)
        yield from _log_prob_breaches(reply)
    if reply.choices != 1:
        yield HoleKind.MANY_CHOICES, f"{reply.choices} choices, one is recorded"
    if reply.finish not in FINISH_WORDS:
        yield HoleKind.UNKNOWN_FINISH, f"the engine stopped for {reply.finish!r}"
    elif reply.finish == "length" and reply.turn.stop is not StopReason.LENGTH:
        yield HoleKind.UNKNOWN_FINISH, f"cut at its length, but told as {reply.turn.stop}"
    if not reply.policy_version:
        yield HoleKind.NO_POLICY_VERSION, "the engine did not say which policy sampled"


def _id_breaches(reply: EngineReply) -> Iterator[tuple[HoleKind, str]]:
    if not reply.prompt_ids:
        yield HoleKind.MISSING_IDS, "no prompt ids"
    if not reply.sampled_ids and reply.turn.usage.completion_tokens:
        yield HoleKind.MISSING_IDS, f"no sampled ids for {reply.turn.usage.completion_tokens} tokens"
    for name, ids in (("prompt", reply.prompt_ids), ("sampled", reply.sampled_ids)):
        if ids and np.frombuffer(ids, dtype=np.int32).min() < 0:
            yield HoleKind.MISSING_IDS, f"negative {name} id"


def _length_breaches(reply: EngineReply) -> Iterator[tuple[HoleKind, str]]:
    usage, sampled, priced = reply.turn.usage, len(reply.sampled_ids), len(reply.log_probs)
    if sampled != priced:
        yield HoleKind.LENGTH_MISMATCH, f"{sampled} sampled ids, {priced} log-probs"
    if sampled and sampled != usage.completion_tokens:
        yield HoleKind.LENGTH_MISMATCH, f"{sampled} sampled ids, usage says {usage.completion_tokens}"
    if reply.prompt_ids and len(reply.prompt_ids) != usage.prompt_tokens:
        yield HoleKind.LENGTH_MISMATCH, f"{len(reply.prompt_ids)} prompt ids, usage says {usage.prompt_tokens}"


def _log_prob_breaches(reply: EngineReply) -> Iterator[tuple[HoleKind, str]]:
    values = np.frombuffer(reply.log_probs, dtype=np.float32)
    good = np.isfinite(values) & (values <= MAX_LOG_PROB) & (values > MIN_LOG_PROB)
    if not good.all():
        first = int(np.argmin(good))
        yield HoleKind.BAD_LOG_PROB, f"{int((~good).sum())} log-probs, first {values[first]} at token {first}"


class Ledger:
    """All calls of one live session. A call is accepted once, in any order of arrival, and never after ``seal``.

    With a ``log`` it is made, filled and sealed inside the log's ``async with``; without one nothing is durable.
    """

    def __init__(self, session_id: str, log: SegmentLog | None = None) -> None:
        self.session_id = session_id
        self._log = log
        self._records = RecordStore()
        self._undelivered: set[str] = set()
        """Committed calls whose reply is on its way; nearly all calls of a session are not in it."""
        self._superseded: set[str] = set()
        self._holes: list[Hole] = []
        self._sealed: SealedLedger | None = None
        self._note(FrameKind.OPEN, session_id=session_id)

    async def append(self, record: CallRecord, request: ModelRequest | None = None) -> None:
        """Commit one call and what it was asked; returns once it is durable. A cancelled caller undoes nothing.

        Raises:
            CaptureError: after ``seal``, for a call or index already taken, or when the log could not write it (then
                the ledger has a LOST_RECORD hole).
        """
        self._admit(record)
        placed = self._records.add(record)
        self._undelivered.add(record.call_id)
        if self._log is None:
            return
        try:
            await self._log.write(record, request, base=placed.base, shared=placed.shared)
        except CaptureError as error:
            self._lose(record, error)
            raise

    def ids(self, call_id: str) -> "array[int]":
        """[P + S]: the exact prompt and sampled ids of a committed call, a copy. Raises KeyError: no such call."""
        return self._records.ids(call_id)

    def mark_delivered(self, call_id: str) -> None:
        """The reply of a committed call reached the client in full. Ignored after ``seal``: the session's verdict is
        closed."""
        if self._sealed is None and call_id in self._undelivered:
            self._undelivered.remove(call_id)
            self._note(FrameKind.DELIVERED, call_id=call_id)

    def mark_superseded(self, call_id: str) -> None:
        """The harness sampled the same request again after a full delivery."""
        if self._sealed is None and call_id not in self._superseded:
            self._superseded.add(call_id)
            self._note(FrameKind.SUPERSEDED, call_id=call_id)

    def mark_incomplete(self, hole: Hole) -> None:
        """Something of the session was not captured: told once, whoever notices. Ignored after ``seal``."""
        told = any((hole.kind, hole.call_id) == (other.kind, other.call_id) for other in self._holes if other.call_id)
        if self._sealed is None and not told:
            self._holes.append(hole)
            self._note(FrameKind.HOLE, kind=hole.kind, call_id=hole.call_id, detail=hole.detail)

    def seal(self) -> SealedLedger:
        """Close the session; the same ledger every time it is asked again."""
        if self._sealed is None:
            self._note(FrameKind.SEAL, records=len(self._records))
            self._sealed = self._close()
        return self._sealed

    def _admit(self, record: CallRecord) -> None:
        if self._sealed is not None:
            raise CaptureError(f"call {record.call_id} came after session {self.session_id} was sealed")
        if record.session_id != self.session_id:
            raise CaptureError(f"call {record.call_id} belongs to session {record.session_id}, not {self.session_id}")
        if record.call_id in self._records or any(record.index == known.index for known in self._records):
            raise CaptureError(f"call {record.call_id} (index {record.index}) was committed before")

    def _lose(self, record: CallRecord, error: CaptureError) -> None:
        if self._sealed is None:
            self._records.drop(record.call_id)
            self.mark_incomplete(Hole(HoleKind.LOST_RECORD, record.call_id, str(error)))

    def _close(self) -> SealedLedger:
        failure = self._log.failure if self._log else None
        if failure is not None and not self._holes:
            self._holes.append(Hole(HoleKind.LOST_RECORD, None, str(failure)))
        return SealedLedger(
            session_id=self.session_id,
            records=self._records.records(),
            delivered=frozenset(record.call_id for record in self._records) - self._undelivered,
            superseded=frozenset(self._superseded),
            holes=(*self._holes, *(hole for record in self._records.bare() for hole in record.holes)),
        )

    def _note(self, mark: FrameKind, /, **header: object) -> None:
        if self._log is not None:
            self._log.note(mark, **header)
