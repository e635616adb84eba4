"""The `polar` resources server: NeMo Gym's face of PolarEnvironment."""

# Gym's servers narrow `config` and request bodies in subclasses: that is its documented way to extend them.
# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, cast

import orjson
from fastapi import FastAPI, Request, Response
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from omegaconf import OmegaConf
from pydantic import ConfigDict, Field

from polar_env.config import PolarConfig, load
from polar_env.errors import ConfigError
from polar_env.gym.environment import PolarEnvironment


class PolarResourcesServerConfig(BaseResourcesServerConfig):
    """The server's block in a Gym config; ``polar`` holds conf/ groups (engine, harness, budget, …)."""

    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.STATELESS

    polar: dict[str, Any] = Field(default_factory=dict)


class PolarVerifyRequest(BaseVerifyRequest):
    """A finished row, to be graded again: ``polar.patch`` is what the agent changed."""

    model_config = ConfigDict(extra="allow")

    polar: dict[str, Any] = Field(default_factory=dict)


class PolarVerifyResponse(BaseVerifyResponse):
    """The row with its reward."""

    model_config = ConfigDict(extra="allow")


class PolarResourcesServer(SimpleResourcesServer):
    """Runs rollouts (`POST /rollout`) and grades finished rows again (`POST /verify`)."""

    ray_enabled = False
    config: PolarResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """The Gym routes plus /rollout; the environment lives as long as the application."""
        app = super().setup_webserver()
        environment = PolarEnvironment(_settings(self.config.polar, self.server_client.global_config_dict))
        outer = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(application: FastAPI) -> AsyncGenerator[Any]:
            async with environment.opened(), outer(application) as state:
                yield state

        async def run(request: Request) -> Response:
            row = orjson.loads(await request.body())
            return Response(orjson.dumps(await environment.run(row)), media_type="application/json")

        app.router.lifespan_context = lifespan
        app.post("/rollout")(run)
        self._environment = environment
        return app

    async def verify(self, body: PolarVerifyRequest) -> PolarVerifyResponse:
        """Grade the row's patch again in a fresh sandbox; nothing else of the row is trusted."""
        row = body.model_dump()
        return PolarVerifyResponse.model_validate({**row, **await self._environment.regrade(row)})


def _settings(polar: Mapping[str, Any], gym: Mapping[str, Any]) -> PolarConfig:
    """conf/ groups from the server's block; an engine without URLs takes Gym's ``policy_base_url``.

    NeMo-RL sets ``policy_base_url`` to a list, one URL per data-parallel rank; Gym alone to one string.
    """
    settings = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(dict(polar)), resolve=True))
    engine = dict(settings.get("engine") or {})
    if engine.get("kind", "vllm") != "scripted" and not engine.get("base_urls"):
        engine["base_urls"] = _urls(gym.get("policy_base_url"))
        engine["model"] = engine.get("model") or str(gym.get("policy_model_name") or "")
        engine["api_key"] = str(gym.get("policy_api_key") or "EMPTY")
        if not engine["base_urls"]:
            raise ConfigError("polar has no engine: set policy_base_url (--model-url) or polar.engine.base_urls")
    return load({**settings, "engine": engine})


def _urls(value: object) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else [str(url) for url in cast("Iterable[object]", value)]
