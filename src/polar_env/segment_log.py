"""The durable log of one session: append-only frames, token ids stored once, one fsync for all that wait.

A file is a run of ``frames``. A call names an earlier call that begins as its prompt does, how many ids they share, and
stores only the ids that are new, as raw little-endian arrays. What it was asked follows in a frame of its own, unless
``store.messages`` is off. The session's key is never written.
"""

import asyncio
import dataclasses
import os
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from polar_env import conversation
from polar_env.conversation import Conversation
from polar_env.errors import CaptureError, boundary
from polar_env.frames import Damage, Frame, FrameKind, encode_frame, frames
from polar_env.messages import Replaced
from polar_env.records import RecordStore
from polar_env.types import (
    AssistantTurn,
    CallKind,
    CallRecord,
    Hole,
    HoleKind,
    ModelRequest,
    Sampling,
    SealedLedger,
    StopReason,
    ToolCall,
    Usage,
    WireApi,
)

FILE_NAME = "calls.log"

WRITERS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="segment-log")
"""Threads that write and fsync, shared by all sessions of the process: a thousand idle logs cost no thread."""


# --- records ----------------------------------------------------------------------------------------------------


def _little(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _array(code: str, data: bytes) -> "array[Any]":
    values: array[Any] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _encode_call(record: CallRecord, base: str | None, shared: int) -> bytes:
    arrays = ("prompt_ids", "sampled_ids", "log_probs")
    header = {each.name: getattr(record, each.name) for each in dataclasses.fields(record) if each.name not in arrays}
    header |= {name: dataclasses.asdict(header[name]) for name in ("turn", "sampling", "asked")}
    header["holes"] = [dataclasses.asdict(hole) for hole in record.holes]
    header |= {"parent": base, "shared": shared, "prompt": len(record.prompt_ids), "sampled": len(record.sampled_ids)}
    body = (_little(record.prompt_ids[shared:]), _little(record.sampled_ids), _little(record.log_probs))
    return encode_frame(FrameKind.CALL, header, b"".join(body))


def _decode_turn(data: dict[str, Any]) -> AssistantTurn:
    return AssistantTurn(
        text=data["text"],
        tool_calls=tuple(ToolCall(**call) for call in data["tool_calls"]),
        stop=StopReason(data["stop"]),
        usage=Usage(**data["usage"]),
        reasoning=data["reasoning"],
    )


def _decode_hole(data: dict[str, Any]) -> Hole:
    return Hole(HoleKind(data["kind"]), data["call_id"], data["detail"])


def _decode_call(frame: Frame) -> CallRecord:
    """The record of a frame; its ``prompt_ids`` lack what the prompt shares with its base."""
    header = dict(frame.header)
    header.pop("parent")
    prompt, sampled = 4 * (header.pop("prompt") - header.pop("shared")), 4 * header.pop("sampled")
    header["turn"] = _decode_turn(header["turn"])
    header["sampling"], header["asked"] = Sampling(**header["sampling"]), Sampling(**header["asked"])
    header["holes"] = tuple(_decode_hole(hole) for hole in header["holes"])
    header["ignored"] = tuple(header["ignored"])
    header["replaced"] = tuple(Replaced(*each) for each in header.get("replaced", ()))
    header["kind"], header["wire"] = CallKind(header["kind"]), WireApi(header["wire"])
    return CallRecord(
        **header,
        prompt_ids=_array("i", frame.body[:prompt]),
        sampled_ids=_array("i", frame.body[prompt : prompt + sampled]),
        log_probs=_array("f", frame.body[prompt + sampled :]),
    )


# --- writing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Queued:
    """A frame on its way to the disk, and who waits for it."""

    frame: bytes
    waiter: asyncio.Future[None] | None = None
    call_id: str = ""
    request: ModelRequest | None = None


class SegmentLog:
    """Append-only log of one session in ``directory``; use as ``async with SegmentLog(directory) as log``.

    All methods are called from one event loop; writing and fsync happen on shared threads. What is queued while one
    fsync runs shares the next one. After the first failed write the log takes nothing more: ``failure`` says why.
    With ``messages`` off, what calls were asked is not kept (``polar export --format sft`` needs it).
    """

    def __init__(self, directory: Path, *, messages: bool = True) -> None:
        self.directory = directory
        self._asked = conversation.Writer() if messages else None
        self.failure: CaptureError | None = None
        self._lock, self._io = Lock(), Lock()
        self._pending: list[_Queued] = []
        self._file, self._closed = -1, False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await asyncio.shield(self._loop.run_in_executor(WRITERS, self._close))

    async def write(
        self, record: CallRecord, request: ModelRequest | None = None, *, base: str | None = None, shared: int = 0
    ) -> None:
        """Store a call and what it was asked. Returns once it is on disk.

        Args:
            base: a call written before; its ids begin with the first ``shared`` ids of this prompt, which are not
                written again.

        Raises:
            CaptureError: it is not on disk.
        """
        durable: asyncio.Future[None] = self._loop.create_future()
        self._put(_Queued(_encode_call(record, base, shared), durable, record.call_id, request))
        await asyncio.shield(durable)

    def note(self, mark: FrameKind, /, **header: Any) -> None:
        """Store a mark (opened, delivered, superseded, hole, sealed) without waiting for the disk.

        The kernel has it at once, so it outlives the process; it is on the disk with the next call, or the end.
        A mark that comes after the log was closed is dropped: the live ledger still has it.
        """
        if not self._closed:
            self._put(_Queued(encode_frame(mark, header)))

    def _put(self, queued: "_Queued") -> None:
        if self._file < 0:
            raise CaptureError(f"the log of session {self.directory.name} is not open: use it inside `async with`")
        with self._lock:
            self._pending.append(queued)
            first = len(self._pending) == 1
        if first:
            WRITERS.submit(self._flush)

    def _open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.directory / FILE_NAME, flags, 0o600)
            used = os.fstat(self._file).st_size
            _sync_directory(self.directory)
        except OSError as error:
            raise CaptureError(
                f"opening the session log {self.directory}: {error}; free or change store.sessions"
            ) from error
        if used:
            os.close(self._file)
            raise CaptureError(f"{self.directory} already holds a session's log: every session needs its own directory")

    def _flush(self, *, last: bool = False) -> None:
        with self._io:
            with self._lock:
                batch, self._pending = self._pending, []
            waiters = [queued.waiter for queued in batch if queued.waiter]
            if batch or last:
                data = b"".join(data for queued in batch for data in self._frames(queued))
                self._commit(data, sync=last or bool(waiters))
                self._answer(waiters)

    def _frames(self, queued: "_Queued") -> Iterator[bytes]:
        """A queued frame, and what its call was asked: a history as JSON takes milliseconds the event loop has not."""
        yield queued.frame
        if self._asked is not None and queued.request is not None:
            with suppress(TypeError, ValueError, RecursionError):  # no JSON: the call counts, its messages do not
                yield encode_frame(FrameKind.MESSAGES, *self._asked.encode(queued.call_id, queued.request))

    def _commit(self, data: bytes, *, sync: bool) -> None:
        if self.failure is not None:
            return
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if sync:
                os.fsync(self._file)
        except OSError as error:
            self.failure = CaptureError(f"writing the session log failed: {error}; calls are no longer recorded")

    def _answer(self, waiters: list[asyncio.Future[None]]) -> None:
        if waiters and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_settle, waiters, self.failure)

    def _close(self) -> None:
        self._flush(last=True)
        with self._io:
            descriptor, self._file = self._file, -1
            os.close(descriptor)


