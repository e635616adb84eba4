"""What a sandbox's processes tried to reach and could not: read from a packet socket on their loopback interface.

Nothing is read while they run, so nothing they send costs other rollouts time: the kernel holds the first few hundred
packets (``enter.watch``) and counts the rest.
"""

import re
import struct
from collections import Counter
from ipaddress import IPv4Address, IPv6Address
from socket import socket

from polar_env.sandbox import bpf
from polar_env.types import Egress

LISTED = 100
"""Distinct destinations that are told."""
_SNAPPED = 512
"""Bytes kept of a packet: a question to a name server fits."""
_DNS = 53
_TCP, _UDP, _ICMP, _ICMP6, _ROUTED = 6, 17, 1, 58, 43
_OWN = re.compile(r"((.+\.)?localhost|ip6-(localhost|loopback)|(.+\.)?127\.in-addr\.arpa|0\.0\.0\.0\.in-addr\.arpa)")
"""Names of the sandbox itself, which resolvers ask for all the same."""
_MOST = 4096
"""Packets read at most: more than the kernel holds."""
_NAMES = {_TCP: "tcp", _UDP: "udp", _ICMP: "icmp", _ICMP6: "icmp"}
_OUTGOING, _IP, _IPV6 = 4, 0x0800, 0x86DD  # linux/if_packet.h, linux/if_ether.h
_PROTOCOL, _KIND = 0xFFFFF000, 0xFFFFF004
"""SKF_AD_OFF + SKF_AD_PROTOCOL and SKF_AD_PKTTYPE (linux/filter.h): what is no byte of the packet."""
_SOL_PACKET, _STATISTICS = 263, 6  # linux/socket.h, linux/if_packet.h
_QUESTION = 12
"""Where a DNS message's question begins (RFC 1035, section 4.1)."""


def program() -> bytes:
    """The BPF program of ``enter.watch``: of what is sent, the packets to other addresses than the loopback's and than
    groups (multicast), and questions to a name server there (resolvers ask 127.0.0.1 when /etc/resolv.conf names none).
    The agent's talk with its model is on the loopback, and is not copied."""
    equal, half, word = bpf.JUMP_EQUAL, bpf.LOAD_HALF, bpf.LOAD_WORD
    return bpf.assemble(
        [
            ("", (word, _KIND, "", "")),
            ("", (equal, _OUTGOING, "", "drop")),
            ("", (half, _PROTOCOL, "", "")),
            ("", (equal, _IPV6, "ipv6", "")),
            ("", (equal, _IP, "", "drop")),
            ("", (bpf.LOAD_BYTE, 16, "", "")),  # the destination's first byte
            ("", (bpf.JUMP_AT_LEAST, 224, "drop", "")),  # multicast and broadcast: among its own programs
            ("", (equal, 127, "", "keep")),
            ("", (bpf.X_IS_HEADER, 0, "", "")),
            ("", (bpf.LOAD_BYTE, 9, "", "")),
            ("", (equal, _UDP, "port", "")),
            ("", (equal, _TCP, "", "drop")),
            ("port", (bpf.LOAD_HALF_AT_X, 2, "", "")),
            ("", (equal, _DNS, "keep", "drop")),
            ("ipv6", (bpf.LOAD_BYTE, 24, "", "")),
            ("", (equal, 255, "drop", "")),
            ("", (bpf.LOAD_BYTE, 6, "", "")),
            ("", (equal, _ROUTED, "keep", "")),  # what it names is only the first stop
            ("", (word, 24, "", "")),  # the destination's four words
            ("", (equal, 0, "", "keep")),
            ("", (word, 28, "", "")),
            ("", (equal, 0, "", "keep")),
            ("", (word, 32, "", "")),
            ("", (equal, 0, "", "keep")),
            ("", (word, 36, "", "")),
            ("", (equal, 1, "", "keep")),
            ("", (bpf.LOAD_BYTE, 6, "", "")),
            ("", (equal, _UDP, "port of ipv6", "")),
            ("", (equal, _TCP, "", "drop")),
            ("port of ipv6", (half, 42, "", "")),
            ("", (equal, _DNS, "keep", "drop")),
            ("keep", (bpf.RETURN, _SNAPPED, "", "")),
            ("drop", (bpf.RETURN, 0, "", "")),
        ]
    )


def read(watched: socket) -> Egress:
    """What a socket of ``Sandbox.watch`` holds, emptied. Never raises for what was sent, whatever it is."""
    tried, told = Counter[str](), 0
    for _ in range(_MOST):
        try:
            name = destination(watched.recv(_SNAPPED))
        except BlockingIOError:
            break
        except OSError:  # the interface was taken down: told once, and what is held can be read on
            continue
        own = name.startswith("dns ") and _OWN.fullmatch(name, 4)
        if not own and (name in tried or len(tried) < LISTED):
            tried[name] += 1
            told += 1
        told += bool(own)
    seen, _ = struct.unpack("=II", watched.getsockopt(_SOL_PACKET, _STATISTICS, 8))
    return Egress(dict(tried), max(0, seen - told))


def destination(packet: bytes) -> str:
    """Where an IP packet was to go: ``dns NAME`` for a question to a name server, else ``tcp 192.0.2.1:443``,
    ``udp [2001:db8::1]:53``, ``icmp 192.0.2.1``; for other protocols their number; ``malformed`` for none."""
    six = packet[:1] >= b"\x60"
    if len(packet) < (40 if six else 20):
        return "malformed"
    start, protocol = (40, packet[6]) if six else (4 * (packet[0] & 15), packet[9])
    where = f"[{IPv6Address(packet[24:40])}]" if six else str(IPv4Address(packet[16:20]))
    kind, body = _NAMES.get(protocol, f"ip{protocol}"), packet[start:]
    if protocol not in (_TCP, _UDP) or len(body) < 4:
        return f"{kind} {where}"
    port = int.from_bytes(body[2:4], "big")
    asked = _asked(body[8:]) if (protocol, port) == (_UDP, _DNS) else ""
    return f"dns {asked}" if asked else f"{kind} {where}:{port}"


def _asked(message: bytes) -> str:
    """The name a DNS message asks for (RFC 1035, section 4.1.2); empty when it is none."""
    at, labels = _QUESTION, list[str]()
    while at < len(message) and (length := message[at]):
        label = message[at + 1 : at + 1 + length]
        if len(label) < length or not label.isascii() or not label.decode("ascii").isprintable():
            return ""
        labels.append(label.decode("ascii").lower())
        at += 1 + length
    return ".".join(labels)
