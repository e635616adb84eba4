"""HTTP endpoints on free ports of this machine, for engines whose servers cannot run here."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(routes: Mapping[str, Handler]) -> AsyncGenerator[str, None]:
    """``{"POST /path": handler}`` on loopback; gives the server's root. A client that leaves cancels its handler."""
    app = web.Application(client_max_size=1 << 26)
    for route, handler in routes.items():
        method, path = route.split(" ")
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def hang(started: asyncio.Event, aborted: asyncio.Event) -> None:
    """A request that is never answered: ``started`` when it hangs, ``aborted`` when the client has left."""
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        aborted.set()


def always(status: int, body: object = None, text: str = "", headers: Mapping[str, str] | None = None) -> Handler:
    """The same answer to every request: ``body`` as JSON, or ``text`` as it is."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if body is None:
            return web.Response(status=status, text=text, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    return answer
