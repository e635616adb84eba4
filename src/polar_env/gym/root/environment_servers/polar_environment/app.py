"""Entry point NeMo Gym starts in this directory; the server itself is in polar_env.gym."""

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

from polar_env.gym import lifeline
from polar_env.gym.environment_server import PolarEnvironmentServer

if __name__ == "__main__":
    lifeline.follow()
    PolarEnvironmentServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = PolarEnvironmentServer.run_webserver()
