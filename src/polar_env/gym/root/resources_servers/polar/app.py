"""Entry point NeMo Gym starts in this directory; the server itself is in polar_env.gym."""

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

from polar_env.gym import lifeline
from polar_env.gym.resources_server import PolarResourcesServer

if __name__ == "__main__":
    lifeline.follow()
    PolarResourcesServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = PolarResourcesServer.run_webserver()
