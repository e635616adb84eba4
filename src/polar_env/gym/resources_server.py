"""The `polar` resources server: NeMo Gym's face of PolarEnvironment."""

# Gym's servers narrow `config` and request bodies in subclasses: that is its documented way to extend them.
# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import orjson
from fastapi import FastAPI, HTTPException, Request, Response
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from omegaconf import OmegaConf
from pydantic import ConfigDict, Field

from polar_env.config import PolarConfig, StoreConfig, environment, load
from polar_env.errors import ConfigError, PolarError
from polar_env.gym.environment import PolarEnvironment
from polar_env.gym.metrics import CONTENT_TYPE
from polar_env.gym.wire import encode
from polar_env.proxy.control import SECRET, refusal

if TYPE_CHECKING:
    from polar_env.gym.workers import Fleet


class PolarResourcesServerConfig(BaseResourcesServerConfig):
    """The server's block in a Gym config; ``polar`` holds conf/ groups (engine, harness, budget, …)."""

    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.STATELESS

    polar: dict[str, Any] = Field(default_factory=dict)
    control_secret: str = ""
    """What a trainer that pauses rollouts here must know (``polar_env.control``); empty: POLAR_CONTROL_SECRET. With
    neither, nobody may."""


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
        gym = self.server_client.global_config_dict
        config = settings(self.config.polar, gym)
        fleet = _fleet(config, gym)
        polar = PolarEnvironment(config, elsewhere=fleet)
        outer = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(application: FastAPI) -> AsyncGenerator[Any]:
            async with fleet.opened() if fleet else nullcontext(), polar.opened(), outer(application) as state:
                yield state

        async def run(request: Request) -> Response:
            answer = await polar.run(_object(await request.body()))
            return Response(await asyncio.to_thread(encode, answer), media_type="application/json")

        async def control(request: Request) -> Response:
            refused = refusal(
                self.config.control_secret or environment(SECRET), request.headers.get("Authorization", "")
            )
            status, body = refused or await polar.order(request.method, request.url.path, await request.body())
            return Response(orjson.dumps(body), status, media_type="application/json")

        async def metrics() -> Response:
            return Response(polar.metrics.text(), media_type=CONTENT_TYPE)

        app.router.lifespan_context = lifespan
        app.get("/metrics")(metrics)
        app.post("/rollout")(run)
        app.get("/control")(control)
        app.get("/control/{order}")(control)
        app.post("/control/{order}")(control)
        self._environment = polar
        return app

    async def verify(self, body: PolarVerifyRequest) -> PolarVerifyResponse:
        """Grade the row's patch again in a fresh sandbox. 422: it is no row of ours; 503: the grader failed."""
        row = body.model_dump()
        try:
            graded = await self._environment.regrade(row)
        except PolarError as error:
            raise HTTPException(422 if isinstance(error, ConfigError) else 503, str(error)) from error
        return PolarVerifyResponse.model_validate({**row, **graded})


def _fleet(config: PolarConfig, gym: Mapping[str, Any]) -> "Fleet | None":
    """The cluster's workers, when they are asked for; Ray is imported then and no sooner."""
    if not config.workers.ray:
        return None
    from polar_env.gym.workers import Fleet  # noqa: PLC0415 - Ray takes seconds to import, and most servers need none

    return Fleet(config, str(gym.get("ray_head_node_address") or ""))


def _object(body: bytes) -> dict[str, Any]:
    """A posted row. Raises HTTPException 400."""
    try:
        row: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise HTTPException(400, "a dataset row is a JSON object")
    return cast("dict[str, Any]", row)


def settings(polar: Mapping[str, Any], gym: Mapping[str, Any]) -> PolarConfig:
    """conf/ groups from the server's block; an engine without URLs takes Gym's ``policy_base_url``.

    NeMo-RL sets ``policy_base_url`` to a list, one URL per data-parallel rank; Gym alone to one string. Raises
    ConfigError: an unknown key, or no engine at all.
    """
    groups = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(dict(polar)), resolve=True))
    engine = dict(groups.get("engine") or {})
    if engine.get("kind", "vllm") != "scripted" and not engine.get("base_urls"):
        engine["base_urls"] = _urls(gym.get("policy_base_url"))
        engine["model"] = engine.get("model") or str(gym.get("policy_model_name") or "")
        engine["api_key"] = engine.get("api_key") or str(gym.get("policy_api_key") or "EMPTY")
        if not engine["base_urls"]:
            raise ConfigError("polar has no engine: set policy_base_url (--model-url) or polar.engine.base_urls")
    return load({**groups, "engine": engine, "store": _store(groups.get("store") or {})})


def _store(given: Mapping[str, Any]) -> dict[str, Any]:
    """Where things are kept. Gym starts a server in its own folder, inside the installed package: nothing may be
    written there, so session logs whose place is relative go under the cache."""
    defaults = StoreConfig()
    cache = Path(given.get("cache") or environment("POLAR_CACHE") or defaults.cache).expanduser()
    sessions = Path(given.get("sessions") or defaults.sessions).expanduser()
    return {**given, "cache": str(cache), "sessions": str(cache / sessions)}


def _urls(value: object) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else [str(url) for url in cast("Iterable[object]", value)]
