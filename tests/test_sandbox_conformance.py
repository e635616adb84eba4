"""One suite for every sandbox provider: ours, a real Docker engine, NeMo Gym's ``local`` as far as it can."""

import os
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.sandbox import SandboxResources, SandboxSpec, create_provider

from docker_helpers import IMAGE, NoDockerError, docker_engine, import_image
from polar_env.config import SandboxConfig
from polar_env.errors import SandboxError
from polar_env.sandbox import Box
from polar_env.sandbox.conformance import CHECKS, ISOLATION, Opener, check_sandbox, opener
from polar_env.sandbox.sandbox import Foreign, Sandbox, end_agent, open_sandbox, still_there
from sandbox_helpers import PlainProvider

BUBBLEWRAP = opener(Box(workdir="/tmp"), SandboxConfig())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_bubblewrap(check: Any) -> None:
    await check(BUBBLEWRAP)


async def test_memory_is_limited_without_being_asked() -> None:
    async with BUBBLEWRAP() as sandbox:
        assert sandbox.groups.held >= {"memory", "pids"} or sandbox.layout.limits.rlimits(sandbox.groups)


@pytest.fixture(scope="module")
def docker() -> Generator[Mapping[str, str]]:
    try:
        with docker_engine() as client:
            import_image(client)
            yield client
    except NoDockerError as error:
        pytest.skip(f"no Docker engine: {error}")


@pytest.mark.e2e
async def test_a_real_docker_engine(docker: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks at once: a container waits for its engine more than for a processor."""
    for name, value in docker.items():
        monkeypatch.setenv(name, value)
    found = await check_sandbox(opener(Box(workdir="/tmp", image=IMAGE), SandboxConfig(provider="docker")), at_once=4)
    assert found == {check.__name__: "" for check in CHECKS}


def local(folder: Path) -> Opener:
    """NeMo Gym's ``local``: commands of the host, in a directory. ``open_sandbox`` refuses it, so it is opened here; a
    kill() would end this machine's processes and is not there."""

    class Unkillable(Foreign):
        async def kill(self) -> None:
            raise SandboxError("local isolates no processes")

    @asynccontextmanager
    async def opened(**changes: Any) -> AsyncGenerator[Sandbox]:
        env = {"PATH": os.defpath, "LC_ALL": "C", **changes.get("env", {})}
        spec = SandboxSpec(workdir=str(folder), env=env, resources=SandboxResources())
        provider = create_provider({"local": {}})
        handle = await provider.create(spec)
        try:
            yield Unkillable(provider, handle, str(folder), _scratch=str(folder / "scratch"))
        finally:
            await provider.close(handle)

    return opened


async def test_gym_s_local_provider_as_far_as_it_can(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="isolat"):
        async with open_sandbox(Box(workdir="/tmp"), SandboxConfig(provider="local")):
            pytest.fail("started")
    found = await check_sandbox(local(tmp_path), without=ISOLATION | {"files"})  # it writes to the host's own /tmp
    assert set(found) == {check.__name__ for check in CHECKS} - ISOLATION - {"files"}
    assert set(found.values()) == {""}


async def test_what_is_wrong_is_told_by_name() -> None:
    """A provider that loses standard input and reads whatever a link leads to."""

    @asynccontextmanager
    async def broken(**changes: Any) -> AsyncGenerator[Any]:
        async with BUBBLEWRAP(**changes) as sandbox:

            class Broken:
                def __getattr__(self, name: str) -> Any:
                    return getattr(sandbox, name)

                async def exec(self, argv: Any, **more: Any) -> Any:
                    return await sandbox.exec(argv, **{**more, "stdin": None})

                async def read(self, path: str) -> bytes:
                    return (await sandbox.exec(["cat", path], timeout=1, output_limit=1000000)).stdout

            yield Broken()

    found = await check_sandbox(broken, without={c.__name__ for c in CHECKS} - {"commands", "files", "exit_codes"})
    assert found["exit_codes"] == ""
    assert found["commands"].startswith("AssertionError: output: b'b c")
    assert found["files"].startswith("AssertionError: reading nothing was not refused")
    assert {check.__name__ for check in CHECKS} > ISOLATION


async def test_a_sandbox_that_dies_is_ours_to_answer_for_where_nobody_can_say_why() -> None:
    """Only an engine that is well and has the container shows that its agent broke it (tests/e2e/test_harbor.py)."""
    async with BUBBLEWRAP() as ours:
        await end_agent(ours)
        assert not await still_there(ours)
    with pytest.raises(SandboxError, match="closed"):
        await end_agent(ours)
    provider = PlainProvider()
    handle = await provider.create(SandboxSpec(workdir="/tmp", resources=SandboxResources()))
    foreign = Foreign(provider, handle, "/tmp")
    await foreign.remember()
    assert (await foreign.changes(), await still_there(foreign)) == ([], False)
    await provider.close(handle)
    with pytest.raises(SandboxError):
        await end_agent(foreign)
