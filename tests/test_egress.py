"""What a sandbox's processes try to reach, seen from outside, and refused as before."""

import asyncio
import socket
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.sandbox import egress
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from polar_env.types import Egress
from sandbox_helpers import box_of, config
from test_netns import answer, connect


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "repo").mkdir()
    return tmp_path / "repo"


async def run(sandbox: Sandbox, script: str, *args: str) -> str:
    done = await sandbox.exec(["/usr/bin/python3", "-c", script, *args], timeout=30)
    return (done.stdout + done.stderr).decode().strip()


async def test_names_and_addresses_that_are_tried_are_told_and_refused(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        with sandbox.watch() or pytest.fail("not watched") as watched:
            before = time.monotonic()
            assert "resolution" in await connect(sandbox, "PyPI.example.org", 443)
            assert "refused" in await connect(sandbox, "192.0.2.1", 443)
            assert "refused" in await connect(sandbox, "2001:db8::1", 80)
            assert time.monotonic() - before < 20  # refused, not waited for
            seen = egress.read(watched)
            again = egress.read(watched)
    assert set(seen.tried) == {"dns pypi.example.org", "tcp 192.0.2.1:443", "tcp [2001:db8::1]:80"}
    assert (seen.tried["tcp 192.0.2.1:443"], seen.tried["tcp [2001:db8::1]:80"], seen.more) == (1, 1, 0)
    assert again == Egress({}, 0)


async def test_talk_with_the_model_and_with_itself_is_not_egress(repo: Path) -> None:
    """IPv4 and IPv6 loopback, and what a server of the agent's own is sent at its unspecified address."""
    own = """
import socket
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "127.7.7.7")):
    with socket.socket(family) as server:
        server.bind((host, 0)); server.listen()
        with socket.create_connection(server.getsockname()[:2]) as client:
            client.sendall(b"x")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talk:
    talk.bind(("127.0.0.1", 0)); talk.sendto(b"x", talk.getsockname()); print(talk.recv(9))
"""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        with sandbox.watch() or pytest.fail("not watched") as watched:
            server = await asyncio.start_server(answer, sock=sandbox.listener(8080))
            async with server:
                assert (await connect(sandbox, "127.0.0.1", 8080)).startswith("pong ping")
            assert await run(sandbox, own) == "b'x'"
            assert egress.read(watched) == Egress({}, 0)


async def test_what_a_sandbox_says_to_itself_by_other_names_is_not_egress(repo: Path) -> None:
    """Groups, and what resolvers ask a name server about this very machine."""
    own = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as group:
    group.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("239.1.1.1") + bytes(4))
    group.sendto(b"x", ("239.1.1.1", 5007))
for ask in (lambda: socket.gethostbyaddr("127.0.0.2"), lambda: socket.getaddrinfo("app.localhost", 80)):
    try: ask()
    except OSError: pass
"""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        with sandbox.watch() or pytest.fail("not watched") as watched:
            assert await run(sandbox, own) == ""
            assert egress.read(watched) == Egress({}, 0)


async def test_questions_to_a_name_server_are_seen_whatever_carries_them(repo: Path) -> None:
    asks = """
import socket
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as six:
    six.sendto(b"?", ("::1", 53))
try: socket.create_connection(("127.0.0.1", 53))
except OSError: pass
try: socket.create_connection(("::1", 53))
except OSError: pass
"""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        with sandbox.watch() or pytest.fail("not watched") as watched:
            assert await run(sandbox, asks) == ""
            seen = egress.read(watched)
    assert set(seen.tried) == {"udp [::1]:53", "tcp 127.0.0.1:53", "tcp [::1]:53"}


async def test_a_listener_of_ours_is_not_reached_at_other_addresses(repo: Path) -> None:
    """Every address is the sandbox's own now; the model listens on 127.0.0.1 alone."""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        with sandbox.watch() or pytest.fail("not watched") as watched, sandbox.listener(8080):
            assert "refused" in await connect(sandbox, "192.0.2.1", 8080)
            assert egress.read(watched).tried == {"tcp 192.0.2.1:8080": 1}