def _settle(waiters: list[asyncio.Future[None]], failure: CaptureError | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if failure is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(failure)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- rebuilding -------------------------------------------------------------------------------------------------


MARKS = (FrameKind.DELIVERED, FrameKind.SUPERSEDED)


@dataclass(slots=True)
class _Rebuilt:
    """What has been read of a log so far."""

    session_id: str
    records: RecordStore = field(default_factory=RecordStore)
    marks: dict[FrameKind, set[str]] = field(default_factory=lambda: {kind: set[str]() for kind in MARKS})
    holes: list[Hole] = field(default_factory=list[Hole])
    asked: list[Frame] = field(default_factory=list[Frame])
    sealed: int | None = None
    """How many calls the session had when it was closed."""
    named: set[str] = field(default_factory=set[str])
    """Calls that any frame speaks of."""
    damage: list[Damage] = field(default_factory=list[Damage])

    def take(self, frame: Frame | Damage) -> None:
        if isinstance(frame, Frame):
            self._take(frame)
            return
        self.damage.append(frame)
        if frame is Damage.CORRUPT:
            self.lose(None, "a frame of the session log is corrupt")

    def told(self) -> Iterator[str]:
        """What is damaged, in words."""
        if corrupt := self.damage.count(Damage.CORRUPT):
            yield f"{corrupt} part{'s' if corrupt > 1 else ''} of it cannot be read: the bytes are not those written"
        if Damage.TORN in self.damage:
            yield "it ends inside a frame: it was cut, or its process was killed while it wrote"
        if missing := sorted(call_id for call_id in self.named if call_id not in self.records):
            yield f"missing, by what is left of it: {', '.join(missing)}"
        if self.sealed is not None and self.sealed != len(self.records):
            yield f"its session was closed with {self.sealed} calls"

    def _take(self, frame: Frame) -> None:
        if frame.kind not in (FrameKind.OPEN, FrameKind.HOLE, FrameKind.SEAL):
            self.named.add(frame.header["call_id"])
        match frame.kind:
            case FrameKind.OPEN:
                self.session_id = frame.header["session_id"]
            case FrameKind.CALL:
                self._take_call(frame)
            case FrameKind.DELIVERED | FrameKind.SUPERSEDED:
                self.marks[frame.kind].add(frame.header["call_id"])
            case FrameKind.HOLE:
                self.holes.append(_decode_hole(frame.header))
            case FrameKind.SEAL:
                self.sealed = int(frame.header["records"])
                self._check_count(self.sealed)
            case FrameKind.MESSAGES:
                self.asked.append(frame)

    def ledger(self) -> SealedLedger:
        return SealedLedger(
            session_id=self.session_id,
            records=self.records.records(),
            delivered=frozenset(self.marks[FrameKind.DELIVERED]),
            superseded=frozenset(self.marks[FrameKind.SUPERSEDED]),
            holes=(*self.holes, *(hole for record in self.records.bare() for hole in record.holes)),
        )

    def lose(self, call_id: str | None, why: str) -> None:
        self.holes.append(Hole(HoleKind.LOST_RECORD, call_id, why))

    def _take_call(self, frame: Frame) -> None:
        base = frame.header["parent"]
        self.named |= {base} - {None}
        if base is None:
            self.records.add(_decode_call(frame))
        elif base in self.records:
            self.records.add_after(_decode_call(frame), base, frame.header["shared"])
        else:
            self.lose(frame.header["call_id"], f"the log lost call {base}, whose ids this call's prompt begins with")

    def _check_count(self, sealed: int) -> None:
        if sealed > len(self.records) and not self.holes:
            self.lose(None, f"the session was sealed with {sealed} calls, the log holds {len(self.records)}")


@dataclass(frozen=True, slots=True)
class SessionLog:
    """A log read back."""

    ledger: SealedLedger
    sealed: bool
    """False: the session was not closed when the log ended, or the log was cut."""
    asked: tuple[Frame, ...]
    damage: tuple[str, ...]
    """What became of the file after it was written, a clause each; empty: all that it holds can be read."""

    def conversations(self) -> dict[str, Conversation]:
        """call_id -> what it was asked; a call that was recorded without is not there. Raises CaptureError."""
        with boundary(CaptureError, f"reading the messages of session {self.ledger.session_id}"):
            return conversation.decode((frame.header, frame.body) for frame in self.asked)


def rebuild(directory: Path) -> SealedLedger:
    """The ledger of ``read``."""
    return read(directory).ledger


def read(directory: Path) -> SessionLog:
    """Read a session's log back; arrays are bit-identical to what was appended.

    A torn last frame (the process was killed while writing) is no hole: nobody was told that it was on disk. A frame
    that is corrupt is a LOST_RECORD hole, and so is every call that needed it. A log without a seal mark gives what is
    there. ``damage`` tells of all that cannot be read.

    Raises:
        CaptureError: there is no readable log in ``directory``.
    """
    state = _Rebuilt(directory.name)
    with boundary(CaptureError, f"reading the session log in {directory}"):
        for frame in frames((directory / FILE_NAME).read_bytes()):
            state.take(frame)
    return SessionLog(state.ledger(), state.sealed is not None, tuple(state.asked), tuple(state.told()))
