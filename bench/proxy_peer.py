"""The peer of bench/proxy.py: NeMo Gym's own model server, as its launcher would serve it, without the launcher.

usage: python bench/proxy_peer.py ENGINE_URL; prints its port.
"""

import socket
import sys

import nemo_gym.global_config as gym_config
import uvicorn
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

HEAD = {"host": "127.0.0.1", "port": 1}
"""A head server nobody asks: the configuration is given."""


def main(engine_url: str) -> None:
    gym_config._GLOBAL_CONFIG_DICT = OmegaConf.create({"head_server": HEAD})
    config = VLLMModelConfig(
        **HEAD,
        entrypoint="app.py",
        name="policy_model",
        base_url=engine_url,
        api_key="none",
        model="stub",
        return_token_id_information=True,
        request_prompt_and_generation_token_ids=True,
        uses_reasoning_parser=False,
    )
    client = ServerClient(head_server_config=BaseServerConfig(**HEAD), global_config_dict=OmegaConf.create({}))
    app = VLLMModel(config=config, server_client=client).setup_webserver()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    print(sock.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[sock])


if __name__ == "__main__":
    main(sys.argv[1])
