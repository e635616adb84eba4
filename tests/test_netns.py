"""The model listener inside a sandbox's own network: the only thing an agent can reach."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polar_env.errors import SandboxError
from polar_env.sandbox import netns
from polar_env.sandbox.sandbox import Sandbox, open_sandbox
from sandbox_helpers import box_of, config

_CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1) as s:
        s.sendall(b"ping")
        print(s.recv(100).decode())
except OSError as e:
    print(e.strerror or e)
"""


async def connect(sandbox: Sandbox, host: str, port: int) -> str:
    result = await sandbox.exec(["/usr/bin/python3", "-c", _CONNECT, host, str(port)], timeout=20)
    return result.stdout.decode().strip()


def network_of(process: str) -> str:
    return os.readlink(f"/proc/{process}/ns/net")  # noqa: PTH115 - a namespace link is a name, not a path


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"pong " + await reader.read(4) + b" from " + network_of("self").encode())
    await writer.drain()
    writer.close()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "repo").mkdir()
    return tmp_path / "repo"


async def test_what_the_agent_connects_to_is_served_by_our_own_process(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as sandbox:
        server = await asyncio.start_server(answer, sock=sandbox.listener(8080))
        async with server:
            said = await connect(sandbox, "127.0.0.1", 8080)
    assert said == f"pong ping from {network_of('self')}"


async def test_sandboxes_have_the_same_port_each_for_itself(repo: Path) -> None:
    async with open_sandbox(box_of(repo), config()) as one, open_sandbox(box_of(repo), config()) as two:
        with one.listener(8080) as first, two.listener(8080) as second:
            assert first.getsockname() == second.getsockname() == ("127.0.0.1", 8080)
            with pytest.raises(SandboxError, match=os.strerror(errno.EADDRINUSE)):
                one.listener(8080)


async def test_the_hosts_loopback_and_the_world_are_out_of_reach(repo: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        async with open_sandbox(box_of(repo), config()) as sandbox:
            assert await connect(sandbox, "127.0.0.1", port) == os.strerror(errno.ECONNREFUSED)
            for address in ("192.0.2.1", "10.0.0.1", "169.254.169.254"):
                assert await connect(sandbox, address, 80) == os.strerror(errno.ENETUNREACH)
            assert "resolution" in await connect(sandbox, "example.com", 80)
            interfaces = await sandbox.exec(["cat", "/proc/net/dev"], timeout=10)
    assert [line.split(b":")[0].strip() for line in interfaces.stdout.splitlines()[2:]] == [b"lo"]


async def test_a_black_hole_times_out_where_the_rest_is_unreachable(repo: Path) -> None:
    async with open_sandbox(box_of(repo, blackholes=("10.0.0.0/8",)), config()) as sandbox:
        assert await connect(sandbox, "10.255.255.1", 80) == "timed out"
        assert await connect(sandbox, "192.0.2.1", 80) == os.strerror(errno.ENETUNREACH)
    with pytest.raises(SandboxError, match=r"Box\.blackholes"):
        async with open_sandbox(box_of(repo, blackholes=("10.0.0.0/99",)), config()):
            pytest.fail("started")


async def test_our_own_network_namespace_is_the_one_it_was(repo: Path) -> None:
    before = network_of("self")
    async with open_sandbox(box_of(repo), config()) as sandbox:
        sandbox.listener(8080).close()
    assert network_of("self") == network_of("thread-self") == before


async def test_a_box_on_the_hosts_network_reaches_it_and_has_no_listener(repo: Path) -> None:
    async with open_sandbox(box_of(repo, network=True), config()) as sandbox:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            assert (await connect(sandbox, "127.0.0.1", server.sockets[0].getsockname()[1])).startswith("pong")
        with pytest.raises(SandboxError, match="host's network"):
            sandbox.listener(8080)


@pytest.mark.skipif(os.geteuid() != 0, reason="entering a container's network needs root")
async def test_the_namespace_of_a_process_id_is_entered_too(repo: Path) -> None:
    """What docker containers get: their first process's pid."""
    async with open_sandbox(box_of(repo), config()) as sandbox:
        server = await asyncio.start_server(answer, sock=netns.socket_in(sandbox.pid, netns.listening(8081)))
        async with server:
            assert (await connect(sandbox, "127.0.0.1", 8081)).startswith("pong ping")


def test_a_dead_process_has_no_network_to_listen_in() -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    with pytest.raises(SandboxError, match="needs root"):
        netns.socket_in(dead.pid, netns.listening(8080))


def test_a_descriptor_that_is_no_namespace_is_an_error() -> None:
    with Path("/dev/null").open("rb") as file, pytest.raises(OSError, match="setns"):
        netns.socket_at(file.fileno(), netns.listening(8080))


_UNPRIVILEGED = """
import asyncio, os, sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from sandbox_helpers import box_of, config
from test_netns import answer, connect
from polar_env.errors import SandboxError
from polar_env.sandbox import egress
from polar_env.sandbox.sandbox import open_sandbox
async def main():
    assert os.geteuid() != 0
    async with open_sandbox(box_of(Path({repo!r}), blackholes=("10.0.0.0/8",)), config()) as sandbox:
        server = await asyncio.start_server(answer, sock=sandbox.listener(8080))
        async with server:
            print((await connect(sandbox, "127.0.0.1", 8080))[:9])
        with sandbox.listener(8082):
            try:
                sandbox.listener(8082)
            except SandboxError as error:
                print(error)
        print(await connect(sandbox, "10.255.255.1", 80))
        with sandbox.watch() as watched:
            print(await connect(sandbox, "192.0.2.1", 80))
            print(egress.read(watched).tried)
        await sandbox.write("x", b"1")
        print((await sandbox.exec(["id", "-un"], timeout=10)).stdout.decode().strip())
asyncio.run(main())
"""


def test_without_any_privilege_a_helper_fetches_the_socket(repo: Path, tmp_path: Path) -> None:
    """A user without capabilities: our own uid where we have none, else another uid in a user namespace."""
    script = tmp_path / "unprivileged.py"
    script.write_text(_UNPRIVILEGED.format(tests=str(Path(__file__).parent), repo=str(repo)))
    drop = ["unshare", "--user", "--map-user=1234", "--map-group=1234"] if os.geteuid() == 0 else []
    run = subprocess.run([*drop, sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    assert run.stdout.splitlines() == [
        "pong ping",
        f"cannot listen on port 8082 inside the sandbox: [Errno {errno.EADDRINUSE}] {os.strerror(errno.EADDRINUSE)} "
        "(while attempting to bind on address ('127.0.0.1', 8082))",
        "timed out",
        "Connection refused",
        "{'tcp 192.0.2.1:80': 1}",
        "agent",
    ]
