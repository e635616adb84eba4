"""Frames of a session's log: ``magic, kind, header length, body length, payload CRC, prefix CRC`` (little-endian), then
a JSON header (zlib-compressed unless small) and a body of raw bytes. Pure.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from polar_env import fast_json

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


class Damage(Enum):
    """What stands in a file where no frame can be read."""

    CORRUPT = 1
    """Bytes that are not those that were written."""
    TORN = 2
    """The beginning of a frame, at the very end: its process was killed while it wrote, or the file was cut."""


def encode_frame(kind: FrameKind, header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame as bytes. ``header`` is JSON; lone surrogates in model text survive (ASCII escapes)."""
    packed = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(packed) > SMALL:
        packed = zlib.compress(packed, 6)
    prefix = PREFIX.pack(MAGIC, kind, len(packed), len(body), zlib.crc32(body, zlib.crc32(packed)))
    return b"".join((prefix, struct.pack("<I", zlib.crc32(prefix)), packed, body))


def _decode_frame(data: bytes, at: int) -> tuple[Frame | Damage, int]:
    """(frame or what is there instead, offset after it)."""
    if len(data) - at < PREFIX_SIZE:
        return Damage.TORN, len(data)
    prefix = data[at : at + PREFIX.size]
    if zlib.crc32(prefix) != int.from_bytes(data[at + PREFIX.size : at + PREFIX_SIZE], "little"):
        following = data.find(MAGIC, at + 1)
        return Damage.CORRUPT, following if following >= 0 else len(data)
    _, kind, header_size, body_size, crc = PREFIX.unpack(prefix)
    start, middle = at + PREFIX_SIZE, at + PREFIX_SIZE + header_size
    end = middle + body_size
    if end > len(data):
        return Damage.TORN, len(data)
    if zlib.crc32(data[start:end]) != crc:
        return Damage.CORRUPT, end
    header = data[start:middle]
    try:
        text = header if header.startswith(b"{") else zlib.decompress(header)
        return Frame(FrameKind(kind), fast_json.read(text), data[middle:end]), end
    except (zlib.error, ValueError):  # its checksums are right, so it was written so
        return Damage.CORRUPT, end


def frames(data: bytes) -> Iterator[Frame | Damage]:
    """Frames in file order; a corrupt stretch is told once, however many frames it was."""
    at, before = 0, None
    while at < len(data):
        found, at = _decode_frame(data, at)
        if found is not Damage.CORRUPT or found is not before:
            yield found
        before = found
