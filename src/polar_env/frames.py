"""Frames of a session's log: ``magic, kind, header length, body length, payload CRC, prefix CRC`` (little-endian), then
a JSON header (zlib-compressed unless small) and a body of raw bytes. Pure.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAGIC = b"PLR1"
PREFIX = struct.Struct("<4sBIII")
"""Magic, kind, header bytes, body bytes, CRC32 of header and body; a CRC32 of these 17 bytes follows."""
PREFIX_SIZE = PREFIX.size + 4

SMALL = 128
"""Headers up to this many bytes (marks) are plain JSON: compressing them makes them longer."""


class FrameKind(IntEnum):
    """What a frame says."""

    OPEN = 1
    CALL = 2
    DELIVERED = 3
    SUPERSEDED = 4
    HOLE = 5
    SEAL = 6
    MESSAGES = 7


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    header: dict[str, Any]
    body: bytes


def encode_frame(kind: FrameKind, header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame as bytes. ``header`` is JSON; lone surrogates in model text survive (ASCII escapes)."""
    packed = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(packed) > SMALL:
        packed = zlib.compress(packed, 6)
    prefix = PREFIX.pack(MAGIC, kind, len(packed), len(body), zlib.crc32(body, zlib.crc32(packed)))
    return b"".join((prefix, struct.pack("<I", zlib.crc32(prefix)), packed, body))


def _decode_frame(data: bytes, at: int) -> tuple[Frame | None, int] | None:
    """(frame or ``None`` when corrupt, offset after it); ``None`` when the file ends before the frame does."""
    if len(data) - at < PREFIX_SIZE:
        return None
    prefix = data[at : at + PREFIX.size]
    if zlib.crc32(prefix) != int.from_bytes(data[at + PREFIX.size : at + PREFIX_SIZE], "little"):
        following = data.find(MAGIC, at + 1)
        return None, following if following >= 0 else len(data)
    _, kind, header_size, body_size, crc = PREFIX.unpack(prefix)
    start, middle = at + PREFIX_SIZE, at + PREFIX_SIZE + header_size
    end = middle + body_size
    if end > len(data):
        return None
    if zlib.crc32(data[start:end]) != crc:
        return None, end
    header = data[start:middle]
    try:
        text = header if header.startswith(b"{") else zlib.decompress(header)
        return Frame(FrameKind(kind), json.loads(text), data[middle:end]), end
    except (zlib.error, ValueError):  # its checksums are right, so it was written so
        return None, end


def frames(data: bytes) -> Iterator[Frame | None]:
    """Frames in file order; ``None`` once for each corrupt stretch. A torn tail (SIGKILL, crash) just ends."""
    at, broken = 0, False
    while step := _decode_frame(data, at):
        frame, at = step
        if frame is not None or not broken:
            yield frame
        broken = frame is None