async def test_black_holes_stay_and_are_seen(repo: Path) -> None:
    async with open_sandbox(box_of(repo, blackholes=("10.0.0.0/8",)), config()) as sandbox:
        with sandbox.watch() or pytest.fail("not watched") as watched:
            assert await connect(sandbox, "10.255.255.1", 80) == "timed out"
            assert "tcp 10.255.255.1:80" in egress.read(watched).tried


async def test_a_flood_is_counted_and_bounded_and_costs_us_no_memory(repo: Path) -> None:
    flood = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talk:
    for number in range(20000):
        try: talk.sendto(b"x" * 1000, (f"198.51.{number % 200}.{number % 7}", 9))
        except OSError: pass
"""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        with sandbox.watch() or pytest.fail("not watched") as watched:
            assert await run(sandbox, flood) == ""
            seen = egress.read(watched)
    assert len(seen.tried) == egress.LISTED
    assert 10_000 < seen.packets <= 20_000
    assert seen.more > sum(seen.tried.values())


async def test_what_was_tried_is_told_after_the_agent_was_killed(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        with sandbox.watch() or pytest.fail("not watched") as watched:
            await connect(sandbox, "192.0.2.7", 22)
            await sandbox.kill()
            assert egress.read(watched) == Egress({"tcp 192.0.2.7:22": 1})


async def test_a_sandbox_on_the_hosts_network_cannot_be_watched(repo: Path) -> None:
    async with open_sandbox(box_of(repo, network=True), config()) as sandbox:
        assert sandbox.watch() is None


def ip(protocol: int, body: bytes, to: str = "192.0.2.9", options: bytes = b"") -> bytes:
    head = struct.pack("!BBHHHBBH4s4s", 0x45 + len(options) // 4, 0, 20 + len(options) + len(body), 0, 0, 64,
                       protocol, 0, socket.inet_aton("127.0.0.1"), socket.inet_aton(to))  # fmt: skip
    return head + options + body


def udp(port: int, body: bytes) -> bytes:
    return struct.pack("!HHHH", 40000, port, 8 + len(body), 0) + body


def query(name: bytes) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b"."))
    return struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0\0\x01\0\x01"


@pytest.mark.parametrize(
    ("packet", "where"),
    [
        (ip(17, udp(53, query(b"Files.PythonHosted.org"))), "dns files.pythonhosted.org"),
        (
            ip(
                17,
                udp(
                    53,
                    query(b"a.b"),
                ),
                options=bytes(8),
            ),
            "dns a.b",
        ),
        (ip(17, udp(53, b"short")), "udp 192.0.2.9:53"),
        (ip(17, udp(53, query(b"bell\x07.org"))), "udp 192.0.2.9:53"),
        (ip(17, udp(53, query("h\u00fc".encode()))), "udp 192.0.2.9:53"),
        (ip(17, udp(123, b"")), "udp 192.0.2.9:123"),
        (ip(6, struct.pack("!HH", 40000, 443) + bytes(16)), "tcp 192.0.2.9:443"),
        (ip(1, b"\x08\0"), "icmp 192.0.2.9"),
        (ip(132, bytes(12)), "ip132 192.0.2.9"),
        (ip(6, b"\0"), "tcp 192.0.2.9"),
    ],
)
def test_a_packet_tells_where_it_was_to_go(packet: bytes, where: str) -> None:
    assert egress.destination(packet) == where


@given(st.binary(max_size=60))
def test_what_is_no_packet_is_told_too(data: bytes) -> None:
    """Whoever may inject packets may inject any bytes."""
    assert egress.destination(data).isprintable()


@given(st.binary(max_size=200), st.sampled_from([4, 6]), st.sampled_from([1, 6, 17, 58, 0, 255]))
def test_whatever_is_sent_can_be_told_in_printable_words(body: bytes, version: int, protocol: int) -> None:
    head = bytearray(ip(protocol, b"")) if version == 4 else bytearray(40)
    head[0] = (version << 4) | (head[0] & 15 if version == 4 else 0)
    if version == 6:
        head[6] = protocol
    told = egress.destination(bytes(head) + body)
    assert told.isascii()
    assert told.isprintable()
