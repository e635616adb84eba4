"""The agent NeMo-RL calls. It is thin: it passes the row to the `polar` resources server and the answer back."""

# Gym's servers narrow `config` and request bodies in subclasses: that is its documented way to extend them.
# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false

import asyncio
from typing import Any

from fastapi import Body, Request, Response
from nemo_gym.base_resources_server import BaseRunRequest
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json, raise_for_status
from pydantic import ConfigDict

from polar_env.config import PolarConfig
from polar_env.errors import SandboxError
from polar_env.gym.environment import placeholder
from polar_env.gym.wire import encode, is_row


class PolarAgentConfig(BaseResponsesAPIAgentConfig):
    """The agent's block in a Gym config."""

    resources_server: ResourcesServerRef
    hard_timeout: float = 6 * 3600.0
    """Seconds after which a row is answered masked, come what may: NeMo-RL itself waits for ever."""


class PolarRunRequest(BaseRunRequest):
    """A dataset row: task fields ride along untyped."""

    model_config = ConfigDict(extra="allow")


class PolarAgent(SimpleResponsesAPIAgent):
    """`polar_agent`: /run posts the row to /rollout of its resources server."""

    ray_enabled = False
    config: PolarAgentConfig

    async def responses(
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        """Not a thing here: an unmodified harness owns its loop. Gym calls /run."""
        raise NotImplementedError("polar_agent runs whole harnesses: call /run with a task row")

    async def run(self, request: Request, body: PolarRunRequest = Body()) -> Response:
        """One row in, one row out, always HTTP 200: anything else ends NeMo-RL's whole batch.

        The answer is passed on as bytes: turning 100K token ids into models and back costs more than the hop.
        """
        row: dict[str, Any] = body.model_dump(mode="json", exclude_unset=True)
        try:
            async with asyncio.timeout(self.config.hard_timeout):
                answer = await self._post("/rollout", row)
        except TimeoutError:
            answer = _placeholder(row, f"it took longer than hard_timeout, {self.config.hard_timeout:g} s")
        except Exception as error:  # noqa: BLE001 - whatever it is: NeMo-RL gets a row, or loses the batch
            answer = _placeholder(row, str(error) or type(error).__name__)
        return Response(answer, media_type="application/json")

    async def _post(self, path: str, row: dict[str, Any]) -> bytes:
        """The answer's bytes. Raises SandboxError when they are not a row."""
        response = await self.server_client.post(server_name=self.config.resources_server.name, url_path=path, json=row)
        content = await response.read()
        if response.status != 200 or not is_row(content):
            raise SandboxError(f"{path} answered {response.status}: {content[:400].decode('utf-8', 'replace')}")
        return content

    async def aggregate_metrics(self, body: AggregateMetricsRequest = Body()) -> AggregateMetrics:
        """The collector asks the agent; the metrics are the resources server's."""
        response = await self.server_client.post(
            server_name=self.config.resources_server.name, url_path="/aggregate_metrics", json=body
        )
        await raise_for_status(response)
        return AggregateMetrics.model_validate(await get_response_json(response))


def _placeholder(row: dict[str, Any], why: str) -> bytes:
    lost = SandboxError(f"the polar resources server did not answer this row: {why}")
    return encode(placeholder(row, lost, PolarConfig()))
