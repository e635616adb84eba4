"""Classic BPF programs, written with labels in place of distances."""

import struct
from collections.abc import Sequence

LOAD_WORD, LOAD_HALF, LOAD_BYTE, LOAD_HALF_AT_X, X_IS_HEADER = 0x20, 0x28, 0x30, 0x48, 0xB1
"""BPF_LD of W, H, B|ABS and H|IND, and BPF_LDX|B|MSH: X becomes the length of an IPv4 header (linux/bpf_common.h)."""
JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x15, 0x35, 0x06
"""BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K."""

Op = tuple[int, int, str, str]
"""Code, value, and where to go if it holds and if not; an empty label is the next operation."""
Listing = Sequence[tuple[str, Op]]
"""(label, operation); an empty label is none."""


def assemble(listing: Listing) -> bytes:
    """``struct sock_filter[]``. Raises KeyError for a label that is nowhere."""
    places = {label: at for at, (label, _) in enumerate(listing) if label}
    ops: list[bytes] = []
    for at, (_, (code, value, yes, no)) in enumerate(listing):
        jumps = [places[label] - at - 1 if label else 0 for label in (yes, no)]
        ops.append(struct.pack("=HBBI", code, *jumps, value))
    return b"".join(ops)
