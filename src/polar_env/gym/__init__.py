"""The gym room: the only door to NeMo Gym.

``resources_server`` (`polar`), ``agent`` (`polar_agent`) and ``environment_server`` are Gym's faces of ``environment``
(PolarEnvironment, which does the work) · ``rows`` and ``contract`` write and judge what NeMo-RL takes · ``launch``
starts Gym as NeMo-RL does · ``venvs`` lends it our environment · ``root`` is the directory tree Gym finds us by.
"""

from pathlib import Path

ROOT = Path(__file__).parent / "root"
"""The directory to put into NEMO_GYM_EXTRA_ROOTS: Gym finds code outside its wheel only by directory."""

SERVERS = (
    "resources_servers/polar",
    "responses_api_agents/polar_agent",
    "environment_servers/polar_environment",
)
"""Our servers, as Gym names their directories under a root."""

CONFIG = "resources_servers/polar/configs/polar.yaml"
"""Path of polar's Gym config under the root: what a config's ``config_paths`` names."""
