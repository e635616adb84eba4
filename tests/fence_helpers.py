"""Waiting until a fence stands as a test needs it."""

import asyncio

from polar_env.engine.fence import Fence


async def until(fence: Fence, *, held: int = 0, running: int = 0) -> None:
    """Let the loop run until so many calls are held and so many generations run."""
    await _until(lambda: (fence.state.held, fence.state.running) == (held, running))


async def until_closed(fence: Fence) -> None:
    """Let the loop run until the fence is paused."""
    await _until(lambda: fence.closed)


async def _until(stands) -> None:
    async with asyncio.timeout(60):
        while not stands():  # noqa: ASYNC110 - a fence tells its trainer of what ends, and nobody of what begins
            await asyncio.sleep(0.001)


async def until_lapsed(fence: Fence) -> None:
    """Let the loop run until the pause has lapsed."""
    await _until(lambda: fence.state.lapsed)
