"""The Gym faces of polar on real sockets, as Gym's own launcher would serve them: no Ray, no head server."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI
from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.server_utils import BaseServerConfig, ServerClient, SimpleServer
from omegaconf import DictConfig

from polar_env.gym.agent import PolarAgent, PolarAgentConfig
from polar_env.gym.resources_server import PolarResourcesServer, PolarResourcesServerConfig


class Announced(uvicorn.Server):
    """uvicorn that says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncGenerator[int]:
    """The application on a port of its own, as uvicorn serves it for Gym."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = Announced(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[sock]))
        await server.up.wait()
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
    sock.close()


def built(server: SimpleServer) -> FastAPI:
    """The application with the middleware Gym's run_webserver puts around it."""
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    server.setup_cancellation_middleware(app)
    return app


def client(port: int = 1, **gym: Any) -> ServerClient:
    """A server's client to the others: ``polar_resources_server`` is at ``port``."""
    block = {"resources_servers": {"polar": {"host": "127.0.0.1", "port": port, "entrypoint": "app.py"}}}
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=DictConfig({"polar_resources_server": block, **gym}),
    )


def agent(port: int, **fields: Any) -> PolarAgent:
    config = PolarAgentConfig(
        host="127.0.0.1",
        port=1,
        entrypoint="app.py",
        name="polar_agent",
        resources_server=ResourcesServerRef(type="resources_servers", name="polar_resources_server"),
        **fields,
    )
    return PolarAgent(config=config, server_client=client(port))


def resources(polar: dict[str, Any], **gym: Any) -> PolarResourcesServer:
    config = PolarResourcesServerConfig(
        host="127.0.0.1", port=1, entrypoint="app.py", name="polar_resources_server", domain="coding", polar=polar
    )
    return PolarResourcesServer(config=config, server_client=client(**gym))


async def post(port: int, path: str, body: Any) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"}) as got,
    ):
        return got.status, await got.read()
